"""Move a factor per channel from a value into the weights that read it: layer norm(x) W = (layer norm(x) / s) (s W).

The channels of a value are its last dimension. Dividing them by s > 0 is free where the parameters of the operator that computes
the value can be divided instead (layer norm, RMS norm, a linear layer, one factor of a product), and all readers are matrix
products by a constant.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.interpreter import read_count
from compresskit.graph.layers.stored import LAYOUT_OPERATORS, bias_of, parameter_reads
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.scheme import channelwise

#: Operators that may keep the last dimension as it is; `keeps_last_dimension` says whether one does.
_MOVING = LAYOUT_OPERATORS | {aten.roll.default, aten.pad.default}


@dataclass(frozen=True)
class ScalingLink:
    """A value, the matrix products that read it, and the parameters whose division divides it.

    base: the node of the value.
    readers: all that read it, matrix products by a constant.
    weights: name and dimension of inputs of the weight of each reader.
    makers: name and dimension of each parameter that must be divided by s to divide the value; empty where there are none.
    biases: name of the bias of each reader; empty where one has none, or one that something else reads, too.
    """

    base: Node
    readers: tuple[Node, ...]
    weights: tuple[tuple[str, int], ...]
    makers: tuple[tuple[str, int], ...]
    biases: tuple[str, ...]


def links_of(module: fx.GraphModule) -> list[ScalingLink]:
    """All values of a captured graph whose readers are all matrix products by a constant, in the order of the graph."""
    reads, links = _reads(module), dict[Node, ScalingLink]()
    for node in module.graph.nodes:
        if (weight_of(node)) is None:
            continue
        base = base_of(node.args[PRODUCTS[node.target][0]])
        if base in links or (readers := _readers(base)) is None:
            continue
        weights = [w for reader in readers if (w := weight_of(reader)) is not None]
        if len(weights) == len(readers) and all(reads[name] == 1 for name, _ in weights):
            biases = [name for reader in readers if (name := _bias_of(module, reader, reads)) is not None]
            own = tuple(biases) if len(biases) == len(readers) else ()
            links[base] = ScalingLink(base, tuple(readers), tuple(weights), _makers(module, base, reads), own)
    return list(links.values())


def why_no_link(module: fx.GraphModule, base: Node) -> str:
    """Why a factor for each channel cannot be moved from a value into the weights that read it."""
    reads, readers = _reads(module), _readers(base)
    if readers is None:
        return "other operators than products by a weight read it, too"
    if shared := [w[0] for reader in readers if (w := weight_of(reader)) is not None and reads[w[0]] != 1]:
        return f"the weight {shared[0]} is used elsewhere, too"
    return "it has no weight and bias that are its own"


def _reads(module: fx.GraphModule) -> dict[str, int]:
    """At how many places a graph reads each parameter, itself or as its quantizer rounds it."""
    reads = parameter_reads(module)
    for node in module.graph.nodes:
        if node.op == "call_module" and node.args and (name := parameter_name(node.args[0])) is not None:
            reads[name] += read_count(node) - 1  # a layer that is called twice has one quantizer
    return reads


def weight_of(node: Node) -> tuple[str, int] | None:
    """Name and dimension of inputs of the weight of a matrix product by a parameter, or None."""
    if node.op != "call_function" or node.target not in PRODUCTS:
        return None
    _, place, axis = PRODUCTS[node.target]
    weight = node.args[place]
    if isinstance(weight, fx.Node) and weight.op == "call_module" and weight.args:
        weight = weight.args[0]  # the input of its quantizer
    name = parameter_name(weight)
    return None if name is None or weight.meta["val"].ndim != 2 else (name, axis)


def base_of(value: Node) -> Node:
    """The node that computes the channels of a value, before all operators that keep the last dimension."""
    while value.target in _MOVING and _keeps_channels(value):
        value = value.args[0]
    return value


def _bias_of(module: fx.GraphModule, reader: Node, reads: dict[str, int]) -> str | None:
    """The name of the vector that a product adds as it is, where nothing else reads it."""
    if reader.target not in (aten.addmm.default, aten.linear.default) or reader.kwargs:  # alpha and beta scale
        return None
    name = parameter_name(reader.args[0] if reader.target is aten.addmm.default else bias_of(reader))
    if name is None or reads[name] != 1:
        return None
    return name if tuple(get_tensor(module, name).shape) == (reader.meta["val"].shape[-1],) else None


def _keeps_channels(node: Node) -> bool:
    after = node.meta["val"]
    return after.ndim > 0 and isinstance(after.shape[-1], int) and keeps_last_dimension(node)


def keeps_last_dimension(node: Node) -> bool:
    """Whether an operator that changes the layout of a value leaves its last dimension as it is."""
    before, after = node.args[0].meta["val"], node.meta["val"]
    if before.ndim == 0 or after.ndim == 0 or str(before.shape[-1]) != str(after.shape[-1]):  # as text, it adds no guard
        return False
    last = before.ndim - 1
    if node.target is aten.permute.default:
        return bool(node.args[1][-1] % before.ndim == last)
    if node.target is aten.transpose.int:
        return last not in {d % before.ndim for d in node.args[1:3]}
    if node.target in (aten.slice.Tensor, aten.select.int, aten.squeeze.dim):
        return (node.args[1] if len(node.args) > 1 else 0) % before.ndim != last
    if node.target is aten.unsqueeze.default:
        return node.args[1] % after.ndim != after.ndim - 1
    if node.target is aten.roll.default:
        return len(node.args) > 2 and last not in {d % before.ndim for d in node.args[2]}
    if node.target is aten.pad.default:
        return not any(node.args[1])  # padding of no values, as windows of a fitting size have it
    return True


def _readers(base: Node) -> list[Node] | None:
    """All matrix products that read a value, through layout operators; None where any other operator reads it."""
    readers, pending = [], [base]
    while pending:
        value = pending.pop()
        if read_count(value) > len(value.users):  # torch.addmm(value, value, W) adds it, too
            return None
        for user in value.users:
            if weight_of(user) is not None and user.args[PRODUCTS[user.target][0]] is value:
                readers.append(user)
            elif user.target in _MOVING and _keeps_channels(user) and user.args[0] is value:
                pending.append(user)
            else:
                return None
    return readers


def _makers(module: fx.GraphModule, base: Node, reads: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """See `ScalingLink.makers`."""
    args: list[Node] = list(base.args)
    tensors: list[tuple[Node, int]] = []
    if base.target is aten.layer_norm.default and len(base.args) > 2 and len(args[1]) == 1:
        tensors = [(args[2], 0), (args[3] if len(args) > 3 else None, 0)]
    elif base.target is aten.rms_norm.default and len(args) > 2 and len(args[1]) == 1:
        tensors = [(args[2], 0)]
    elif base.target in PRODUCTS and (weight := weight_of(base)) is not None:
        place = PRODUCTS[base.target][1]
        bias = args[0] if base.target is aten.addmm.default else bias_of(base)
        if bias is not None and bias.meta["val"].ndim != 1:
            return ()
        tensors = [(args[place], 1 - weight[1]), (bias, 0)]
    elif base.target is aten.mul.Tensor:
        for factor, other in (args, args[::-1]):
            if not isinstance(factor, fx.Node):
                continue
            if _is_vector(module, factor, other):  # the weight of an RMS norm written as a product
                tensors = [(factor, 0)]
                break
            inner = base_of(factor)
            # x * act(y): of a gated layer. In x * x, both factors would be divided.
            alone = inner is factor and read_count(factor) == 1 and factor.meta["val"].shape[-1:] == base.meta["val"].shape[-1:]
            if alone and inner.target in PRODUCTS:
                return _makers(module, inner, reads)
    if base.target is aten.layer_norm.default and tensors and None in (tensors[0][0], tensors[1][0]):
        return ()  # both are needed
    named = [(parameter_name(node), dim) for node, dim in tensors if node is not None]
    if not named or any(name is None or reads.get(name, 0) != 1 for name, _ in named):
        return ()
    channels = base.meta["val"].shape[-1]
    if any(get_tensor(module, str(name)).shape[dim] != channels for name, dim in named):
        return ()
    return tuple((str(name), dim) for name, dim in named)


def _is_vector(module: fx.GraphModule, factor: Node, other: object) -> bool:
    name = parameter_name(factor)
    if name is None or not isinstance(other, fx.Node) or other.op == "get_attr":
        return False
    values, channels = get_tensor(module, name), other.meta["val"].shape[-1]
    return operator.eq(tuple(values.shape), (channels,))


def divide_(module: torch.nn.Module, link: ScalingLink, factor: Tensor) -> None:
    """Divide the makers of a link by `factor` (channels,) and multiply the weights of its readers, in place.

    module: the graph that the link was found in, or a model with the same names of parameters.
    """
    with torch.no_grad():
        for name, dim in link.makers:
            _scale_(get_tensor(module, name), factor.reciprocal(), dim)
        for name, dim in link.weights:
            _scale_(get_tensor(module, name), factor, dim)


def _scale_(tensor: Tensor, factor: Tensor, dim: int) -> None:
    tensor.mul_(channelwise(factor.to(tensor), tensor, dim))
