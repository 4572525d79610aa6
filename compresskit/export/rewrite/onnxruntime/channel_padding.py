"""Give layers between whose channels ONNX Runtime's integer kernels are slow a multiple of 16 of them; the new ones are zero.

The depthwise kernel computes 16 channels at a time, or 8, and what is left one by one: 12 channels take 4.4 times as long as 16,
and 72 take 1.6 times as long as 80. A convolution with 8 or 12 outputs takes up to 2.4 times as long as one with 16
(benchmarks/quantize_kernels.md, AVX512-VNNI).

Channels are widened where they begin and end: the filters that make them, what works on each alone, and the filters that read
them, whose new weights are zero. So whatever is in a new channel, no output changes by a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, dequantize_of, initializer, symmetric_integers

LANES_OF_KERNEL = 16  # channels that the integer kernels compute at a time
LEAST_CHANNELS = 8  # of a convolution that is not depthwise, below which 16 are not faster
LEAST_POSITIONS = 256  # of such a convolution, below which it is too fast for its weights to be stored with zeros
#: Multiply-accumulates of other layers, for each tap of a depthwise kernel and each position: half of those that they do in the
#: time that is saved, some 0.3 ns for each channel, and 40 ns where channels are not in eights.
AFFORDABLE_BY_CHANNEL, AFFORDABLE_BY_REST = 2.5, 320
#: Operators that compute each channel of their one input by itself.
CHANNELWISE = frozenset(
    "AveragePool Clip DequantizeLinear GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity LeakyRelu MaxPool"
    " QuantizeLinear Relu Sigmoid Tanh".split()
)
PAIRWISE = frozenset(("Add", "Max", "Min", "Mul", "Sub"))


def pad_channels(model: ir.Model) -> None:
    """Widen the channels of integer convolutions to a multiple of 16 where that is faster."""
    done: set[ir.Value] = set()
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Conv" else None
        if x is None or x in done or _filters(node) is None or (count := _channels(x)) is None or count % LANES_OF_KERNEL == 0:
            continue
        if not (_is_depthwise(node, count) or LEAST_CHANNELS <= count < LANES_OF_KERNEL):
            continue
        group = ChannelGroup(count)
        if group.grow(x) and group.pays():
            group.widen_(model.graph)
        done |= group.values


@dataclass
class ChannelGroup:
    """Values that have the same channels, and the nodes around them.

    count: channels. values: with these channels at axis 1. made, read, each: convolutions that make them, read them, and work on
    each by itself. constants: inputs of other nodes with a value for each channel, (node, index).
    """

    count: int
    values: set[ir.Value] = field(default_factory=set)
    made: dict[ir.Node, None] = field(default_factory=dict)
    read: dict[ir.Node, None] = field(default_factory=dict)
    each: dict[ir.Node, None] = field(default_factory=dict)
    constants: dict[tuple[ir.Node, int], None] = field(default_factory=dict)

    def grow(self, value: ir.Value) -> bool:
        """Collect all values and nodes; False where some node mixes the channels with others, or shows them outside."""
        left = [value]
        while left:
            value = left.pop()
            if value in self.values:
                continue
            producer = value.producer()
            if producer is None or value.is_graph_output() or _channels(value) != self.count:
                return False
            self.values.add(value)
            for node, place in [(producer, None), *((use.node, use.idx) for use in value.uses())]:
                neighbours = self._neighbours(node, place)
                if neighbours is None:
                    return False
                left += neighbours
        return True

    def _neighbours(self, node: ir.Node, place: int | None) -> list[ir.Value] | None:
        """The other values of a node that have the channels; None where it cannot be widened. place: of a value that it reads."""
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return None
        x, output = node.inputs[0], node.outputs[0]
        if node.op_type == "Conv":
            if place not in (None, 0) or _filters(node) is None or x is None:
                return None
            if node.attributes.get_int("group", 1) == 1:
                (self.made if place is None else self.read)[node] = None
                return []
            self.each[node] = None
            return [x, output] if _is_depthwise(node, self.count) else None
        if node.op_type in CHANNELWISE:
            others = [constant(v) for v in node.inputs[1:] if v is not None]
            scalars = all(v is not None and v.size == 1 for v in others)
            return [x, output] if x is not None and place in (None, 0) and scalars else None
        return self._of_pair(node) if node.op_type in PAIRWISE else None

    def _of_pair(self, node: ir.Node) -> list[ir.Value] | None:
        found = [node.outputs[0]]
        rank = len(node.outputs[0].shape or ())
        for index, value in enumerate(node.inputs):
            stored = constant(value)
            if value is None or (stored is None and len(value.shape or ()) != rank):
                return None
            if stored is None and _channels(value) == self.count:
                found.append(value)
            elif stored is None and _channels(value) != 1:
                return None
            elif stored is not None and stored.size > 1:
                if stored.ndim != rank or stored.shape[1] not in (1, self.count):
                    return None
                if stored.shape[1] == self.count:
                    self.constants[node, index] = None
        return found

    def pays(self) -> bool:
        """Whether what slow kernels lose is more than what the other layers compute in addition."""
        extra = -self.count % LANES_OF_KERNEL
        if not self.each:
            sizes = [_positions(conv) for conv in (*self.made, *self.read)]
            return all(size is None or size >= LEAST_POSITIONS for size in sizes)
        more = 0
        for axis, layers in enumerate((self.made, self.read)):
            more += sum(extra * _taps(conv) * _shape(conv)[1 - axis] * (_positions(conv) or 1) for conv in layers)
        affordable = AFFORDABLE_BY_CHANNEL * self.count + (AFFORDABLE_BY_REST if self.count % 8 else 0)
        return more <= sum(affordable * _taps(conv) * (_positions(conv) or 1) for conv in self.each)

    def widen_(self, graph: ir.Graph) -> None:
        """Change the nodes in place."""
        extra = -self.count % LANES_OF_KERNEL
        for conv in (*self.made, *self.each):
            _pad_filters(graph, conv, 0, extra)
        for conv in self.read:
            _pad_filters(graph, conv, 1, extra)
        for conv in self.each:
            conv.attributes["group"] = ir.AttrInt64("group", self.count + extra)
        for node, index in self.constants:
            stored = constant(node.inputs[index])
            assert stored is not None
            wide = np.pad(stored, _at(stored, 1, extra), mode="edge")
            node.replace_input_with(index, initializer(graph, _tensor(wide, node.inputs[index])))
        for value in self.values:
            assert value.shape is not None
            value.shape = ir.Shape([value.shape[0], self.count + extra, *list(value.shape)[2:]])


def _pad_filters(graph: ir.Graph, conv: ir.Node, axis: int, extra: int) -> None:
    """Zero weights at the end of an axis; on axis 0 zero biases, too, and the scales of the last filter."""
    for index in (1, 2) if axis == 0 else (1,):
        value = conv.inputs[index] if index < len(conv.inputs) else None
        if value is None:
            continue
        decode = _decoder(value)
        if decode is None:
            stored = constant(value)
            assert stored is not None
            conv.replace_input_with(index, initializer(graph, _tensor(np.pad(stored, _at(stored, axis, extra)), value)))
            continue
        inputs = list(decode.inputs)
        integers = constant(inputs[0])
        assert integers is not None
        inputs[0] = initializer(graph, _tensor(np.pad(integers, _at(integers, axis, extra)), inputs[0]))
        for k, other in enumerate(inputs[1:], 1):
            stored = constant(other)
            if axis == 0 and stored is not None and stored.ndim:
                inputs[k] = initializer(graph, _tensor(np.pad(stored, (0, extra), mode="edge"), other))
        again = ir.Node("", "DequantizeLinear", inputs, decode.attributes, name=decode.name)
        assert inputs[0] is not None
        again.outputs[0].type, again.outputs[0].shape = value.type, inputs[0].shape
        graph.insert_before(conv, again)
        conv.replace_input_with(index, again.outputs[0])


def _tensor(values: np.ndarray, like: ir.Value | None) -> ir.TensorProtocol:
    return ir.tensor(np.ascontiguousarray(values), name=None if like is None else like.name)


def _at(stored: np.ndarray, axis: int, extra: int) -> list[tuple[int, int]]:
    """The padding of one axis at its end."""
    return [(0, extra if k == axis else 0) for k in range(stored.ndim)]


def _filters(conv: ir.Node) -> np.ndarray | None:
    """The integer weights (O, I, h, w) of a convolution that reads rounded values; None of any other."""
    stored = symmetric_integers(_decoder(conv.inputs[1]))
    rounded = dequantize_of(conv.inputs[0]) is not None
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    known = bias is None or constant(bias) is not None or symmetric_integers(_decoder(bias)) is not None
    return stored if stored is not None and stored.ndim == 4 and rounded and known else None


def _decoder(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear that makes a value, with a zero point or without; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _is_depthwise(conv: ir.Node, channels: int) -> bool:
    """Whether a convolution has one filter for each of its input channels."""
    filters = _filters(conv)
    return filters is not None and conv.attributes.get_int("group", 1) == channels > 1 and filters.shape[:2] == (channels, 1)


def _shape(conv: ir.Node) -> tuple[int, ...]:
    """(O, I, h, w) of the filters."""
    filters = _filters(conv)
    assert filters is not None
    return filters.shape


def _taps(conv: ir.Node) -> int:
    return int(np.prod(_shape(conv)[2:]))


def _positions(conv: ir.Node) -> int | None:
    """Height times width of what a convolution gives; None where they vary."""
    sizes = list(conv.outputs[0].shape or ())[2:]
    return int(np.prod(sizes)) if sizes and all(isinstance(s, int) for s in sizes) else None  # type: ignore[arg-type]


def _channels(value: ir.Value | None) -> int | None:
    shape = [] if value is None else list(value.shape or ())
    return shape[1] if len(shape) == 4 and isinstance(shape[1], int) else None
