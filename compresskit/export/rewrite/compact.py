"""Make a quantized file small: what every runtime infers by itself is not stored, names that no user reads are short, and what a
lookup and a product read of one weight is stored once.

A small network has many such names beside few weights.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.ops.blocks import LEAST_SHARED
from compresskit.export.rewrite.common import initializer

SHORT = {
    "QuantizeLinear": "q",
    "DequantizeLinear": "d",
    "Cast": "c",
    "Clip": "c",
}  # of nodes that are no layers


def compact_(model: ir.Model) -> None:
    """Drop inferred shapes, default attributes and long names of conversions and clips, in place. Names of layers stay."""
    graph = model.graph
    _store_tables_once(graph)
    taken = {value.name for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    taken |= {value.name for node in graph for value in node.outputs}
    for number, node in enumerate(graph):
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _drop_default_attributes(node)
        name = f"{SHORT.get(node.op_type, '')}{number}"
        if node.op_type in SHORT and name not in taken and not node.outputs[0].is_graph_output():
            node.name = node.outputs[0].name = name
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
    for name, value in list(graph.initializers.items()):
        short = name.removeprefix("quantizers.").removesuffix(".integers")
        if short != name and short not in taken:
            value.name = short
            if value.const_value is not None:
                value.const_value.name = short
            taken.add(short)
        if not value.is_graph_output():
            value.shape = value.type = None  # the tensor has both


def _store_tables_once(graph: ir.Graph) -> None:
    """Store the numbers of a table that are those of a product, too, in another layout or the same, for both.

    The Reshape or Transpose between is of a constant: runtimes compute it when they load the file, before ONNX Runtime looks for
    the decoded weights that it fuses with a product. Behind DequantizeLinear, a Transpose would hide them.
    """
    stored = [v for v in graph.initializers.values() if v.const_value is not None and v.const_value.nbytes >= LEAST_SHARED]
    for table in [value for value in stored if _is_looked_up(value)]:
        for other in stored:
            if other is table or not table.uses() or not other.uses():
                continue
            ours, others = table.const_value, other.const_value
            if ours is None or others is None or ours.dtype != others.dtype or ours.size != others.size:
                continue
            if np.array_equal(ours.numpy().ravel(), others.numpy().ravel()):
                _read_instead(graph, table, other, "Reshape")
            elif ours.shape.rank() == others.shape.rank() == 2 and np.array_equal(ours.numpy().T, others.numpy()):
                _read_instead(graph, other, table, "Transpose")


def _is_looked_up(value: ir.Value) -> bool:
    """Whether rows of a stored value are looked up, as they are or decoded."""
    for node, place in value.uses():
        if node.op_type in ("Gather", "GatherBlockQuantized") and place != 1:
            return True
        if node.op_type == "DequantizeLinear" and any(use.node.op_type == "Gather" for use in node.outputs[0].uses()):
            return True
    return False


def _read_instead(graph: ir.Graph, old: ir.Value, new: ir.Value, operator: str) -> None:
    """Let all that reads one stored value read another through a Reshape or Transpose, and drop the one."""
    before, after, value = old.const_value, new.const_value, new
    if before is None or after is None or old.is_graph_output():
        return
    if operator == "Transpose" or before.shape != after.shape:
        inputs = [new]
        if operator == "Reshape":
            inputs.append(initializer(graph, ir.tensor(np.array(before.shape.numpy(), np.int64), name=f"{old.name}_shape")))
        node = ir.Node("", operator, inputs, [ir.AttrInt64s("perm", [1, 0])] if operator == "Transpose" else ())
        node.name = node.outputs[0].name = f"{old.name}_{operator}"
        graph.insert_before(graph[0], node)
        value = node.outputs[0]
    for user, place in list(old.uses()):
        user.replace_input_with(place, value)
    del graph.initializers[str(old.name)]


def _drop_default_attributes(node: ir.Node) -> None:
    if node.attributes.get_int("saturate", 0) == 1:
        del node.attributes["saturate"]
    scale = node.inputs[1].const_value if node.inputs[1] is not None else None
    if "axis" in node.attributes and scale is not None and len(scale.shape) == 0:
        del node.attributes["axis"]
