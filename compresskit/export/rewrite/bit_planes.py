"""Store integers of any width as bit planes: as many bits as they need, in operators that every runtime has.

planes (bits, n / 8, 1) uint8 -> Mod 2, 4, 8, ..., 256 -> at least 1, 2, 4, ..., 128 -> times 1, 2, 4, ..., -2^(bits - 1)
    -> sum over the planes -> int8 -> Split into the tensors -> Reshape

Bit b of an integer in two's complement stands in plane b, eight neighbouring integers in a byte. Integers that are only -1 and 1
take one plane: 2 times the bit, less 1. Tensors of one width share the operators, up to `MOST_TOGETHER` values.

There are no operators on bits: OpenVINO (2026.4) computes none of them on loading a file, so that convolutions that read the
weights run in float, and BitShift as a division in float, which leaves behind the point what is shifted out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

PLANES_OPSET = 18  # older files are for tools that read weights of bytes
MOST_TOGETHER = 2**20  # values: a runtime holds 4 bytes for each bit while it computes them
PLANES = "planes"  # how the name of what is stored begins


@dataclass(frozen=True)
class Packed:
    """An int8 initializer, its integers, and how many bits they need."""

    value: ir.Value
    integers: np.ndarray
    bits: int


def bits_needed(integers: np.ndarray) -> int:
    """The width that holds all of the integers, 1 to 8: in two's complement, or 1 where all are -1 or 1.

    >>> [bits_needed(np.array(v)) for v in ([-1, 1], [-1, 0], [-3, 3], [-8, 7], [127])]
    [1, 2, 3, 4, 8]
    """
    if bool((np.abs(integers) == 1).all()):
        return 1
    low, high = int(integers.min()), int(integers.max())
    return next(bits for bits in range(2, 9) if -(2 ** (bits - 1)) <= low and high < 2 ** (bits - 1))


def store_bit_planes(model: ir.Model, tensors: Sequence[Packed]) -> None:
    """Store initializers of a model that need the same number of bits as bit planes, in place."""
    builder = _PlaneBuilder(model)
    for group in _groups_of_planes(tensors):
        builder.store(group)


def _groups_of_planes(members: Iterable[Packed]) -> Iterable[list[Packed]]:
    """The tensors in groups of at most `MOST_TOGETHER` values, or one tensor."""
    group: list[Packed] = []
    for tensor in members:
        if group and sum(other.integers.size for other in (*group, tensor)) > MOST_TOGETHER:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


class _PlaneBuilder:
    """Adds operators at the start of a graph; constants that are the same are stored once."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.start = model.graph[0]
        self.names = {name for node in self.graph for name in (node.name, *(value.name for value in node.outputs))}
        self.names |= set(self.graph.initializers)
        self.stored: dict[Any, ir.Value] = {}

    def store(self, group: Sequence[Packed]) -> None:
        """Store tensors in planes of their own."""
        bits = group[0].bits
        flat = np.concatenate([tensor.integers.reshape(-1) for tensor in group])
        rest = -len(flat) % 8
        flat = np.concatenate([flat, np.full(rest, flat[0])]).astype(np.int64)
        codes = (flat + 1) // 2 if bits == 1 else flat & (2**bits - 1)
        planes = np.stack([np.packbits((codes >> bit & 1).astype(np.uint8), bitorder="little") for bit in range(bits)])
        self.graph.register_initializer(stored := self._value(self._new_name(PLANES), planes[:, :, None]))
        places = np.left_shift(1, np.arange(8, dtype=np.int32))
        up_to_place = self._node("Mod", self._node("Cast", stored, to=ir.DataType.INT32.value), self._constant(2 * places))
        digits = self._node("GreaterOrEqual", up_to_place, self._constant(places))
        numbers = self._node("Cast", digits, to=ir.DataType.INT32.value)
        if bits == 1:
            numbers = self._node("Mul", numbers, self._constant(np.int32(2)))
            numbers = self._node("Sub", numbers, self._constant(np.int32(1)))
        else:
            worth = np.array([*(2**bit for bit in range(bits - 1)), -(2 ** (bits - 1))], np.int32)
            numbers = self._node("Mul", numbers, self._constant(worth[:, None, None]))
            numbers = self._node("ReduceSum", numbers, self._constant(np.array([0])), keepdims=0)
        row = self._node("Reshape", self._node("Cast", numbers, to=ir.DataType.INT8.value), self._constant(np.array([-1])))
        sizes = [tensor.integers.size for tensor in group] + [rest] * (rest > 0)
        parts = self._nodes("Split", [row, self._constant(np.array(sizes))], len(sizes), axis=0) if len(sizes) > 1 else [row]
        for tensor, part in zip(group, parts, strict=False):
            value = tensor.value
            made = self._node("Reshape", part, self._constant(np.array(tensor.integers.shape)))
            made.shape, made.type = ir.Shape(tensor.integers.shape), value.type
            value.replace_all_uses_with(made)
            del self.graph.initializers[str(value.name)]
            made.name = str(value.name).removeprefix("quantizers.").removesuffix(".integers")

    def _constant(self, array: Any) -> ir.Value:
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.stored:
            self.stored[key] = self._value(self._new_name("k"), array)
            self.graph.register_initializer(self.stored[key])
        return self.stored[key]

    def _new_name(self, start: str) -> str:
        """A short name that no value has."""
        name = next(name for i in itertools.count() if (name := f"{start}{i}") not in self.names)
        self.names.add(name)
        return name

    @staticmethod
    def _value(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)

    def _node(self, kind: str, *inputs: ir.Value, **attributes: int | str) -> ir.Value:
        return self._nodes(kind, inputs, 1, **attributes)[0]

    def _nodes(self, kind: str, inputs: Sequence[ir.Value], outputs: int, **attributes: int | str) -> Sequence[ir.Value]:
        node = ir.Node("", kind, inputs, ir.convenience.convert_attributes(attributes), num_outputs=outputs)
        for value in node.outputs:
            value.name = self._new_name("p")
        node.name = node.outputs[0].name
        self.graph.insert_before(self.start, node)
        return node.outputs
