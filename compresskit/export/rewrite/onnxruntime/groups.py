"""Grouped convolutions in integers as one convolution, zero outside of the groups.

ONNX Runtime's integer kernel computes groups one after another, and each takes 40 ns at least for each position, however few its
channels are: 16 groups of 4 channels take 3.7 times as long as the whole convolution of 64 (benchmarks/quantize_kernels.md,
AVX512-VNNI). Its depthwise kernel is another one, but for several filters for each channel there is none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import dequantize_of, initializer, symmetric_integers

MOST_PRODUCTS = 8000  # for each position and group, of the whole convolution: four fifths of those that it does in 40 ns


def join_groups(model: ir.Model) -> None:
    """Write grouped convolutions as whole ones where that is faster."""
    for node in list(model.graph):
        if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1:
            _join(model.graph, node)


def _join(graph: ir.Graph, conv: ir.Node) -> None:
    groups, decode = conv.attributes.get_int("group", 1), dequantize_of(conv.inputs[1])
    filters = symmetric_integers(decode)
    if decode is None or filters is None or filters.ndim != 4 or dequantize_of(conv.inputs[0]) is None:
        return
    outputs, each, *kernel = filters.shape
    depthwise = each == 1 and outputs == groups
    pairs_move = each % 2 and each > 1  # those whose products x86 without VNNI adds in 16 bits, see `quant.numerics.saturation`
    if depthwise or pairs_move or outputs * each * groups * np.prod(kernel) > MOST_PRODUCTS * groups:
        return
    whole = np.zeros((groups, outputs // groups, groups, each, *kernel), filters.dtype)
    for k in range(groups):
        whole[k, :, k] = filters.reshape(groups, -1, each, *kernel)[k]
    stored = initializer(graph, ir.tensor(whole.reshape(outputs, groups * each, *kernel), name=f"{conv.name}_whole"))
    again = ir.Node("", "DequantizeLinear", [stored, *decode.inputs[1:]], decode.attributes, name=decode.name)
    again.outputs[0].type, again.outputs[0].shape = decode.outputs[0].type, stored.shape
    graph.insert_before(conv, again)
    conv.replace_input_with(1, again.outputs[0])
    conv.attributes["group"] = ir.AttrInt64("group", 1)
