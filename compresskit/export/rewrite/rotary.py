"""Rotary positions in an ONNX graph (onnx-ir): torch's exporter writes them as RotaryEmbedding from opset 23 on."""

from __future__ import annotations

import onnx_ir as ir


def expand_rotary_caches(model: ir.Model) -> None:
    """Give every RotaryEmbedding cosines and sines with a row for each row of its input, in place.

    The operator wants them of the shape (batch, steps, width / 2); a model that computes its positions once for all rows gives
    (1, steps, width / 2), with which ONNX Runtime runs a batch of one only.
    """
    for node in list(model.graph):
        if node.op_type != "RotaryEmbedding" or node.domain or node.inputs[0] is None:
            continue
        rows = node.inputs[0].shape
        for place in (1, 2):
            cache = node.inputs[place]
            if cache is None or (cache.shape is not None and len(cache.shape) != 3):
                continue  # a table that position_ids look up
            if cache.shape is not None and rows is not None and _same(cache.shape[0], rows[0]):
                continue
            _expand(model.graph, node, place)


def _same(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
    return a == b if isinstance(a, int) or isinstance(b, int) else a.value is not None and a.value == b.value


def _expand(graph: ir.Graph, node: ir.Node, place: int) -> None:
    x, cache = node.inputs[0], node.inputs[place]
    assert x is not None
    assert cache is not None
    count = ir.node("Shape", [x], {"start": 0, "end": 1})
    rest = ir.node("Shape", [cache], {"start": 1})
    shape = ir.node("Concat", [count.outputs[0], rest.outputs[0]], {"axis": 0})
    expanded = ir.node("Expand", [cache, shape.outputs[0]])
    for i, new in enumerate((count, rest, shape, expanded)):
        new.outputs[0].name = f"{node.outputs[0].name}.cache.{place}.{i}"
    expanded.outputs[0].type = cache.type
    graph.insert_before(node, [count, rest, shape, expanded])
    node.replace_input_with(place, expanded.outputs[0])
