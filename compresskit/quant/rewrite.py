"""Rewrites of a captured graph that put its operators in the terms that integer kernels have.

silu(x)        -> x * sigmoid(x)
hardswish(x)   -> x * hardsigmoid(x)
batch_norm(x) that no layer could take in  -> a depthwise 1x1 convolution: one scale and one bias for each channel
"""

from __future__ import annotations

import torch
from torch import fx, nn

from compresskit.graph import parameter_name
from compresskit.normalize import Node, aten
from compresskit.quant.fold import drop_unused_
from compresskit.quant.targets import Target
from compresskit.surgery import get_tensor

_GATES = {aten.silu.default: aten.sigmoid.default, aten.hardswish.default: aten.hardsigmoid.default}
_CONVS = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}


def rewrite_(module: fx.GraphModule, target: Target) -> None:
    """Apply the rewrites that help on the target."""
    for node in list(module.graph.nodes):
        gate = _GATES.get(node.target)
        if gate is not None and _kind_of(gate) in target.operators and "mul" in target.operators:
            _split_gate(module.graph, node, gate)
        elif node.target is aten.batch_norm.default and "conv" in target.operators:
            _norm_to_conv(module, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    drop_unused_(module)


def _kind_of(gate: Node) -> str:
    return "sigmoid" if gate is aten.sigmoid.default else "hardsigmoid"


def _split_gate(graph: fx.Graph, node: Node, gate: Node) -> None:
    x = node.args[0]
    with graph.inserting_before(node):
        opened = graph.call_function(gate, (x,))
        product = graph.call_function(aten.mul.Tensor, (x, opened))
    opened.meta, product.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _norm_to_conv(module: fx.GraphModule, node: Node) -> None:
    x, gamma, beta, mean, var = node.args[:5]
    conv = _CONVS.get(x.meta["val"].ndim)
    names = [parameter_name(n) for n in (gamma, beta, mean, var)]
    if conv is None or None in names[2:]:
        return
    mean_value, var_value = (get_tensor(module, str(n)).detach().double() for n in names[2:])
    scale = torch.rsqrt(var_value + node.args[7])
    if names[0] is not None:
        scale = scale * get_tensor(module, names[0]).detach().double()
    shift = -mean_value * scale
    if names[1] is not None:
        shift = shift + get_tensor(module, names[1]).detach().double()
    channels, rank = len(scale), x.meta["val"].ndim
    dtype = x.meta["val"].dtype
    holder = nn.Module()
    holder.weight = nn.Parameter(scale.to(dtype).view(-1, *[1] * (rank - 1)))
    holder.bias = nn.Parameter(shift.to(dtype))
    name = f"affine_{node.name}"
    module.add_submodule(name, holder)
    spatial = rank - 2
    with module.graph.inserting_before(node):
        weight, bias = (module.graph.get_attr(f"{name}.{leaf}") for leaf in ("weight", "bias"))
        args = (x, weight, bias, [1] * spatial, [0] * spatial, [1] * spatial, channels)
        new = module.graph.call_function(conv, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
