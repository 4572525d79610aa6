"""How much a model loses when the weights of one layer alone are rounded to few bits: measured, or by a Fisher trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import ModelError
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, Task, call
from compresskit.graph.differences import without_fills
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers
from compresskit.quant.calibration.rows import row_count, take_rows
from compresskit.quant.effort.samples import float_leaves
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import WeightQuantizer


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """What rounding the weights of one layer costs.

    layer: dotted name of the module. weights: how many. macs: of one sample.
    noise: bits -> what the model loses; `choose_bits(sensitivity=)` says in what unit.
    """

    layer: str
    weights: int
    macs: int
    noise: dict[int, float]


def layer_sensitivities(
    quantized: Quantized, loss: Callable[[Quantized], float], widths: Mapping[str, Sequence[int]]
) -> list[LayerSensitivity]:
    """Round the weights of one layer after the other, everything else in float, and measure the model.

    Args:
        quantized: a calibrated model; it is as before afterwards.
        loss: what a model loses against the float model.
        widths: layer -> the bits to try, as `layers_by_name` names them.

    Returns one entry for each layer, in the order of the graph. It takes one measurement for each layer and width.
    """
    found = []
    for name, members in progress_bar(list(layers_by_name(quantized).items()), desc="sensitivity"):
        noise = {}
        for bits in widths[name]:
            with weights_rounded(quantized, {name: bits}):
                noise[bits] = loss(quantized)
        found.append(_sensitivity(quantized, name, members, noise))
    return found


def fisher_sensitivities(
    quantized: Quantized, batches: Sequence[tuple[Inputs, object]], task: Task | None, widths: Mapping[str, Sequence[int]]
) -> list[LayerSensitivity]:
    """Predict the growth of the loss from the Fisher information of each layer's weights and the errors of their rounding.

    The growth is half the sum of F d^2 over the weights: d is the error of a weight, F the mean of its squared gradients over the
    samples, the diagonal of the Fisher information. HAWQ-V2 (arXiv 1911.03852) and FIT (arXiv 2210.08502) take its trace, which
    gives all weights of a layer the same F. It takes one backward pass for each sample, and none for each width.

    Args:
        quantized: a calibrated model; it is as before afterwards.
        batches: inputs and labels.
        task: has the loss of the labels. None draws labels from the model's own predictions, once for each sample: classes from
            the probabilities of outputs (N, classes), other outputs from a normal distribution around them, of their own power.
        widths: as in `layer_sensitivities`.

    Raises ModelError where no gradient reaches the weights.
    """
    fisher = _squared_gradients(quantized, batches, task)
    found = []
    for name, members in layers_by_name(quantized).items():
        noise = {}
        for bits in widths[name]:
            with weights_rounded(quantized, {name: bits}), torch.no_grad():
                noise[bits] = sum(
                    float((fisher[layer.weight] * (layer.quantizer(weight) - weight).square()).double().sum()) / 2
                    for layer in members
                    for weight in [get_tensor(quantized.body, layer.weight)]
                )
        found.append(_sensitivity(quantized, name, members, noise))
    return found


def layers_by_name(quantized: Quantized) -> dict[str, list[IntegerLayer]]:
    """The layers in integers by the dotted name of their module, in the order of the graph."""
    layers: dict[str, list[IntegerLayer]] = {}
    for layer in integer_layers(quantized):
        layers.setdefault(quantized.placement.layers[layer.node.name], []).append(layer)
    return layers


@contextmanager
def weights_rounded(quantized: Quantized, bits: Mapping[str, int]) -> Iterator[None]:
    """Round the weights of the named layers to these bits inside the block, and nothing else; afterwards all is as before."""
    members = [
        (layer.quantizer, bits[name]) for name, group in layers_by_name(quantized).items() if name in bits for layer in group
    ]
    before = [(quantizer, quantizer.enabled) for quantizer in quantized.quantizers()]
    kept = [(quantizer, quantizer.scheme, quantizer.packing) for quantizer, _ in members]
    quantized.enable_(False)
    for quantizer, width in members:
        _round_to(quantizer, width)
    try:
        yield
    finally:
        for rounding, scheme, packing in kept:
            rounding.scheme, rounding.packing = scheme, packing
        for each, on in before:
            each.enabled = on


def _sensitivity(quantized: Quantized, name: str, members: Sequence[IntegerLayer], noise: dict[int, float]) -> LayerSensitivity:
    weights = sum(get_tensor(quantized.body, layer.weight).numel() for layer in members)
    macs = sum(quantized.placement.costs[layer.node.name].macs for layer in members)
    return LayerSensitivity(layer=name, weights=weights, macs=macs, noise=noise)


def _round_to(rounding: WeightQuantizer, bits: int) -> None:
    """Let a quantizer round to a width. Up to seven bits no pair of products overflows, and none has to be made smaller."""
    if bits != rounding.scheme.bits:
        rounding.scheme, rounding.packing = replace(rounding.scheme, bits=bits), None
    rounding.enabled = True


def _squared_gradients(quantized: Quantized, batches: Sequence[tuple[Inputs, object]], task: Task | None) -> dict[str, Tensor]:
    """The mean over the samples of the squared gradient of each weight, by the name of the weight."""
    names = [layer.weight for layer in integer_layers(quantized)]
    weights = [get_tensor(quantized.body, name) for name in names]
    wanted, total = [weight.requires_grad for weight in weights], [torch.zeros_like(weight) for weight in weights]
    generator, count = torch.Generator().manual_seed(0), 0
    try:
        for weight in weights:
            weight.requires_grad_()
        with weights_rounded(quantized, {}), mode(quantized, training=False), torch.enable_grad():
            for inputs, labels in progress_bar(list(_single_samples(batches)), desc="Fisher information"):
                output = call(quantized, inputs)
                loss = _own_loss(output, generator) if task is None else task.loss(task.predict(output), labels)
                if not loss.requires_grad:
                    raise ModelError('choose_bits(sensitivity="fisher"): no gradient reaches the weights; take "outputs"')
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                for place, gradient in zip(total, gradients, strict=True):
                    place += 0 if gradient is None else gradient.square()
                count += 1
    finally:
        for weight, wants in zip(weights, wanted, strict=True):
            weight.requires_grad_(wants)
    return {name: value / max(1, count) for name, value in zip(names, total, strict=True)}


def _single_samples(batches: Sequence[tuple[Inputs, object]]) -> Iterator[tuple[Inputs, object]]:
    """The samples one by one, with their labels; a batch without rows as it is."""
    for inputs, labels in batches:
        rows = row_count((inputs, labels))
        for row in range(rows or 0):
            sample = take_rows((inputs, labels), slice(row, row + 1))
            assert isinstance(sample, tuple)
            yield sample[0], sample[1]
        if rows is None:
            yield inputs, labels


def _own_loss(output: object, generator: torch.Generator) -> Tensor:
    """The negative logarithm of the probability of labels that are drawn from the model's own predictions."""
    loss = torch.zeros(())
    for value in float_leaves(output):
        clean = value.detach()
        if value.ndim == 2 and value.shape[1] > 1:
            labels = torch.multinomial(clean.float().softmax(1), 1, generator=generator)[:, 0]
            loss = loss + F.cross_entropy(value, labels)
        else:
            clean, value = without_fills(clean, value)
            drawn = torch.randn(value.shape, generator=generator, device="cpu").to(clean)
            loss = loss + (value * drawn).sum() / clean.square().mean().sqrt().clamp(min=1e-12)
    return loss
