"""Give convolutions that read the image four channels, or twelve.

The symmetric kernel of ONNX Runtime wants input channels in fours: on AVX512-VNNI a first convolution takes a third to a half
less time so (benchmarks/quantize_kernels.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, dequantize_of, initializer, own_decoder, replace_stored

LANES = 4  # input channels that one VNNI instruction multiplies and sums
SMALLEST = 24  # height and width below which padding costs what it saves


def pad_input_channels(model: ir.Model) -> None:
    """Give convolutions that read the quantized input of the model a multiple of four channels, the new ones zero."""
    for node in list(model.graph):
        if node.op_type == "Conv" and node.attributes.get_int("group", 1) == 1:
            _pad_channels(model.graph, node)


def _pad_channels(graph: ir.Graph, conv: ir.Node) -> None:
    x, weight = conv.inputs[0], conv.inputs[1]
    wide, kernel = dequantize_of(x), dequantize_of(weight)
    integers = None if kernel is None else constant(kernel.inputs[0])
    if wide is None or integers is None or integers.ndim != 4 or not _is_quantized_input(wide.inputs[0]):
        return
    if wide.inputs[2] is None or wide.inputs[2].dtype not in (ir.DataType.UINT8, ir.DataType.INT8):
        return  # ONNX Runtime pads no integers of 16 bits
    if x is None or x.shape is None or any(not isinstance(s, int) or s < SMALLEST for s in list(x.shape)[2:]):
        return
    channels = integers.shape[1]
    if channels % LANES == 0 or integers.shape[2] > 7:
        return
    if _can_fold(conv, integers, x):
        moved, integers = _fold_pixels(conv, wide, integers)
    else:
        extra = -channels % LANES
        pads = ir.tensor(np.array([0, 0, 0, 0, 0, extra, 0, 0], np.int64), name=f"{conv.name}_pads")
        moved = ir.Node("", "Pad", [wide.inputs[0], initializer(graph, pads), wide.inputs[2]])
        integers = np.pad(integers, ((0, 0), (0, extra), (0, 0), (0, 0)))
    source = wide.inputs[0]
    assert source is not None
    moved.outputs[0].type = source.type
    again = ir.Node("", "DequantizeLinear", [moved.outputs[0], *wide.inputs[1:]], wide.attributes)
    again.outputs[0].type = x.type
    graph.insert_before(conv, [moved, again])
    conv.replace_input_with(0, again.outputs[0])
    decode = own_decoder(graph, conv, 1)
    assert decode is not None
    replace_stored(graph, decode, 0, integers)
    decode.outputs[0].shape = ir.Shape(list(integers.shape))


def _can_fold(conv: ir.Node, integers: np.ndarray, x: ir.Value) -> bool:
    """Whether folding 2x2 pixels into channels is possible and faster: kernels of 5 or more, stride 2, even height and width."""
    plain = conv.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    plain = plain and list(conv.attributes.get_ints("dilations", [1, 1])) == [1, 1]
    strided = list(conv.attributes.get_ints("strides", [1, 1])) == [2, 2]
    assert x.shape is not None
    even = all(isinstance(s, int) and s % 2 == 0 for s in list(x.shape)[2:])
    return bool(plain and strided and even and min(integers.shape[2:]) >= 5)


def _fold_pixels(conv: ir.Node, wide: ir.Node, integers: np.ndarray) -> tuple[ir.Node, np.ndarray]:
    """SpaceToDepth of the input, and the kernel in its terms: tap d of a row, counted from the window's middle pixel 2 o, is tap
    d // 2 of the folded row and pixel d % 2 of its four.
    """
    out, channels, *kernel = integers.shape
    pads = list(conv.attributes.get_ints("pads", [0, 0, 0, 0]))
    low = [-((p + 1) // 2) for p in pads[:2]]
    high = [(k - 1 - p) // 2 for k, p in zip(kernel, pads[:2], strict=True)]
    size = [h - lo + 1 for h, lo in zip(high, low, strict=True)]
    folded = np.zeros((out, 2, 2, channels, *size), integers.dtype)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            (row, a), (column, b) = divmod(i - pads[0], 2), divmod(j - pads[1], 2)
            folded[:, a, b, :, row - low[0], column - low[1]] = integers[:, :, i, j]
    shape = wide.outputs[0].shape
    assert shape is not None
    ends = []
    for axis in range(2):
        positions = int(shape[2 + axis])  # type: ignore[arg-type]
        outputs = (positions + pads[axis] + pads[2 + axis] - kernel[axis]) // 2 + 1
        ends.append(outputs - 1 + size[axis] - positions // 2 + low[axis])
    conv.attributes["pads"] = ir.AttrInt64s("pads", [-low[0], -low[1], *ends])
    conv.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])
    conv.attributes["kernel_shape"] = ir.AttrInt64s("kernel_shape", size)
    move = ir.Node("", "SpaceToDepth", [wide.inputs[0]], {"blocksize": ir.AttrInt64("blocksize", 2)})
    return move, folded.reshape(out, 4 * channels, *size)


def _is_quantized_input(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return bool(node is not None and node.op_type == "QuantizeLinear" and node.inputs[0] and node.inputs[0].is_graph_input())
