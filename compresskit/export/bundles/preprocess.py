"""Preprocessing of pictures: as data, as numpy, and as operators in front of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from compresskit.base.errors import DataError, ExportError, SettingError
from compresskit.base.files import atomic
from compresskit.base.task import Inputs
from compresskit.export.files import read_proto

PIXELS = "pixels"  # name of the input of pictures


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How pictures become the input of a network: uint8 (N, height, width, channels) to float (N, channels, height, width).

    Each value is (pixel / 255 - mean) / std, as of torchvision's `ToTensor` and `Normalize`. Decoding and resizing are left to
    the caller, since no two libraries resize alike.

    Args:
        mean, std: one number for each channel. std > 0.
        in_graph: put these operators into the file, whose input is then the pictures.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    in_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values or not all(map(_is_finite, values)):
                raise SettingError(
                    f"Preprocess({name}=...): wanted a number for each channel, such as (0.5, 0.5, 0.5), got {values!r}"
                )
            object.__setattr__(self, name, tuple(map(float, values)))
        if len(self.mean) != len(self.std):
            raise SettingError(f"Preprocess: wanted as many means as deviations, got {len(self.mean)} and {len(self.std)}")
        if min(self.std) <= 0:
            raise SettingError(f"Preprocess(std=...): wanted numbers > 0, got {self.std}")

    def pixels(self, example: Inputs | Tensor) -> np.ndarray:
        """The pictures of an example; DataError where they are none, or of other channels."""
        value = (
            example
            if isinstance(example, Tensor)
            else next(iter(example.values() if isinstance(example, dict) else example), None)
        )
        pictures = value.detach().cpu().numpy() if isinstance(value, Tensor) else None
        if pictures is None or pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[-1] != len(self.mean):
            got = f"{pictures.dtype} {pictures.shape}" if pictures is not None else type(value).__name__
            raise DataError(
                f"bundle(preprocess=...): wanted pictures as example, uint8 (N, height, width, {len(self.mean)}), got {got};"
                " decode and resize them first, and leave the rest to preprocess"
            )
        return pictures

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 (N, height, width, channels) -> float32 (N, channels, height, width), by the operations of the file."""
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        scaled = pixels.astype(np.float32).transpose(0, 3, 1, 2) / np.float32(255)
        return np.ascontiguousarray((scaled - mean) / std)

    def write_into(self, source: Path, to: Path) -> None:
        """Write a file whose input is pictures: these operators in front of the network.

        Raises ExportError where it has not one float input (N, channels, height, width), or an input or value of that name.
        """
        from onnx import TensorProto, helper, numpy_helper  # heavy, and only exporting needs it

        proto = read_proto(source)
        stored = {tensor.name for tensor in proto.graph.initializer}
        inputs = [entry for entry in proto.graph.input if entry.name not in stored]
        sizes = [_size(dimension) for dimension in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
        if len(sizes) != 4 or sizes[1] not in (len(self.mean), None) or inputs[0].type.tensor_type.elem_type != TensorProto.FLOAT:
            names = ", ".join(entry.name for entry in inputs)
            raise ExportError(
                f"{source}: preprocessing wants one float input (N, {len(self.mean)}, height, width), the file has {names}"
                f" {tuple(sizes) if sizes else ''}".rstrip()
            )
        name, batch, _, height, width = inputs[0].name, *sizes
        shape = [batch, height, width, len(self.mean)]
        inputs[0].CopyFrom(helper.make_tensor_value_info(PIXELS, TensorProto.UINT8, shape))
        settings = {"full": np.float32(255), "mean": np.array(self.mean, np.float32)[:, None, None]}
        settings["std"] = np.array(self.std, np.float32)[:, None, None]
        for key, value in settings.items():
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), f"{PIXELS}.{key}"))
        steps = [
            helper.make_node("Cast", [PIXELS], [f"{PIXELS}.float"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", [f"{PIXELS}.float"], [f"{PIXELS}.moved"], perm=[0, 3, 1, 2]),
            helper.make_node("Div", [f"{PIXELS}.moved", f"{PIXELS}.full"], [f"{PIXELS}.scaled"]),
            helper.make_node("Sub", [f"{PIXELS}.scaled", f"{PIXELS}.mean"], [f"{PIXELS}.centred"]),
            helper.make_node("Div", [f"{PIXELS}.centred", f"{PIXELS}.std"], [name]),
        ]
        nodes = [*steps, *proto.graph.node]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        with atomic(to) as temporary:
            temporary.write_bytes(proto.SerializeToString())


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _size(dimension: Any) -> int | str | None:
    """A dimension of an ONNX shape: its size, its name, or None where it has neither."""
    return dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
