"""Rewrite operators of a captured graph to ones that have integer kernels.

silu(x)                                           -> x * sigmoid(x)
hardswish(x)                                      -> x * hardsigmoid(x)
conv_transpose(x)                                 -> a convolution and depth to space, see `transposed_to_conv`
batch_norm(x) that could not be folded            -> a depthwise 1x1 convolution: one scale and one bias per channel
conv(x) of patches whose result stays in float    -> a linear layer on the patches, whose result need not be rounded
relu(move(x)), or another clamp that is fusible   -> move(relu(x)): the quantizer of x replaces the clamp
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.fold_batchnorm import FoldedBatchNorm, norms_by_name, of_norm
from compresskit.graph.layers.stored import CONV_OF_RANK, drop_unused_
from compresskit.graph.masks import map_mask_
from compresskit.graph.normalize import Node, aten, insert_call
from compresskit.graph.surgery import free_name, get_tensor, owner
from compresskit.quant.numerics.operators import OPERATOR_KINDS, fusible, is_depthwise, keeps_grid
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.transposed_to_conv import rewrite_transposed_

_GATED_ACTIVATIONS = {aten.silu.default: aten.sigmoid.default, aten.hardswish.default: aten.hardsigmoid.default}


def rewrite_(module: fx.GraphModule, target: Target) -> list[FoldedBatchNorm]:
    """Apply the rewrites that help on the target, in place; returns the BatchNorms that became layers of their own."""
    norms: list[FoldedBatchNorm] = []
    alone = {path for path, calls in norms_by_name(module).items() if len(calls) == 1}
    if "conv" in target.operators:
        rewrite_transposed_(module)
    for node in list(module.graph.nodes):
        gate = _GATED_ACTIVATIONS.get(node.target)
        if gate is not None and _kind_of(gate) in target.operators and "mul" in target.operators:
            _split_gate(module.graph, node, gate)
        elif node.target is aten.batch_norm.default and "conv" in target.operators:
            norm = _norm_to_conv(module, node)
            norms += [norm] if norm is not None and norm.norm in alone else []
        elif node.target is aten.conv2d.default and _is_of_patches(module, node, target):
            _patches_to_linear(module, node)
    for node in list(module.graph.nodes):
        if OPERATOR_KINDS.get(node.target) == "clamp" and fusible(node):
            _clamp_before_moves(node, target)
    module.graph.eliminate_dead_code()
    module.recompile()
    drop_unused_(module)
    return norms


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


def _clamp_before_moves(clamp: Node, target: Target) -> None:
    """Put a clamp before the moves whose result it alone reads, where an operator with integer kernels computes what they move.

    A clamp never falls and keeps 0, so it may change places with max pooling and padding, too. The integers would else cover
    what it cuts off: half of them for a ReLU.
    """
    source = last = clamp.args[0]
    while _moves_alone(source) and _is_read_once(source):
        source = source.args[0]
    kind = OPERATOR_KINDS.get(source.target)
    if source is last or kind not in target.operators or kind == "concat" or not _is_read_once(source):
        return
    clamp.replace_all_uses_with(last)
    clamp.replace_input_with(last, source)
    source.append(clamp)
    for reader in [user for user in source.users if user is not clamp]:
        reader.replace_input_with(source, clamp)  # the first move, and those who want its size
    clamp.meta = {**clamp.meta, "val": source.meta["val"]}


def _moves_alone(node: Node) -> bool:
    """Whether an operator moves the values of one node to one node, with nothing but zeros among them."""
    kind, value = OPERATOR_KINDS.get(node.target), node.meta.get("val")
    return kind == "move" and isinstance(value, Tensor) and node.target is not operator.getitem and keeps_grid(node)


def _is_read_once(value: Node) -> bool:
    """Whether one operator reads the values of a node; others may read its size."""
    return sum(user.target is not aten.sym_size.int for user in value.users) == 1


def _is_of_patches(module: fx.GraphModule, node: Node, target: Target) -> bool:
    """Whether a convolution cuts its input into patches without overlap or remainder, and its result is read in float."""
    linear, weight = target.operators.get("linear"), parameter_name(node.args[1])
    if linear is None or linear.output or "conv" not in target.operators or weight is None:
        return False
    kernel = list(get_tensor(module, weight).shape[2:])
    settings = [*node.args[3:], *[[1, 1], [0, 0], [1, 1], 1][len(node.args[3:]) :]]
    size = list(node.args[0].meta["val"].shape[2:])
    if list(settings[0]) != kernel or settings[1:] != [[0, 0], [1, 1], 1] or max(kernel) == 1:
        return False
    if any(not isinstance(s, int) or s % k for s, k in zip(size, kernel, strict=True)) or len(node.args[1].users) > 1:
        return False
    return _reads_in_float(module, node, target)


def _reads_in_float(module: fx.GraphModule, node: Node, target: Target) -> bool:
    """Whether no layer that runs in integers reads a value.

    Operators that are in integers only where their inputs are (moves, clamps, sums, depthwise convolutions) are looked through.
    """
    pending, visited = [node], {node}
    while pending:
        for reader in pending.pop().users:
            kind = OPERATOR_KINDS.get(reader.target, "unknown")
            rule = target.operators.get(kind)
            if reader.op == "output":
                return False
            if kind in ("move", "clamp") or (rule and rule.follow) or (kind == "conv" and is_depthwise(module, reader)):
                pending += [reader] if reader not in visited else []
                visited.add(reader)
            elif rule:
                return False
    return True


def _patches_to_linear(module: fx.GraphModule, node: Node) -> None:
    """(N, C, H, W) as (N, H / h, W / w, C * h * w), times the weight as a matrix, permuted back to (N, channels, ...).

    QLinearConv would return integers, and the whole residual stream of a ConvNeXt, say, would then be rounded.
    """
    x, weight, bias = node.args[0], node.args[1], node.args[2] if len(node.args) > 2 else None
    name = str(parameter_name(weight))
    values = get_tensor(module, name)
    out, channels, h, w = values.shape
    rows, columns = (s // k for s, k in zip(x.meta["val"].shape[2:], (h, w), strict=True))
    holder, leaf = owner(module, name)
    setattr(holder, leaf, nn.Parameter(values.detach().reshape(out, -1), requires_grad=values.requires_grad))
    map_mask_(module, name, lambda mask: mask.reshape(out, -1))
    weight.meta["val"] = x.meta["val"].new_empty(out, channels * h * w)
    if bias is not None:
        bias.meta["val"] = x.meta["val"].new_empty(out)
    with module.graph.inserting_before(node):
        split = insert_call(node, aten.reshape.default, x, [-1, channels, rows, h, columns, w])
        patches = insert_call(node, aten.permute.default, split, [0, 2, 4, 1, 3, 5])
        flat = insert_call(node, aten.reshape.default, patches, [-1, rows, columns, channels * h * w])
        product = insert_call(node, aten.linear.default, flat, weight, bias)
        result = insert_call(node, aten.permute.default, product, [0, 3, 1, 2])
    node.replace_all_uses_with(result)
    module.graph.erase_node(node)


def _norm_to_conv(module: fx.GraphModule, node: Node) -> FoldedBatchNorm | None:
    """Make a BatchNorm a depthwise convolution; returns it as folded into one with weights of 1, None where it stays."""
    x, gamma, beta, mean, var = node.args[:5]
    conv = CONV_OF_RANK.get(x.meta["val"].ndim)
    names = [parameter_name(n) for n in (gamma, beta, mean, var)]
    if conv is None or None in names[2:] or any(n is not None and parameter_name(n) is None for n in (gamma, beta)):
        return None  # a weight that is computed, such as exp(parameter), has no values here
    own = of_norm(module, node)
    scale, shift = _scale_and_shift(own["tensors"], own["eps"])
    channels, rank = len(scale), x.meta["val"].ndim
    dtype, spatial = x.meta["val"].dtype, rank - 2
    holder = nn.Module()
    holder.weight = nn.Parameter(scale.to(dtype).view(-1, *[1] * (rank - 1)))
    holder.bias = nn.Parameter(shift.to(dtype))
    name = free_name(module, f"affine_{node.name}")
    module.add_submodule(name, holder)
    with module.graph.inserting_before(node):
        weight, bias = (module.graph.get_attr(f"{name}.{leaf}") for leaf in ("weight", "bias"))
        args = (x, weight, bias, [1] * spatial, [0] * spatial, [1] * spatial, channels)
        new = module.graph.call_function(conv, args)
    for read, values in ((weight, holder.weight), (bias, holder.bias)):
        read.meta["val"] = x.meta["val"].new_empty(values.shape)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    own["tensors"] |= {"weight": torch.ones_like(holder.weight), "bias": None}
    own["frozen"] |= {"weight"}
    return FoldedBatchNorm(layer=new, **own)


def _scale_and_shift(stored: Mapping[str, Tensor | None], eps: float) -> tuple[Tensor, Tensor]:
    """What a BatchNorm with running statistics multiplies each channel by, and what it adds, in float64."""
    gamma, beta, mean, var = (None if (v := stored[key]) is None else v.double() for key in ("gamma", "beta", "mean", "var"))
    assert mean is not None
    assert var is not None
    scale = torch.rsqrt(var + eps) if gamma is None else torch.rsqrt(var + eps) * gamma
    return scale, -mean * scale if beta is None else beta - mean * scale
