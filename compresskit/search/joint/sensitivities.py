"""What a model loses when one group of channels alone is pruned, or the weights of one layer alone are rounded.

Both are measured after the repair in closed form that follows: layers that lost inputs are refitted by least squares, and weights
are rounded one input after the other, each error made up for by the inputs still to come (GPTQ). What is learned afterwards
starts from there; with weights rounded to nearest, layers of two bits would all look hopeless. BatchNorm statistics are not
estimated again: from some hundred inputs they would change the outputs more than many a choice does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs
from compresskit.graph.surgery import copy_model, get_tensor
from compresskit.prune.channels.own_forwards import has_own_forward
from compresskit.prune.channels.reconstruct import (
    MOST_COLUMNS,
    InputStatistics,
    RefittableLayer,
    can_refit,
    input_statistics,
    refit_,
)
from compresskit.prune.channels.selector import plan_of
from compresskit.prune.evidence import restored_after
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import apply_
from compresskit.quant.calibration.layer_outputs import IntegerLayer
from compresskit.quant.calibration.rows import in_chunks
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.error_feedback import rounded_in_turn

FEW = 8  # samples in a batch of statistics: of each batch, only some hundred positions are read
TRIED_SCALES = 40  # from 0.2 to 1 times that of the extremes


@dataclass(frozen=True, kw_only=True)
class GroupSensitivity:
    """What pruning one group of channels costs.

    layer: that makes the channels. size: how many there are.
    loss: channels that stay -> power of the error of the outputs, relative to theirs.
    """

    layer: str
    size: int
    loss: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class RoundingSensitivity:
    """What rounding the weights of one layer costs.

    layer: dotted name of its module; "" for the model itself. weights: how many. loss: bits -> as in `GroupSensitivity`.
    """

    layer: str
    weights: int
    loss: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class JointSensitivities:
    """Of all groups and layers of a model; `choose_channels_and_bits` takes them for further budgets."""

    groups: tuple[GroupSensitivity, ...]
    layers: tuple[RoundingSensitivity, ...]


class Measuring:
    """A float model in eval mode, and the data on which it is repaired and judged. It is not changed."""

    def __init__(self, model: nn.Module, fit: Sequence[Inputs], error: OutputError) -> None:
        """fit: inputs for least squares and roundings. error: of the outputs on other inputs."""
        self.model, self.fit, self.error = model, fit, error
        names = [name for name, _ in model.named_parameters() if "." in name and can_refit(model, name)]
        self.statistics = input_statistics(model, [*names, *_computed_weights(model)], in_chunks(fit, FEW), norms=True)

    def groups(self, analysis: ChannelAnalysis, macs: int, kept: Sequence[Sequence[int]]) -> list[GroupSensitivity]:
        """Prune one group after the other. analysis: with scores. macs: of one sample. kept: channels that stay, of each."""
        found = []
        for group, counts in progress_bar(list(zip(analysis.groups, kept, strict=True)), desc="sensitivity of channels"):
            losses = {group.size: 0.0}
            for count in counts:
                group.removed = group.size - count
                plan = plan_of(analysis, macs, analysis.prefix)
                group.removed = 0
                pruned = apply_(copy_model(self.model), plan)
                refit_(pruned, self.model, plan, self.statistics)
                losses[count] = self._lost(pruned)
            found.append(GroupSensitivity(layer=analysis.prefix + group.layer, size=group.size, loss=losses))
        return found

    def layers(
        self, quantized: Quantized, layers: Mapping[str, Sequence[IntegerLayer]], widths: Sequence[int]
    ) -> list[RoundingSensitivity]:
        """Round the weights of one layer after the other.

        They are rounded in the graph: there, weights that the model computes from others (weight norm) are tensors as well.

        Args:
            quantized: the model, still computing in float; it is as before afterwards.
            layers: as `layers_by_name` finds them. widths: bits to try.
        """
        found = []
        for name, parts in progress_bar(list(layers.items()), desc="sensitivity of bits"):
            weights = {part.weight: get_tensor(quantized.body, part.weight).detach().clone() for part in parts}
            losses = {}
            for bits in widths:
                rounded = {}
                for stored, weight in weights.items():  # a folded weight has a name of its own, and is alone in its layer
                    inputs = self.statistics.get(f"{name}.weight" if len(parts) == 1 else stored)
                    rounded[stored] = gptq_rounded(weight, bits, inputs)
                with restored_after(quantized.body, rounded):
                    for stored, values in rounded.items():
                        get_tensor(quantized.body, stored).copy_(values)
                    losses[bits] = self._lost(quantized)
            found.append(RoundingSensitivity(layer=name, weights=sum(w.numel() for w in weights.values()), loss=losses))
        return found

    def _lost(self, model: nn.Module) -> float:
        return sum(self.error.of(model))


def _computed_weights(model: nn.Module) -> list[str]:
    """Names of the weights that a model in eval mode computes from others, of layers whose inputs statistics can be taken of."""
    found = []
    for path, module in model.named_modules():
        if not path or not isinstance(module, RefittableLayer) or "weight" in module._parameters or has_own_forward(module):
            continue
        if getattr(module, "groups", 1) == 1 and module.weight[0].numel() <= MOST_COLUMNS:
            found.append(f"{path}.weight")
    return found


def gptq_rounded(weight: Tensor, bits: int, inputs: InputStatistics | None) -> Tensor:
    """A weight (outputs, ...) on the symmetric grid of each output, of least squared error of the weight.

    inputs: sums over the inputs of the layer. The error of each column is then made up for by the columns still to come (GPTQ,
    Frantar et al., 2210.17323, algorithm 1). None rounds to nearest.
    """
    rows = weight.double().flatten(1)
    top = 2 ** (bits - 1) - 1
    scale = _scale_of_least_error(rows, top)
    if inputs is None or inputs.products.shape[0] != rows.shape[1]:
        return ((rows / scale).round().clamp(-top, top) * scale).to(weight.dtype).view(weight.shape)
    moment = inputs.products / inputs.rows

    def round_input(index: int, ahead: Callable[[int], Tensor]) -> Tensor:
        return (ahead(1)[:, 0] / scale[:, 0]).round().clamp(-top, top) * scale[:, 0]

    rounded = rounded_in_turn(rows, moment, round_input)
    return rounded.to(weight.dtype).view(weight.shape)


def _scale_of_least_error(rows: Tensor, top: int) -> Tensor:
    """(outputs, 1) the step of each row, at most that of its extremes, with which rounding to nearest errs least."""
    full = (rows.abs().amax(1, keepdim=True) / top).clamp(min=1e-12)
    best, least = full, torch.full_like(full, torch.inf)
    for i in range(TRIED_SCALES + 1):
        scale = full * (1 - 0.8 * i / TRIED_SCALES)
        error = ((rows / scale).round().clamp(-top, top) * scale - rows).square().sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best
