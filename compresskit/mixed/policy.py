"""Which numbers a model trains in, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compresskit.errors import SettingError

#: Layers whose statistics need fp32 whatever the policy: sums over a batch overflow and lose digits in half.
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Numbers of one kind of training.

    param_dtype: what weights are stored in during training; None leaves them as they are (fp32).
    autocast_dtype: what `torch.autocast` runs matmuls and convolutions in; None for no autocast.
    master: keep an fp32 copy of every half weight, which is what the optimizer updates.
    loss_scale: None, a fixed factor, or "dynamic".
    keep_fp32: kinds of module that stay in fp32 under a half `param_dtype`.
    """

    name: str
    param_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    master: bool = False
    loss_scale: float | str | None = None
    keep_fp32: tuple[type[nn.Module], ...] = BATCH_NORMS

    def __post_init__(self) -> None:
        if self.param_dtype is not None and self.autocast_dtype is not None:
            raise SettingError(f"Policy {self.name}: param_dtype and autocast_dtype exclude one another; give one")
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise SettingError(f"Policy {self.name}: loss_scale must be None, a number or 'dynamic', got {self.loss_scale!r}")
        if isinstance(self.loss_scale, float | int) and self.loss_scale <= 0:
            raise SettingError(f"Policy {self.name}: loss_scale must be positive, got {self.loss_scale}")
        if self.master and self.param_dtype is None:
            raise SettingError(f"Policy {self.name}: master=True needs a half param_dtype, such as torch.bfloat16")


FP32 = Policy(name="FP32")
AMP_BF16 = Policy(name="AMP_BF16", autocast_dtype=torch.bfloat16)
AMP_FP16 = Policy(name="AMP_FP16", autocast_dtype=torch.float16, loss_scale="dynamic")
MASTER_BF16 = Policy(name="MASTER_BF16", param_dtype=torch.bfloat16, master=True)
MASTER_FP16 = Policy(name="MASTER_FP16", param_dtype=torch.float16, master=True, loss_scale="dynamic")
