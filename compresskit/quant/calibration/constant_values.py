"""Name the values that were the same throughout the calibration data although the model computes them from its inputs.

A constant is exactly representable, but nothing is known of the values that other data may bring. Channels of an output that are
the same only since rounding made them so are lost altogether.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.diagnose import APART, channel_numbers
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.calibration.rows import channel_dims
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.operators import LAYER_KINDS, OPERATOR_KINDS
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.passes.insert import quantizer_of

#: Operators that read of a tensor its shape alone.
_FILLS = frozenset(
    {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
    | {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
)
SHOWN = 8  # values that are named
LEAST_SEEN, USED = 32, 0.5  # values of a channel that tell that it is lost, and the share of them that is not 0 in float
VARIES = 0.1  # of its largest value by which a channel differs that is no constant


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


def warn_of_lost_channels(quantized: Quantized, batches: Callable[[], Iterable[Inputs]], where: str) -> None:
    """Warn, in a message that begins with `where`, of channels of an output of which rounding left one number.

    Only outputs that are rounded as a whole can have them: all their channels share one scale. batches: gives those that are
    compared.
    """
    output = next(node for node in quantized.body.graph.nodes if node.op == "output")
    leaves = [node for node in pytree.tree_leaves(output.args[0]) if isinstance(node, fx.Node)]
    scales = {i: quantizer_of(quantized.body, node) for i, node in enumerate(leaves)}
    rounded = {i: scale for i, scale in scales.items() if isinstance(scale, ActivationQuantizer)}
    seen: dict[tuple[int, int], _Ends] = {}

    def visit(node: Node, pair: Pair, pair_of: Callable[[Node], Pair]) -> None:
        for i in rounded:
            if leaves[i] is node and isinstance(pair[0], Tensor) and pair[0].numel():
                for dim in channel_dims(pair[0]):
                    seen.setdefault((i, dim), _Ends()).add(*pair, dim)

    with mode(quantized, training=False):
        for inputs in batches() if rounded else ():
            run_float_and_quantized(quantized.body, inputs, visit)
    for (i, _), ends in seen.items():
        if lost := ends.lost():
            which = "the output" if len(leaves) == 1 else f"output {i}"
            warnings.warn(
                f"{where}: nothing is left of {len(lost)} of {ends.count} channels ({channel_numbers(lost)}) of {which}: each is"
                f" rounded to one number, since all share the scale {float(rounded[i].scale):g}, and these hardly reach a step of"
                f" it; {APART}",
                stacklevel=4,
            )
            return


class _Ends:
    """The smallest and the largest value of each channel of an output, in float and rounded, over batches."""

    def __init__(self) -> None:
        self.count = self.seen = 0
        self.used = torch.zeros(())  # values of each channel that are not 0 in float, of `seen`
        self.values: list[Tensor] = []  # smallest in float, largest, smallest rounded, largest

    def add(self, clean: Tensor, rounded: Tensor, dim: int) -> None:
        """See a batch. dim: of its channels. Batches with another number of channels than the first are left out."""
        rows = [value.detach().movedim(dim, 0).flatten(1).double() for value in (clean, rounded)]
        new = [end for row in rows for end in (row.amin(1), row.amax(1))]
        if not self.values or len(self.values[0]) == len(new[0]):
            pairs = zip(self.values or new, new, (torch.minimum, torch.maximum) * 2, strict=True)
            self.values, self.count = [join(a, b) for a, b, join in pairs], len(new[0])
            self.used, self.seen = self.used + (rows[0] != 0).sum(1).cpu(), self.seen + rows[0].shape[1]

    def lost(self) -> list[int]:
        """The channels that differ in float, by more than a tenth of their size, and not once rounded.

        One that is mostly 0, as an activation function leaves channels that are hardly ever used, loses as good as nothing; few
        values tell nothing.
        """
        if self.seen < LEAST_SEEN:
            return []
        low, high, rounded_low, rounded_high = (ends.cpu() for ends in self.values)
        varies = (high - low > VARIES * torch.maximum(low.abs(), high.abs())) & (self.used > USED * self.seen)
        found: list[int] = torch.nonzero(varies & (rounded_low == rounded_high)).flatten().tolist()
        return found


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
