"""Build a quantized model from a float one: capture, smooth, place and insert quantizers.

float model -> prepare_graph -> smooth_tensors_ -> place_quantizers -> insert_quantizers_ -> Quantized, still to be calibrated
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx, nn

from compresskit.base.errors import ModelError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Dynamic, module_path
from compresskit.quant.calibration.sensitive_ends import sensitive_ends
from compresskit.quant.calibration.smoothquant import smooth_tensors_
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.observers import Observer
from compresskit.quant.numerics.operators import OPERATOR_KINDS
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.insert import insert_quantizers_
from compresskit.quant.passes.placement import Placement, place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


def build_quantized(
    model: nn.Module,
    example: Inputs,
    target: Target,
    observer: Callable[[], Observer] | None,
    *,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    dynamic: Dynamic = (0,),
    strict: bool = False,
    trainable: bool = False,
    smooth: Inputs | None = None,
) -> Quantized:
    """Capture a float model, fold BatchNorm, place and insert quantizers; the model itself is not changed.

    The result still computes in float: `calibrate_` finds the ranges of its quantizers and switches them on.

    Args:
        model, example, target, observer, skip, dynamic, strict: as in `quantize_static`.
        floating: nodes of the graph that stay float, each with its reason, besides those that the target's rules leave float.
        trainable: keep what `Quantized.unfold_batchnorm_` needs.
        smooth: inputs by which `smooth_` evens out channels; the sensitive first and last layers then stay float, too
            (`sensitive_ends`). None leaves the weights as they are.

    Raises ModelError where nothing of the model runs in integers on the target.
    """
    captured, origin, folds = prepare_graph(model, example, target, skip, dynamic)
    if smooth is not None:
        origin = replace(origin, smoothed=smooth_tensors_(captured.module, captured, [smooth]))
        floating = {**sensitive_ends(captured.module.graph), **(floating or {})}
    origin = replace(origin, floating=dict(floating or {}))
    placement = place_quantizers(captured.module.graph, target, skip=skip, floating=floating)
    if not placement.integer:
        raise ModelError(f"{type(model).__name__}: {target.name} can run none of its operators in integers:\n{placement}")
    if strict:
        _refuse_unknown(captured.module.graph, placement)
    insert_quantizers_(captured.module, placement, target, observer)
    return Quantized(captured, target, placement, origin, folds if trainable else ()).train(model.training)


def _refuse_unknown(graph: fx.Graph, placement: Placement) -> None:
    """Raise ModelError where an operator is one that no rule knows; the message names all of them."""
    unknown = [n for n in graph.nodes if n.name in placement.floating and n.target not in OPERATOR_KINDS]
    if unknown:
        named = ", ".join(f"{n.target} ({module_path(n) or 'the model itself'})" for n in unknown)
        raise ModelError(f"strict=True: no rule knows {len(unknown)} operators, which would stay float: {named}")
