"""Calibration without data: inputs made of the statistics that BatchNorm layers keep (ZeroQ, Cai et al., 2001.00281).

synthesize             batches of inputs on which each BatchNorm sees the mean and variance that it saw in training
compare_calibration    how much worse than real inputs they calibrate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.inputs import AnyInputs, Batches, as_inputs, call_checked, first_and_all
from compresskit.base.progress import announce, log, progress_bar
from compresskit.base.task import Inputs, call
from compresskit.graph.surgery import mode
from compresskit.quant.calibration.diagnose import diagnose
from compresskit.quant.calibration.rows import row_count, take_rows
from compresskit.quant.model import Quantized

FIRST_SCALES = (1.0, 0.01, 0.1, 10.0, 100.0)  # standard deviations of the inputs that the synthesis may start from
LEAST_VARIANCE = 1e-3  # of a channel, as a fraction of the mean of its layer: a channel that is always 0 has none


def synthesize(
    model: nn.Module,
    example: AnyInputs,
    *,
    samples: int = 128,
    steps: int = 200,
    batch_size: int = 64,
    rate: float = 0.1,
    seed: int = 0,
) -> list[Inputs]:
    """Make inputs for calibration without data, from the running statistics of the BatchNorm layers (ZeroQ, 2001.00281).

    Normally distributed inputs are changed by Adam until the mean and the standard deviation of each channel that a BatchNorm
    layer reads are those that it kept from training. All layers count alike, differences of means in kept standard deviations,
    those of standard deviations by their logarithm. The inputs look like noise; what they share with real ones are the ranges
    inside the network.

    Args:
        model: a trained float module with BatchNorm; it is not changed, and runs in eval mode.
        example: its inputs: a tensor, a tuple or a dict. Only their shapes and types are read; all must be floating point.
        samples: how many inputs to make.
        steps: of Adam, for each batch; the rate falls as a cosine.
        batch_size: inputs that are made together; statistics are those of a batch, so 32 at least are better.
        rate: of Adam, in units of the inputs' first standard deviation, which is chosen from 0.01 to 100 to fit the statistics.
        seed: of the first inputs. The same seed gives the same inputs; torch's own generator is left alone.

    Returns batches of inputs, as `example` is (a tensor is a tuple of one), in the model's device and the example's dtype.
    Raises ModelError where the model has no BatchNorm with running statistics, none that the inputs pass, or only such that were
    never trained; DataError where inputs are no floating point tensors with one row for each sample; SettingError for settings
    out of range.
    """
    for name, value in (("samples", samples), ("steps", steps)):
        if value < 1:
            raise SettingError(f"synthesize({name}=...): wanted a whole number >= 1, got {value}")
    if batch_size < 2:
        raise SettingError(f"synthesize(batch_size=...): wanted 2 or more, since one input has no variance, got {batch_size}")
    if rate <= 0:
        raise SettingError(f"synthesize(rate=...): wanted a positive number, got {rate}")
    example = as_inputs(example)
    _check_float(example)
    _trained_norms(model)
    generator = torch.Generator().manual_seed(seed)
    batches, left, right = [], [], []
    sizes = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    with mode(model, training=False), progress_bar(total=len(sizes) * steps, desc="synthesize", unit="step") as bar:
        for size in sizes:
            drawn = _Synthesis(model, example, max(size, 2), generator)
            before, after = drawn.run(steps, rate, bar)
            batches.append(take_rows(drawn.inputs(), slice(0, size)))
            left.append(before)
            right.append(after)
    text = "synthesized %d inputs: distance to the BatchNorm statistics %.3f, %.3f of noise"
    announce(log, text, samples, sum(right) / len(right), sum(left) / len(left))
    return batches


def _check_float(example: Inputs) -> None:
    leaves = pytree.tree_leaves(example)
    wrong = [str(v.dtype) if isinstance(v, Tensor) else type(v).__name__ for v in leaves]
    if not leaves or not all(isinstance(v, Tensor) and v.is_floating_point() for v in leaves):
        raise DataError(
            f"synthesize: wanted inputs that are floating point tensors, got {wrong}, which have no gradient; calibrate with"
            " real inputs"
        )
    if row_count(example) is None:
        raise DataError(f"synthesize: wanted tensors with one row for each sample, got shapes {[tuple(v.shape) for v in leaves]}")


def _trained_norms(model: nn.Module) -> list[nn.Module]:
    """The BatchNorm layers with running statistics; frozen ones, whose statistics are buffers of those names, are among them."""
    found = []
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)  # its statistics are those of single samples
        if not instance and {"running_mean", "running_var"} <= set(buffers):
            found.append((module, buffers["running_mean"], buffers["running_var"]))
    name = type(model).__name__
    if not found:
        raise ModelError(
            f"synthesize: {name} has no BatchNorm with running statistics, of which inputs could be made; calibrate with real"
            " inputs, some dozens without labels will do. A model whose BatchNorm was folded keeps none: pass the one before"
        )
    if all(bool((mean == 0).all() & (variance == 1).all()) for _, mean, variance in found):
        raise ModelError(
            f"synthesize: the BatchNorm layers of {name} have the statistics that they are made with, mean 0 and variance 1;"
            " load trained weights first"
        )
    return [module for module, _, _ in found]


class _Synthesis:
    """One batch of inputs, and the statistics that BatchNorm layers see of it."""

    def __init__(self, model: nn.Module, example: Inputs, rows: int, generator: torch.Generator) -> None:
        self.model, self.norms = model, _trained_norms(model)
        device = next((p.device for p in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        leaves, self.structure = pytree.tree_flatten(example)
        self.dtypes = [leaf.dtype for leaf in leaves]
        noise = [torch.randn((rows, *leaf.shape[1:]), generator=generator) for leaf in leaves]
        self.values = [value.to(device).requires_grad_() for value in noise]
        self.scale = 1.0

    def inputs(self) -> Inputs:
        """The inputs as they are now."""
        return self._inputs([value.detach() for value in self.values])

    def _inputs(self, values: Sequence[Tensor]) -> Inputs:
        scaled = [(self.scale * value).to(dtype) for value, dtype in zip(values, self.dtypes, strict=True)]
        made: Inputs = pytree.tree_unflatten(scaled, self.structure)
        return made

    def run(self, steps: int, rate: float, bar: Any) -> tuple[float, float]:
        """Change the inputs; returns the distance to the statistics before and after."""
        with torch.no_grad():
            call_checked(self.model, self._inputs(self.values), "synthesize")
            distances = {}
            for self.scale in FIRST_SCALES:
                distances[self.scale] = float(self._distance())
        self.scale = min(distances, key=lambda scale: distances[scale])
        optimizer = torch.optim.Adam(self.values, lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            with torch.enable_grad():
                distance = self._distance()
                gradients = torch.autograd.grad(distance, self.values, allow_unused=True)
            for value, gradient in zip(self.values, gradients, strict=True):
                value.grad = gradient
            optimizer.step()
            schedule.step()
            bar.update()
        with torch.no_grad():
            return distances[self.scale], float(self._distance())

    def _distance(self) -> Tensor:
        """The mean over layers and channels of how far mean and standard deviation are from those of training."""
        with _readings(self.norms) as found:
            call(self.model, self._inputs(self.values))
        if not found:
            raise ModelError(
                f"synthesize: no BatchNorm of {type(self.model).__name__} runs when it is called; calibrate with real inputs"
            )
        return torch.stack(found).mean()


@contextmanager
def _readings(norms: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the distance of each run of a BatchNorm layer inside the block."""
    found: list[Tensor] = []

    def read(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x, kept = args[0].float(), dict(module.named_buffers(recurse=False))
        mean, variance = kept["running_mean"].float(), kept["running_var"].float()
        others = [d for d in range(x.ndim) if d != 1]
        least = LEAST_VARIANCE * variance.mean() + 1e-12
        deviations = ((x.var(others, correction=0) + least).log() - (variance + least).log()) / 2
        found.append(((x.mean(others) - mean).square() / (variance + least) + deviations.square()).mean())

    handles = [module.register_forward_pre_hook(read) for module in norms]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class CalibrationComparison:
    """What `compare_calibration` found; prints as a line.

    real, synthetic: SQNR of the outputs, in dB, of the model calibrated by real and by synthetic inputs.
    samples: real inputs that both were measured on, and that calibrated neither.
    """

    real: float
    synthetic: float
    samples: int

    @property
    def loss(self) -> float:
        """How many dB worse synthetic inputs calibrate."""
        return self.real - self.synthetic

    def __str__(self) -> str:
        found = f"calibrated by real inputs {self.real:.1f} dB, by synthetic ones {self.synthetic:.1f} dB"
        return f"{found}: {abs(self.loss):.1f} dB {'worse' if self.loss >= 0 else 'better'}, on {self.samples} other real inputs"


def compare_calibration(
    quantize: Callable[[list[Inputs]], Quantized], synthetic: Batches, real: Batches
) -> CalibrationComparison:
    """Say how much worse a model is that was calibrated by synthetic inputs, where some real inputs are at hand.

    One half of the real inputs calibrates one model, the synthetic inputs another; both are compared with the float model on the
    other half.

    Args:
        quantize: quantizes the model with some batches, such as `partial(quantize_static, model)`.
        synthetic: what `synthesize` returned.
        real: an iterable of real inputs without labels, or one batch; two in each batch at least.

    Raises DataError where there is no batch, or a real one has fewer than two rows.
    """
    made = list(first_and_all(synthetic, "compare_calibration(synthetic=...)")[1])
    halves: tuple[list[Inputs], list[Inputs]] = ([], [])
    samples = 0
    for inputs in first_and_all(real, "compare_calibration(real=...)")[1]:
        rows = row_count(inputs)
        if rows is None or rows < 2:
            raise DataError(f"compare_calibration(real=...): wanted two samples or more in each batch, got {rows}")
        halves[0].append(take_rows(inputs, slice(0, rows // 2)))
        halves[1].append(take_rows(inputs, slice(rows // 2, rows)))
        samples += rows - rows // 2
    found = {name: diagnose(quantize(batches), halves[1]).sqnr for name, batches in (("real", halves[0]), ("synthetic", made))}
    return CalibrationComparison(samples=samples, **found)
