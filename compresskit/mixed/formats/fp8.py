"""Linear layers whose three matrix products run in fp8: e4m3 forward, e5m2 for gradients (Micikevicius et al., 2209.05433).

    y  = x8 @ w8.T                x8, w8: e4m3 (4 exponent, 3 fraction bits, at most 448)
    dx = g8 @ w8                  g8: e5m2 (5 exponent, 2 fraction bits, at most 57344)
    dw = g8.T @ x8

One scale per tensor, from its largest value in the same step; sums in fp32. The stored weight keeps the dtype of the policy. It
pays where products are large and the model is compiled: below 2048 the rounding costs more than the product saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed.formats.policy import Fp8Mode, Policy

FORWARD_DTYPE, BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
#: `torch._scaled_mm` takes sizes in multiples of this.
FP8_ALIGNMENT = 16


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale values so that the largest fills the range of an fp8 dtype, and round them.

    Args:
        values: any shape, fp32 or half. One that is not finite makes the factor nan, and with it the whole product.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        The fp8 values and the fp32 factor (a scalar tensor) with `values = fp8 * factor`.
    """
    amax = values.detach().abs().amax().float()
    # A tensor of zeros has no scale of its own; below 2^-100 the factor itself would leave fp32's normal range.
    factor = torch.where(amax == 0, 1.0, amax.clamp(min=2.0**-100) / torch.finfo(dtype).max)
    limit = torch.finfo(dtype).max
    return (values.float() / factor).clamp(-limit, limit).to(dtype), factor


def scaled_matmul(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out: torch.dtype, *, mode: Fp8Mode, fast: bool = False
) -> Tensor:
    """Multiply fp8 matrices, `a @ b.T` times both scales.

    Args:
        a: (rows, k), fp8.
        b: (columns, k), fp8.
        scales: the factors of `to_fp8` for a and b.
        out: dtype of the result, (rows, columns).
        mode: "hardware" or "emulated".
        fast: accumulate with less precision, which is good enough for the forward product.
    """
    if mode == "emulated":
        return ((a.float() @ b.float().t()) * (scales[0] * scales[1])).to(out)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=scales[0], scale_b=scales[1], out_dtype=out, use_fast_accum=fast
    )


