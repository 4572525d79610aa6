"""Run a quantized graph twice at once, rounded and unrounded, and look at both values of every operator as they pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.dynamic_quantizers import DynamicActivation
from compresskit.quant.numerics.operators import moved
from compresskit.quant.numerics.quantizers import ActivationQuantizer, Quantizer

Pair = tuple[Any, Any]  # (unrounded, rounded)


def run_pairs(
    body: fx.GraphModule,
    inputs: Inputs,
    look: Callable[[Node, Pair, Callable[[Node], Pair]], None],
    weights: Mapping[str, Tensor] | None = None,
    *,
    until: Node | None = None,
) -> Pair:
    """Run a batch; returns both outputs.

    look: called with (node, its values, the values of any of its arguments) after every operator.
    weights: parameters that the unrounded run has in the place of the graph's own, by name.
    until: the last node to run; nothing that it does not depend on is run.
    """

    def compute(node: Node, value_of: ValueOf) -> Pair:
        def pair_of(source: Node) -> Pair:
            value = value_of(source)
            return (value, value) if source.op == "placeholder" else value

        pair = _both(body, node, pair_of, weights or {})
        look(node, pair, pair_of)
        return pair

    with torch.no_grad():
        result: Pair = run_graph(body, pytree.tree_leaves(inputs), compute=compute, until=until)
    return result


def _both(body: fx.GraphModule, node: Node, pair_of: Callable[[Node], Pair], weights: Mapping[str, Tensor]) -> Pair:
    """The unrounded and the rounded value of a node."""
    if node.op == "get_attr":
        own = get_tensor(body, node.target)
        return weights.get(node.target, own), own

    def unrounded_of(source: Node) -> Any:
        return pair_of(source)[0]

    def rounded_of(source: Node) -> Any:
        return pair_of(source)[1]

    module = body.get_submodule(node.target) if node.op == "call_module" else None
    if isinstance(module, Quantizer):
        return module.unrounded(*fx.map_arg(node.args, unrounded_of)), execute(body, node, rounded_of)
    return execute(body, node, unrounded_of), execute(body, node, rounded_of)


def rounding_of(body: fx.GraphModule, value: Node) -> ActivationQuantizer | DynamicActivation | None:
    """The quantizer whose numbers a value has, looking back through what only moves it."""
    here: Node | None = value
    while here is not None:
        module = body.get_submodule(str(here.target)) if here.op == "call_module" else None
        if isinstance(module, ActivationQuantizer | DynamicActivation):
            return module
        here = moved(here)
    return None
