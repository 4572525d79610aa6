"""Fold BatchNorm into the convolution or linear layer before it, on a captured graph.

    conv(x; W, b) -> batch_norm(mean, var, gamma, beta, eps)  =  conv(x; W * k, (b - mean) * k + beta)
    k = gamma / sqrt(var + eps)

It comes before quantizers are inserted: a BatchNorm after a quantized convolution cannot be folded any more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import CONVS, TRANSPOSED_CONVS, drop_unused_, fold_affine_, stored_value
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor


@dataclass(frozen=True, kw_only=True)
class FoldedBatchNorm:
    """A layer and the BatchNorm that was folded into it, as they were before.

    layer: the node. norm: dotted path of the BatchNorm. tensors: weight, bias (of the layer), gamma, beta, mean, var.
    frozen: those of them that required no gradient.
    """

    layer: Node
    norm: str
    tensors: dict[str, Tensor | None]
    momentum: float
    eps: float
    frozen: frozenset[str] = frozenset()


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
    tensors = {name: stored_value(module, node) for name, node in zip(names, nodes, strict=True)}
    path = str(parameter_name(norm.args[3])).rpartition(".")[0]
    stored = {name: get_tensor(module, str(parameter_name(n))) for name, n in zip(names, nodes, strict=True) if n is not None}
    return str(parameter_name(layer.args[1])), FoldedBatchNorm(
        layer=layer,
        norm=path,
        tensors=tensors,
        momentum=norm.args[6] or 0.1,  # captured in eval mode, a cumulative average reads 0
        eps=norm.args[7],
        frozen=frozenset(name for name, value in stored.items() if not value.requires_grad),
    )


def _fold_norm(module: fx.GraphModule, layer: Node, norm: Node) -> None:
    gamma, beta, mean, var = (stored_value(module, node) for node in norm.args[1:5])
    assert mean is not None
    assert var is not None
    factor = torch.rsqrt(var.double() + norm.args[7])  # in float64: done once, and exported as is
    factor = factor if gamma is None else factor * gamma.double()
    fold_affine_(module, layer, factor, -mean.double(), torch.zeros_like(factor) if beta is None else beta.double())
    norm.replace_all_uses_with(layer)
    module.graph.erase_node(norm)
