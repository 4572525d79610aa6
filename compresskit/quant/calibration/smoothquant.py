"""Move what is hard to round from activations into weights: SmoothQuant (Xiao et al., 2211.10438), with a shift of each channel
beside its factor (Outlier Suppression+, Wei et al., 2304.09145). The float model computes what it did.

    (layer norm(x) - z) / s        from its own weight and bias: gamma / s, (beta - z) / s
    W' = W s, b' = b + W z         in every product that reads it

The values of a linear layer are moved the same way, as is v in attention, whose rows of weights sum to one: what attention hands
on moves by as much. How far is tried out for every value, on the rounding of its own products.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, Dynamic, capture, parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import get_tensor
from compresskit.quant.calibration.statistics import Seen, watch
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.scheme import Scheme, affine, fake_quantize
from compresskit.quant.passes.attention import attended
from compresskit.quant.passes.channel_scaling import ScalingLink, divide_, links_of

SAMPLE = 1024  # positions of a value that are kept to try factors and shifts on


def smooth_(
    model: nn.Module,
    batches: Batches,
    *,
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    shift: bool = True,
    dynamic: Dynamic = (0,),
) -> int:
    """Even out, in place, the channels of values that linear layers read; returns how many values changed.

    Args:
        model: any float module.
        batches: an iterable of inputs, or one batch; one pass, and a thousand positions of each value are kept.
        strengths: candidates for a in s = max|x|^a / max|w|^(1 - a); 0 stands for s = 1. The one is taken whose rounding to 8
            bits, activations with one scale and weights with one a channel, changes the products least.
        shift: move each channel, too, so that its range or its mean lies at 0, where that serves the rounding.
        dynamic: dimensions of the inputs that may vary; see `graph.Dynamic`.

    Legal, and done, only where a layer norm, an RMS norm or a linear layer makes the value and only products by a constant read
    it; a shift needs biases on both sides. Raises DataError where there is no batch or a value is not finite, ModelError for a
    quantized model, SettingError for strengths outside [0, 1].
    """
    if is_quantized(model):
        raise ModelError("smooth_: this model is quantized already; smooth the float model it came from")
    if not strengths or any(not 0 <= a <= 1 for a in strengths):
        raise SettingError(f"smooth_(strengths=...): wanted numbers in [0, 1], got {strengths}")
    first, every = first_and_all(batches, "smooth_")
    captured = capture(copy.deepcopy(model), first, dynamic=dynamic)
    return smooth_tensors_(model, captured, list(every), strengths=strengths, shift=shift)


def smooth_tensors_(
    model: nn.Module,
    captured: Captured,
    data: Sequence[Inputs],
    *,
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    shift: bool = True,
) -> int:
    """As `smooth_`, the links found on a captured graph; `model` is the one it was captured from, or the graph itself."""
    links = links_of(captured.module)
    if not links:
        return 0
    mixed = attended(captured, [link.base for link in links]) if shift else {}
    links = [link for link in links if link.makers or link.base in mixed]
    seen = watch(captured.module, data, [link.base for link in links], SAMPLE)
    with torch.no_grad():
        return sum(_smooth(model, link, mixed.get(link.base), seen[link.base], strengths, shift=shift) for link in links)


def _smooth(
    model: nn.Module,
    link: ScalingLink,
    mixed: tuple[str, Tensor] | None,
    seen: Seen,
    strengths: tuple[float, ...],
    *,
    shift: bool,
) -> bool:
    """Try shifts and factors on the products of one value, and apply the best; whether there was one better than none."""
    weights = [get_tensor(model, name).movedim(dim, 1) for name, dim in link.weights]
    biases = [_bias_of(model, reader) for reader in link.readers]
    inward = mixed or _additive(model, link)
    still = torch.zeros_like(seen.mean)
    shifts = [still]
    if shift and inward is not None and None not in biases:
        shifts += [seen.mean, (seen.low + seen.high) / 2]
    loudest = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    best, choice = torch.inf, (still, torch.ones_like(still))
    for z in shifts:
        largest = torch.maximum(seen.high - z, z - seen.low)
        for strength in strengths if link.makers else (0.0,):
            factor = _factor(largest, loudest, strength)
            noise = _noise(seen, z, factor, weights)
            if noise < best * 0.98:  # no shift and no factor stand first, and stay unless something is better
                best, choice = noise, (z, factor)
    z, factor = choice
    if bool(z.any()) and inward is not None:
        for reader, weight in zip(link.readers, weights, strict=True):
            bias = _bias_of(model, reader)
            assert bias is not None
            bias.add_((weight.double() @ z.double()).to(bias))
        name, places = inward
        get_tensor(model, name).index_add_(0, places, -z.to(get_tensor(model, name)))
    if bool((factor != 1).any()):
        divide_(model, link, factor)
    return bool(z.any()) or bool((factor != 1).any())


def _factor(largest: Tensor, loudest: Tensor, strength: float) -> Tensor:
    """S of each channel, its geometric mean 1."""
    alive = (largest > 0) & (loudest > 0)
    if strength == 0 or not bool(alive.any()):
        return torch.ones_like(largest)
    factor = torch.where(alive, largest.clamp(min=1e-30) ** strength / loudest.clamp(min=1e-30) ** (1 - strength), 1.0)
    factor = factor / factor[alive].log().mean().exp()
    return torch.where(alive, factor.clamp(1e-3, 1e3), 1.0)


def _noise(seen: Seen, shift: Tensor, factor: Tensor, weights: list[Tensor]) -> float:
    """What rounding does to the products: x with one uint8 scale, each weight with an int8 scale for each of its channels.

    Errors of channels are taken for independent, so that sums of squares do. Of some ranges for x, the best.
    """
    x = (seen.some - shift) / factor
    low, high = ((seen.low - shift) / factor).min(), ((seen.high - shift) / factor).max()
    power, loud, total = x.square().mean(0), torch.zeros_like(factor), 0.0
    for weight in weights:
        scaled = weight.to(factor) * factor
        grid = affine(scaled.amin(1), scaled.amax(1), _WEIGHTS)
        total += float(((fake_quantize(scaled, *grid, _WEIGHTS) - scaled).square().sum(0) * power).sum())
        loud += scaled.square().sum(0)
    return total + min(
        float(((fake_quantize(x, *affine(low * share, high * share, _INPUTS), _INPUTS) - x).square().mean(0) * loud).sum())
        for share in (1.0, 0.9, 0.8, 0.7, 0.6)
    )


_INPUTS, _WEIGHTS = Scheme(), Scheme(signed=True, symmetric=True, per_channel=True)


def _bias_of(model: nn.Module, reader: Node) -> Tensor | None:
    """The bias of a product, where it has one of its own."""
    bias = reader.args[0] if reader.target is aten.addmm.default else reader.args[2] if len(reader.args) > 2 else None
    name = parameter_name(bias)
    alone = reader.target in (aten.addmm.default, aten.linear.default) and bias is not None and len(bias.users) == 1
    return get_tensor(model, name) if name is not None and alone else None


def _additive(model: nn.Module, link: ScalingLink) -> tuple[str, Tensor] | None:
    """The vector among the makers of a value that is added to it, and the places of its channels there."""
    if link.base.target not in (aten.layer_norm.default, *PRODUCTS) or len(link.makers) < 2:
        return None
    name = link.makers[1][0]
    return name, torch.arange(len(get_tensor(model, name)))