class Fp8Matmul(torch.autograd.Function):
    """`x @ w.T` for x (rows, in) and w (out, in), all three products in fp8; tensors saved for backward take one byte a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, mode: Fp8Mode) -> Tensor:
        """(rows, in), (out, in) -> (rows, out), in the dtype of x; rows are padded to a multiple of 16."""
        rows = len(x)
        x8, x_factor = to_fp8(_pad_rows(x), FORWARD_DTYPE)
        w8, w_factor = to_fp8(w, FORWARD_DTYPE)
        ctx.save_for_backward(x8, x_factor, w8, w_factor)
        ctx.mode, ctx.rows, ctx.w_dtype = mode, rows, w.dtype
        return scaled_matmul(x8, w8, (x_factor, w_factor), x.dtype, mode=mode, fast=True)[:rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        """Gradients of x and w."""
        x8, x_factor, w8, w_factor = ctx.saved_tensors
        g8, g_factor = to_fp8(_pad_rows(grad), BACKWARD_DTYPE)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = scaled_matmul(g8, w8.t(), (g_factor, w_factor), grad.dtype, mode=ctx.mode)[: ctx.rows]
        if ctx.needs_input_grad[1]:
            dw = scaled_matmul(g8.t(), x8.t(), (g_factor, x_factor), ctx.w_dtype, mode=ctx.mode)
        return dx, dw, None


def _pad_rows(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % FP8_ALIGNMENT))


class Fp8Linear(nn.Linear):
    """A linear layer that shares the parameters of another and multiplies in fp8; the bias is added in the dtype of x."""

    def __init__(self, layer: nn.Linear, mode: Fp8Mode) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.mode = layer.in_features, layer.out_features, mode
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        flat = x.reshape(-1, self.in_features)
        y: Tensor = Fp8Matmul.apply(flat, self.weight, self.mode)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@dataclass(frozen=True, kw_only=True)
class Fp8Conversion:
    """The result of `to_float8`: names of the layers in fp8, and of those that are not, with the reason; prints as a list."""

    layers: tuple[str, ...]
    skipped: dict[str, str]
    replaced: tuple[tuple[nn.Module, str, nn.Linear], ...] = ()

    def __str__(self) -> str:
        rows = [f"fp8: {len(self.layers)} of {len(self.layers) + len(self.skipped)} linear layers"]
        return "\n".join([*rows, *(f"  not {name}: {reason}" for name, reason in self.skipped.items())])

    def undo(self) -> None:
        """Put the original layers back; they share their parameters with the fp8 layers."""
        for parent, name, layer in self.replaced:
            layer.train(parent.training)
            setattr(parent, name, layer)


def check_fp8(mode: Fp8Mode, device: torch.device) -> None:
    """Refuse hardware fp8 on a device without it."""
    if mode == "emulated":
        return
    remedy = "use MASTER_BF16, or fp8='emulated' to try the numbers, slowly"
    if device.type != "cuda":
        raise SettingError(
            f"fp8='hardware' needs an NVIDIA GPU of compute capability 8.9 or more, the model is on {device}; {remedy}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise SettingError(
            f"fp8='hardware' needs compute capability 8.9 (Ada, Hopper) or more, {name} has {major}.{minor}; {remedy}"
        )


def to_float8(model: nn.Module, *, fp8: Fp8Mode = "hardware", skip: Sequence[str] = ()) -> Fp8Conversion:
    """Replace the linear layers of a model by layers that multiply in fp8, in place.

    Args:
        model: on the device where it will train. Its parameters stay the same objects under the same names.
        fp8: "hardware" for `torch._scaled_mm`; "emulated" for the same numbers on any device, slowly.
        skip: dotted names of layers, or of modules with all layers inside them, to leave as they are, such as the last layer.

    Returns:
        The converted layers, and the others with the reason.

    Raises:
        SettingError: where the hardware lacks fp8.
        ModelError: for an unknown name in `skip`, and where no layer can be converted.
    """
    check_fp8(fp8, next((p.device for p in model.parameters()), torch.device("cpu")))
    modules = dict(model.named_modules())
    if unknown := [name for name in skip if name not in modules]:
        raise ModelError(f"to_float8: skip names {unknown[0]!r}, which the model does not have")
    names: list[str] = []
    skipped: dict[str, str] = {}
    replaced: list[tuple[nn.Module, str, nn.Linear]] = []
    for name, layer in modules.items():
        if not isinstance(layer, nn.Linear):
            continue
        if reason := _why_not_fp8(name, layer, skip):
            skipped[name or type(layer).__name__] = reason
            continue
        parent, leaf = modules[name.rpartition(".")[0]], name.rpartition(".")[2]
        setattr(parent, leaf, Fp8Linear(layer, fp8))
        names.append(name)
        replaced.append((parent, leaf, layer))
    if not names:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items()) or "it has no nn.Linear"
        raise ModelError(f"to_float8: no layer of the model can run in fp8 ({reasons}); use MASTER_BF16")
    return Fp8Conversion(layers=tuple(names), skipped=skipped, replaced=tuple(replaced))


def _why_not_fp8(name: str, layer: nn.Linear, skip: Sequence[str]) -> str | None:
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    unaligned = [f"{key} = {size}" for key, size in sizes.items() if size % FP8_ALIGNMENT]
    if any(name == outer or name.startswith(f"{outer}.") for outer in skip):
        return "asked for"
    if not name:
        return "it is the model itself and has no place to be replaced in; wrap it in nn.Sequential"
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks, which would be lost"
    return f"{', '.join(unaligned)} is no multiple of {FP8_ALIGNMENT}" if unaligned else None


def convert_by_policy(model: nn.Module, policy: Policy) -> Fp8Conversion | None:
    """Convert linear layers to fp8 where the policy says so, except those that it keeps in fp32."""
    if policy.fp8 is None:
        return None
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type))
    kept = {name for name, module in model.named_modules() if name in policy.keep_fp32 or isinstance(module, kinds)}
    return to_float8(model, fp8=policy.fp8, skip=sorted(kept))
