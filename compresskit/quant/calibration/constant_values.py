"""Name the values that were the same throughout the calibration data although the model computes them from its inputs.

A constant is exactly representable, but nothing is known of the values that other data may bring.
"""

from __future__ import annotations

import warnings

from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.operators import LAYER_KINDS, OPERATOR_KINDS
from compresskit.quant.numerics.quantizers import ActivationQuantizer

#: Operators that read of a tensor its shape alone.
_FILLS = frozenset(
    {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
    | {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
)
SHOWN = 8  # values that are named


def warn_of_constants(quantized: Quantized, where: str) -> None:
    """Warn, in a message that begins with `where`, of calibrated values that showed no range; see `constant_values`."""
    found = constant_values(quantized)
    if found:
        named = ", ".join(f"{label!r} is {value:g}" for label, value in list(found.items())[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        warnings.warn(
            f"{where}: some values are the same throughout the calibration data: {named}{more}. Nothing shows the range that they"
            " have on other data, which would be rounded coarsely or clipped; calibrate with data that reaches them, or name them"
            " in skip= to leave them in float",
            stacklevel=4,
        )


def constant_values(quantized: Quantized) -> dict[str, float]:
    """Name in the placement of each rounded value that was always the same number, and that number.

    Left out is what does not depend on the values of inputs: what is computed from buffers or shapes, or by a layer whose weights
    are all zero.
    """
    points = {point.node for point in quantized.placement.points}
    found: dict[str, float] = {}
    for node in quantized.body.graph.nodes:
        quantizer = quantized.body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(quantizer, ActivationQuantizer):
            low, high = (float(end[0]) for end in quantizer.observer.range())
            name = str(node.target).rpartition(".")[2]
            if low == high and _depends_on_inputs(quantized.body, node):
                found[name if name in points else quantizer.label] = low + 0.0  # no -0
    return found


def _depends_on_inputs(body: fx.GraphModule, node: Node) -> bool:
    pending, visited = [node], {node}
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            return True
        if current.target in _FILLS or _is_zero_layer(body, current):
            continue
        sources = [n for n in current.all_input_nodes if isinstance(n.meta.get("val"), Tensor | tuple | list)]  # no sizes
        pending += [source for source in sources if source not in visited]
        visited.update(sources)
    return False


def _is_zero_layer(body: fx.GraphModule, node: Node) -> bool:
    """Whether a node is a layer whose weights are all zero."""
    if OPERATOR_KINDS.get(node.target) not in LAYER_KINDS or len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return False
    rounded = node.args[1]
    name = parameter_name(rounded.args[0] if rounded.op == "call_module" else rounded)
    return name is not None and not bool(get_tensor(body, name).any())
