"""Quantizers: modules inside a captured graph that round activations, weights and biases, and their exported counterparts.

ActivationQuantizer, WeightQuantizer, BiasQuantizer       simulate rounding, with gradients
DeployedActivation, DeployedConstant, DeployedHardSigmoid  QuantizeLinear and DequantizeLinear, integers stored
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError
from compresskit.export.ops.quantize import dequantize_linear, quantize_linear
from compresskit.quant.numerics.observers import MinMax, MovingAverage, Observer, extremes, has_fixed_range
from compresskit.quant.numerics.saturation import ChangedPairs, FitPairs, PairPacking
from compresskit.quant.numerics.scheme import (
    Scheme,
    affine,
    anchored,
    channelwise,
    fake_quantize,
    learned_scale,
    row_of,
    signs,
    to_integers,
)

LARGEST_BIAS = 2.0**31 - 2**8  # in steps: the largest fp32 below 2^31 that int32 can hold


class Quantizer(nn.Module):
    """Base of all quantizers. `enabled` switches rounding on; until then values pass unchanged. Mixed precision keeps fp32."""

    keeps_fp32 = True  # a scale in bf16 is off by up to 0.4 %
    of_activations = False  # whether it rounds activations, and nothing else

    def __init__(self) -> None:
        super().__init__()
        self.enabled = False

    def pass_activations_(self, on: bool = True) -> None:
        """Let activations pass in float, or round them again; weights are rounded as before."""
        if self.of_activations:
            self.enabled = not on

    def unrounded(self, x: Tensor, *rest: Any) -> Any:
        """The output while rounding is switched off."""
        return x

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As `nn.Module` moves its tensors to another device; their dtype stays, whatever `half()` makes of the weights."""

        def moved(value: Tensor) -> Tensor:
            new = fn(value)
            return new if new.dtype == value.dtype else value.to(new.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]


