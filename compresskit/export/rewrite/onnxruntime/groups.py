"""Grouped convolutions in integers as one convolution, zero outside of the groups.

ONNX Runtime's integer kernel computes groups one after another, and each takes its time for each position, however few its
channels are: layers of 64 channels in 16 groups take 3.2 times as long as whole ones (benchmarks/quantize_kernels.md,
AVX512-VNNI). Its depthwise kernel is another one, but for several filters for each channel there is none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import dequantize_of, own_decoder, replace_stored, symmetric_integers

MOST_PRODUCTS = 8000  # for each position and group, of the whole convolution: four fifths of those that it does in 40 ns
MOST_STORED = 160_000  # weights of a whole convolution, which the file holds, too
LEAST_POSITIONS_JOINED = 64  # below which reading these weights takes longer than the groups


def join_groups(model: ir.Model) -> None:
    """Write grouped convolutions as whole ones where that is faster."""
    for node in list(model.graph):
        if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1:
            _join(model.graph, node)


def _join(graph: ir.Graph, conv: ir.Node) -> None:
    groups, filters = conv.attributes.get_int("group", 1), symmetric_integers(dequantize_of(conv.inputs[1]))
    if filters is None or filters.ndim != 4 or dequantize_of(conv.inputs[0]) is None or not _pays(conv, filters, groups):
        return
    outputs, each, *kernel = filters.shape
    whole = np.zeros((groups, outputs // groups, groups, each, *kernel), filters.dtype)
    for k in range(groups):
        whole[k, :, k] = filters.reshape(groups, -1, each, *kernel)[k]
    decode = own_decoder(graph, conv, 1)
    assert decode is not None
    replace_stored(graph, decode, 0, whole.reshape(outputs, groups * each, *kernel))
    decode.outputs[0].shape = ir.Shape([outputs, groups * each, *kernel])
    conv.attributes["group"] = ir.AttrInt64("group", 1)


def _pays(conv: ir.Node, filters: np.ndarray, groups: int) -> bool:
    """Whether the whole convolution is faster, and its weights are not too many."""
    outputs, each = filters.shape[:2]
    sizes = list(conv.outputs[0].shape or ())[2:]
    small = bool(sizes) and all(isinstance(s, int) for s in sizes) and np.prod(sizes) < LEAST_POSITIONS_JOINED  # type: ignore[arg-type]
    depthwise = each == 1 and outputs == groups
    pairs_move = each % 2 and each > 1  # those whose products x86 without VNNI adds in 16 bits, see `quant.numerics.saturation`
    stored = filters.size * groups
    return not (small or depthwise or pairs_move) and stored <= min(MOST_PRODUCTS * groups, MOST_STORED)
