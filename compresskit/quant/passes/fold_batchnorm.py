"""Fold BatchNorm into the convolution or linear layer before it, on a captured graph.

    conv(x; W, b) -> batch_norm(mean, var, gamma, beta, eps)  =  conv(x; W * k, (b - mean) * k + beta)
    k = gamma / sqrt(var + eps)

It comes before quantizers are inserted: a BatchNorm after a quantized convolution cannot be folded any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from compresskit.graph.capture import parameter_name
from compresskit.graph.masks import MASK_PREFIX, copy_mask_
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import CONVS, TRANSPOSED_CONVS


@dataclass(frozen=True, kw_only=True)
class FoldedBatchNorm:
    """A layer and the BatchNorm that was folded into it, as they were before.

    layer: the node. norm: dotted path of the BatchNorm. tensors: weight, bias (of the layer), gamma, beta, mean, var.
    """

    layer: Node
    norm: str
    tensors: dict[str, Tensor | None]
    momentum: float
    eps: float


def fold_batchnorm_(module: fx.GraphModule, folds: list[FoldedBatchNorm] | None = None) -> int:
    """Fold every BatchNorm that directly follows a convolution or linear layer, in place; returns how many.

    folds: receives a record of each BatchNorm whose parameters are not shared, so that training can unfold it again.
    """
    count = 0
    for norm in list(module.graph.nodes):
        if norm.target is not aten.batch_norm.default:
            continue
        layer = norm.args[0]
        # The channels of BatchNorm are dim 1, which is the last dim of a linear layer only in two dimensions.
        foldable = layer.target in CONVS or (layer.target is aten.linear.default and norm.meta["val"].ndim == 2)
        foldable = foldable or (layer.target in TRANSPOSED_CONVS and (len(layer.args) < 7 or layer.args[6] == 1))
        tracked = parameter_name(norm.args[3]) is not None and not norm.args[5]
        if foldable and tracked and len(layer.users) == 1 and parameter_name(layer.args[1]) is not None:
            record = _record_norm(module, layer, norm)
            _fold_norm(module, layer, norm)
            count += 1
            # The folded weight of a layer that is called twice has another name.
            if folds is not None and record is not None and parameter_name(layer.args[1]) == record[0]:
                folds.append(record[1])
    module.graph.eliminate_dead_code()
    module.recompile()
    module.delete_all_unused_submodules()
    drop_unused_(module)
    return count


def _record_norm(module: fx.GraphModule, layer: Node, norm: Node) -> tuple[str, FoldedBatchNorm] | None:
    nodes = (layer.args[1], layer.args[2] if len(layer.args) > 2 else None, *norm.args[1:5])
    names = ("weight", "bias", "gamma", "beta", "mean", "var")
    read = [node for node in nodes if node is not None]
    if any(len(node.users) > 1 for node in read) or len({parameter_name(n) for n in read}) < len(read):
        return None
    if any(n.target == node.target for node in read for n in module.graph.nodes if n.op == "get_attr" and n is not node):
        return None
    tensors = {name: _value(module, node) for name, node in zip(names, nodes, strict=True)}
    path = str(parameter_name(norm.args[3])).rpartition(".")[0]
    return str(parameter_name(layer.args[1])), FoldedBatchNorm(
        layer=layer,
        norm=path,
        tensors=tensors,
        momentum=norm.args[6] or 0.1,  # captured in eval mode, a cumulative average reads 0
        eps=norm.args[7],
    )


def _value(module: fx.GraphModule, node: Node | None) -> Tensor | None:
    name = parameter_name(node)
    return None if name is None else get_tensor(module, name).detach()


def _fold_norm(module: fx.GraphModule, layer: Node, norm: Node) -> None:
    gamma, beta, mean, var = (_value(module, node) for node in norm.args[1:5])
    assert mean is not None
    assert var is not None
    factor = torch.rsqrt(var.double() + norm.args[7])  # in float64: done once, and exported as is
    factor = factor if gamma is None else factor * gamma.double()
    fold_affine_(module, layer, factor, -mean.double(), torch.zeros_like(factor) if beta is None else beta.double())
    norm.replace_all_uses_with(layer)
    module.graph.erase_node(norm)


def fold_affine_(module: fx.GraphModule, layer: Node, factor: Tensor, before: Tensor, after: Tensor) -> None:
    """Give a layer the weight and bias of `(layer + before) * factor + after`, in place; each (channels,), float64."""
    weight_node, bias_node = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    weight, bias = _value(module, weight_node), _value(module, bias_node)
    assert weight is not None
    shape = [1] * weight.ndim
    shape[1 if layer.target in TRANSPOSED_CONVS else 0] = -1
    folded_weight = (weight.double() * factor.view(shape)).to(weight.dtype)
    shift = (0 if bias is None else bias.double()) + before
    folded_bias = (shift * factor + after).to(weight.dtype)
    path = parameter_name(weight_node).rpartition(".")[0]  # type: ignore[union-attr]
    with module.graph.inserting_before(layer):
        frozen = not get_tensor(module, str(parameter_name(weight_node))).requires_grad
        new_weight = _new_parameter(module, f"{path}.weight", weight_node, folded_weight, frozen=frozen)
        copy_mask_(module, str(parameter_name(weight_node)), str(parameter_name(new_weight)))  # scaling keeps zeros
        new_bias = _new_parameter(module, f"{path}.bias", bias_node, folded_bias, frozen=frozen)
    rest = tuple(layer.args[3:])
    layer.args = (layer.args[0], new_weight, new_bias, *rest)


def _new_parameter(module: fx.GraphModule, name: str, old: Node | None, values: Tensor, *, frozen: bool) -> Node:
    """A parameter called `name` with new values; where another layer reads that one, the name gets a number."""
    read = {parameter_name(n) for n in module.graph.nodes if n is not old and n.users}
    if old is not None and len(old.users) > 1:
        read.add(parameter_name(old))
    path, _, leaf = name.rpartition(".")
    chosen, count = leaf, 2
    while (f"{path}.{chosen}" if path else chosen) in read:
        chosen, count = f"{leaf}_{count}", count + 1
    setattr(module.get_submodule(path), chosen, nn.Parameter(values, requires_grad=not frozen))
    new = module.graph.get_attr(f"{path}.{chosen}" if path else chosen)
    new.meta = {} if old is None else dict(old.meta)
    return new


def drop_unused_(module: fx.GraphModule) -> None:
    """Delete parameters and buffers that no node reads any more, such as BatchNorm statistics. Masks stay."""
    used = {parameter_name(node) for node in module.graph.nodes}
    for path, part in list(module.named_modules()):
        for store in (part._parameters, part._buffers):
            for leaf in list(store):
                mask = leaf.startswith(MASK_PREFIX) and leaf.removeprefix(MASK_PREFIX) in part._parameters
                if (f"{path}.{leaf}" if path else leaf) not in used and not mask:
                    del store[leaf]
