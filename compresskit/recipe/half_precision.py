"""A network in half precision, for inference: what fp16 and bf16 files reach is a baseline of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.surgery import copy_model
from compresskit.mixed.formats.casts import cast_floating

#: Names of the dtypes, as rows call them.
HALF_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfPrecision(nn.Module):
    """A network in half precision that takes and returns fp32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = copy_model(model).to(dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = least_precise_dtype(self.model)  # a bf16 network is widened where its file is written
        args, kwargs = cast_floating((args, kwargs), dtype)
        return cast_floating(self.model(*args, **kwargs), torch.float32)


@dataclass(frozen=True, kw_only=True)
class InHalfPrecision(Stage):
    """Put a network into half precision.

    Args:
        dtype: fp16 or bf16.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset()

    dtype: str

    def skeleton(self, model: nn.Module) -> nn.Module:
        return HalfPrecision(model, HALF_DTYPES[self.dtype])

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        return self.skeleton(model).eval()
