"""The oldest release of onnxruntime that reads an ONNX file, by its opset, its IR version and the kernels of its operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compresskit.export.check.profile.optimized_graph import all_nodes

#: Newest opset and IR version that a release of onnxruntime reads -> the release. From 1.15 on that was tried, before that it is
#: by its own table. `BY_TYPE`, `BY_OPSET` and `OWN` came later.
RUNTIMES = {
    (13, 7): (1, 7),
    (14, 7): (1, 8),
    (15, 8): (1, 10),
    (16, 8): (1, 11),
    (17, 8): (1, 12),
    (18, 8): (1, 14),
    (19, 9): (1, 16),
    (20, 9): (1, 17),
    (21, 10): (1, 18),
    (22, 10): (1, 21),
    (23, 11): (1, 23),
    (25, 13): (1, 24),
}
_BYTES, _NIBBLES = "UINT8 INT8", "UINT4 INT4"
_SMALL = f"{_BYTES} UINT16 INT16"
#: (operators, types, release): their kernels for these types came later than the opset. `benchmarks/old_runtimes.py` tries each.
BY_TYPE = (
    ("QuantizeLinear DequantizeLinear Shape Transpose", _NIBBLES, (1, 19)),
    ("Trilu", "BOOL", (1, 19)),
    ("ArgMax ReduceMean", "INT64", (1, 20)),
    ("ArgMin", f"{_BYTES} INT64", (1, 20)),
    ("Add Sub Mul Div Equal Greater GreaterOrEqual Less LessOrEqual", _SMALL, (1, 21)),
    ("Neg", "INT16", (1, 21)),
    ("DepthToSpace", "UINT8", (1, 21)),
    ("Cast CastLike", _NIBBLES, (1, 23)),
    ("Max Min", _BYTES, (1, 24)),
    ("ConvInteger", "INT8", (1, 24)),
    ("TopK", f"{_BYTES} INT16", (1, 26)),
    ("DepthToSpace", "INT8", (1, 28)),
    ("SpaceToDepth", _BYTES, (1, 28)),
    ("Trilu", "INT32", (1, 29)),
    ("Where", "INT8", (1, 31)),
)
#: (operator, opset, release): its kernels from that opset on came later than the opset.
BY_OPSET = (("QuantizeLinear", 23, (1, 24)), ("DeformConv", 19, (1, 25)), ("LpNormalization", 22, (1, 25)))
#: Operator of onnxruntime's own -> bits of its weights -> release.
OWN = {
    "MatMulNBits": {2: (1, 24), 4: (1, 17), 8: (1, 22)},
    "GatherBlockQuantized": {2: (1, 24), 4: (1, 23), 8: (1, 23)},
}
_BY_OUTPUT = frozenset({"Cast", "CastLike", "QuantizeLinear", "Where"})  # operators with a type that their first input has not


def file_opset(proto: Any) -> int:
    """Version of the standard operators of a file."""
    return max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=1)


def oldest_runtime(proto: Any, types: Mapping[str, str]) -> str:
    """The oldest release of onnxruntime that reads a file, "1.17"; "" where it is newer than all that we know.

    types: of its values, see `value_types`.
    """
    opset = file_opset(proto)
    readers = [release for (newest, ir), release in RUNTIMES.items() if newest >= opset and ir >= proto.ir_version]
    if not readers:
        return ""
    needed = [release for node in all_nodes(proto.graph) for release in _kernel_releases(node, opset, types)]
    return "{}.{}".format(*max([min(readers), *needed]))


def _kernel_releases(node: Any, opset: int, types: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """The releases that brought the kernels of a node, where these are younger than its operator."""
    numbers = {a.name: a.i for a in node.attribute}
    if node.op_type in OWN:
        by_bits = OWN[node.op_type]
        yield by_bits.get(numbers.get("bits", 4), max(by_bits.values()))
    if node.op_type == "DequantizeLinear" and numbers.get("block_size"):
        yield (1, 19)  # 1.18 loads blocks of 8 bits, but does not run them
    yield from (release for name, since, release in BY_OPSET if name == node.op_type and opset >= since)
    values = [*node.input[:1], *(node.output[:1] if node.op_type in _BY_OUTPUT else ())]
    found = {types.get(value) for value in values}
    for operators, kinds, release in BY_TYPE:
        if node.op_type in operators.split() and not found.isdisjoint(kinds.split()):
            yield release