class ActivationQuantizer(Quantizer):
    """Rounds an activation with one scale and zero point for the tensor.

    scheme: number format.
    observer: finds the range.
    clamp: bounds of a clamp merged into the quantizer (0 and None for ReLU, 0 and 6 for ReLU6), the lower one at most 0, or None.
    anchor: a number that must be exactly representable, see `placement.QuantizationPoint`.
    label: name of the operator whose result is rounded, for messages.

    ratio: of the scale to the buffer `scale`, a parameter, while `learn_` has it learned; else None (see `learned_scale`).

    `observing`: the observer sees the values that pass, and in train mode the range follows it.
    """

    of_activations = True
    scale: Tensor
    zero_point: Tensor
    ratio: nn.Parameter | None
    offset: nn.Parameter | None

    def __init__(
        self,
        scheme: Scheme,
        observer: Observer,
        clamp: tuple[float, float | None] | None = None,
        anchor: float | None = None,
        label: str = "",
    ) -> None:
        super().__init__()
        self.scheme, self.observer, self.clamp, self.anchor, self.label = scheme, observer, clamp, anchor, label
        self.observing = False
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(0, dtype=torch.int32))
        self.register_parameter("ratio", None)
        self.register_parameter("offset", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            x = self.unrounded(x)
            if self.observing and x.numel():
                self.observer.update(x.detach().reshape(1, -1))
            return x
        # Once rounding is on, evaluation must not move the range, nor does a batch without rows.
        if self.observing and self.training and x.numel():
            self.observer.update(self._observed(x.detach()))
            self.freeze_range_()
        factor = 1.0
        if self.ratio is not None:
            # Of the values of one sample, as LSQ counts them; a batch may be without rows.
            factor = (max(1, math.prod(x.shape[1:])) * self.scheme.high) ** -0.5 if x.ndim else 1.0
        scale = self.effective_scale()
        if self.offset is not None:
            self.zero_point.copy_(self._learned_zero_point(scale))
        return fake_quantize(x, scale, self.zero_point, self.scheme, gradient_scale=factor, offset=self.offset)

    def _learned_zero_point(self, scale: Tensor) -> Tensor:
        """The integer that 0 is rounded to, such that the smallest integer is `offset`; 0 stays exactly representable."""
        assert self.offset is not None
        lowest = torch.round(self.offset.detach() / scale.detach())
        return (self.scheme.low - lowest).clamp(self.scheme.low, self.scheme.high).to(torch.int32)

    def _observed(self, x: Tensor) -> Tensor:
        """What the observer sees of a value, (1, n): its two ends, where it looks at nothing else, cost no copy of the value."""
        if x.numel() and type(self.observer) in (MinMax, MovingAverage):
            x = torch.stack(torch.aminmax(row_of(x)))
        return self.unrounded(x).reshape(1, -1)

    def unrounded(self, x: Tensor, *rest: Any) -> Tensor:
        """The value, clamped where an activation function is merged into the quantizer."""
        if self.clamp is None:
            return x
        low, high = self.clamp
        return F.relu(x) if low == 0 and high is None else F.hardtanh(x, low, torch.inf if high is None else high)

    def clipped(self, x: Tensor) -> Tensor:
        """A value of any shape within the range, not rounded."""
        low, high = (end - int(self.zero_point) for end in (self.scheme.low, self.scheme.high))
        scale = float(self.effective_scale().detach())
        return x.clamp(low * scale, high * scale)

    def following(self) -> list[Tensor]:
        """The ends that a moving average follows in training."""
        observer = self.observer
        if not (self.training and self.observing and isinstance(observer, MovingAverage)):
            return []
        return [end for end in (observer.low, observer.high) if end is not None]

    def effective_scale(self) -> Tensor:
        """The scale that rounding uses; a learned one is kept well above zero."""
        if self.ratio is not None:
            return learned_scale(self.ratio, self.scale)
        # The scale of a quantizer called several times changes between the calls; each needs its own for the gradient.
        return self.scale.clone() if self.observing else self.scale

    def freeze_range_(self, *, checked: bool = False) -> None:
        """Take scale and zero point from the observed range; `checked`: raise DataError where it is empty or not finite."""
        low, high = self.observer.range()
        if checked:
            self._check(float(low[0]), float(high[0]))
        if self.anchor is None:
            # Of a value that was always 0 nothing is known but that; networks are made so that most values are below 1, and a
            # larger scale would make the steps of the next layer's bias coarse.
            scale, zero_point = affine(low[0], high[0], self.scheme, empty=1 / self.scheme.high)
        else:
            scale, zero_point = anchored(low[0], high[0], self.scheme, self.anchor)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def _check(self, low: float, high: float) -> None:
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DataError(
                f"{self.label}: its values are nan or infinite on the calibration data; clean the data, or look at that layer"
            )

    @property
    def is_fixed(self) -> bool:
        """Whether a hardsigmoid in integers depends on the scale, so that only observing may change it."""
        return self.anchor is not None or has_fixed_range(self.observer)

    def learn_(self, on: bool = True, *, offset: bool = False) -> None:
        """Let the scale be learned from its present value on, or make it a constant again. One that is fixed stays so.

        offset: learn the end of the range at the smallest integer, too, where no activation function sets it (LSQ+).
        """
        if self.offset is not None:
            self.zero_point.copy_(self._learned_zero_point(self.effective_scale()))
            self.register_parameter("offset", None)
        if on and offset and not self.is_fixed and self.clamp is None and not self.scheme.symmetric:
            self.offset = nn.Parameter(((self.scheme.low - self.zero_point) * self.scale).detach().clone())
        if not self.is_fixed:
            self.scale.copy_(self.effective_scale().detach())
            self.ratio = nn.Parameter(torch.ones_like(self.scale)) if on else None

    def extra_repr(self) -> str:
        sign = "int" if self.scheme.signed else "uint"
        return f"{sign}{self.scheme.bits}, scale={self.effective_scale().item():.4g}, zero_point={self.zero_point.item()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationQuantizer:
        new = ActivationQuantizer(self.scheme, copy.deepcopy(self.observer, memo), self.clamp, self.anchor, self.label)
        new.observing, new.enabled = self.observing, self.enabled
        new.ratio, new.offset = copy.deepcopy(self.ratio, memo), copy.deepcopy(self.offset, memo)
        new.scale, new.zero_point = self.scale.clone(), self.zero_point.clone()
        new.training = self.training
        memo[id(self)] = new
        return new


class WeightQuantizer(Quantizer):
    """Rounds a weight, with scales from the extremes of each channel along `axis`, recomputed whenever the weight changes.

    scale: of each channel, or one; 0 while it follows the weight. `fix_scale_` sets a constant.
    ratio: of the scale to the buffer `scale`, a parameter, while `learn_` has it learned; else None (see `learned_scale`).
    min_scale: lower bound of each scale. Where the weights of a channel are tiny, the bias, in steps of their scale, would
        exceed int32.
    scale_factor: factor of each scale, 1 or slightly more, that keeps results away from rounding boundaries (see
        `passes.rounding_boundaries`).
    packing: which weights kernels multiply in pairs that must not overflow, on targets where they could; else None.
    correction: steps that are added to the nearest integers (see `balance_`); None where `packing` is.
    """

    scale: Tensor
    ratio: nn.Parameter | None
    min_scale: Tensor
    scale_factor: Tensor
    correction: Tensor | None
    unit: Tensor | None  # see `learned_scale`

    def __init__(self, scheme: Scheme, axis: int, channels: int, packing: PairPacking | None = None) -> None:
        super().__init__()
        self.scheme, self.axis, self.packing = scheme, axis, packing
        self.register_buffer("correction", None)
        for name, value in (("scale", 0.0), ("min_scale", 0.0), ("scale_factor", 1.0)):
            self.register_buffer(name, torch.full((channels,) if scheme.per_channel else (), value, dtype=torch.float32))
        self.register_buffer("unit", None, persistent=False)
        self.register_parameter("ratio", None)

    def pack_(self, packing: PairPacking | None, weight: Tensor) -> None:
        """Let the pairs of one more layer that reads the weight fit; None of a layer that adds none."""
        self.packing = packing if self.packing is None else self.packing.joined(packing)
        if self.packing is not None:
            self.register_buffer("correction", torch.zeros_like(weight, dtype=torch.int8))

    def balance_(self, weight: Tensor) -> None:
        """Where pairs needed a larger scale, round some weights the other way, so that the errors of each kernel cancel."""
        if self.packing is not None and self.correction is not None:
            rows = self._rows(weight) / self.qparams(weight)[0].detach().reshape(-1, 1)
            self.correction.copy_(self._turned_back(self.packing.balance(rows, self.scheme), weight))

    def _corrected(self) -> bool:
        """Whether any weight is rounded another way; `any` of int8 takes twenty times as long on a CPU."""
        return self.correction is not None and bool(torch.maximum(self.correction.amax(), -self.correction.amin()))

    def forget_correction_(self) -> None:
        """Round every weight to the nearest integer again, as long as its pair fits."""
        if self.correction is not None:
            self.correction.zero_()

    def qparams(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of a weight, each (channels,) or a scalar."""
        rows = self._rows(weight)
        if self.scheme.binary:
            scale = self._mean_size(weight)
            return self._chosen(scale), torch.zeros_like(scale, dtype=torch.int32)
        low, high = extremes(rows if self.scheme.per_channel else rows.reshape(1, -1))
        if self.packing is not None:
            low, high = self.packing.widen(rows, low, high, self.scheme)
        low, high = (low, high) if self.scheme.per_channel else (low.amin(), high.amax())
        scale, zero_point = affine(low, high, self.scheme)
        return self._chosen(scale), zero_point

    def _chosen(self, scale: Tensor) -> Tensor:
        """The learned or fixed scale, or, where there is none, the given one of the weight."""
        if self.ratio is not None:
            return learned_scale(self.ratio, self.scale, self.unit).maximum(self.min_scale) * self.scale_factor
        return torch.where(self.scale > 0, self.scale, scale).maximum(self.min_scale) * self.scale_factor

    def _mean_size(self, weight: Tensor) -> Tensor:
        """The mean of |weight|, (channels,) or a scalar; 1 of a weight that is all zero."""
        rows = self._rows(weight).float().abs()
        mean = rows.mean(1) if self.scheme.per_channel else rows.mean()
        return torch.where(mean > 0, mean, 1.0)

    def integers(self, weight: Tensor) -> Tensor:
        """The integers that a weight is rounded to, of its shape and `scheme.dtype`."""
        scale, zero_point = self.qparams(weight)
        if self.packing is None:
            return to_integers(weight, scale, zero_point, self.scheme, self.axis)
        return self._fitted(weight, scale, zero_point, self._corrected())[0].to(self.scheme.dtype)

    def steps(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The whole numbers, fp32, that a weight is rounded to in a symmetric format with a scale, (channels,) or a scalar."""
        if self.scheme.binary:
            return signs(weight.detach().float())
        if self.packing is None:
            return torch.round(weight / channelwise(scale, weight, self.axis)).clamp_(self.scheme.low, self.scheme.high)
        return self._fitted(weight, scale, torch.zeros_like(scale), self._corrected())[0]

    def _fitted(self, weight: Tensor, scale: Tensor, zero_point: Tensor, corrected: bool) -> tuple[Tensor, ChangedPairs]:
        """Integers whose pairs fit, in fp32, and the pairs that had to be changed."""
        assert self.packing is not None
        exact = self._rows(weight) / scale.detach().reshape(-1, 1)
        correction = self._rows(self.correction) if self.correction is not None and corrected else None
        rows, changed = self.packing.round(exact, zero_point.reshape(-1, 1), self.scheme, correction)
        return self._turned_back(rows, weight), changed

    def _rows(self, weight: Tensor) -> Tensor:
        """A weight as a matrix with one row for each index of the channel axis."""
        rows = weight.detach().movedim(self.axis, 0).flatten(1)
        return rows.float() if rows.is_floating_point() else rows

    def _turned_back(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows.view(weight.movedim(self.axis, 0).shape).movedim(0, self.axis)

    def fix_scale_(self, scale: Tensor) -> None:
        """Set a constant scale that no longer follows the weight."""
        self.scale.copy_(scale)
        self.scale_factor.fill_(1)
        self.forget_correction_()

    def learn_(self, weight: Tensor, on: bool = True, *, unit: Tensor | None = None) -> None:
        """Let the scale be learned (LSQ), or make it a constant again. unit: see `learned_scale`.

        The first value is 2 mean|w| / sqrt(largest integer) (Esser et al., arXiv 1902.08153, section 2.1), or the scale of the
        extremes where that is smaller, as it is for 8 bits. Of one bit it is mean|w| (Rastegari et al., arXiv 1603.05279).
        """
        scale = self.qparams(weight)[0].detach()
        if on and not self.scheme.binary:
            axes = [d for d in range(weight.ndim) if d != self.axis] if self.scheme.per_channel else list(range(weight.ndim))
            mean = weight.detach().float().abs().mean(axes)
            first = 2 * mean / self.scheme.high**0.5
            scale = torch.where(first > 0, torch.minimum(first, scale), scale)
        self.scale.copy_(scale)
        self.ratio, self.unit = nn.Parameter(torch.ones_like(self.scale)) if on else None, unit
        self.scale_factor.fill_(1)

    def keep_nonzero_(self, weight: Tensor, mask: Tensor) -> None:
        """Move weights that `mask` keeps but that would round to zero to one step of the grid, in place."""
        scale, zero_point = self.qparams(weight)
        rounded = self.integers(weight).float() - channelwise(zero_point, weight, self.axis)
        steps = channelwise(scale, weight, self.axis)
        one = torch.where(weight < 0, -steps, steps).to(weight.dtype)
        weight.copy_(torch.where(mask & (rounded == 0), one, weight))

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        scale, zero_point = self.qparams(weight)
        factor = (weight.numel() / max(1, scale.numel()) * self.scheme.high) ** -0.5 if scale.requires_grad else 1.0
        rounded = None
        if self.packing is not None:
            corrected = self._corrected()
            integers, changed = self._fitted(weight, scale, zero_point, corrected)
            if changed or corrected:
                step, zero = channelwise(scale.detach(), weight, self.axis), channelwise(zero_point, weight, self.axis)
                steps = integers - zero
                nearest = torch.round(weight.detach() / step).clamp_(self.scheme.low - zero, self.scheme.high - zero)
                # Others stay as they are: their distance from the grid is what a learned scale follows.
                moved = torch.where(steps != nearest, (steps * step).to(weight.dtype), weight.detach())
                weight = FitPairs.apply(weight, moved, changed, self.axis)  # type: ignore[no-untyped-call]
            elif self.scheme.symmetric and integers.stride() == weight.stride():
                rounded = integers
        return fake_quantize(weight, scale, zero_point, self.scheme, self.axis, gradient_scale=factor, rounded=rounded)


class BiasQuantizer(Quantizer):
    """Rounds a bias as the runtime does: to int32 with scale (scale of the input) * (scale of the weight)."""

    def __init__(self, activation: ActivationQuantizer, weight: WeightQuantizer) -> None:
        super().__init__()
        # In a tuple, so that they are not registered as submodules: state dicts name each quantizer once.
        self.grid = (activation, weight)

    def scale(self, weight: Tensor) -> Tensor:
        """The scale, (channels,) or a scalar."""
        return (self.grid[0].effective_scale() * self.grid[1].qparams(weight)[0]).detach()

    def fits(self, bias: Tensor, weight: Tensor) -> bool:
        """Whether int32 holds the bias."""
        return bool((bias.detach().float().abs() <= LARGEST_BIAS * self.scale(weight)).all())

    def make_room_(self, bias: Tensor) -> None:
        """Raise the lower bound of the weight's scale so that this bias, and one twice as large, fits in int32."""
        activation, weight = self.grid
        least = bias.detach().float().abs() / (activation.effective_scale().detach() * 2.0**30)
        weight.min_scale.copy_(torch.maximum(weight.min_scale, least if weight.min_scale.ndim else least.max()))

    def forward(self, bias: Tensor, weight: Tensor) -> Tensor:
        if not self.enabled:
            return bias
        step = self.scale(weight)
        rounded = (torch.round(bias.detach().float() / step) * step).to(bias.dtype)
        return bias + (rounded - bias).detach()


class DeployedActivation(nn.Module):
    """Exported form of an activation quantizer: QuantizeLinear, DequantizeLinear.

    QuantizeLinear saturates at the ends of 8 or 16 bits. A narrower format is clipped: up to 8 bits as integers, between the two,
    so that the kernels before and after it still run in integers; past 8 bits in float, before them.
    """

    bottom: Tensor
    top: Tensor

    def __init__(self, quantizer: ActivationQuantizer) -> None:
        super().__init__()
        scheme = quantizer.scheme
        self.register_buffer("scale", quantizer.scale.clone())
        self.register_buffer("zero_point", quantizer.zero_point.to(scheme.dtype))
        self.clips_integers, self.clips_floats = scheme.bits < 8, 8 < scheme.bits < 16
        ends = torch.tensor([scheme.low, scheme.high])
        ends = ends.to(scheme.dtype) if self.clips_integers else (ends - quantizer.zero_point) * quantizer.scale
        for name, end in zip(("bottom", "top"), ends, strict=True):
            self.register_buffer(name, end if self.clips_integers or self.clips_floats else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.clips_floats:
            x = torch.clamp(x, self.bottom, self.top)
        q = quantize_linear(x, self.scale, self.zero_point)
        if self.clips_integers:
            q = torch.clamp(q, self.bottom, self.top)
        return dequantize_linear(q, self.scale, self.zero_point, 0)


class DeployedHardSigmoid(nn.Module):
    """hardsigmoid(x) = clip(x / 6 + 1/2, 0, 1) without arithmetic on integers.

    With 3 exactly representable as n steps, the result is the same integers, clipped to [zero_point - n, zero_point + n] and
    read with zero point `zero_point - n` and scale / 6.
    """

    bottom: Tensor
    top: Tensor

    def __init__(self, quantizer: ActivationQuantizer) -> None:
        super().__init__()
        steps = int(torch.round(3.0 / quantizer.scale))
        middle, dtype = int(quantizer.zero_point), quantizer.scheme.dtype
        self.register_buffer("scale", quantizer.scale.clone())
        self.register_buffer("zero_point", quantizer.zero_point.to(dtype))
        self.register_buffer("sixth", quantizer.scale / 6)
        self.register_buffer("bottom", torch.tensor(middle - steps, dtype=dtype))
        self.register_buffer("top", torch.tensor(middle + steps, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        q = quantize_linear(x, self.scale, self.zero_point)
        return dequantize_linear(torch.clamp(q, self.bottom, self.top), self.sixth, self.bottom, 0)


class DeployedSixth(nn.Module):
    """x / 6 + 1/2, which the rounding behind it clips to 0..1 since it saturates there: a hardsigmoid of x with any scale.

    The division by 6 is another scale of the same integers. ONNX Runtime makes one integer addition of all this.
    """

    def __init__(self, quantizer: ActivationQuantizer) -> None:
        super().__init__()
        dtype = quantizer.scheme.dtype
        self.rounding = DeployedActivation(quantizer)
        self.register_buffer("sixth", quantizer.scale / 6)
        self.middle = DeployedConstant(torch.tensor(1, dtype=dtype), torch.tensor(0.5), torch.tensor(0, dtype=dtype), 0)

    def forward(self, x: Tensor) -> Tensor:
        q = quantize_linear(x, self.rounding.scale, self.rounding.zero_point)
        return dequantize_linear(q, self.sixth, self.rounding.zero_point, 0) + self.middle()


class DeployedConstant(nn.Module):
    """Exported form of a weight or bias: stored integers and DequantizeLinear."""

    def __init__(self, integers: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("zero_point", zero_point)

    def forward(self) -> Tensor:
        return dequantize_linear(self.integers, self.scale, self.zero_point, self.axis)


def deployed_weight(quantizer: WeightQuantizer, weight: Tensor) -> DeployedConstant:
    """The weight as stored integers."""
    scale, zero_point = quantizer.qparams(weight)
    integers = quantizer.integers(weight)
    # ONNX allows leaving out a zero point of zeros, but ONNX Runtime fuses no Gemm without it.
    return DeployedConstant(integers, scale, zero_point.to(quantizer.scheme.dtype), quantizer.axis)


def deployed_bias(quantizer: BiasQuantizer, bias: Tensor, weight: Tensor) -> DeployedConstant:
    """The bias as stored int32."""
    step = quantizer.scale(weight)
    integers = torch.round(bias.detach().float() / step).clamp(-LARGEST_BIAS, LARGEST_BIAS).to(torch.int32)
    return DeployedConstant(integers, step, None, 0)
