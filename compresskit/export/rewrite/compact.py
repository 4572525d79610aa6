"""Make a quantized file small: what every runtime infers by itself is not stored, and names that no user reads are short.

A small network has many such names beside few weights.
"""

from __future__ import annotations

import onnx_ir as ir

SHORT = {
    "QuantizeLinear": "q",
    "DequantizeLinear": "d",
    "Cast": "c",
    "Clip": "c",
}  # of nodes that are no layers


def compact_(model: ir.Model) -> None:
    """Drop inferred shapes, default attributes and long names of conversions and clips, in place. Names of layers stay."""
    graph = model.graph
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


def _drop_default_attributes(node: ir.Node) -> None:
    if node.attributes.get_int("saturate", 0) == 1:
        del node.attributes["saturate"]
    scale = node.inputs[1].const_value if node.inputs[1] is not None else None
    if "axis" in node.attributes and scale is not None and len(scale.shape) == 0:
        del node.attributes["axis"]
