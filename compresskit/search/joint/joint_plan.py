"""The plan of `choose_channels_and_bits`: how many channels stay in each group, and how many bits each layer has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from compresskit.base.budget import keep
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import batch_size
from compresskit.graph.surgery import copy_model
from compresskit.metrics import decibels
from compresskit.prune.channels.prune import Prune
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.criteria import Criterion
from compresskit.prune.structure.plan import Plan, apply_
from compresskit.quant.calibration.rows import in_chunks
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.search.joint.sensitivities import FEW, JointSensitivities
from compresskit.train.batchnorm import reestimate_batchnorm_

ITSELF = "the model itself"  # in tables, in the place of a name, which it has not


@dataclass(frozen=True, kw_only=True)
class MeasuredJointChoice:
    """Channels and bits that were measured together.

    name: how they were chosen. kept: channels of each group. bits: of each layer. file_bytes: of the exported file.
    lost: in percent, as in `repair`.
    """

    name: str
    kept: tuple[int, ...]
    bits: tuple[int, ...]
    file_bytes: int
    lost: float


@dataclass(frozen=True, kw_only=True)
class JointPlan:
    """Channels and bits of a model, chosen together and not yet applied; prints as tables.

    ratios: layer that makes a group of channels -> ratio of them that is removed, for `plan_channels(ratios=)`.
    bits: for `quantize_static(bits=)`, `prepare_qat(bits=)` and their stages; "" names a weight that the model itself holds.
    channels: the same ratios as a plan of pruning. criterion: that chose the channels.
    file_bytes: of the exported file. budget: its most.
    predicted: power of the error of the outputs if the losses of single groups and layers add up.
    sensitivities: of each group and layer. measured: choices that were measured, the best first; empty with `check=False`.
    judge: what on.
    """

    ratios: dict[str, float]
    bits: dict[str, Bits]
    channels: Plan
    criterion: Criterion
    file_bytes: int
    budget: int
    predicted: float
    sensitivities: JointSensitivities
    measured: tuple[MeasuredJointChoice, ...] = ()
    judge: str = ""

    def pruned(self, model: nn.Module, batches: Batches) -> nn.Module:
        """A copy of a model without the channels, its layers refitted.

        BatchNorm statistics are estimated again where that brings the outputs nearer to the model's: few inputs do not suffice.

        Args:
            model: the one that the plan was made for, or another of its class and sizes.
            batches: an iterable of inputs, or one batch, without labels; some hundreds.

        Raises ModelError for a model of other sizes, DataError where there is no batch.
        """
        return repaired(model, self.channels, batches)

    def prune(self, **settings: Any) -> Prune:
        """The stage of a recipe that removes the channels; `QAT` or `StaticQuant` with `bits=plan.bits` comes after it.

        settings: others of `Prune`, such as `finetune=`.
        """
        return Prune(budget=keep(channels=1.0), ratios=self.ratios, criterion=self.criterion, **settings)

    @property
    def kept(self) -> dict[str, int]:
        """Layer that makes a group of channels -> how many of them stay."""
        groups = self.sensitivities.groups
        return {group.layer: group.size - round(self.ratios.get(group.layer, 0.0) * group.size) for group in groups}

    def __str__(self) -> str:
        head = f"{self.file_bytes:,} bytes of {self.budget:,}; predicted SQNR of the outputs {_decibels(self.predicted)}"
        rows = ["channels that stay, and the SQNR with one group pruned alone:"]
        for group in self.sensitivities.groups:
            curve = ", ".join(f"{kept}: {_decibels(loss)}" for kept, loss in sorted(group.loss.items()) if kept < group.size)
            rows.append(f"  {group.layer or ITSELF}: {self.kept[group.layer]} of {group.size}  ({curve})")
        rows.append("bits of weights, and the SQNR with one layer rounded alone:")
        for layer in self.sensitivities.layers:
            curve = ", ".join(f"{bits}: {_decibels(loss)}" for bits, loss in sorted(layer.loss.items()))
            rows.append(f"  {layer.layer or ITSELF}: {self.bits[layer.layer].weights}  ({curve})")
        rows += [f"measured together on {self.judge}:"] if self.measured else []
        rows += [f"  {choice.lost:.3f} % lost, {choice.file_bytes:,} bytes: {choice.name}" for choice in self.measured]
        return "\n".join([head, *rows])


def repaired(model: nn.Module, channels: Plan, batches: Batches) -> nn.Module:
    """A copy of a model without the channels of a plan, its layers refitted; as `JointPlan.pruned`, which explains it."""
    data = list(first_and_all(batches, "pruning")[1])
    model = copy_model(model).eval()  # the caller's own keeps its state: a spectral norm moves where its weight is read
    small = apply_(copy_model(model), channels)
    reconstruct_(small, model, channels, in_chunks(data, FEW))
    error, again = OutputError(model, data, max(map(batch_size, data))), copy_model(small)
    reestimate_batchnorm_(again, data)
    return min(small, again, key=lambda candidate: sum(error.of(candidate))).eval()


def _decibels(loss: float) -> str:
    return f"{decibels(1.0, loss, most=120.0):.1f} dB"
