"""Transposed convolutions of an ONNX graph (onnx-ir) that ONNX Runtime does not run: `output_padding` of the stride or more.

PyTorch takes one that is smaller than the dilation. The positions that it adds are those that `pads` cut off at the end and, past
these, those that zeros behind the input would give:

    output_padding   -> fewer cut off; where that does not do, Pad of the input, each zero worth a stride, and the rest cut off
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import initializer


def write_transposed_ends(model: ir.Model) -> None:
    """Write every ConvTranspose whose `output_padding` is its stride or more without one, in place."""
    for node in list(model.graph):
        if node.op_type != "ConvTranspose" or node.domain or (x := node.inputs[0]) is None:
            continue
        added = list(node.attributes.get_ints("output_padding", []))
        if not added:
            continue
        stride = list(node.attributes.get_ints("strides", [1] * len(added)))
        if not any(more >= step for more, step in zip(added, stride, strict=True)):
            continue
        spatial = len(added)
        pads = list(node.attributes.get_ints("pads", [0] * 2 * spatial))
        missing = [more - cut for more, cut in zip(added, pads[spatial:], strict=True)]  # positions past those that were cut off
        zeros = [max(0, -(-more // step)) for more, step in zip(missing, stride, strict=True)]  # each makes `step` positions
        ends = [count * step - more for count, step, more in zip(zeros, stride, missing, strict=True)]
        node.attributes["pads"] = ir.AttrInt64s("pads", [*pads[:spatial], *ends])
        del node.attributes["output_padding"]
        if any(zeros):
            _append_zeros(model.graph, node, x, zeros)


def _append_zeros(graph: ir.Graph, node: ir.Node, x: ir.Value, zeros: list[int]) -> None:
    """Append zeros to each spatial dimension of a layer's input."""
    behind = np.array([0] * (len(zeros) + 4) + zeros, dtype=np.int64)  # before each dimension, then behind each
    name = node.outputs[0].name
    sizes = initializer(graph, ir.tensor(behind, name=f"{name}.pads"))
    pad = ir.Node("", "Pad", [x, sizes], name=f"{name}.pad")
    pad.outputs[0].name, pad.outputs[0].type = f"{name}.padded", x.type
    graph.insert_before(node, pad)
    node.replace_input_with(0, pad.outputs[0])
