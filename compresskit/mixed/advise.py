"""Advise on a precision policy from layer sizes, gradient magnitudes and data speed, before training."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import TrainingError
from compresskit.mixed.formats.policy import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, MASTER_FP16, Policy
from compresskit.mixed.histograms import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    FP16_LARGEST,
    FP16_SMALLEST_EXPONENT,
    WEIGHT_GRADIENTS,
    WEIGHTS,
    Collector,
    Histograms,
    ValueCounts,
    scalar_loss,
    split_batch,
)
from compresskit.mixed.run import prepare

#: What else a model may run under whose code makes fp32 values itself.
_AUTOCAST_IN_HALF = {MASTER_BF16: AMP_BF16, MASTER_FP16: AMP_FP16}
#: Layers that multiply matrices.
MATRIX_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer that multiplies matrices.

    name, kind: dotted name in the model and class.
    sizes: by name, such as in_features.
    unaligned, unaligned_fp8: names of the sizes that are no multiple of 8, and of 16 as fp8 needs.
    """

    name: str
    kind: str
    sizes: dict[str, int]
    unaligned: tuple[str, ...]
    unaligned_fp8: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The result of `advise`; prints as a table.

    layers: layers that multiply matrices, which can run on tensor cores where their sizes allow it.
    others: classes of the other layers with parameters.
    exponents: histogram of the binary exponents of the weights' gradients, {exponent: fraction of the values that are not 0}.
    flushed: fraction of them that fp16 would turn into 0 without loss scaling.
    scale: smallest power of two that keeps all but 0.1 % of the gradients, those of the weights and those of the activations,
        and does not overflow the largest.
    histograms: weights, activations and the gradients of both, by layer, on the example.
    policy, why: the suggested policy, and the reason.
    notes: other obstacles, such as activations that fp16 cannot hold, or slow data.
    """

    layers: tuple[LayerSizes, ...]
    others: tuple[str, ...]
    exponents: dict[int, float] = field(repr=False)
    flushed: float
    scale: float
    policy: Policy
    why: str
    histograms: Histograms = field(repr=False)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"suggested policy: {self.policy.name} ({self.why})"]
        good = [layer for layer in self.layers if not layer.unaligned]
        rows.append(f"tensor cores: {len(good)} of {len(self.layers)} layers have all sizes in multiples of 8")
        for layer in self.layers:
            if layer.unaligned:
                named = ", ".join(f"{key} = {layer.sizes[key]}" for key in layer.unaligned)
                rows.append(f"  {layer.name} ({layer.kind}): {named}; pad to a multiple of 8")
        if self.others:
            rows.append(f"not on tensor cores: {', '.join(self.others)}")
        rows.append(f"gradients: {self.flushed:.2%} below 2^{FP16_SMALLEST_EXPONENT}, lost in fp16 without a scale;"
                    f" {self.scale:g} keeps them")  # fmt: skip
        rows += [f"  2^{e:<4d} {part:7.2%} {'#' * round(50 * part)}" for e, part in sorted(self.exponents.items())]
        for kind in (ACTIVATIONS, ACTIVATION_GRADIENTS):
            counts = self.histograms.of_kind(kind)
            zeros, below = (part / max(1, counts.values) for part in (counts.zeros, counts.below))
            rows.append(f"{kind}: {zeros:.2%} are 0, {below:.2%} more would be in fp16 without a scale")
        return "\n".join([*rows, *self.notes])


def advise(
    model: nn.Module, example: Any, *, loss: Callable[[Any], Tensor] | None = None, batches: Iterable[Any] | None = None
) -> Advice:
    """Measure a model's layer sizes and the gradients of one batch, and suggest a policy; the model is not changed.

    Args:
        model: an fp32 model, on the device where it will train.
        example: one batch of its inputs: a tensor, a tuple of positional ones, or a mapping of keyword ones.
        loss: from outputs to a scalar; None for the mean square of all outputs.
        batches: the training data; four batches are taken; the last three are timed against a forward and backward pass.

    Returns:
        The sizes, the histogram of gradient exponents and the suggested policy: a copy of the model runs on the example under it.

    Raises:
        ModelError: where the model does not run on the example, or no output depends on a parameter that requires gradients.
        SettingError: for a loss that is not one floating number.

    Sizes: NVIDIA, "Deep Learning Performance: matrix multiplication" (multiples of 8 for fp16, 16 for fp8). Histogram:
    Micikevicius et al., 1710.03740, figure 3.
    """
    layers, found, notes = _measure(model, example, loss, batches)
    of_weights, of_activations = found.of_kind(WEIGHT_GRADIENTS), found.of_kind(ACTIVATION_GRADIENTS)
    trained = [p for p in model.parameters() if p.requires_grad]
    policy, why = _suggested_policy(trained[0].device)
    if any(p.dtype == torch.float64 for p in trained):
        policy, why = FP32, "the model is float64, which no half policy casts; give model.float() for one"
    policy, why = _policy_that_runs(model, example, policy, why)
    leaf = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    return Advice(
        layers=layers,
        others=tuple(sorted({type(m).__name__ for m in leaf if not isinstance(m, MATRIX_LAYERS)})),
        exponents=of_weights.fractions(),
        flushed=of_weights.below / max(1, sum(of_weights.exponents.values())),
        scale=_smallest_scale(of_weights, of_activations),
        policy=policy,
        why=why,
        histograms=found,
        notes=(*_overflows(found), *notes),
    )


def _measure(
    model: nn.Module, example: Any, loss: Callable[[Any], Tensor] | None, batches: Iterable[Any] | None
) -> tuple[tuple[LayerSizes, ...], Histograms, tuple[str, ...]]:
    """Sizes of the layers, histograms and obstacles, of one forward and backward pass; the model is left as it was."""
    args, kwargs, _ = split_batch(example)
    layers: list[LayerSizes] = []
    names = {module: name for name, module in model.named_modules()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    collector = Collector(model)

    def record_sizes(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(module, MATRIX_LAYERS):
            layers.append(_layer_sizes(names[module], module, output))

    @torch.enable_grad()
    def gradients() -> list[tuple[str, Tensor]]:
        total = scalar_loss(model, args, kwargs, loss, "advise")
        grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return [(name, grad) for name, grad in zip(parameters, grads, strict=True) if grad is not None]

    handles = [module.register_forward_hook(record_sizes) for module in names]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    collector.add_parameters_(WEIGHTS, model.named_parameters())
    try:
        with torch.random.fork_rng(list({p.device for p in parameters.values() if p.is_cuda})):  # dropout draws numbers
            with collector.watching():
                collector.add_parameters_(WEIGHT_GRADIENTS, gradients())
            for handle in handles:
                handle.remove()
            notes = _obstacles(next(iter(parameters.values())).device, batches, gradients)
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in model.named_buffers():
            if name in before:  # the forward pass may make others
                buffer.copy_(before[name])
    return tuple(layers), collector.result(1), notes


def _overflows(found: Histograms) -> tuple[str, ...]:
    """What fp16 cannot hold whatever the loss scale: activations and weights above its largest number."""
    lines = []
    for kind in (WEIGHTS, ACTIVATIONS):
        if layers := [name for name, counts in found.counts[kind].items() if counts.above or counts.not_finite]:
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            lines.append(
                f"{kind} of {layers[0] or 'the model'}{more} exceed {FP16_LARGEST:g}: fp16 overflows there and no loss scale"
                " helps; take a bf16 policy, or keep these layers in fp32 with Policy(keep_fp32=...)"
            )
    return tuple(lines)


def _obstacles(device: torch.device, batches: Iterable[Any] | None, step: Callable[[], Any]) -> tuple[str, ...]:
    notes = []
    if device.type == "cuda" and not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()):
        notes.append("cuDNN is off, and with it the half convolutions: set torch.backends.cudnn.enabled = True")
    if batches is not None:
        loader = iter(batches)
        next(loader, None)  # the first batch includes the start of the workers
        begin = time.perf_counter()
        count = sum(1 for _ in itertools.islice(loader, 3))
        pace = (time.perf_counter() - begin) / max(count, 1)
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        needed = time.perf_counter() - begin
        end = "it keeps up" if pace < needed else "faster numbers gain nothing before the data comes faster (more workers)"
        notes.append(f"data: {pace * 1000:.1f} ms a batch, forward and backward {needed * 1000:.1f} ms: {end}")
    return tuple(notes)


def _layer_sizes(name: str, module: nn.Module, output: Any) -> LayerSizes:
    sizes: dict[str, int] = {}
    if isinstance(module, nn.Linear):
        rows = output.numel() // module.out_features
        sizes = {"rows": rows, "in_features": module.in_features, "out_features": module.out_features}
    elif isinstance(module, nn.modules.conv._ConvNd):
        groups = module.groups
        sizes = {"in_channels": module.in_channels // groups, "out_channels": module.out_channels // groups}
    elif isinstance(module, nn.RNNBase):
        sizes = {"input_size": module.input_size, "hidden_size": module.hidden_size}
    elif isinstance(module, nn.MultiheadAttention):
        sizes = {"embed_dim": module.embed_dim, "head_dim": module.head_dim}
    of_8, of_16 = (tuple(key for key, size in sizes.items() if size % multiple) for multiple in (8, 16))
    return LayerSizes(name=name, kind=type(module).__name__, sizes=sizes, unaligned=of_8, unaligned_fp8=of_16)


def _smallest_scale(*gradients: ValueCounts) -> float:
    scale, largest = 1.0, max(counts.largest for counts in gradients)
    while scale < 2.0**24 and largest * scale * 2 < FP16_LARGEST:
        if all(_lost(counts, scale) <= 1e-3 for counts in gradients):
            break
        scale *= 2
    return scale


def _lost(counts: ValueCounts, scale: float) -> float:
    """The fraction of the values that fp16 would turn into 0 at a loss scale."""
    return sum(part for e, part in counts.fractions().items() if scale * 2.0**e < 2.0**FP16_SMALLEST_EXPONENT)


def _policy_that_runs(model: nn.Module, example: Any, policy: Policy, why: str) -> tuple[Policy, str]:
    """The policy and the reason for it; where half and fp32 values meet in the model's code under it, autocast, or else FP32."""
    if policy not in _AUTOCAST_IN_HALF:
        return policy, why
    for tried in (policy, _AUTOCAST_IN_HALF[policy]):
        if not (failure := _failure_under(model, example, tried)):
            return tried, why
        why += f"; {failure}"
    return FP32, why


@torch.enable_grad()
def _failure_under(model: nn.Module, example: Any, policy: Policy) -> str:
    """Why a copy of a model does not run on an example under a policy; "" where it does, or where that cannot be tried."""
    args, kwargs, _ = split_batch(example)
    devices = list({p.device for p in model.parameters() if p.is_cuda})
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            warnings.simplefilter("ignore")  # of slow formats: nothing is trained here
            copied = deepcopy(model)
            run = prepare(copied, torch.optim.SGD(copied.parameters(), lr=0.0), policy)
            run(*args, **kwargs)
    except TrainingError as error:
        return str(error)
    except Exception:  # no copy can be made, or `prepare` refuses the model, and says why where a training calls it
        return ""
    return ""


def _suggested_policy(device: torch.device) -> tuple[Policy, str]:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return MASTER_BF16, f"compute capability {major}.{minor} has bf16 tensor cores"
        if major >= 7:
            return MASTER_FP16, f"compute capability {major}.{minor} has fp16 tensor cores and no bf16"
        return FP32, f"compute capability {major}.{minor} has no tensor cores"
    if device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return MASTER_BF16, "this CPU multiplies bf16"
    return FP32, f"this {device.type} is not known to multiply halves faster"
