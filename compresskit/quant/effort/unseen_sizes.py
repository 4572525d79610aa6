"""Warn of sizes that inputs may have and no calibration data had, at which little is left of the outputs.

Values that are made of sizes, such as coordinates, grow with them and leave the ranges that the data showed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.inputs import call_inputs
from compresskit.base.task import Inputs, call, shapes_of
from compresskit.export.check.other_sizes import falls_short, resized_inputs, rounding_decibels, sizes_by_name
from compresskit.graph.capture import Dynamic, input_names
from compresskit.graph.surgery import mode
from compresskit.quant.calibration.rows import row_count
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer

LEAVES = 0.1  # of its range by which a value leaves it that is named
TIMES = (2.0, 0.5)  # the data's size
MOST_BYTES = 2**27  # of the largest value of one sample there, if it is one of an attention, which grows with the square


class SeenSizes:
    """The sizes that calibration data had of the dimensions that may vary."""

    def __init__(self, module: nn.Module, example: Inputs, dynamic: Dynamic) -> None:
        """module, example: what is quantized, and its inputs."""
        self.example, self.seen = example, dict[str, set[int]]()
        self.names = _dimension_names(module, example, dynamic)
        _, self.batch = sizes_by_name(example, self.names)
        # Which dimensions of inputs with other numbers of rows belong together, names alone say.
        self.known = isinstance(dynamic, Mapping) or row_count(example) is not None or not self.batch

    def add(self, inputs: Inputs) -> None:
        """See a batch of inputs of what is quantized."""
        for name, size in sizes_by_name(inputs, self.names)[0].items():
            self.seen.setdefault(name, set()).add(size)

    @contextmanager
    def of_calls(self, quantized: Quantized) -> Iterator[None]:
        """See what a model is called with inside the block."""

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.add(call_inputs(quantized, args, kwargs, "calibration data"))

        hook = quantized.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def warn_of_others(self, quantized: Quantized, where: str) -> None:
        """Warn, in a message that begins with `where`, where rounding leaves much less of the outputs at twice or half the one
        size that the data had. Nothing is said of sizes that the model does not take, nor where it draws random numbers.
        """
        alone = {name: min(sizes) for name, sizes in self.seen.items() if len(sizes) == 1 and name != self.batch}
        given = pytree.tree_leaves(self.example)
        if not alone or not self.known or any(isinstance(v, Tensor) and v.is_cuda and not v.is_floating_point() for v in given):
            return  # an index outside of a table ends the process on a GPU
        drawn, own = torch.get_rng_state(), None
        with torch.no_grad(), mode(quantized, training=False):
            for times in (1.0, *TIMES):
                if times ** (2 * len(alone)) * quantized.row_bytes > MOST_BYTES:
                    continue
                sizes = {name: int(times * size) or 1 for name, size in alone.items()}
                inputs = resized_inputs(self.example, self.names, sizes | {self.batch: 1})
                try:
                    left = rounding_decibels(quantized, inputs)
                except Exception:  # sizes that the model does not take
                    continue
                own = left if times == 1 else own
                if own is not None and falls_short(left, own) and torch.equal(drawn, torch.get_rng_state()):
                    warnings.warn(_message(quantized, inputs, left, own, where), stacklevel=4)
                    return


def _dimension_names(module: nn.Module, example: Inputs, dynamic: Dynamic) -> dict[str, list[Any]]:
    """Input -> for each of its dimensions a name, where it may vary, and else its size."""
    found = {}
    for name, value in zip(input_names(module, example), pytree.tree_leaves(example), strict=True):
        if isinstance(value, Tensor):
            named = dynamic.get(name, {}) if isinstance(dynamic, Mapping) else {int(d): f"dim_{d}" for d in dynamic}
            found[name] = [named.get(d, size) for d, size in enumerate(value.shape)]
    return found


def _message(quantized: Quantized, inputs: Inputs, left: float, own: float, where: str) -> str:
    outside = _first_outside(quantized, inputs)
    named = "calibrate with the sizes that will come, the largest, too" + (f"; {outside}" if outside else "")
    return (
        f"{where}: at inputs of shape {shapes_of(inputs)}, which dynamic= allows, rounding leaves {left:.1f} dB of the output; at"
        f" the one size of the calibration data {own:.1f} dB: {named}"
    )


def _first_outside(quantized: Quantized, inputs: Inputs) -> str:
    """Say which value leaves its range by far; "" where none does. Those behind it leave theirs since it does: the first is named
    that leaves it by half as much as any.
    """
    ends: dict[nn.Module, tuple[float, float]] = {}

    def see(module: nn.Module, _: Any, value: Tensor) -> None:
        if value.numel():
            low, high = ends.get(module, (0.0, 0.0))
            ends[module] = min(low, float(value.min())), max(high, float(value.max()))

    with ExitStack() as stack, torch.no_grad(), mode(quantized, training=False):
        stack.enter_context(quantized.float_activations())
        for quantizer in quantized.activation_quantizers():
            stack.callback(quantizer.register_forward_hook(see).remove)
        call(quantized, inputs)
    points = {point.node for point in quantized.placement.points}
    found = []
    for node in quantized.body.graph.nodes:
        rounding = quantized.body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(rounding, ActivationQuantizer) and rounding in ends:
            low, high = (
                float((end - rounding.zero_point) * rounding.scale) for end in (rounding.scheme.low, rounding.scheme.high)
            )
            lowest, highest = ends[rounding]
            name = str(node.target).rpartition(".")[2]
            text = (
                f"{(name if name in points else rounding.label)!r} has {lowest:.3g} to {highest:.3g} there, and its range is"
                f" {low:.3g} to {high:.3g}; a name in skip= leaves a value float"
            )
            found.append((max(highest - high, low - lowest) / (high - low), text))
    most = max((share for share, _ in found), default=0.0)
    return next((text for share, text in found if share >= most / 2), "") if most > LEAVES else ""
