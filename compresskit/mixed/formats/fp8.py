"""Linear layers whose three products run in fp8: e4m3 forward, e5m2 for the gradients (Micikevicius et al., 2209.05433).

    y  = x8 @ w8.T                x8, w8: e4m3 (4 exponent, 3 fraction bits, at most 448)
    dx = g8 @ w8                  g8: e5m2 (5 exponent, 2 fraction bits, at most 57344)
    dw = g8.T @ x8

One scale a tensor, from its own largest value in this very step; sums in fp32. The weight itself stays what the policy keeps
it in. It pays where products are large and the model is compiled: below 2048 the rounding costs more than the product saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed.formats.policy import Fp8

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
#: `torch._scaled_mm` takes sizes in multiples of this.
STEP = 16


def to_fp8(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values in fp8 and the fp32 factor that undoes the scaling: values = eighths * factor, the largest at the format's end.

    Values that are not finite stay so: the largest of them makes the factor nan, and with it the whole product.
    """
    amax = values.detach().abs().amax().float()
    # A tensor of zeros has no scale of its own; below 2^-100 the factor itself would leave fp32's normal range.
    factor = torch.where(amax == 0, 1.0, amax.clamp(min=2.0**-100) / torch.finfo(dtype).max)
    limit = torch.finfo(dtype).max
    return (values.float() / factor).clamp(-limit, limit).to(dtype), factor


def product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], out: torch.dtype, *, kind: Fp8, fast: bool = False) -> Tensor:
    """`a @ b.T` of fp8 matrices (rows, k) and (columns, k), times both factors; `fast` sums with fewer digits, forward only."""
    if kind == "emulated":
        return ((a.float() @ b.float().t()) * (scales[0] * scales[1])).to(out)
    return torch._scaled_mm(
        a.contiguous(), b.contiguous().t(), scale_a=scales[0], scale_b=scales[1], out_dtype=out, use_fast_accum=fast
    )


class Matmul(torch.autograd.Function):
    """`x @ w.T` for x (rows, in), w (out, in), all three products in fp8; what is kept for backward takes one byte a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, kind: Fp8) -> Tensor:
        """(rows, in), (out, in) -> (rows, out), in the dtype of x; rows are filled up to a multiple of 16."""
        rows = len(x)
        x8, x_factor = to_fp8(_filled(x), FORWARD)
        w8, w_factor = to_fp8(w, FORWARD)
        ctx.save_for_backward(x8, x_factor, w8, w_factor)
        ctx.kind, ctx.rows, ctx.w_dtype = kind, rows, w.dtype
        return product(x8, w8, (x_factor, w_factor), x.dtype, kind=kind, fast=True)[:rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        """Gradients of x and w."""
        x8, x_factor, w8, w_factor = ctx.saved_tensors
        g8, g_factor = to_fp8(_filled(grad), BACKWARD)
        dx = product(g8, w8.t(), (g_factor, w_factor), grad.dtype, kind=ctx.kind)[: ctx.rows] if ctx.needs_input_grad[0] else None
        dw = product(g8.t(), x8.t(), (g_factor, x_factor), ctx.w_dtype, kind=ctx.kind) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _filled(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % STEP))


class Linear8(nn.Linear):
    """A linear layer with the parameters of another, by the same names, and products in fp8; the bias is added in x's dtype."""

    def __init__(self, layer: nn.Linear, kind: Fp8) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        flat = x.reshape(-1, self.in_features)
        y: Tensor = Matmul.apply(flat, self.weight, self.kind)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What `to_float8` did: names of the layers in fp8, and of those that are not, with the reason."""

    layers: tuple[str, ...]
    skipped: dict[str, str]
    replaced: tuple[tuple[nn.Module, str, nn.Linear], ...] = ()

    def __str__(self) -> str:
        rows = [f"fp8: {len(self.layers)} of {len(self.layers) + len(self.skipped)} linear layers"]
        return "\n".join([*rows, *(f"  not {name}: {reason}" for name, reason in self.skipped.items())])

    def undo(self) -> None:
        """Put the layers of before back; their parameters have been shared all along."""
        for parent, name, layer in self.replaced:
            layer.train(parent.training)
            setattr(parent, name, layer)


def check_fp8(kind: Fp8, device: torch.device) -> None:
    """Refuse hardware fp8 where there is none."""
    if kind == "emulated":
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


def to_float8(model: nn.Module, *, fp8: Fp8 = "hardware", skip: Sequence[str] = ()) -> Converted:
    """Let the linear layers of a model compute in fp8, in place; returns, printable, what was left out and why.

    Args:
        model: on the device where it will train. Its parameters stay what they are, by the same names.
        fp8: "hardware" for `torch._scaled_mm`; "emulated" for the same numbers on any device.
        skip: dotted names of layers, or of modules with all layers inside, to leave as they are, such as the last.

    Raises SettingError where the hardware lacks fp8; ModelError for an unknown name in `skip`, and where no layer is left.
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
        if reason := _reason(name, layer, skip):
            skipped[name or type(layer).__name__] = reason
            continue
        parent, leaf = modules[name.rpartition(".")[0]], name.rpartition(".")[2]
        setattr(parent, leaf, Linear8(layer, fp8))
        names.append(name)
        replaced.append((parent, leaf, layer))
    if not names:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items()) or "it has no nn.Linear"
        raise ModelError(f"to_float8: no layer of the model can run in fp8 ({reasons}); use MASTER_BF16")
    return Converted(layers=tuple(names), skipped=skipped, replaced=tuple(replaced))


def _reason(name: str, layer: nn.Linear, skip: Sequence[str]) -> str | None:
    odd = [f"{key} = {size}" for key in ("in_features", "out_features") if (size := getattr(layer, key)) % STEP]
    if any(name == outer or name.startswith(f"{outer}.") for outer in skip):
        return "asked for"
    if not name:
        return "it is the model itself and has no place to be replaced in; wrap it in nn.Sequential"
    if type(layer) is not nn.Linear:
        return f"it is a {type(layer).__name__}, which may compute something else"
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has forward hooks, which would be lost"
    return f"{', '.join(odd)} is no multiple of {STEP}" if odd else None
