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
    """Trace `torch.take_along_dim` as `gather`, `F.affine_grid` of sizes that vary as a product, `torch.linspace` of as many
    steps as one as a range, and `torch.tensor_split` into equal parts of one as slices: torch's operators make constants of
    sizes, `tensor_split` only when the graph is decomposed.

    Numbers that are read from `torch.arange` of numbers, as by `torch.arange(1, x.ndim).tolist()`, are numbers: torch's trace
    takes them for values of a tensor, which depend on inputs. `divmod` takes sizes that vary, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: Any = WeakTensorKeyDictionary()  # tensor -> how often it was written, its values
        self._added: dict[str, Any] = {}  # methods of sizes that vary, while this is entered

    def __enter__(self) -> PlainCalls:
        if "__divmod__" not in vars(torch.SymInt):  # which has both of what it gives
            self._added = {"__divmod__": lambda a, b: (a // b, a % b), "__rdivmod__": lambda b, a: (a // b, a % b)}
        for name, function in self._added.items():
            setattr(torch.SymInt, name, function)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in self._added:
            delattr(torch.SymInt, name)
        self._added = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.take_along_dim or func is Tensor.take_along_dim:
            return _gathered(*args, **kwargs)
        if (func is F.affine_grid or func is torch.affine_grid_generator) and _varies(*args, **kwargs):
            return _grid(*args, **kwargs)
        if func is torch.linspace and _has_varying_steps(*args, **kwargs):
            return _spaced(*args, **kwargs)
        if func is torch.tensor_split or func is Tensor.tensor_split:
            return _split_equally(*args, **kwargs) or func(*args, **kwargs)
        if func not in (torch.arange, Tensor.unbind, Tensor.item) or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        return self._with_numbers(func, args, kwargs)

    def _with_numbers(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call one of the functions that make or read numbers; `tolist` is traced as `unbind`, and `item` of each."""
        if func is torch.arange:
            made = func(*args, **kwargs)
            if all(type(bound) is int for bound in args) and kwargs.keys() <= {"device"} and not made.is_inference():
                self._numbers[made] = made._version, range(*args)
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


def _has_varying_steps(start: Any, end: Any, steps: Any = 0, **given: Any) -> bool:
    """While torch reads the code, all sizes look like numbers."""
    return (type(steps) is not int or torch.compiler.is_dynamo_compiling()) and given.get("out") is None


def _spaced(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    """`torch.linspace`: from both ends to the middle, as torch computes it, so that it is symmetric and the last one is `end`."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = next((end.device for end in (start, end) if isinstance(end, Tensor)), None) if device is None else device
    computed = dtype if dtype in (torch.float32, torch.float64) else torch.float64
    positions = torch.arange(steps, dtype=computed, device=device)
    low, high = (
        value.to(computed) if isinstance(value, Tensor) else torch.full((), value, dtype=computed, device=device)
        for value in (start, end)
    )
    last = positions[-1:]
    least = last.clamp(min=1)
    step = (high - low) / least
    return torch.where(2 * positions < least, low + positions * step, high - (last - positions) * step).to(dtype)


def _split_equally(input: Tensor, sections: Any = None, dim: int = 0, **_: Any) -> tuple[Tensor, ...] | None:
    """`torch.tensor_split` into a number of parts of a dimension that varies, the first of which have one row more; else None."""
    if type(sections) is not int or (type(input.shape[dim]) is int and not torch.compiler.is_dynamo_compiling()):
        return None
    parts, start = [], 0
    for i in range(sections):
        rows = (input.shape[dim] + sections - 1 - i) // sections
        parts.append(input.narrow(dim, start, rows))
        start = start + rows
    return tuple(parts)


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
