"""Fold BatchNorm into the convolution or linear layer before it, on a captured graph.

    conv(x; W, b) -> batch_norm(mean, var, gamma, beta, eps)  =  conv(x; W * k, (b - mean) * k + beta)
    k = gamma / sqrt(var + eps)

It comes before quantizers are inserted: a BatchNorm after a quantized convolution cannot be folded any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.layers.stored import (
    CONVS,
    TRANSPOSED_CONVS,
    Scales,
    bias_of,
    drop_unused_,
    fold_affine_,
    scaled_inputs,
    stored_value,
    sum_over_inputs,
)
from compresskit.graph.normalize import Node, aten, give_output_of_
from compresskit.graph.surgery import get_tensor

NORM_LEAVES = ("weight", "bias", "running_mean", "running_var")  # what BatchNorm calls its tensors, in the operator's order


@dataclass(frozen=True, kw_only=True)
class FoldedScales:
    """A layer as it was before scales and shifts by constants were merged into it.

    layer: the node. tensors: weight, bias. frozen: those of them that required no gradient. scales: what was merged into it.
    """

    layer: Node
    tensors: dict[str, Tensor | None]
    frozen: frozenset[str] = frozenset()
    scales: Scales | None = None

    def entered(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias with what was merged before the layer, in float64."""
        weight, bias, scales = self.tensors["weight"], self.tensors["bias"], self.scales
        assert weight is not None
        weight, bias = weight.double(), None if bias is None else bias.double()
        if scales is not None and scales.entering is not None:
            bias = sum_over_inputs(weight, scales.entering, scales.groups) + (0 if bias is None else bias)
        if scales is not None and scales.inward is not None:
            weight = scaled_inputs(weight, scales.inward, scales.groups)
        return weight, bias

    def moved(self, layer: Node, weight: Tensor) -> FoldedScales | None:
        """The same of a convolution or linear layer that took the place of this one, and stores such a weight; or None.

        It may read each input, or compute each output, several times in a row: patches, the phases of a transposed convolution.
        """
        own, bias = self.tensors["weight"], self.tensors["bias"]
        assert own is not None
        assert self.scales is not None
        scales = self.scales.resized(weight)
        factor = scales.factor(weight)
        if self.scales.axis == 0 and own.numel() == weight.numel():
            own = own.reshape(weight.shape)
        elif bool((factor != 0).all()):
            own = (weight.double() / factor).to(weight.dtype)
        if own.shape != weight.shape or not torch.allclose(own.double() * factor, weight.double(), rtol=1e-5, atol=0):
            return None
        bias = None if bias is None else bias.repeat_interleave(len(own) // len(bias))
        return FoldedScales(layer=layer, tensors={"weight": own, "bias": bias}, frozen=self.frozen, scales=scales)


@dataclass(frozen=True, kw_only=True)
class FoldedBatchNorm(FoldedScales):
    """A layer and the BatchNorm that was folded into it, as they were before.

    others: further calls of the same layer and BatchNorm. norm: dotted path of the BatchNorm.
    tensors: gamma, beta, mean, var, too. scales: what was merged before the layer and behind the BatchNorm.
    """

    others: tuple[Node, ...] = ()
    norm: str
    momentum: float
    eps: float

    def settled(self) -> FoldedBatchNorm:
        """The same with the scales in the tensors of layer and BatchNorm."""
        weight, bias = self.entered()
        tensors: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
        gamma, beta, scales = self.tensors["gamma"], self.tensors["beta"], self.scales or Scales()
        for factor in (scales.outward, None if scales.gain is None else scales.gain[1].double().flatten()):
            if factor is not None:
                gamma = factor if gamma is None else gamma.double() * factor
                beta = None if beta is None else beta.double() * factor
        if scales.leaving is not None:
            beta = scales.leaving if beta is None else beta.double() + scales.leaving
        tensors |= {"gamma": gamma, "beta": beta}
        like = self.tensors["var"]
        rounded = {name: None if value is None else value.to(like) for name, value in tensors.items()}
        return replace(self, tensors={**self.tensors, **rounded}, scales=None)


def fold_batchnorm_(module: fx.GraphModule, folds: list[FoldedBatchNorm] | None = None) -> int:
    """Fold every BatchNorm that directly follows a convolution or linear layer, in place; returns how many.

    Where a layer runs several times, each time with the same BatchNorm behind, all calls keep one weight.

    folds: receives a record of each BatchNorm whose parameters nothing else reads, so that training can unfold it again.
    """
    pairs = {norm: layer for norm in module.graph.nodes if (layer := _layer_before(norm)) is not None}
    count = 0
    while pairs:
        norm, layer = next(iter(pairs.items()))
        same = [other for other in pairs if _computes_as(pairs[other], other, layer, norm)]
        if not _only_they_read(module, [*same, *(pairs[other] for other in same)]):
            same = [norm]
        calls = [(pairs.pop(other), other) for other in same]
        record = _record_norm(module, calls)
        _fold_norm(module, calls)
        count += len(calls)
        # The folded weight of a layer that is called twice, with other BatchNorms, has another name.
        if folds is not None and record is not None and parameter_name(layer.args[1]) == record[0]:
            folds.append(record[1])
    module.graph.eliminate_dead_code()
    module.recompile()
    module.delete_all_unused_submodules()
    drop_unused_(module)
    return count


def _layer_before(norm: Node) -> Node | None:
    """The layer that a BatchNorm can be folded into; None where there is none, or the node is no BatchNorm."""
    if norm.target is not aten.batch_norm.default:
        return None
    layer = norm.args[0]
    # The channels of BatchNorm are dim 1, which is the last dim of a linear layer only in two dimensions.
    foldable = layer.target in CONVS or (layer.target is aten.linear.default and norm.meta["val"].ndim == 2)
    foldable = foldable or (layer.target in TRANSPOSED_CONVS and (len(layer.args) < 7 or layer.args[6] == 1))
    tracked = parameter_name(norm.args[3]) is not None and not norm.args[5]
    if not (foldable and tracked) or len(layer.users) != 1 or layer.args[0] is layer.args[1]:
        return None
    given = [node for node in (layer.args[1], bias_of(layer), *norm.args[1:5]) if node is not None]
    return layer if all(parameter_name(node) is not None for node in given) else None  # such as a weight that is exp(parameter)


def _computes_as(layer: Node, norm: Node, other_layer: Node, other_norm: Node) -> bool:
    """Whether a layer with its BatchNorm computes what another pair does, of another value."""

    def settings(layer: Node, norm: Node) -> list[Any]:
        read = [*layer.args[1:], *norm.args[1:]]
        return [layer.target, *(parameter_name(value) or value if isinstance(value, fx.Node) else value for value in read)]

    return settings(layer, norm) == settings(other_layer, other_norm)


def _only_they_read(module: fx.GraphModule, nodes: list[Node]) -> bool:
    """Whether nothing but these layers and BatchNorms reads their parameters and statistics."""
    names = {parameter_name(value) for node in nodes for value in node.args[1:5] if isinstance(value, fx.Node)} - {None}
    readers = {user for node in module.graph.nodes if node.op == "get_attr" and node.target in names for user in node.users}
    return readers <= set(nodes)


def _record_norm(module: fx.GraphModule, calls: list[tuple[Node, Node]]) -> tuple[str, FoldedBatchNorm] | None:
    layer, norm = calls[0]
    nodes = (layer.args[1], layer.args[2] if len(layer.args) > 2 else None, *norm.args[1:5])
    read = [node for node in nodes if node is not None]
    if len({parameter_name(n) for n in read}) < len(read) or not _only_they_read(module, [n for call in calls for n in call]):
        return None
    own = of_norm(module, norm)
    layers = {"weight": layer.args[1], "bias": nodes[1]}
    frozen = {key for key, n in layers.items() if n is not None and not get_tensor(module, str(parameter_name(n))).requires_grad}
    own["tensors"] |= {key: stored_value(module, n) for key, n in layers.items()}
    own["frozen"] |= frozen
    return str(parameter_name(layer.args[1])), FoldedBatchNorm(layer=layer, others=tuple(other for other, _ in calls[1:]), **own)


def of_norm(module: fx.GraphModule, norm: Node) -> dict[str, Any]:
    """What a `FoldedBatchNorm` says of the BatchNorm, a node whose parameters are stored, and not of the layer: its settings."""
    reads = dict(zip(("gamma", "beta", "mean", "var"), norm.args[1:5], strict=True))
    stored = {key: get_tensor(module, str(parameter_name(read))) for key, read in reads.items() if read is not None}
    return {
        "norm": str(parameter_name(norm.args[3])).rpartition(".")[0],
        "tensors": {key: stored_value(module, read) for key, read in reads.items()},
        "frozen": frozenset(key for key, value in stored.items() if not value.requires_grad),
        "momentum": norm.args[6] or 0.1,  # captured in eval mode, a cumulative average reads 0
        "eps": norm.args[7],
    }


def norms_by_name(module: fx.GraphModule) -> dict[str, list[Node]]:
    """The calls of each BatchNorm with running statistics, by the name of the module that holds its tensors, and no others."""
    calls: dict[str, list[Node]] = {}
    readers: dict[str, set[Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            readers.setdefault(str(node.target), set()).update(node.users)
        if node.target is aten.batch_norm.default and not node.args[5]:
            calls.setdefault(str(parameter_name(node.args[3])).rpartition(".")[0], []).append(node)
    return {path: nodes for path, nodes in calls.items() if path and _own_their_tensors(module, path, nodes, readers)}


def _own_their_tensors(module: fx.GraphModule, path: str, norms: list[Node], readers: dict[str, set[Node]]) -> bool:
    holder, names = module.get_submodule(path), [f"{path}.{leaf}" for leaf in NORM_LEAVES]
    held = {*dict(holder.named_parameters()), *dict(holder.named_buffers())} - {"num_batches_tracked"}
    given = [pair for node in norms for pair in zip(names, node.args[1:5], strict=True) if pair[1] is not None]
    return (
        held.issubset(NORM_LEAVES)
        and all(parameter_name(read) == name for name, read in given)
        and all(readers.get(name, set()).issubset(norms) for name in names)
    )


def _fold_norm(module: fx.GraphModule, calls: list[tuple[Node, Node]]) -> None:
    layer, norm = calls[0]
    gamma, beta, mean, var = (stored_value(module, node) for node in norm.args[1:5])
    assert mean is not None
    assert var is not None
    factor = torch.rsqrt(var.double() + norm.args[7])  # in float64: done once, and exported as is
    factor = factor if gamma is None else factor * gamma.double()
    for other, _ in calls[1:]:
        other.args = (other.args[0], None, None, *other.args[3:])
    fold_affine_(module, layer, factor, -mean.double(), torch.zeros_like(factor) if beta is None else beta.double())
    for other, behind in calls:
        other.args = (other.args[0], *layer.args[1:3], *other.args[3:])
        give_output_of_(other, behind)
        behind.replace_all_uses_with(other)
        module.graph.erase_node(behind)
