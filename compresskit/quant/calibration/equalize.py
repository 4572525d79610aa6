"""Cross-layer equalization: even out the ranges of channels between two layers (Nagel et al., 1906.04721, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from compresskit.base.errors import ModelError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.graph.capture import capture, parameter_name
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.normalize import Node, aten
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model, get_tensor
from compresskit.quant.numerics.scheme import channelwise

#: Operators f with f(s x) = s f(x) for s > 0 and each channel.
SCALE_EQUIVARIANT = frozenset(
    {aten.relu.default, aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default}
)


@dataclass(frozen=True)
class _LayerPair:
    """Parameter names of a layer, of the BatchNorm after it (or None), and of the next layer, which alone reads it.

    norm: names of the BatchNorm's weight, bias and running variance, and its eps.
    """

    weight: str
    bias: str | None
    norm: tuple[str, str, str, float] | None
    reader: str
    depthwise: bool


def equalize_(model: nn.Module, batches: Batches, *, rounds: int = 20) -> int:
    """Even out, in place, the ranges of a layer's output channels and of the next layer's input channels.

    Channel i of a layer is divided by s_i = sqrt(r1_i / r2_i) and multiplied again in the layer that alone reads it, through
    BatchNorm, ReLU and pooling. r1_i is the largest |weight| of output channel i (BatchNorm folded in), r2_i that of input
    channel i. The float model computes the same function afterwards. It helps most where a weight has one scale for all channels.
    Pairs with other operators between them (ReLU6, sums) are not changed.

    Args:
        model: any float module.
        batches: an iterable of inputs, or one batch; the first captures the model.
        rounds: how often all pairs are equalized, at most.

    Returns the number of pairs.
    Raises DataError where there is no batch, ModelError for a quantized model.
    """
    if is_quantized(model):
        raise ModelError("equalize_: this model is quantized already; equalize the float model it came from")
    captured = capture(copy_model(model), first_and_all(batches, "equalize_")[0])
    pairs = _layer_pairs(captured.module)
    named = captured.module if captured.renamed else model
    with torch.no_grad():
        for _ in range(rounds):
            change = max((_equalize_pair_(named, pair) for pair in pairs), default=0.0)
            if change < 1e-3:
                break
    if captured.renamed:
        captured.copy_parameters_to_(model)
    return len(pairs)


def _layer_pairs(module: fx.GraphModule) -> list[_LayerPair]:
    reads: dict[str, int] = {}
    for node in module.graph.nodes:
        name = parameter_name(node)
        if name is not None:
            reads[name] = reads.get(name, 0) + len(node.users)
    candidates = (_layer_pair(node) for node in module.graph.nodes if node.target in CONVS or node.target is aten.linear.default)
    return [pair for pair in candidates if pair is not None and max(reads[pair.weight], reads[pair.reader]) == 1]


def _layer_pair(layer: Node) -> _LayerPair | None:
    weight, bias = parameter_name(layer.args[1]), parameter_name(layer.args[2]) if len(layer.args) > 2 else None
    norm, node = None, layer
    while True:
        if len(node.users) != 1:
            return None
        node = next(iter(node.users))
        if node.target is aten.batch_norm.default and norm is None:
            names = [parameter_name(a) for a in (node.args[1], node.args[2], node.args[4])]
            if None in names:
                return None
            norm = (*names, node.args[7])
        elif node.target in CONVS or node.target is aten.linear.default:
            break
        elif node.target not in SCALE_EQUIVARIANT:
            return None
    reader = parameter_name(node.args[1])
    groups = node.args[6] if node.target in CONVS and len(node.args) > 6 else 1
    same = (node.target in CONVS) == (layer.target in CONVS)
    if weight is None or reader is None or not same or (groups > 1 and groups != node.args[0].meta["val"].shape[1]):
        return None
    return _LayerPair(weight, bias, norm, reader, groups > 1)  # type: ignore[arg-type]


def _equalize_pair_(model: nn.Module, pair: _LayerPair) -> float:
    """Equalize one pair; returns the largest |log s|."""
    weight, reader = get_tensor(model, pair.weight), get_tensor(model, pair.reader)
    ranges = weight.abs().flatten(1).amax(1)
    if pair.norm is not None:
        gamma, _, var, eps = pair.norm
        ranges = ranges * get_tensor(model, gamma).abs() * torch.rsqrt(get_tensor(model, var) + eps)
    channels = reader.movedim(0 if pair.depthwise else 1, 0).abs().flatten(1).amax(1)
    if pair.depthwise:
        channels = channels.view(len(ranges), -1).amax(1)
    used = (ranges > 0) & (channels > 0)
    s = torch.where(used, (ranges / channels.clamp(min=1e-30)).sqrt().clamp(1e-3, 1e3), torch.ones_like(ranges))
    if pair.norm is not None:
        for name in pair.norm[:2]:
            get_tensor(model, name).div_(s)
    else:
        weight.div_(channelwise(s, weight, 0))
        if pair.bias is not None:
            get_tensor(model, pair.bias).div_(s)
    many = reader.shape[0] // len(s) if pair.depthwise else 1
    reader.mul_(channelwise(s.repeat_interleave(many), reader, 0 if pair.depthwise else 1))
    return float(s.log().abs().max())
