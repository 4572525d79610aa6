"""Lower a quantized graph to the operators that are exported: QuantizeLinear, DequantizeLinear, stored integers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, fx, nn

from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import free_name, get_tensor
from compresskit.quant.numerics.dynamic_quantizers import RowQuantizer
from compresskit.quant.numerics.quantizers import (
    ActivationQuantizer,
    BiasQuantizer,
    DeployedActivation,
    DeployedConstant,
    DeployedHardSigmoid,
    DeployedSixth,
    WeightQuantizer,
    deployed_bias,
    deployed_weight,
)


def deploy(body: fx.GraphModule, hardsigmoids: Mapping[str, bool]) -> fx.GraphModule:
    """A copy of a graph with quantizers, in ONNX's terms.

    hardsigmoids: names of the hardsigmoid nodes that run in integers -> whether their own rounding clips them.
    """
    shared = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())}  # only read here
    body = copy.deepcopy(body, shared).eval()  # type: ignore[arg-type]
    calls = [node for node in body.graph.nodes if node.op == "call_module"]
    quantizers: dict[Node, nn.Module] = {node: body.get_submodule(node.target) for node in calls}
    for node in [n for n in body.graph.nodes if n.name in hardsigmoids]:
        form = DeployedSixth if hardsigmoids[node.name] else DeployedHardSigmoid
        _replace_hardsigmoid(body, node, form, quantizers[node.args[0]])
    transposed: dict[str, str] = {}
    for node in [n for n in body.graph.nodes if n.target is aten.linear.default]:
        _linear_to_matmul(body, node, quantizers, transposed)
    stored: dict[str, str] = {}
    for node in [n for n in body.graph.nodes if n.target is aten.embedding.default]:
        _look_up_integers(body, node, quantizers, stored)
    for node, quantizer in quantizers.items():
        values = [get_tensor(body, a.target) for a in node.args if a.op == "get_attr"]
        if isinstance(quantizer, ActivationQuantizer):
            body.add_submodule(node.target, DeployedActivation(quantizer))
        elif node.users:
            constant = deployed_weight(quantizer, *values) if isinstance(quantizer, WeightQuantizer) else None
            body.add_submodule(node.target, constant or deployed_bias(quantizer, *values))  # type: ignore[arg-type]
            node.args = ()
    body.graph.eliminate_dead_code()
    for node in reversed(list(body.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            body.graph.erase_node(node)
    body.recompile()
    body.delete_all_unused_submodules()
    return body


def _replace_hardsigmoid(
    body: fx.GraphModule, node: Node, form: Callable[[ActivationQuantizer], nn.Module], quantizer: nn.Module
) -> None:
    """quantizer: of its input."""
    assert isinstance(quantizer, ActivationQuantizer)
    holder = str(node.args[0].target).rpartition(".")[0]
    name = free_name(body, f"{holder}.{node.name}")
    body.add_submodule(name, form(quantizer))
    with body.graph.inserting_before(node):
        clipped = body.graph.call_module(name, (node.args[0],))
    node.replace_all_uses_with(clipped)
    body.graph.erase_node(node)


class DeployedRows(nn.Module):
    """Exported form of a lookup in a rounded table with one scale a row: Gather of integers and of scales.

    `export.rewrite.compact` lets it and the product share the integers.
    """

    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale[:, None].clone())

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.get_buffer("integers")).float() * F.embedding(ids, self.get_buffer("scale"))


def _look_up_integers(body: fx.GraphModule, node: Node, quantizers: dict[Node, nn.Module], stored: dict[str, str]) -> None:
    """Replace a lookup in a rounded table, or one whose rows are rounded. stored: name of each table -> of its stored form."""
    rounding = quantizers.get(node.args[0])
    of_rows = {user: module for user in node.users if isinstance(module := quantizers.get(user), RowQuantizer)}
    if isinstance(rounding, WeightQuantizer):
        table, quantizer, result = node.args[0].args[0], rounding, node
    elif of_rows:
        ((result, rows_rounding),) = of_rows.items()
        table, quantizer = node.args[0], rows_rounding.table
        del quantizers[result]
    else:
        return
    if table.target not in stored:
        stored[table.target] = free_name(body, f"{table.target}_rows")
        weight = get_tensor(body, table.target)
        body.add_submodule(stored[table.target], DeployedRows(quantizer.integers(weight), quantizer.qparams(weight)[0]))
    with body.graph.inserting_before(node):
        rows = body.graph.call_module(stored[table.target], (node.args[1],))
    rows.meta = dict(node.meta)
    result.replace_all_uses_with(rows)
    for gone in dict.fromkeys((result, node)):
        body.graph.erase_node(gone)


def _linear_to_matmul(body: fx.GraphModule, node: Node, quantizers: dict[Node, nn.Module], transposed: dict[str, str]) -> None:
    """Write a linear layer of more than two dimensions, which Gemm does not take, as MatMul and Add.

    The weight is stored transposed, so that no operator is between DequantizeLinear and MatMul. The rounded bias is added in
    float.

    transposed: name of the quantizer of each weight that is stored so already -> name of the stored one.
    """
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    quantizer = quantizers.get(weight)
    if not isinstance(quantizer, WeightQuantizer) or node.args[0].meta["val"].ndim == 2:
        return
    if weight.target not in transposed:
        stored = deployed_weight(quantizer, get_tensor(body, weight.args[0].target))
        zero_point = stored.get_buffer("zero_point")
        turned = DeployedConstant(stored.get_buffer("integers").T.contiguous(), stored.get_buffer("scale"), zero_point, 1)
        transposed[weight.target] = free_name(body, f"{weight.target}_transposed")
        body.add_submodule(transposed[weight.target], turned)
    name = transposed[weight.target]
    with body.graph.inserting_before(node):
        new = body.graph.call_function(aten.matmul.default, (node.args[0], body.graph.call_module(name)))
        if bias is not None:
            rounding = quantizers.get(bias)
            if isinstance(rounding, BiasQuantizer):
                values = [get_tensor(body, a.target) for a in bias.args]
                rounded = free_name(body, f"{node.name}_bias")
                body.register_buffer(rounded, deployed_bias(rounding, *values)().detach())
                bias = body.graph.get_attr(rounded)
            new = body.graph.call_function(aten.add.Tensor, (new, bias))
    node.replace_all_uses_with(new)
    body.graph.erase_node(node)
