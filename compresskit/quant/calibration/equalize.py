"""Cross-layer equalization: even out the ranges of channels between two layers (Nagel et al., 1906.04721, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from compresskit.base.errors import ModelError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.graph.capture import capture, parameter_name
from compresskit.graph.interpreter import read_count
from compresskit.graph.layers.stored import CONVS, bias_of, parameter_reads
from compresskit.graph.normalize import Node, aten
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model, get_tensor
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.calibration.smoothquant import keep_function_
from compresskit.quant.numerics.scheme import channelwise

#: Operators f with f(s x) = s f(x) for s > 0 and each channel.
SCALE_EQUIVARIANT = frozenset(
    {aten.relu.default, aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default}
)
_SPATIAL_POOLS = SCALE_EQUIVARIANT - {aten.relu.default}


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

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the tensors that are scaled, and of the weight whose ranges count."""
        maker = self.norm[:2] if self.norm is not None else () if self.bias is None else (self.bias,)
        return (self.weight, *maker, self.reader)


@no_modes_of_caller()
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
    first, _ = first_and_all(batches, "equalize_")
    captured = capture(copy_model(model), first)
    pairs = _layer_pairs(captured.module)
    named = captured.module if captured.renamed else model

    def change() -> int:
        for _ in range(rounds):
            if max((_equalize_pair_(named, pair) for pair in pairs), default=0.0) < 1e-3:
                break
        return len(pairs)

    count = keep_function_(named, captured, first, {name for pair in pairs for name in pair.changed}, change, "equalize_")
    if captured.renamed:
        captured.copy_parameters_to_(model)
    return count


def _layer_pairs(module: fx.GraphModule) -> list[_LayerPair]:
    reads = parameter_reads(module)
    candidates = (_layer_pair(node) for node in module.graph.nodes if node.target in CONVS or node.target is aten.linear.default)
    return [pair for pair in candidates if pair is not None and all(reads[name] == 1 for name in pair.changed)]


def _layer_pair(layer: Node) -> _LayerPair | None:
    weight, bias = parameter_name(layer.args[1]), parameter_name(bias_of(layer))
    norm, node = None, layer
    if bias_of(layer) is not None and bias is None:
        return None  # it is computed
    while True:
        value, node = node, next(iter(node.users), None)
        if node is None or read_count(value) != 1 or node.args[0] is not value:
            return None
        if node.target is aten.batch_norm.default and norm is None:
            if value.meta["val"].ndim != layer.args[1].meta["val"].ndim:
                return None  # its channels are dimension 1, those of a layer over tokens the last one
            names = [parameter_name(a) for a in (node.args[1], node.args[2], node.args[4])]
            if None in names:
                return None
            norm = (*names, node.args[7])
        elif node.target in CONVS or node.target is aten.linear.default:
            break
        elif node.target not in SCALE_EQUIVARIANT or (node.target in _SPATIAL_POOLS and not _pools_positions(layer, node)):
            return None
    reader = parameter_name(node.args[1])
    groups = node.args[6] if node.target in CONVS and len(node.args) > 6 else 1
    same = (node.target in CONVS) == (layer.target in CONVS)
    if weight is None or reader is None or not same or (groups > 1 and groups != node.args[0].meta["val"].shape[1]):
        return None
    return _LayerPair(weight, bias, norm, reader, groups > 1)  # type: ignore[arg-type]


def _pools_positions(layer: Node, pool: Node) -> bool:
    """Whether a pooling over the last two dimensions pools positions of a convolution's output, rather than its channels."""
    return layer.target in CONVS and pool.args[0].meta["val"].ndim == layer.args[1].meta["val"].ndim == 4


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
