"""Build a quantized model from a float one: capture, smooth, place and insert quantizers.

float model -> prepare_graph -> smooth_tensors_ -> place_quantizers -> insert_quantizers_ -> Quantized, still to be calibrated
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import fx, nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, Dynamic, parameter_name
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.layers.stored import LAYOUT_OPERATORS
from compresskit.graph.normalize import Node, aten
from compresskit.graph.quantized import tied_names
from compresskit.graph.rewrites.gradient_hooks import hooked_modules
from compresskit.quant.calibration.smoothquant import smooth_tensors_
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import TARGET_BITS, BitWidths, bits_of_layer
from compresskit.quant.numerics.observers import Observer
from compresskit.quant.numerics.operators import OPERATOR_KINDS
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import layer_costs
from compresskit.quant.passes.insert import insert_quantizers_
from compresskit.quant.passes.placement import Placement, place_quantizers
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph

MAX_FRACTION = 0.01  # of the MACs, for each of the two layers of a transformer that stay float
#: Products that no rule knows.
_OTHER_PRODUCTS = frozenset({aten.einsum.default, aten.bilinear.default})

#: What may not stay float: nothing is refused; layers with weights; any operator.
Strict = bool | Literal["all"]


def build_quantized(
    model: nn.Module,
    example: Inputs,
    target: Target,
    observer: Callable[[], Observer] | None,
    *,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    dynamic: Dynamic = (0,),
    strict: Strict = False,
    trainable: bool = False,
    bits: BitWidths = TARGET_BITS,
    smooth: Inputs | None = None,
    adjust: Callable[[Captured], object] | None = None,
    merges: Sequence[MergedLayer] | None = None,
    prepared: tuple[Captured, Origin] | None = None,
    separate: Callable[[Captured, Placement, Scheme], Mapping[str, str]] | None = None,
    share: Callable[[Captured, Placement, Scheme], Placement] | None = None,
) -> Quantized:
    """Capture a float model, fold BatchNorm, place and insert quantizers; the model itself is not changed.

    The result still computes in float: `calibrate_` finds the ranges of its quantizers and switches them on.

    Args:
        model, example, target, observer, skip, dynamic, strict, bits: as in `quantize_static`.
        floating: nodes of the graph that stay float, each with its reason, besides those that the target's rules leave float.
        trainable: keep what `Quantized.unfold_batchnorm_` needs.
        smooth: inputs by which `smooth_` evens out channels; the sensitive first and last layers then stay float, too
            (`_sensitive_ends`). None leaves the weights as they are.
        adjust: changes weights of the captured graph in place, such that it still computes the same, before quantizers are
            placed.
        merges: see `prepare_graph`.
        prepared: the graph that `prepare_graph` made of the same model with the same settings, which is copied instead of
            capturing the model once more; without `trainable`.
        separate: names what stays float, too, by the ranges of values in a placement, and is asked again after each change of
            that (`measured_placement.by_ranges`). None leaves it to `floating`.
        share: makes one group of more values of the last placement (`measured_placement.repeated_calls`). None leaves them.

    Raises ModelError where nothing of the model runs in integers on the target, or `strict` forbids what stays float.
    """
    if prepared is None:
        apart = hooked_modules(model) if trainable else ()  # a hook is for the weight as it is
        captured, origin, folds = prepare_graph(
            model, example, target, skip, dynamic, apart=apart, trains=trainable, bits=bits, merges=merges
        )
    else:
        captured, origin, folds = copy.deepcopy(prepared[0]), prepared[1], []
    if smooth is not None:
        origin = replace(origin, smoothed=smooth_tensors_(captured.module, captured, [smooth], bits=bits))
        floating = {**_sensitive_ends(captured.module.graph), **(floating or {})}
    if adjust is not None:
        adjust(captured)
    placement, floating = placed_by_ranges(captured, target, skip, floating or {}, bits, separate, share)
    origin = replace(origin, floating=dict(floating), bits=bits)
    if not placement.integer:
        raise ModelError(f"{type(model).__name__}: {target.name} can run none of its operators in integers:\n{placement}")
    _refuse_left_float(strict, captured.module.graph, target, placement)
    insert_quantizers_(captured.module, placement, target, observer, bits)
    kept, classes = folds if trainable else (), {name: type(module) for name, module in model.named_modules()}
    return Quantized(captured, target, placement, origin, kept, classes, tied_names(model)).train(model.training)


def placed_by_ranges(
    captured: Captured,
    target: Target,
    skip: tuple[str, ...],
    floating: Mapping[str, str],
    bits: BitWidths,
    separate: Callable[[Captured, Placement, Scheme], Mapping[str, str]] | None,
    share: Callable[[Captured, Placement, Scheme], Placement] | None = None,
) -> tuple[Placement, Mapping[str, str]]:
    """The placement, as `share` joins its groups, and what is left float besides what the rules leave so, as `separate` names."""
    scheme = replace(target.activations, bits=bits_of_layer(bits, "").activations or target.activations.bits)
    placement = place_quantizers(captured.module.graph, target, skip=skip, floating=floating, bits=bits)
    while separate is not None and placement.integer and (found := separate(captured, placement, scheme)):
        more = {**floating, **found}
        again = place_quantizers(captured.module.graph, target, skip=skip, floating=more, bits=bits)
        if not again.integer or again == placement:
            break
        placement, floating = again, more
    return placement if share is None else share(captured, placement, scheme), floating


def _refuse_left_float(strict: Strict, graph: fx.Graph, target: Target, placement: Placement) -> None:
    """Raise ModelError where something stays float that `strict` forbids to."""
    if strict == "all":
        _refuse_float_operators(placement)
    elif strict:
        _refuse_float_layers(graph, target, placement)


def _refuse_float_operators(placement: Placement) -> None:
    """Raise ModelError where an operator stays float, for whatever reason."""
    if placement.floating:
        named = "; ".join(f"{placement.layers.get(name) or name}: {reason}" for name, reason in placement.floating.items())
        total = len(placement.floating) + len(placement.integer)
        raise ModelError(
            f'strict="all": {len(placement.floating)} of {total} operators would stay float: {named}. Put others in their place,'
            " or write strict=True, which only asks for the layers with weights"
        )


def _refuse_float_layers(graph: fx.Graph, target: Target, placement: Placement) -> None:
    """Raise ModelError where a layer with weights stays float although nothing was chosen that leaves it so."""
    able = place_quantizers(graph, target, slow=True)
    layers = {node.name for node in graph.nodes if _is_layer(node, able)}
    refused = [name for name, reason in able.floating.items() if name in layers and placement.floating.get(name) == reason]
    if refused:
        named = "; ".join(f"{able.layers[name] or name}: {able.floating[name]}" for name in refused)
        raise ModelError(
            f"strict=True: {len(refused)} of {len(layers)} layers with weights would stay float: {named}. Name them in skip= to"
            " leave them so, or take a target that runs them"
        )


def _is_layer(node: Node, placement: Placement) -> bool:
    """Whether an operator multiplies by weights: convolutions, linear and recurrent layers, products by a parameter."""
    if node.target in _OTHER_PRODUCTS:
        return any(parameter_name(value) is not None for value in node.all_input_nodes)
    cost = placement.costs.get(node.name)
    return cost is not None and (cost.parameters > 0 or OPERATOR_KINDS[node.target] in ("conv", "conv_transpose", "linear"))


def _sensitive_ends(graph: fx.Graph) -> dict[str, str]:
    """The first and last layers of a transformer that are a small part of its MACs, by name, each with why it stays float.

    Rounding errors of the first layer are in every token from then on; those of the last layer are in the output. ViT-B/16, of
    which the two are 0.7 % of the MACs: 29.8 dB with both in integers, 30.8 with the first in float, 31.2 with both in float.
    None for a model without layer norms.
    """
    costs = layer_costs(graph)
    total_macs = sum(cost.macs for cost in costs.values())
    if not total_macs or not any(node.target in (aten.layer_norm.default, aten.rms_norm.default) for node in graph.nodes):
        return {}
    reasons = {}
    for node in graph.nodes:
        if node.target is not aten.linear.default or node.name not in costs:
            continue
        fraction = costs[node.name].macs / total_macs
        position = "first" if _reads_input(node) else "last" if _is_output(node) else ""
        if position and fraction <= MAX_FRACTION:
            reasons[node.name] = (
                f"it is the {position} layer and {fraction:.1%} of the MACs: float costs little there, rounding much"
            )
    return reasons


def _reads_input(node: Node) -> bool:
    value = node.args[0]
    while value.op == "call_function" and value.target in LAYOUT_OPERATORS:
        value = value.args[0]
    return value.op == "placeholder"


def _is_output(node: Node) -> bool:
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.target in LAYOUT_OPERATORS:
                pending.append(user)
            elif user.op != "output":
                return False
    return True
