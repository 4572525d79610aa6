"""Calls that torch's trace cannot follow where sizes vary, replaced by others while a model is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PlainCalls(TorchFunctionMode):
    """Trace `torch.take_along_dim` as `gather`: torch's operator makes constants of sizes that vary."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.take_along_dim or func is Tensor.take_along_dim:
            return _gathered(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _gathered(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`torch.take_along_dim`: all dimensions but `dim` are broadcast; with None, both are flat."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    dim %= input.ndim
    shapes = [[1 if d == dim else size for d, size in enumerate(value.shape)] for value in (input, indices)]
    if shapes[0] != shapes[1]:
        common = torch.broadcast_shapes(*shapes)
        input, indices = (value.expand([*common[:dim], value.shape[dim], *common[dim + 1 :]]) for value in (input, indices))
    return input.gather(dim, indices)
