"""SmoothQuant: move outliers from activations into weights; the float model computes the same function.

Each channel is scaled (Xiao et al., 2211.10438), and shifted to the middle of its range (Outlier Suppression+, Wei et al.,
2304.09145):

    (layer norm(x) - z) / s        by the norm's own weight and bias: gamma / s, (beta - z) / s
    W' = W s, b' = b + W z         in every product that reads it

The outputs of linear layers are scaled and shifted in the same way. So is v in attention: the rows of attention weights sum to
one, so the attention's output shifts by as much as v. Shift and strength are chosen for each value, by the rounding error of the
products that read it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs, call, copied_tensors
from compresskit.graph.capture import Captured, Dynamic, capture, module_path
from compresskit.graph.differences import without_fills
from compresskit.graph.interpreter import run_graph
from compresskit.graph.normalize import aten
from compresskit.graph.quantized import is_quantized
from compresskit.graph.surgery import copy_model, get_tensor, mode, state_kept
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.calibration.activation_statistics import ActivationStatistics, collect_statistics
from compresskit.quant.calibration.rows import row_count, take_rows
from compresskit.quant.numerics.bit_widths import TARGET_BITS, Bits, BitWidths, bits_of_layer
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.scheme import Scheme, affine, fake_quantize
from compresskit.quant.passes.attention import attended
from compresskit.quant.passes.channel_scaling import ScalingLink, divide_, links_of, why_no_link

_CHANNEL_NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})
CHECKED_ROWS = 8  # on which a change is checked
SMALL_OUTPUT = 1e-2  # of the largest output: smaller ones are judged as if they had this size, since fp32 may cancel in them
LARGEST_ERROR = 1e-3  # of each output, in root mean square: rounding in fp32 makes 1e-6 or so, a factor that is wrong far more
SAMPLE_POSITIONS = 1024  # of each value, on which factors and shifts are tried


@no_modes_of_caller()
def smooth_(
    model: nn.Module,
    batches: Batches,
    *,
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    shift: bool = True,
    dynamic: Dynamic = (0,),
) -> int:
    """Even out, in place, the ranges of the channels that linear layers read; returns how many values were changed.

    A value is changed only where a layer norm, an RMS norm or a linear layer makes it and only products by a constant read it; it
    is shifted only where there are biases on both sides. The float model computes the same function afterwards.

    Args:
        model: any float module.
        batches: an iterable of inputs, or one batch; one pass, and about 1000 positions of each value are kept in memory.
        strengths: candidates for a in s = max|x|^a / max|w|^(1 - a), in [0, 1]; 0 means s = 1. The candidate is taken whose
            rounding to 8 bits (one scale for activations, one per channel for weights) changes the products least.
        shift: also try to shift each channel so that the middle of its range, or its mean, lies at 0.
        dynamic: dimensions of the inputs that may vary; see `graph.Dynamic`.

    Raises DataError where there is no batch or a value is not finite, ModelError for a quantized model, SettingError for
    strengths outside [0, 1].
    """
    if is_quantized(model):
        raise ModelError("smooth_: this model is quantized already; smooth the float model it came from")
    if not strengths or any(not 0 <= a <= 1 for a in strengths):
        raise SettingError(f"smooth_(strengths=...): wanted numbers in [0, 1], got {strengths}")
    first, data = first_and_all(batches, "smooth_")
    captured = capture(copy_model(model), first, dynamic=dynamic)
    named = captured.module if captured.renamed else model
    count = smooth_tensors_(named, captured, list(data), strengths=strengths, shift=shift)
    if captured.renamed:
        captured.copy_parameters_to_(model)
    return count


def smooth_tensors_(
    model: nn.Module,
    captured: Captured,
    data: Sequence[Inputs],
    *,
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75),
    shift: bool = True,
    bits: BitWidths = TARGET_BITS,
) -> int:
    """Do what `smooth_` does, on a model that is captured already.

    model: the model that was captured, or the graph itself. captured: the graph, in which the values are found. bits: in which
    weights and activations are rounded in the choice; 8 where they do not say.
    """
    links = links_of(captured.module)
    if not links:
        return 0
    attention_shifts = attended(captured, [link.base for link in links]) if shift else {}
    links = [link for link in links if link.makers or link.base in attention_shifts]
    statistics = collect_statistics(captured.module, data, [link.base for link in links], sample=SAMPLE_POSITIONS)

    def change() -> int:
        return sum(
            _smooth_value_(model, link, attention_shifts.get(link.base), statistics[link.base], strengths, bits, shift=shift)
            for link in links
        )

    changed = {name for link in links for name in (*link.biases, *(name for name, _ in (*link.weights, *link.makers)))}
    changed |= {name for name, _ in attention_shifts.values()}
    return keep_function_(model, captured, data[0], changed, change, "smooth_")


def keep_function_(
    model: nn.Module, captured: Captured, inputs: Inputs, names: Iterable[str], change: Callable[[], int], what: str
) -> int:
    """Change tensors of a model in place, and undo it, with a warning, where the model computes something else then.

    Such changes rest on what the graph shows of the readers of each value. Two runs on a few rows show whether that was all.

    Args:
        model, captured: as in `smooth_tensors_`.
        inputs: that the model runs on; where its batch may vary, at most 8 rows of them are taken.
        names: of the tensors that are changed.
        change: changes them, and returns how many values that concerns.
        what: begins the warning.

    Returns what `change` returns; 0 where that was undone.
    """
    if row_count(inputs) is not None and all(0 in dims for dims in captured.varying):
        inputs = take_rows(inputs, slice(CHECKED_ROWS))
    with torch.no_grad():
        kept = {name: get_tensor(model, name).clone() for name in names}
        before = _float_outputs(model, captured, inputs)
        count = change()
        if not count:
            return 0
        after = _float_outputs(model, captured, inputs)
        pairs = [without_fills(*pair) for pair in zip(before, after, strict=True)]
        sizes = [_root_mean_square(a) for a, _ in pairs]
        least = SMALL_OUTPUT * max(sizes, default=0.0)
        errors = [_root_mean_square(a - b) / max(size, least, 1e-30) for (a, b), size in zip(pairs, sizes, strict=True)]
        error = max(errors, default=0.0)
        if error <= LARGEST_ERROR:
            return count
        for name, values in kept.items():
            get_tensor(model, name).copy_(values)
    warnings.warn(
        f"{what}: {type(model).__name__} computes something else once the ranges of its channels are evened out, by"
        f" {error:.1%} of its outputs, so they stay as they were; please report this network",
        stacklevel=2,
    )
    return 0


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _float_outputs(model: nn.Module, captured: Captured, inputs: Inputs) -> list[Tensor]:
    """The outputs of a model that are floating point tensors, in float64. A model that draws noise always draws the same."""
    with torch.random.fork_rng(), state_kept(model), mode(model, training=False):
        torch.manual_seed(0)
        if model is captured.module:
            outputs = run_graph(captured.module, pytree.tree_leaves(inputs))
        else:
            outputs = call(model, copied_tensors(inputs))
    tensors = [v for v in pytree.tree_leaves(outputs) if isinstance(v, Tensor) and v.is_floating_point()]
    return [v.double().nan_to_num(0, 0, 0) for v in tensors]


def _smooth_value_(
    model: nn.Module,
    link: ScalingLink,
    attention_shift: tuple[str, Tensor] | None,
    statistics: ActivationStatistics,
    strengths: tuple[float, ...],
    bits: BitWidths,
    *,
    shift: bool,
) -> bool:
    """Find the shift and factor of one value that add the least noise to its products, and apply them; False for none."""
    weights = [get_tensor(model, name).movedim(dim, 1) for name, dim in link.weights]
    formats = [_formats(bits_of_layer(bits, module_path(reader))) for reader in link.readers]
    vector = _shifted_vector(model, link, attention_shift)
    no_shift = torch.zeros_like(statistics.mean)
    shifts = [no_shift]
    if shift and vector is not None:
        shifts += [statistics.mean, (statistics.low + statistics.high) / 2]
    max_weight = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    best, choice = torch.inf, (no_shift, torch.ones_like(no_shift))
    for z in shifts:
        max_input = torch.maximum(statistics.high - z, z - statistics.low)
        for strength in strengths if link.makers else (0.0,):
            factor = _smoothing_factor(max_input, max_weight, strength)
            noise = _product_noise(statistics, z, factor, weights, formats)
            if noise < best * 0.98:  # no shift and no factor come first, and stay unless something is better
                best, choice = noise, (z, factor)
    z, factor = choice
    _apply_(model, link, vector, z, factor)
    return bool(z.any()) or bool((factor != 1).any())


def _apply_(model: nn.Module, link: ScalingLink, vector: tuple[str, Tensor] | None, shift: Tensor, factor: Tensor) -> None:
    """Shift each channel of a value by -shift where there is a vector to do so, then divide it by the factor."""
    if bool(shift.any()) and vector is not None:
        for bias_name, (name, dim) in zip(link.biases, link.weights, strict=True):
            bias, weight = get_tensor(model, bias_name), get_tensor(model, name).movedim(dim, 1)
            bias.add_((weight.double() @ shift.double()).to(bias))
        name, places = vector
        get_tensor(model, name).index_add_(0, places, -shift.to(get_tensor(model, name)))
    if bool((factor != 1).any()):
        divide_(model, link, factor)


def even_norms_(captured: Captured, data: Sequence[Inputs], strength: float) -> int:
    """Give all channels that a layer norm or RMS norm hands to linear layers the same range, in place; returns how many norms.

    A range for each channel is found, and moved into the parameters of the norm and the weights and biases of the layers that
    read it, so that one scale and zero point serve all channels (RepQ-ViT, Li et al., arXiv 2212.08254). The float model
    computes the same. Norms that this does not apply to stay as they are: `norms_of` names them.

    strength: exponent of each channel's range in its factor, in (0, 1]; 1 makes all ranges equal.
    """
    links, _ = norms_of(captured.module)
    statistics = collect_statistics(captured.module, data, [link.base for link in links], sample=1)
    with torch.no_grad():
        for link in links:
            found, vector = statistics[link.base], _shifted_vector(captured.module, link, None)
            middle = (found.low + found.high) / 2 if vector is not None else torch.zeros_like(found.mean)
            largest = torch.maximum(found.high - middle, middle - found.low)
            _apply_(captured.module, link, vector, middle, _smoothing_factor(largest**strength, torch.ones_like(largest), 1.0))
    return len(links)


def norms_of(module: fx.GraphModule) -> tuple[list[ScalingLink], dict[str, str]]:
    """The norms whose channels `even_norms_` evens out, and the reason why for the dotted name of every other one."""
    links = {link.base: link for link in links_of(module) if link.base.target in _CHANNEL_NORMS and link.makers}
    norms = [node for node in module.graph.nodes if node.target in _CHANNEL_NORMS]
    return list(links.values()), {module_path(node): why_no_link(module, node) for node in norms if node not in links}


def _smoothing_factor(max_input: Tensor, max_weight: Tensor, strength: float) -> Tensor:
    """The factor s of each channel, scaled so that its geometric mean is 1."""
    used = (max_input > 0) & (max_weight > 0)
    if strength == 0 or not bool(used.any()):
        return torch.ones_like(max_input)
    ratio = max_input.clamp(min=1e-30) ** strength / max_weight.clamp(min=1e-30) ** (1 - strength)
    factor = torch.where(used, ratio, 1.0)
    factor = factor / factor[used].log().mean().exp()
    return torch.where(used, factor.clamp(1e-3, 1e3), 1.0)


def _product_noise(
    statistics: ActivationStatistics, shift: Tensor, factor: Tensor, weights: list[Tensor], formats: list[tuple[Scheme, Scheme]]
) -> float:
    """The squared error of the products after rounding x with one scale, and weights with a scale per channel.

    Errors of channels are taken as independent, so that their squares add up. The best of several ranges of x counts.
    """
    x = (statistics.sample - shift) / factor
    low, high = ((statistics.low - shift) / factor).min(), ((statistics.high - shift) / factor).max()
    input_power, weight_power, noise = x.square().mean(0), torch.zeros_like(factor), 0.0
    inputs = max((x_format for x_format, _ in formats), key=lambda scheme: scheme.bits)
    for weight, (_, of_weight) in zip(weights, formats, strict=True):
        scaled = weight.to(factor) * factor
        grid = affine(scaled.amin(1), scaled.amax(1), of_weight)
        noise += float(((fake_quantize(scaled, *grid, of_weight) - scaled).square().sum(0) * input_power).sum())
        weight_power += scaled.square().sum(0)
    return noise + min(
        float(((fake_quantize(x, *affine(low * part, high * part, inputs), inputs) - x).square().mean(0) * weight_power).sum())
        for part in (1.0, 0.9, 0.8, 0.7, 0.6)
    )


def _formats(bits: Bits) -> tuple[Scheme, Scheme]:
    """Of the values that a layer reads, and of its weights."""
    weights = Scheme(signed=True, symmetric=True, per_channel=True, bits=max(2, bits.weights or 8))
    return Scheme(bits=max(2, bits.activations or 8)), weights


def _shifted_vector(model: nn.Module, link: ScalingLink, attention_shift: tuple[str, Tensor] | None) -> tuple[str, Tensor] | None:
    """The name of the vector that is added to a value where it is made, and the index of each of its channels in it.

    None where there is none, or where a reader has no bias that takes up the shift.
    """
    if not link.biases:
        return None
    if attention_shift is not None:
        return attention_shift
    if link.base.target not in (aten.layer_norm.default, *PRODUCTS) or link.base.kwargs or len(link.makers) < 2:
        return None
    name = link.makers[1][0]
    return name, torch.arange(len(get_tensor(model, name)))
