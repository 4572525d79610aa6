"""A precision policy: the number formats of weights, products, masters and outputs during training, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from compresskit.base.errors import SettingError

#: Layers whose statistics need fp32 under every policy: in half, sums over a batch overflow and lose precision.
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
HALVES = (torch.float16, torch.bfloat16)

#: How a bf16 weight without a master keeps what bf16 cannot hold; see `formats.bf16_formats`.
Bf16Format = Literal["split", "kahan", "stochastic"]
Fp8Mode = Literal["hardware", "emulated"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The number formats of one training ("half" below means fp16 or bf16).

    Args:
        name: shown in messages and reports.
        param_dtype: dtype in which weights are stored during training; None leaves them in fp32.
        autocast_dtype: dtype in which `torch.autocast` runs matmuls and convolutions; None for no autocast.
        master: keep an fp32 copy of every half weight, which the optimizer updates (Micikevicius et al., 1710.03740).
        bf16_format: how a bf16 weight without a master keeps what bf16 cannot hold. "split" keeps all remaining bits in an
            int16, "kahan" the next eight in a bf16, "stochastic" rounds at random so that the mean is exact; None drops them.
        loss_scale: None, a fixed factor, or "dynamic" (see `LossScaler`).
        keep_fp32: what stays in fp32 under a half `param_dtype`: module classes, and dotted names of modules or parameters; of a
            module, all that is inside it too, for which the module has to be called: not its parts one by one.
        cast_inputs: cast floating inputs of the model to `param_dtype`.
        output_dtype: dtype to which floating outputs are cast before the loss; None leaves them.
        seed: seed of the stochastic rounding.
        tf32: whether fp32 products on NVIDIA GPUs may round their factors to ten mantissa bits (TF32); None leaves torch's
            setting.
        fp8: "hardware" runs the products of `nn.Linear` in fp8 on GPUs that support it, "emulated" computes the same numbers on
            any device, slowly; see `to_float8`.

    Raises:
        SettingError: for settings that contradict one another.
    """

    name: str
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    master: bool = False
    bf16_format: Bf16Format | None = None
    loss_scale: float | str | None = None
    keep_fp32: tuple[type[nn.Module] | str, ...] = BATCH_NORMS
    cast_inputs: bool = True
    output_dtype: torch.dtype | None = torch.float32
    seed: int = 0
    tf32: bool | None = None
    fp8: Fp8Mode | None = None

    def __post_init__(self) -> None:
        where = f"Policy {self.name}"
        if self.param_dtype is not None and self.autocast_dtype is not None:
            raise SettingError(f"{where}: param_dtype and autocast_dtype exclude one another; give one")
        for field in ("param_dtype", "autocast_dtype"):
            if getattr(self, field) not in (None, *HALVES):
                raise SettingError(f"{where}: {field} must be None, torch.float16 or torch.bfloat16, got {getattr(self, field)}")
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise SettingError(f"{where}: loss_scale must be None, a number or 'dynamic', got {self.loss_scale!r}")
        if self.loss_scale not in (None, "dynamic") and not is_positive(self.loss_scale):
            raise SettingError(f"{where}: loss_scale must be positive and finite, got {self.loss_scale!r}")
        if self.master and self.param_dtype is None:
            raise SettingError(f"{where}: master=True needs a half param_dtype, such as torch.bfloat16")
        if self.bf16_format not in (None, "split", "kahan", "stochastic"):
            raise SettingError(f"{where}: bf16_format must be None, 'split', 'kahan' or 'stochastic', got {self.bf16_format!r}")
        if self.bf16_format is not None and (self.master or self.param_dtype != torch.bfloat16):
            raise SettingError(
                f"{where}: bf16_format={self.bf16_format!r} is for bf16 weights without masters; set master=False, "
                "param_dtype=torch.bfloat16"
            )
        if self.tf32 not in (None, True, False):
            raise SettingError(f"{where}: tf32 must be True, False or None for torch's own setting, got {self.tf32!r}")
        if self.fp8 not in (None, "hardware", "emulated"):
            raise SettingError(f"{where}: fp8 must be None, 'hardware' or 'emulated', got {self.fp8!r}")
        if isinstance(self.keep_fp32, str) or not all(isinstance(k, str | type) for k in self.keep_fp32):
            raise SettingError(f"{where}: keep_fp32 must be a tuple of module classes and names, got {self.keep_fp32!r}")

    @property
    def pure(self) -> bool:
        """Whether the optimizer updates half weights directly, without masters or remainders."""
        return self.param_dtype is not None and not self.master and self.bf16_format is None

    def __str__(self) -> str:
        """One line: the formats of weights, products, masters and outputs."""
        half = _dtype_name(self.param_dtype)
        parts = [f"{half or 'fp32'} weights"]
        if self.autocast_dtype is not None:
            parts = [f"fp32 weights, {_dtype_name(self.autocast_dtype)} products by autocast"]
        elif self.param_dtype is None:
            products = {None: "products as torch is set", False: "IEEE fp32 products", True: "TF32 products"}[self.tf32]
            parts.append(products)
        if self.param_dtype is not None:
            formats = {
                "split": "exact fp32 in int16 remainders",
                "kahan": "bf16 compensations",
                "stochastic": "stochastic rounding",
            }
            parts.append("fp32 masters" if self.master else formats[self.bf16_format] if self.bf16_format else "no masters")
            names = [kind if isinstance(kind, str) else kind.__name__.lstrip("_") for kind in self.keep_fp32]
            parts += [f"{' and '.join(names)} in fp32"] if names else []
        if self.fp8 is not None:
            parts.append(f"fp8 products in linear layers ({self.fp8})")
        if self.loss_scale is not None:
            parts.append(f"loss scale {self.loss_scale}")
        return f"{self.name}: {', '.join(parts)}"


def is_positive(value: object) -> bool:
    """Whether a setting is a finite number above 0; True and text are none."""
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _dtype_name(dtype: torch.dtype | None) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", None: ""}[dtype]


FP32 = Policy(name="FP32", tf32=False)
TF32 = Policy(name="TF32", tf32=True)
AMP_BF16 = Policy(name="AMP_BF16", autocast_dtype=torch.bfloat16)
AMP_FP16 = Policy(name="AMP_FP16", autocast_dtype=torch.float16, loss_scale="dynamic")
MASTER_BF16 = Policy(name="MASTER_BF16", param_dtype=torch.bfloat16, master=True)
MASTER_FP16 = Policy(name="MASTER_FP16", param_dtype=torch.float16, master=True, loss_scale="dynamic")
SPLIT_BF16 = Policy(name="SPLIT_BF16", param_dtype=torch.bfloat16, bf16_format="split")
KAHAN_BF16 = Policy(name="KAHAN_BF16", param_dtype=torch.bfloat16, bf16_format="kahan")
SR_BF16 = Policy(name="SR_BF16", param_dtype=torch.bfloat16, bf16_format="stochastic")
PURE_BF16 = Policy(name="PURE_BF16", param_dtype=torch.bfloat16)
PURE_FP16 = Policy(name="PURE_FP16", param_dtype=torch.float16)
FP8 = Policy(name="FP8", param_dtype=torch.bfloat16, master=True, fp8="hardware")
