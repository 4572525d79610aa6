"""Operator kinds: how quantization classifies ATen operators, and the tables of operators that its passes share.

`OPERATOR_KINDS` names a kind for each operator that a rule knows: "conv", "linear", "add", ... A "clamp" bounds its input and can
be merged into a quantizer; a "move" copies values to other places and keeps them on their grid.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import CONVS, TRANSPOSED_CONVS
from compresskit.graph.layers.value_ranges import EVERYTHING, clipped_to
from compresskit.graph.normalize import Node, aten
from compresskit.graph.recurrent import OPERATORS
from compresskit.graph.surgery import get_tensor

#: Operators that enlarge by repeating values.
NEAREST = frozenset({aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec})
#: Matrix products by a constant: operator -> (position of its input, position of its weight, dimension of inputs of the weight).
PRODUCTS = {
    aten.linear.default: (0, 1, 1),
    aten.matmul.default: (0, 1, 0),
    aten.mm.default: (0, 1, 0),
    aten.addmm.default: (1, 2, 0),
}
#: Kinds that multiply and add: the layers that coverage counts.
LAYER_KINDS = frozenset({"conv", "conv_transpose", "linear", "matmul", "addmm", "recurrent"})

#: The kind of each ATen operator that a rule knows.
OPERATOR_KINDS: dict[Any, str] = {
    **dict.fromkeys(CONVS, "conv"),
    **dict.fromkeys(TRANSPOSED_CONVS, "conv_transpose"),
    aten.linear.default: "linear",
    aten.matmul.default: "matmul",
    aten.bmm.default: "matmul",
    aten.mm.default: "matmul",
    aten.addmm.default: "addmm",
    **dict.fromkeys(OPERATORS.values(), "recurrent"),
    aten.add.Tensor: "add",
    aten.mul.Tensor: "mul",
    aten.cat.default: "concat",
    aten.relu.default: "clamp",
    aten.hardtanh.default: "clamp",
    aten.relu6.default: "clamp",
    aten.clamp.default: "clamp",
    aten.clamp_min.default: "clamp",
    aten.avg_pool1d.default: "avg_pool",
    aten.avg_pool2d.default: "avg_pool",
    aten.avg_pool3d.default: "avg_pool",
    aten.adaptive_avg_pool1d.default: "mean",
    aten.adaptive_avg_pool2d.default: "mean",
    aten.adaptive_avg_pool3d.default: "mean",
    aten.mean.dim: "mean",
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.leaky_relu.default: "leaky_relu",
    aten.prelu.default: "leaky_relu",
    aten.batch_norm.default: "batch_norm",
    **dict.fromkeys(
        (
            aten.reshape.default,
            aten.view.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.permute.default,
            aten.transpose.int,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
            aten.unsqueeze.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.expand.default,
            aten.pad.default,
            aten.constant_pad_nd.default,
            aten.max_pool1d.default,
            aten.max_pool2d.default,
            aten.chunk.default,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            operator.getitem,
            aten.pixel_shuffle.default,
            aten.pixel_unshuffle.default,
            aten.channel_shuffle.default,
            *NEAREST,
        ),
        "move",
    ),
}


def bounds(node: Node) -> tuple[float, float | None]:
    """Lower and upper bound of a clamp that is `fusible`; None where there is no upper bound."""
    low, high = clipped_to(node) or EVERYTHING
    return float(low), None if high == math.inf else float(high)


def fusible(node: Node) -> bool:
    """Whether a quantizer's range, which holds 0, may do what a clamp does.

    It does exactly that where the clamp starts at 0, and only about so elsewhere: the zero point is a whole number, and a learned
    scale moves the ends. Layers take that, also behind moves; an `acos`, or who wants pixels from 0 to 1, relies on the bounds.
    """
    low, high = clipped_to(node) or EVERYTHING
    if low == 0 and (high == math.inf or node.target is not aten.clamp.default):
        return True
    return -math.inf < low <= 0 < high and _only_layers_read(node)


def _only_layers_read(value: Node) -> bool:
    kinds = {user: OPERATOR_KINDS.get(user.target) for user in value.users}
    return all(kind in ("conv", "linear") or (kind == "move" and _only_layers_read(user)) for user, kind in kinds.items())


def is_float_tensor(node: Node) -> bool:
    """Whether the operator returns a floating point tensor, or several."""
    value = node.meta.get("val")
    parts = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(part, Tensor) and part.is_floating_point() for part in parts)


def is_depthwise(module: fx.GraphModule, conv: Node) -> bool:
    """Whether each filter of a convolution reads one channel."""
    weight = parameter_name(conv.args[1])
    return weight is not None and get_tensor(module, weight).shape[1] == 1


def is_global(node: Node) -> bool:
    """Whether a mean is taken over all spatial positions and no other dimension."""
    rank = node.args[0].meta["val"].ndim
    if node.target is aten.mean.dim:
        return rank > 2 and sorted(d % rank for d in node.args[1]) == list(range(2, rank))
    size = node.args[1]
    return all(s == 1 for s in (size if isinstance(size, list | tuple) else [size]))


#: Operators whose results lie in a range that no data changes.
KNOWN_RANGES: dict[Any, tuple[float, float]] = {
    **dict.fromkeys((aten.sigmoid.default, aten.hardsigmoid.default, aten.softmax.int, aten._softmax.default), (0.0, 1.0)),
    aten.tanh.default: (-1.0, 1.0),
}


def moved_input(node: Node) -> Node | None:
    """The first input of a node that only moves values, so that they stay on the grid of the input; None for other nodes."""
    return next(iter(moved_inputs(node)), None)


def moved_inputs(node: Node) -> list[Node]:
    """The inputs of a node that only moves values or joins them; none of other nodes."""
    if OPERATOR_KINDS.get(node.target) not in ("move", "concat") or not keeps_grid(node):
        return []
    given = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    return [value for value in given if isinstance(value, fx.Node)]


def keeps_grid(node: Node) -> bool:
    """Whether moved values stay on the grid of the input. Padding with a value other than zero leaves it."""
    if node.target in (aten.pad.default, aten.constant_pad_nd.default):
        mode = node.args[2] if node.target is aten.pad.default and len(node.args) > 2 else "constant"
        fill = node.args[-1] if len(node.args) > (3 if node.target is aten.pad.default else 2) else 0.0
        return mode != "constant" or fill in (None, 0, 0.0)
    return True
