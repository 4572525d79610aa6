"""Advise on a precision policy from layer sizes, gradient magnitudes and data speed, before training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed.formats.policy import FP32, MASTER_BF16, MASTER_FP16, Policy

#: Below 2^-24 a value becomes 0 in fp16; the largest is 65504.
FP16_SMALLEST_EXPONENT, FP16_LARGEST = -24, 65504.0
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
    exponents: histogram of the binary exponents of all gradients, {exponent: fraction of the values that are not 0}.
    flushed: fraction of them that fp16 would turn into 0 without loss scaling.
    scale: smallest power of two that keeps all but 0.1 % of them, and does not overflow the largest.
    policy, why: the suggested policy, and the reason.
    notes: other obstacles, such as slow data.
    """

    layers: tuple[LayerSizes, ...]
    others: tuple[str, ...]
    exponents: dict[int, float] = field(repr=False)
    flushed: float
    scale: float
    policy: Policy
    why: str
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
        return "\n".join([*rows, *self.notes])


def advise(
    model: nn.Module, example: Any, *, loss: Callable[[Any], Tensor] | None = None, batches: Iterable[Any] | None = None
) -> Advice:
    """Measure a model's layer sizes and the gradients of one batch, and suggest a policy; the model is not changed.

    Args:
        model: an fp32 model, on the device where it will train.
        example: one batch of its inputs: a tensor, a tuple of positional ones, or a mapping of keyword ones.
        loss: from outputs to a scalar; None for the mean square of all outputs.
        batches: the training data; four batches are taken and timed against a forward and backward pass.

    Returns:
        The sizes, the histogram of gradient exponents and the suggested policy.

    Raises:
        ModelError: where the model does not run on the example, or no output depends on a parameter that requires gradients.
        SettingError: for a loss that is not one floating number.

    Sizes: NVIDIA, "Deep Learning Performance: matrix multiplication" (multiples of 8 for fp16, 16 for fp8). Histogram:
    Micikevicius et al., 1710.03740, figure 3.
    """
    args, kwargs = _as_inputs(example)
    layers: list[LayerSizes] = []
    names = {module: name for name, module in model.named_modules()}
    leaf = [m for m in names if not list(m.children()) and list(m.parameters())]

    def record_sizes(module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(module, MATRIX_LAYERS):
            layers.append(_layer_sizes(names[module], module, output))

    handles = [module.register_forward_hook(record_sizes) for module in names]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients() -> list[Tensor]:
        return _gradients_of_example(model, args, kwargs, parameters, loss)

    try:
        with torch.random.fork_rng(list({p.device for p in parameters if p.is_cuda})):  # dropout draws numbers
            grads = gradients()
            for handle in handles:
                handle.remove()
            notes = _obstacles(parameters[0].device, batches, gradients)
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    exponents, largest = _histogram(grads)
    policy, why = _suggested_policy(parameters[0].device)
    return Advice(
        layers=tuple(layers),
        others=tuple(sorted({type(m).__name__ for m in leaf if not isinstance(m, MATRIX_LAYERS)})),
        exponents=exponents,
        flushed=sum(part for e, part in exponents.items() if e < FP16_SMALLEST_EXPONENT),
        scale=_smallest_scale(exponents, largest),
        policy=policy,
        why=why,
        notes=notes,
    )


def _gradients_of_example(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: list[nn.Parameter],
    loss: Callable[[Any], Tensor] | None,
) -> list[Tensor]:
    try:
        output = model(*args, **kwargs)
    except Exception as error:
        raise ModelError(f"advise: {type(model).__name__} does not run on the example: {error}; give it as one batch") from error
    leaves = [o for o in pytree.tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
    if not leaves or not parameters:
        raise ModelError("advise: no output depends on a parameter with requires_grad; there are no gradients to look at")
    total = _checked_loss(loss, output) if loss is not None else torch.stack([o.float().square().mean() for o in leaves]).sum()
    return [grad for grad in torch.autograd.grad(total, parameters, allow_unused=True) if grad is not None]


def _checked_loss(loss: Callable[[Any], Tensor], output: Any) -> Tensor:
    """The loss of an output: a scalar that depends on it."""
    try:
        total: Any = loss(output)
    except Exception as error:
        raise SettingError(f"advise: loss fails on the model's output: {error}") from error
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
        got = f"{total.dtype} {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise SettingError(f"advise: loss must return one floating number that depends on the output, got {got}")
    return total


def _as_inputs(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs: a mapping holds keyword inputs, a tuple or list positional ones, else there is one."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


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


def _histogram(grads: list[Tensor]) -> tuple[dict[int, float], float]:
    flat = torch.cat([grad.detach().flatten().float().abs() for grad in grads])
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    if not flat.numel():
        return {}, 0.0
    # frexp gives a mantissa in [0.5, 1), so that its exponent is one more than the usual one.
    values, counts = (torch.frexp(flat)[1] - 1).unique(return_counts=True)
    return dict(zip(values.tolist(), (counts / flat.numel()).tolist(), strict=True)), flat.max().item()


def _smallest_scale(exponents: dict[int, float], largest: float) -> float:
    scale = 1.0
    while scale < 2.0**24 and largest * scale * 2 < FP16_LARGEST:
        lost = sum(part for e, part in exponents.items() if scale * 2.0**e < 2.0**FP16_SMALLEST_EXPONENT)
        if lost <= 1e-3:
            break
        scale *= 2
    return scale


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
