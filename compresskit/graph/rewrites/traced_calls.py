"""Calls that torch's trace cannot follow, most of them where sizes vary, replaced by others while a model is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary


class PlainCalls(TorchFunctionMode):
    """Trace `torch.take_along_dim` as `gather`, and `F.affine_grid` of sizes that vary as a product: torch's operators make
    constants of sizes.

    Numbers that are read from `torch.arange` of numbers, as by `torch.arange(1, x.ndim).tolist()`, are numbers: torch's trace
    takes them for values of a tensor, which depend on inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Any = WeakTensorKeyDictionary()  # tensor -> how often it was written, its values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.take_along_dim or func is Tensor.take_along_dim:
            return _gathered(*args, **kwargs)
        if (func is F.affine_grid or func is torch.affine_grid_generator) and _varies(*args, **kwargs):
            return _grid(*args, **kwargs)
        if func not in (torch.arange, Tensor.unbind, Tensor.item) or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        return self._with_numbers(func, args, kwargs)

    def _with_numbers(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call one of the functions that make or read numbers; `tolist` is traced as `unbind`, and `item` of each."""
        if func is torch.arange:
            made = func(*args, **kwargs)
            if all(type(bound) is int for bound in args) and kwargs.keys() <= {"device"} and not made.is_inference():
                self._numbers[made] = made._version, list(range(*args))
            return made
        version, values = self._numbers.get(args[0], (None, None))
        if version is None or version != args[0]._version:  # made of something else, or written since
            return func(*args, **kwargs)
        if func is Tensor.item:
            return values if isinstance(values, int) else values[0]
        parts = func(*args, **kwargs)
        self._numbers.update({part: (version, value) for part, value in zip(parts, values, strict=True)})
        return parts


def _varies(theta: Tensor, size: Sequence[Any], *_: Any, **__: Any) -> bool:
    return not all(type(n) is int for n in size[2:])


def _grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """`F.affine_grid`: the coordinates of each position from -1 to 1, the last axis first, and 1, times theta."""
    sizes, columns = list(size[2:]), []
    for axis in reversed(range(len(sizes))):
        steps = torch.arange(sizes[axis], dtype=theta.dtype, device=theta.device)
        last = steps[-1:]
        line = (2 * steps - last) / (last.clamp(min=1) if align_corners else last + 1)
        columns.append(line.view([-1 if other == axis else 1 for other in range(len(sizes))]).expand(sizes))
    base = torch.stack([*columns, torch.ones_like(columns[0])], -1)
    return (base.flatten(0, -2) @ theta.transpose(1, 2)).unflatten(1, sizes)


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
