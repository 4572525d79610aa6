"""The layers of an ONNX file, those of its optimized graph, and which layers of two files belong together.

A layer is an operator with a stored weight (convolution, matrix product, recurrent layer) and what follows it up to the next one.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from compresskit.export.check.contents import PASSED_ON
from compresskit.export.check.profile.optimized_graph import (
    FUSED,
    INTEGER_KERNELS,
    RECURRENT_OPERATORS,
    WEIGHT,
    all_nodes,
    constant_shapes,
)

#: Kinds of operators that a layer begins with -> those of one family, which rewrites turn into one another.
FAMILIES = {"Conv": "convolution", "ConvTranspose": "convolution", "Gemm": "matrix product", "MatMul": "matrix product"}
BEFORE = -1  # index of what comes before the first layer
WIDENED = "InsertedPrecisionFreeCast_"  # before names of values that ONNX Runtime computes in fp32, not in fp16 as in the file


@dataclass(frozen=True, kw_only=True)
class FileLayer:
    """One layer of a file.

    name: of the module that the weight belongs to, or of the node where the weight has no name of the model.
    node: name of its operator. kind: such as "Conv". shape: of the weight as it is stored. groups: of a convolution.
    """

    name: str
    node: str
    kind: str
    shape: tuple[int, ...]
    groups: int = 1

    @property
    def key(self) -> str:
        """The name as both a float and a quantized file have it."""
        return re.sub(r"[^0-9a-z]+", "_", self.name.lower())

    @property
    def depthwise(self) -> bool:
        """Whether each channel is convolved alone."""
        return self.kind == "Conv" and self.groups > 1 and self.shape[1] == 1

    @property
    def fewest_channels(self) -> int:
        """The smaller number of channels that a convolution reads (for each group) or writes; of others that of features."""
        ends = self.shape[:2] if FAMILIES.get(self.kind) == "convolution" else self.shape[-2:]
        return min(ends, default=0)


def kind_of(operator: str) -> str:
    """The operator that a kernel of ONNX Runtime stands for."""
    return INTEGER_KERNELS.get(operator, FUSED.get(operator, operator))


def name_nodes_(graph: Any) -> bool:
    """Give nodes without a name, or with that of another, names of their own, in place; returns whether there were any."""
    count = Counter(node.name for node in graph.node)
    changed = [node for node in graph.node if not node.name or count[node.name] > 1]
    for i, node in enumerate(changed):
        node.name = f"{node.name or node.op_type}_{next(filter(None, node.output), i)}"
    return bool(changed)


def file_layers(graph: Any) -> list[FileLayer]:
    """The layers of a graph as it is written, in its order."""
    shapes, sources = constant_shapes(graph), {name: node for node in graph.node for name in node.output}
    layers = []
    for node in graph.node:
        if (kind := kind_of(node.op_type)) not in FAMILIES and kind not in RECURRENT_OPERATORS:
            continue
        place = 1 if kind in RECURRENT_OPERATORS else WEIGHT.get(node.op_type, 1)
        weight = node.input[place] if len(node.input) > place else ""
        stored = _stored_behind(weight, sources)
        if weight not in shapes and stored not in shapes:
            continue
        groups = next((a.i for a in node.attribute if a.name == "group"), 1)
        name = _module_name(stored) or node.name
        shape = tuple(shapes.get(weight) or shapes[stored])
        layers.append(FileLayer(name=name, node=node.name, kind=kind, shape=shape, groups=groups))
    return layers


def _stored_behind(value: str, sources: dict[str, Any]) -> str:
    """Name of the stored tensor that a value is made of without a computation; else of the value where the chain ends."""
    while value in sources and sources[value].op_type in PASSED_ON:
        value = sources[value].input[0]
    return value


def _module_name(weight: str) -> str:
    """The module that a stored weight belongs to, "" where its name is not one of the model."""
    name = re.sub(r"(_quantized|_transposed\.integers|\.integers|_transposed)$", "", weight)
    if own := re.match(r"quantizers\.weight_(.+)$", name) or re.match(r"weight_(.+_weight)$", name):
        return re.sub(r"_weight$", "", own[1])
    module, _, last = name.rpartition(".")
    return "" if not module or "::" in name else module if last.startswith("weight") else name


def optimized_layers(source: Any, layers: Sequence[FileLayer], optimized: Any) -> dict[str, int]:
    """Node of a graph that ONNX Runtime optimized -> index of its layer in the file, `BEFORE` for what precedes all layers.

    A node without a weight belongs to the last layer that its inputs come from.
    """
    find = _Heads(source, layers)
    stored = {tensor.name for tensor in optimized.initializer}
    of_value: dict[str, int] = {value.name: BEFORE for value in optimized.input if value.name not in stored}
    found: dict[str, int] = {}
    for node in optimized.node:
        reads = [of_value[name] for name in _values_read(node) if name in of_value]
        head = find(node) if kind_of(node.op_type) in FAMILIES or kind_of(node.op_type) in RECURRENT_OPERATORS else None
        if head is None and not reads:
            continue
        found[node.name] = max(reads) if head is None else head
        of_value.update(dict.fromkeys(node.output, found[node.name]))
    readers: dict[str, set[str]] = defaultdict(set)
    for node in optimized.node:
        for name in _values_read(node):
            readers[name].add(node.name)
    for node in reversed(optimized.node):  # what is computed of constants alone belongs to the layer that reads it
        if node.name not in found:
            found[node.name] = min((found[r] for name in node.output for r in readers[name]), default=BEFORE)
    return found


def _values_read(node: Any) -> set[str]:
    """Names of what a node reads, also inside of its graphs (If, Loop)."""
    inner = (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))
    return {*node.input, *(name for graph in inner for within in all_nodes(graph) for name in within.input)}


class _Heads:
    """Finds the layer that a node of the optimized graph begins; no layer is found twice."""

    def __init__(self, source: Any, layers: Sequence[FileLayer]) -> None:
        self.of_node = {layer.node: i for i, layer in enumerate(layers)}
        self.sources = {name: node for node in source.node for name in node.output}
        self.taken: set[int] = set()

    def __call__(self, node: Any) -> int | None:
        for head in self._candidates(node):
            if head is not None and head not in self.taken:
                self.taken.add(head)
                return head
        return None

    def _candidates(self, node: Any) -> Iterator[int | None]:
        name = re.sub(rf"^{WIDENED}|_token_\d+$", "", node.name)  # what ONNX Runtime appends to make a name its own
        yield self.of_node.get(node.name)
        yield self.of_node.get(name)
        yield self.of_node.get(name.split("/MatMul", 1)[0])
        yield self._behind(name.removesuffix("_nchwc"))  # named for the value that it computes
        for value in node.output:
            yield self._behind(value.removeprefix(WIDENED))

    def _behind(self, value: str) -> int | None:
        """The nearest layer that a value of the file comes from."""
        level, seen = [value], {value}
        while level:
            heads = [self.of_node[n.name] for v in level if (n := self.sources.get(v)) is not None and n.name in self.of_node]
            if heads:
                return max(heads)
            level = [name for v in level if v in self.sources for name in self.sources[v].input if name not in seen]
            seen.update(level)
        return None


def match_layers(first: Sequence[FileLayer], second: Sequence[FileLayer]) -> list[tuple[int | None, int | None]]:
    """Pairs of indices of layers that belong together, in the order of the first file; None where the other file has none.

    Layers match by their names where both files have them, others by order, family and the size of the weight, or by the layer
    before them.
    """
    keys = [[layer.key for layer in layers] for layers in (first, second)]
    of_second = {key: i for i, key in enumerate(keys[1]) if keys[1].count(key) == 1}
    partner = {
        i: of_second[key]
        for i, key in enumerate(keys[0])
        if keys[0].count(key) == 1 and key in of_second and _family(first[i]) == _family(second[of_second[key]])
    }
    left = [i for i in range(len(first)) if i not in partner]
    right = [i for i in range(len(second)) if i not in set(partner.values())]
    signs = [[(_family(layers[i]), prod(layers[i].shape)) for i in some] for layers, some in ((first, left), (second, right))]
    for block in difflib.SequenceMatcher(None, signs[0], signs[1], autojunk=False).get_matching_blocks():
        partner.update({left[block.a + k]: right[block.b + k] for k in range(block.size)})
    for i in left:  # a weight that a file holds folded or padded, between layers that match
        j = 0 if i == 0 else partner.get(i - 1, -2) + 1
        if i not in partner and 0 <= j < len(second) and j not in partner.values() and _family(first[i]) == _family(second[j]):
            partner[i] = j
    pairs: list[tuple[int | None, int | None]] = [(i, partner.get(i)) for i in range(len(first))]
    return pairs + [(None, i) for i in range(len(second)) if i not in set(partner.values())]


def _family(layer: FileLayer) -> str:
    return FAMILIES.get(layer.kind, layer.kind)
