"""Inspect an ONNX file of any tool: its inputs and outputs, and what each layer stores, in which type, with which scales."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError
from compresskit.export.files import file_bytes, read_proto

#: Operators behind which a stored tensor is still the same weight.
PASSED_ON = frozenset(("DequantizeLinear", "QuantizeLinear", "Transpose", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze"))
#: Operators that take scales themselves -> places of the weight, its scales, and the scale of the input (None: none).
SCALED_OPERATORS: dict[str, tuple[int, int, int | None]] = {
    "QLinearConv": (3, 4, 1),
    "QLinearMatMul": (3, 4, 1),
    "QGemm": (3, 4, 1),
    "MatMulIntegerToFloat": (1, 3, 2),
    "DynamicQuantizeMatMul": (1, 2, None),
    "MatMulNBits": (1, 2, None),
    "GatherBlockQuantized": (0, 2, None),
}
#: Bits of an element by ONNX's name of its type, where they are not in the name.
BITS = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8, "UNDEFINED": 0}
NO_WEIGHT = frozenset(("INT64", "INT32", "BOOL", "STRING"))  # types of shapes, axes, indices and biases
LONGEST_NAME = 44
#: Operators that take bits apart, in our files and in those of earlier versions.
TAKING_APART = frozenset(("Mod", "BitShift"))
#: Operators between stored bit planes and the tensors that they hold; see `export.rewrite.bit_planes`.
PLANE_OPERATORS = TAKING_APART | {"Split", "Reshape", "Cast", "ReduceSum", "Mul", "Sub", "GreaterOrEqual", "BitwiseAnd"}


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """An operator with a weight that the file stores.

    Attributes:
        name: of the node, or of its output where it has none.
        operator: such as "Conv".
        weight: name of the largest stored tensor among its inputs; shape, dtype: of that tensor, as it is stored.
        bytes: of all tensors that are stored for this operator, and for none before it.
        scales: number of scales of the weight; 0 where there are none, or none that the file stores.
        scale_low, scale_high: the smallest and the largest of them.
        input_scale: scale of its first input, where that is one stored number.
    """

    name: str
    operator: str
    weight: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    scales: int = 0
    scale_low: float | None = None
    scale_high: float | None = None
    input_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class FileContents:
    """What is in a file; prints as a table.

    Attributes:
        path: of the file. bytes: of the file, with its external data.
        producer: the tool that wrote it. opset: version of the standard operators. ir_version: of the format.
        inputs, outputs: (name, dtype, dimensions), a dimension that varies by its name.
        layers: the operators with weights.
        stored: type -> bytes of all stored tensors of that type.
        operators: type -> number, those of inner graphs (If, Loop) included.
    """

    path: str
    bytes: int
    producer: str
    opset: int
    ir_version: int
    inputs: list[tuple[str, str, tuple[int | str, ...]]]
    outputs: list[tuple[str, str, tuple[int | str, ...]]]
    layers: list[StoredLayer]
    stored: dict[str, int]
    operators: dict[str, int]

    def __str__(self) -> str:
        made = f", made by {self.producer}" if self.producer else ""
        lines = [f"{self.path}: {self.bytes:,} bytes, opset {self.opset}, IR {self.ir_version}{made}"]
        for kind, values in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {kind:<7} {name}: {dtype} ({', '.join(map(str, shape))})" for name, dtype, shape in values]
        if self.layers:
            rows = [("weight", "operator", "shape", "stored as", "bytes", "scales", "input scale"), *map(_cells_of, self.layers)]
            widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
            lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        each = ", ".join(f"{dtype} {size:,} bytes" for dtype, size in self.stored.items())
        lines.append(f"  stored: {each or 'no tensors'}")
        lines.append(f"  operators: {', '.join(f'{kind} {count}' for kind, count in self.operators.items())}")
        return "\n".join(lines)


def _cells_of(layer: StoredLayer) -> tuple[str, ...]:
    scales = "-"
    if layer.scales:
        scales = f"{layer.scales}: {layer.scale_low:.3g}" + (f" to {layer.scale_high:.3g}" if layer.scales > 1 else "")
    name = layer.weight if len(layer.weight) <= LONGEST_NAME else f"...{layer.weight[3 - LONGEST_NAME :]}"
    shape = "x".join(map(str, layer.shape))
    given = "-" if layer.input_scale is None else f"{layer.input_scale:.3g}"
    return name, layer.operator, shape, layer.dtype, f"{layer.bytes:,}", scales, given


def inspect_onnx(path: str | Path) -> FileContents:
    """Read what is in a file, without running it.

    Raises ExportError where it is not an ONNX file.
    """
    proto = read_proto(path)
    if not proto.graph.node and not proto.graph.output:
        raise ExportError(f"{path}: no graph in it; wanted an ONNX file")
    reader = _Reader(proto, Path(path).parent)
    return FileContents(
        path=str(path),
        bytes=file_bytes(path),
        producer=f"{proto.producer_name} {proto.producer_version}".strip(),
        opset=max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1),
        ir_version=proto.ir_version,
        inputs=[_described(v) for v in proto.graph.input if v.name not in reader.tensors],
        outputs=[_described(v) for v in proto.graph.output],
        layers=list(reader.layers()),
        stored=dict(reader.stored.most_common()),
        operators=dict(Counter(node.op_type for node in reader.nodes).most_common()),
    )


def _described(value: Any) -> tuple[str, str, tuple[int | str, ...]]:
    """(name, dtype, dimensions) of an input or an output."""
    import onnx

    kind = value.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim)
    return value.name, onnx.TensorProto.DataType.Name(kind.elem_type).lower(), dims


class _Reader:
    """The stored tensors of a file by name, and the operators that take them."""

    def __init__(self, proto: Any, folder: Path) -> None:
        import onnx

        self.folder, self.type_name = folder, onnx.TensorProto.DataType.Name
        self.nodes: list[Any] = []
        self.tensors: dict[str, Any] = {}
        self.stored: Counter[str] = Counter()
        self._collect(proto.graph)
        self.sources = {name: node for node in self.nodes if node.op_type in PASSED_ON for name in node.output}
        self.decoding: set[str] = set()
        self._find_planes()
        self.palettes: dict[str, tuple[str, ...]] = {}
        self._find_palettes()
        self._find_scaled()
        self.counted: set[str] = set()

    def _collect(self, graph: Any) -> None:
        for tensor in graph.initializer:
            self._add(tensor.name, tensor)
        for node in graph.node:
            self.nodes.append(node)
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "value":
                    self._add(node.output[0], attribute.t)
                for inner in (attribute.g, *attribute.graphs):
                    self._collect(inner)

    def _add(self, name: str, tensor: Any) -> None:
        self.tensors[name] = tensor
        self.stored[self.type_name(tensor.data_type).lower()] += self._bytes(tensor)

    def _bytes(self, tensor: Any) -> int:
        """Bytes of the values of a tensor; of text, the letters."""
        name = self._type_name(tensor)
        if name == "STRING":
            return sum(map(len, tensor.string_data))
        digits = re.search(r"\d+", name)  # FLOAT8E4M3FN has 8 bits
        bits = BITS[name] if digits is None else int(digits[0])
        return -(-prod(tensor.dims) * bits // 8)

    def _find_planes(self) -> None:
        """Enter the tensors that are stored as bit planes as if each were stored by itself.

        `decoding`: names of what the operators compute that decode stored tensors, and are no layers.
        """
        makers = {name: node for node in self.nodes if node.op_type in PLANE_OPERATORS for name in node.output}
        for name, node in list(makers.items()):
            shape = self.tensors.get(node.input[1]) if node.op_type == "Reshape" and len(node.input) > 1 else None
            if shape is None or makers.get(node.input[0]) is None:
                continue
            here, seen = node.input[0], set[str]()
            while here in makers and here not in seen:
                seen.add(here)
                here = makers[here].input[0]
            in_bits = any(makers[other].op_type in TAKING_APART for other in seen)
            planes = self.tensors.get(here)
            dims = [int(n) for n in self._numbers(node.input[1])]
            if in_bits and planes is not None and len(planes.dims) == 3 and -1 not in dims:
                self.tensors[name] = SimpleNamespace(dims=dims, data_type=f"INT{planes.dims[0]}")
                self.decoding |= seen

    def _find_palettes(self) -> None:
        """Enter the weights that a Gather makes of stored indices and centroids as if each were stored by itself.

        `palettes`: name of such a weight -> its centroids, and the places of the channels in them.
        """
        makers = {name: node for node in self.nodes for name in node.output}
        for node in [n for n in self.nodes if n.op_type == "Gather"]:
            added = makers.get(node.input[1])
            if added is None or added.op_type != "Add" or node.input[0] not in self.tensors or len(added.input) != 2:
                continue
            indices = self._behind(added.input[0])[-1]
            if indices in self.tensors and added.input[1] in self.tensors:
                kind = f"{self._kind(indices)} PALETTE"
                self.tensors[node.output[0]] = SimpleNamespace(dims=self.tensors[indices].dims, data_type=kind)
                self.palettes[node.output[0]] = (node.input[0], added.input[1])
                self.decoding |= {node.output[0], added.output[0]}

    def _find_scaled(self) -> None:
        """Let a Cast, Sub and Mul of stored integers be passed on, as a DequantizeLinear is; see `rewrite.constant_weights`."""
        for node in [n for n in self.nodes if n.op_type in ("Sub", "Mul") and len(n.input) == 2]:
            chain = self._behind(node.input[0])
            decoded = chain[-1] in self.tensors and len(chain) > 1 and re.match("U?INT", self._kind(chain[-1]))
            if decoded and node.input[1] in self.tensors:
                self.sources[node.output[0]] = node
                self.decoding.add(node.output[0])

    def layers(self) -> Iterator[StoredLayer]:
        """The operators that take a stored weight, in the order of the file."""
        for node in self.nodes:
            if node.op_type in PASSED_ON or node.op_type == "Constant" or node.output[0] in self.decoding:
                continue
            found = [self._behind(name) for name in node.input if name]
            weights = [chain[-1] for chain in found if chain[-1] in self.tensors]
            weights = [w for w in weights if self.tensors[w].dims and self._kind(w) not in NO_WEIGHT]
            if not weights:
                continue
            weight = max(weights, key=lambda name: prod(self.tensors[name].dims))
            used = {name for chain in found for name in self._stored_along(chain)}
            size = sum(self._bytes(self.tensors[name]) for name in used - self.counted)
            self.counted |= used
            yield StoredLayer(
                name=node.name or node.output[0],
                operator=node.op_type,
                weight=weight,
                shape=tuple(self.tensors[weight].dims),
                dtype=self._kind(weight).lower(),
                bytes=size,
                **self._scales(node, weight, found),
            )

    def _kind(self, name: str) -> str:
        return self._type_name(self.tensors[name])

    def _type_name(self, tensor: Any) -> str:
        kind = tensor.data_type
        return kind if isinstance(kind, str) else str(self.type_name(kind))

    def _behind(self, name: str) -> list[str]:
        """The names from an input of an operator back to the stored tensor that it is made of, or to what is computed."""
        chain = [name]
        while chain[-1] not in self.tensors and chain[-1] in self.sources and self.sources[chain[-1]].input:
            before = self.sources[chain[-1]].input[0]
            if before in chain:
                break
            chain.append(before)
        return chain

    def _stored_along(self, chain: Sequence[str]) -> Iterator[str]:
        """The stored tensors of a chain that ends in one: it, and the scales and zero points on the way."""
        if chain[-1] in self.tensors:
            yield chain[-1]
            yield from self.palettes.get(chain[-1], ())
            for name in chain[:-1]:
                yield from (extra for extra in self.sources[name].input[1:] if extra in self.tensors)

    def _scales(self, node: Any, weight: str, found: Sequence[Sequence[str]]) -> dict[str, Any]:
        """The scales of a layer's weight and of its first input, as `StoredLayer` names them."""
        places = SCALED_OPERATORS.get(node.op_type)
        names, given = list(node.input), None
        scale = None
        if places is not None:
            of_weight, of_input = places[1], places[2]
            scale = names[of_weight] if len(names) > of_weight else None
            given = names[of_input] if of_input is not None else None
        else:
            scale = next((self._scale_in(chain) for chain in found if chain[-1] == weight), None)
            given = self._scale_in(found[0]) if found and found[0][-1] != weight else None
        values, one = self._numbers(scale), self._numbers(given)
        entries: dict[str, Any] = {"input_scale": float(one[0]) if one.size == 1 else None}
        if values.size:
            entries |= {"scales": int(values.size), "scale_low": float(values.min()), "scale_high": float(values.max())}
        return entries

    def _scale_in(self, chain: Sequence[str]) -> str | None:
        """Name of the scales of the DequantizeLinear, or Mul, of a chain."""
        nodes = (self.sources[name] for name in chain if name in self.sources)
        return next((node.input[1] for node in nodes if node.op_type in ("DequantizeLinear", "Mul")), None)

    def _numbers(self, name: str | None) -> np.ndarray:
        """The values of a stored tensor; none where it is computed."""
        from onnx import numpy_helper

        if name is None or name not in self.tensors:
            return np.zeros(0)
        return np.asarray(numpy_helper.to_array(self.tensors[name], str(self.folder))).astype(np.float64).reshape(-1)
