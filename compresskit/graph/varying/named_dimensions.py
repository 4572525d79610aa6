"""What a caller says of the dimensions that vary, checked with the example: inputs have them, and a name stands for one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from compresskit.base.errors import SettingError


def check_dimensions(varying: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> None:
    """Raise SettingError for dimensions that inputs do not have, or that the example shows as 1, which `torch.export` takes for a
    constant; the batch is shown by two rows.

    Args:
        varying: input name -> dimensions that vary.
        tensors: input name -> the example.
    """
    for name, dims in varying.items():
        for d in dims:
            if not 0 <= d < tensors[name].ndim:
                raise SettingError(f"dynamic: input {name!r} has dimensions 0..{tensors[name].ndim - 1}, got {d}")
            if d and tensors[name].shape[d] < 2:
                raise SettingError(f"dynamic: dimension {d} of input {name!r} is 1 in the example; show it with two or more")


def check_names(dynamic: Mapping[str, Mapping[int, str]], tensors: Mapping[str, Tensor]) -> None:
    """Raise SettingError where one name is given to dimensions of two sizes: ONNX Runtime plans its memory by names.

    Args:
        dynamic: input name -> dimension -> its name; inputs have these dimensions.
        tensors: input name -> the example.
    """
    first: dict[str, tuple[str, int]] = {}
    for name, dims in dynamic.items():
        for d, label in dims.items():
            other, there = first.setdefault(label, (name, d))
            sizes = tensors[other].shape[there], tensors[name].shape[d]
            if sizes[0] != sizes[1]:
                raise SettingError(
                    f"dynamic: {label!r} names dimension {there} of input {other!r} and dimension {d} of input {name!r}; wanted"
                    f" one size for one name, got {sizes[0]} and {sizes[1]} in the example: give each a name of its own"
                )
