"""Add quantizers to a graph under names that nothing in it has: no module of the user, and no attribute of torch's modules."""

from __future__ import annotations

from torch import fx, nn

from compresskit.graph.surgery import free_name
from compresskit.quant.numerics.quantizers import Quantizer


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


def stored_name(weight: str) -> str:
    """Name of the quantizer of a weight: `"layer1.0.weight"` -> `"weight_layer1_0_weight"`."""
    return "weight_" + weight.replace(".", "_")
