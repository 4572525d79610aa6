"""Give layers between whose channels ONNX Runtime's integer kernels are slow a multiple of 16 of them; the new ones are zero.

The depthwise kernel computes 16 channels at a time, or 8, and what is left one by one; a convolution with 8 or 12 filters costs
more than one with 16. Blocks of 1x1, depthwise and 1x1 convolutions take 0.48 to 0.85 of their time so, 3x3 convolutions to 8 and
12 channels and back 0.87 and 0.82 (benchmarks/quantize_kernels.md; AVX512-VNNI, with 8 depthwise channels AMX).

Channels are widened where they begin and end: the filters that make them, what works on each alone, and the filters that read
them, whose new weights are zero. So whatever is in a new channel, no output changes by a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from compresskit.export.rewrite.common import constant, decoder_of, dequantize_of, own_decoder, replace_stored, symmetric_integers

LANES_OF_KERNEL = 16  # channels that the integer kernels compute at a time
LEAST_CHANNELS = 8  # of a convolution that is not depthwise, below which 16 are not faster
LEAST_POSITIONS = 256  # of such a convolution, below which it is too fast for its weights to be stored with zeros
#: What may be computed in addition, in multiply-accumulates for each tap of a kernel and each position. These layers do 200 in a
#: nanosecond, and half of the time that is saved may be spent. A depthwise kernel saves 0.03 ns a tap for each channel, and 4
#: ns where channels are not in eights; a convolution with 8 or 12 filters 1 to 2 ns a tap.
FOR_A_CHANNEL, FOR_A_REST, FOR_FEW_FILTERS = 2.5, 320, 200  # from single kernels, timed by hand on one machine
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
        if x is not None and x not in done and _reads_slow_channels(node):
            group = SharedChannels(_channels(x) or 0)
            if group.grow_(x) and group.pays():
                group.widen_(model.graph)
            done |= group.values


def _reads_slow_channels(conv: ir.Node) -> bool:
    """Whether an integer convolution reads channels that a kernel is slow for."""
    count = _channels(conv.inputs[0])
    if count is None or _integer_filters(conv) is None or count % LANES_OF_KERNEL == 0:
        return False
    return _is_depthwise(conv, count) or LEAST_CHANNELS <= count < LANES_OF_KERNEL


@dataclass
class SharedChannels:
    """Values that have the same channels, and the nodes around them.

    count: channels. values: with these channels at axis 1. made, read, each: convolutions that make them, read them, and work on
    each by itself. constants: inputs of other nodes with a value for each channel, (node, index). All but the values are dicts
    without values, which are sets in the order of the graph.
    """

    count: int
    values: set[ir.Value] = field(default_factory=set)
    made: dict[ir.Node, None] = field(default_factory=dict)
    read: dict[ir.Node, None] = field(default_factory=dict)
    each: dict[ir.Node, None] = field(default_factory=dict)
    constants: dict[tuple[ir.Node, int], None] = field(default_factory=dict)

    def grow_(self, value: ir.Value) -> bool:
        """Collect values and nodes from one value on; False where a node mixes the channels, or they are seen outside."""
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
                neighbours = self._entered_(node, place) if node.graph is producer.graph else None
                if neighbours is None:
                    return False
                left += neighbours
        return True

    def _entered_(self, node: ir.Node, place: int | None) -> list[ir.Value] | None:
        """Enter a node; returns its other values that have the channels, or None where it cannot be widened.

        place: of a value that it reads; None of one that it makes.
        """
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return None
        x, output = node.inputs[0], node.outputs[0]
        if node.op_type == "Conv":
            if place not in (None, 0) or _integer_filters(node) is None or x is None:
                return None
            if node.attributes.get_int("group", 1) == 1:
                (self.made if place is None else self.read)[node] = None
                return []
            if not _is_depthwise(node, self.count):
                return None
            self.each[node] = None
            return [x, output]
        if node.op_type in CHANNELWISE:
            scalars = all(_is_one_number(v) for v in node.inputs[1:] if v is not None)
            return [x, output] if x is not None and place in (None, 0) and scalars else None
        return self._entered_pair_(node) if node.op_type in PAIRWISE else None

    def _entered_pair_(self, node: ir.Node) -> list[ir.Value] | None:
        """The same for an operator on two values, one of which may be a constant, or have one channel."""
        found = [node.outputs[0]]
        rank = len(node.outputs[0].shape or ())
        for index, value in enumerate(node.inputs):
            stored, integer = constant(value), decoder_of(value)
            if integer is not None and _is_one_number(integer.inputs[0]):
                continue
            if value is None or (stored is None and len(value.shape or ()) != rank):
                return None
            if stored is None and _channels(value) == self.count:
                found.append(value)
            elif stored is None and _channels(value) != 1:
                return None
            elif stored is not None and stored.size > 1:
                if stored.ndim != rank or stored.shape[1] != self.count or stored.size != self.count:
                    return None
                self.constants[node, index] = None
        return found

    def pays(self) -> bool:
        """Whether what slow kernels lose is more than what the other layers compute in addition."""
        extra = -self.count % LANES_OF_KERNEL
        makes = sum(extra * _taps(conv) * _shape(conv)[1] * (_map_positions(conv) or 1) for conv in self.made)
        reads = sum(extra * _taps(conv) * _shape(conv)[0] * (_map_positions(conv) or 1) for conv in self.read)
        # So few filters cost more than 16 do, however many channels they read.
        few = LEAST_CHANNELS <= self.count < LANES_OF_KERNEL
        saved: float = sum(FOR_FEW_FILTERS * _taps(conv) * (_map_positions(conv) or 1) for conv in self.made) if few else 0
        if self.each:
            affordable = FOR_A_CHANNEL * self.count + (FOR_A_REST if self.count % 8 else 0)
            saved += sum(affordable * _taps(conv) * (_map_positions(conv) or 1) for conv in self.each)
            return (0 if few else makes) + reads <= saved
        if any((_map_positions(conv) or LEAST_POSITIONS) < LEAST_POSITIONS for conv in (*self.made, *self.read)):
            return False
        return reads <= saved

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
            replace_stored(graph, node, index, np.pad(stored, _at(stored, 1, extra), mode="edge"))
        for value in self.values:
            assert value.shape is not None
            value.shape = ir.Shape([value.shape[0], self.count + extra, *list(value.shape)[2:]])


def _pad_filters(graph: ir.Graph, conv: ir.Node, axis: int, extra: int) -> None:
    """Zero weights at the end of an axis; on axis 0 zero biases, too, and the scales of the last filter."""
    for index in range(1, len(conv.inputs) if axis == 0 else 2):
        if conv.inputs[index] is None:
            continue
        decode = own_decoder(graph, conv, index)
        node, place = (conv, index) if decode is None else (decode, 0)
        stored = constant(node.inputs[place])
        assert stored is not None
        wide = np.pad(stored, _at(stored, axis, extra))
        replace_stored(graph, node, place, wide)
        if decode is None:
            continue
        decode.outputs[0].shape = ir.Shape(list(wide.shape))
        for k in range(1, len(decode.inputs)):
            of_filters = constant(decode.inputs[k])
            if axis == 0 and of_filters is not None and of_filters.ndim:
                replace_stored(graph, decode, k, np.pad(of_filters, (0, extra), mode="edge"))


def _at(stored: np.ndarray, axis: int, extra: int) -> list[tuple[int, int]]:
    """The padding of one axis at its end."""
    return [(0, extra if k == axis else 0) for k in range(stored.ndim)]


def _integer_filters(conv: ir.Node) -> np.ndarray | None:
    """The integer weights (O, I, h, w) of a convolution that reads rounded values; None of any other."""
    stored = symmetric_integers(decoder_of(conv.inputs[1]))
    rounded = dequantize_of(conv.inputs[0]) is not None
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    known = bias is None or constant(bias) is not None or symmetric_integers(decoder_of(bias)) is not None
    return stored if stored is not None and stored.ndim == 4 and rounded and known else None


def _is_depthwise(conv: ir.Node, channels: int) -> bool:
    """Whether a convolution has one filter for each of its input channels."""
    filters = _integer_filters(conv)
    return filters is not None and conv.attributes.get_int("group", 1) == channels > 1 and filters.shape[:2] == (channels, 1)


def _shape(conv: ir.Node) -> tuple[int, ...]:
    """(O, I, h, w) of the filters."""
    filters = _integer_filters(conv)
    assert filters is not None
    return filters.shape


def _taps(conv: ir.Node) -> int:
    return int(np.prod(_shape(conv)[2:]))


def _map_positions(conv: ir.Node) -> int | None:
    """Height times width of what a convolution gives; None where they vary."""
    sizes = list(conv.outputs[0].shape or ())[2:]
    return int(np.prod(sizes)) if sizes and all(isinstance(s, int) for s in sizes) else None  # type: ignore[arg-type]


def _is_one_number(value: ir.Value | None) -> bool:
    stored = constant(value)
    return stored is not None and stored.size == 1


def _channels(value: ir.Value | None) -> int | None:
    shape = [] if value is None else list(value.shape or ())
    return shape[1] if len(shape) == 4 and isinstance(shape[1], int) else None
