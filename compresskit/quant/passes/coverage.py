"""How much of a model runs in integers: the fraction of its layers, parameters and multiply-accumulates (MACs).

What reads stored tensors alone counts no MACs: a runtime computes it once, when it loads a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import LAYER_KINDS, OPERATOR_KINDS

ONCE = "it reads stored tensors alone: a runtime computes it once, when it loads the file"
MOST_ONCE = 0.1  # of the parameters of all layers, in layers that are computed once: more are worth their bytes in integers
_CREATED = {"aten::arange", "aten::linspace", "aten::full", "aten::zeros", "aten::ones", "aten::eye"}
#: What a record says of nodes that stay float, by their names, while a model is built again from it; else None.
_recorded: ContextVar[Mapping[str, str] | None] = ContextVar("_recorded", default=None)


@contextmanager
def reasons_as_recorded(floating: Mapping[str, str]) -> Iterator[None]:
    """Let placements, inside the block, read in a record what depends on the values of weights, or on rules it may be older than.

    Of a model that is built again, weights are loaded later: cut ones are zeros until then, those of a new head may be, and those
    that were all zero may be others.

    floating: of the recorded placement, the nodes that stayed float, each with its reason.
    """
    token = _recorded.set(floating)
    try:
        yield
    finally:
        _recorded.reset(token)


def stayed_float(node: Node, reason: str) -> bool | None:
    """Whether a node stayed float for a reason, by the record that a model is built again from; None outside of that."""
    recorded = _recorded.get()
    return None if recorded is None else recorded.get(node.name) == reason


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Parameters of a layer, and its multiply-accumulates for one sample."""

    parameters: int
    macs: int


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Layers, parameters and MACs, each as (in integers, all). reasons: layer that stays float -> reason."""

    layers: tuple[int, int]
    parameters: tuple[int, int]
    macs: tuple[int, int]
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        named = (("layers", self.layers), ("parameters", self.parameters), ("MACs", self.macs))
        fractions = ", ".join(f"{done / every:.1%} of {name}" for name, (done, every) in named if every)
        head = f"{self.layers[0]} of {self.layers[1]} layers in integers: {fractions}"
        return "\n".join([head, *(f"  {name}: float, {reason}" for name, reason in self.reasons.items())])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return asdict(self) | {"reasons": dict(self.reasons)}


def layer_costs(graph: fx.Graph) -> dict[str, LayerCost]:
    """Parameters and MACs of each layer of a captured graph, by the name of its node."""
    return {n.name: _layer_cost(graph, n) for n in graph.nodes if OPERATOR_KINDS.get(n.target) in LAYER_KINDS and "val" in n.meta}


def computed_once(graph: fx.Graph) -> set[Node]:
    """The nodes that read stored tensors alone, or ones that the code creates, such as layers over a grid of coordinates.

    None where the layers among them hold more than a tenth of the parameters: integers save their bytes.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        read = node.all_input_nodes
        if node.op == "get_attr":
            found.add(node)
        elif node.op == "call_function" and found.issuperset(read):
            created = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _CREATED
            if read or created:
                found.add(node)
    computed = {node for node in found if node.op == "call_function"}
    if not any(OPERATOR_KINDS.get(node.target) in LAYER_KINDS for node in computed):
        return set()
    costs = layer_costs(graph)
    inside = sum(costs[node.name].parameters for node in computed if node.name in costs)
    if inside > MOST_ONCE * sum(cost.parameters for cost in costs.values()) and _recorded.get() is None:
        return set()
    return {node for node in computed if stayed_float(node, ONCE) is not False}


def costs_of_runs(graph: fx.Graph, once: Collection[Node]) -> dict[str, LayerCost]:
    """Parameters and MACs of each layer, by the name of its node. once: nodes that a runtime computes once, of no MACs."""
    names = {node.name for node in once}
    return {name: replace(cost, macs=0) if name in names else cost for name, cost in layer_costs(graph).items()}


def _layer_cost(graph: fx.Graph, node: Node) -> LayerCost:
    kind = OPERATOR_KINDS[node.target]
    if kind == "recurrent":
        return _recurrent_cost(graph, node)
    operands = node.args[1:3] if kind == "addmm" else node.args[:3]
    tensors = [_tensor(graph, a) for a in operands]
    stored = [(a, t) for a, t in zip(operands, tensors, strict=False) if t is not None and parameter_name(a)]
    if kind in ("conv", "conv_transpose", "linear") and stored and stored[0][0] is operands[0]:
        stored = stored[1:]  # a grid of coordinates, say, that the layer reads
    parameters = sum(t.numel() for _, t in stored)
    x, weight = tensors[:2]
    assert x is not None
    assert weight is not None
    value, rows = node.meta["val"], example_rows(graph)
    if kind == "conv_transpose":
        macs = element_count(x, rows) // rows * element_count(weight, rows) // int(weight.shape[0])
    elif kind in ("matmul", "addmm"):
        macs = element_count(value, rows) * int(x.shape[-1]) // rows
    else:
        macs = element_count(value, rows) // rows * (element_count(weight, rows) // int(weight.shape[0]))
    return LayerCost(parameters=int(parameters), macs=macs)


def _recurrent_cost(graph: fx.Graph, node: Node) -> LayerCost:
    """Each matrix is multiplied once per step of a sequence."""
    tensors = [t for a in node.args[2] if (t := _tensor(graph, a)) is not None]
    x, batch_first = node.args[0].meta["val"], node.args[8]
    steps = int(x.shape[1 if batch_first else 0])
    return LayerCost(parameters=sum(t.numel() for t in tensors), macs=steps * sum(t.numel() for t in tensors if t.ndim == 2))


def example_rows(graph: fx.Graph) -> int:
    """Batch size of the example; the first dimension of a value may hold heads or windows as well."""
    inputs = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    return next((int(v.shape[0]) for v in inputs if isinstance(v, Tensor) and v.ndim), 1)


def element_count(tensor: Tensor, rows: int) -> int:
    """Number of values. A size that is known only at run time, as of rows that the data selects, counts as all rows."""
    return math.prod(d if isinstance(d, int) else int(d) if d.node.has_hint() else rows for d in tensor.shape)


def _tensor(graph: fx.Graph, value: Any) -> Tensor | None:
    if not isinstance(value, fx.Node):
        return None
    name = parameter_name(value)
    return value.meta.get("val") if name is None or graph.owning_module is None else get_tensor(graph.owning_module, name)


def coverage_of(
    costs: Mapping[str, LayerCost], integer: Mapping[str, str], floating: Mapping[str, str], layers: Mapping[str, str]
) -> Coverage:
    """Sum the costs of the layers that run in integers, and collect why the others do not."""
    inside = [cost for name, cost in costs.items() if name in integer]
    every = list(costs.values())
    return Coverage(
        layers=(len(inside), len(every)),
        parameters=(sum(c.parameters for c in inside), sum(c.parameters for c in every)),
        macs=(sum(c.macs for c in inside), sum(c.macs for c in every)),
        reasons={layers.get(name) or name: floating[name] for name in costs if name in floating},
    )
