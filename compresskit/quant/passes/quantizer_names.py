"""Quantizers of a graph by name: added under names that nothing in it has, found, and named where no data reached them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from compresskit.base.errors import DataError
from compresskit.graph.surgery import free_name
from compresskit.quant.numerics.observers import has_seen_nothing
from compresskit.quant.numerics.quantizers import ActivationQuantizer, Quantizer

MOST_UNREACHED = 8  # modules that a message lists


class QuantizerHolder(nn.Module):
    """The submodule of a graph that holds its quantizers: `quantizers`, or another name where the user's model has that one."""


def add_quantizer_(body: fx.GraphModule, name: str, quantizer: Quantizer) -> str:
    """Add a quantizer to a graph, called `name` or, where that is taken, `name_2`, `name_3`, ...; returns its dotted name."""
    holders = [child for child, module in body.named_children() if isinstance(module, QuantizerHolder)]
    holder = holders[0] if holders else free_name(body, "quantizers")
    if not holders:
        body.add_submodule(holder, QuantizerHolder())
    path = free_name(body, f"{holder}.{name}")
    body.add_submodule(path, quantizer)
    return path


def quantizers_of(module: nn.Module) -> list[Quantizer]:
    """All quantizers of a graph, each once, in the order in which they were added; not those inside other quantizers."""
    found: list[Quantizer] = []
    for child in module.children():
        found += [child] if isinstance(child, Quantizer) else quantizers_of(child)
    return found


def check_reached(body: fx.GraphModule, layers: Mapping[str, str]) -> None:
    """Raise DataError where the calibration data did not reach a value to round; the message names what reads it.

    layers: dotted names of the modules that nodes stand in.
    """
    unreached: dict[str, None] = {}
    for node in body.graph.nodes:
        quantizer = body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(quantizer, ActivationQuantizer) and has_seen_nothing(quantizer.observer):
            readers = [layers.get(reader.name, "") for reader in node.users]
            unreached |= dict.fromkeys([path for path in readers if path] or [quantizer.label or node.name])
    if unreached:
        named = [repr(name) for name in [*unreached][:MOST_UNREACHED]]
        more = "" if len(unreached) <= MOST_UNREACHED else f" and {len(unreached) - MOST_UNREACHED} more"
        raise DataError(
            f"the calibration data do not reach {', '.join(named)}{more}, so that nothing is known of the values that are rounded"
            f" there; calibrate with data that reach all layers, or leave these in float: skip=({', '.join(named)},)"
        )


def stored_name(weight: str) -> str:
    """Name of the quantizer of a weight: `"layer1.0.weight"` -> `"weight_layer1_0_weight"`."""
    return "weight_" + weight.replace(".", "_")
