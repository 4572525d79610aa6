"""Run a quantized graph twice at once, rounded and unrounded, and look at both values of every operator as they pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.dynamic_quantizers import DynamicActivation
from compresskit.quant.numerics.operators import moved
from compresskit.quant.numerics.quantizers import ActivationQuantizer, Quantizer

Pair = tuple[Any, Any]  # (unrounded, rounded)


def run_pairs(
    body: fx.GraphModule,
    inputs: Inputs,
    look: Callable[[Node, Pair, Callable[[Node], Pair]], bool],
    weights: Mapping[str, Tensor] | None = None,
) -> Pair:
    """Run a batch; returns both outputs.

    look: called with (node, its values, the values of any of its arguments) behind every operator; True ends the run.
    weights: parameters that the unrounded run has in the place of the graph's own, by name.
    """
    values: dict[Node, Pair] = {}
    left = {node: len(node.users) for node in body.graph.nodes}
    leaves = iter(pytree.tree_leaves(inputs))
    with torch.no_grad():
        for node in body.graph.nodes:
            if node.op == "placeholder":
                x = next(leaves)
                values[node] = (x, x)
            elif node.op == "get_attr":
                own = get_tensor(body, node.target)
                values[node] = ((weights or {}).get(node.target, own), own)
            else:
                values[node] = _both(body, node, values)
            if look(node, values[node], values.__getitem__) or node.op == "output":
                return values[node]
            for source in node.all_input_nodes:
                left[source] -= 1
                if not left[source]:
                    del values[source]
    raise AssertionError("a graph ends with its output")


def _both(body: fx.GraphModule, node: Node, values: dict[Node, Pair]) -> Pair:
    sides = []
    for side in (0, 1):
        there = {source: values[source][side] for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), there.__getitem__)
        if node.op == "output":
            sides.append(args[0])
        elif node.op == "call_module":
            module = body.get_submodule(node.target)
            if isinstance(module, Quantizer):
                sides.append(module.unrounded(*args) if side == 0 else module(*args))
            else:
                sides.append(module(*args, **kwargs))
        else:
            sides.append(node.target(*args, **kwargs))
    return sides[0], sides[1]


def rounding_of(body: fx.GraphModule, value: Node) -> ActivationQuantizer | DynamicActivation | None:
    """The quantizer whose numbers a value has, looking back through what only moves it."""
    here: Node | None = value
    while here is not None:
        module = body.get_submodule(str(here.target)) if here.op == "call_module" else None
        if isinstance(module, ActivationQuantizer | DynamicActivation):
            return module
        here = moved(here)
    return None
