"""Run the float and the quantized graph in lockstep and visit both values of every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.inputs import call_checked
from compresskit.base.task import Inputs
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.graph.tracing import no_autocast
from compresskit.quant.numerics.quantizers import Quantizer

Pair = tuple[Any, Any]  # (value in the float graph, value in the quantized graph)
VisitPair = Callable[[Node, Pair, Callable[[Node], Pair]], object]


def run_float_and_quantized(
    body: fx.GraphModule,
    inputs: Inputs,
    visit: VisitPair,
    float_weights: Mapping[str, Tensor] | None = None,
    *,
    until: Node | None = None,
) -> Pair:
    """Run one batch through a quantized graph with quantizers off and on, in lockstep, and return both outputs.

    Args:
        body: the graph with quantizers.
        inputs: of one batch.
        visit: called after every operator with (node, its pair of values, a function from an argument's node to its pair).
        float_weights: parameters that the float run uses instead of the graph's own, by name.
        until: the last node to run, whose pair is returned; only the nodes that it depends on are run.

    Raises DataError where the graph does not run on the inputs.
    """

    def compute(node: Node, value_of: ValueOf) -> Pair:
        def pair_of(source: Node) -> Pair:
            value = value_of(source)
            return (value, value) if source.op == "placeholder" else value

        pair = _compute_pair(body, node, pair_of, float_weights or {})
        visit(node, pair, pair_of)
        return pair

    def run(*args: Any, **kwargs: Any) -> Pair:
        found: Pair = run_graph(body, pytree.tree_leaves((args, kwargs)), compute=compute, until=until)
        return found

    with torch.no_grad(), no_autocast():
        result: Pair = call_checked(run, inputs, "calibration data")
    return result


def _compute_pair(body: fx.GraphModule, node: Node, pair_of: Callable[[Node], Pair], float_weights: Mapping[str, Tensor]) -> Pair:
    if node.op == "get_attr":
        tensor = get_tensor(body, node.target)
        return float_weights.get(node.target, tensor), tensor

    def float_of(source: Node) -> Any:
        return pair_of(source)[0]

    def quantized_of(source: Node) -> Any:
        return pair_of(source)[1]

    module = body.get_submodule(node.target) if node.op == "call_module" else None
    if isinstance(module, Quantizer):
        return module.unrounded(*fx.map_arg(node.args, float_of)), execute(body, node, quantized_of)
    return execute(body, node, float_of), execute(body, node, quantized_of)
