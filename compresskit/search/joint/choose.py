"""Choose channels and bits together under one size of the file: sensitivities, an exact choice, and a measured check of it.

sensitivity of each group at each width and of each layer at each number of bits -> integer program, with several exchange rates
    between the two kinds of loss -> each choice pruned, quantized, shortly trained without labels, and measured
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from compresskit.base.budget import keep
from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, Task, batch_size
from compresskit.export import export_onnx
from compresskit.graph.surgery import check_is_module, copy_model
from compresskit.prune.channels.plan_channels import analyze_channels, plan_channels
from compresskit.prune.criteria import CHANNEL_EVIDENCE, Criterion, check_criterion, l2
from compresskit.prune.normalizers import unscaled
from compresskit.prune.scores import score_groups_
from compresskit.prune.structure.groups import ChannelAnalysis
from compresskit.prune.structure.plan import Plan, apply_
from compresskit.quant.accuracy_target.layer_sensitivity import layers_by_name
from compresskit.quant.accuracy_target.losses import MetricLoss, OutputLoss
from compresskit.quant.build import build_quantized
from compresskit.quant.calibration.reconstruct import reconstruct_blocks_
from compresskit.quant.calibration.rows import in_chunks, row_count, take_rows
from compresskit.quant.effort.samples import LEAST_SAMPLES, OutputError, joined_samples
from compresskit.quant.effort.tuning import imitate_float_
from compresskit.quant.model import CALIBRATION_BYTES, Quantized
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.targets import X86, Target, check_target
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.static import quantize_static
from compresskit.search.joint.file_size import StoredWeight, modelled_bytes, stored_weights
from compresskit.search.joint.joint_plan import JointPlan, MeasuredJointChoice, repaired
from compresskit.search.joint.program import Options, best_choice
from compresskit.search.joint.sensitivities import JointSensitivities, Measuring

JOINT_WIDTHS = (2, 3, 4, 6, 8)
JOINT_RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
EXCHANGE_RATES = (1.0, 4.0, 0.25)  # of a loss by rounding for one by pruning
JUDGED = 4  # one of so many samples judges
RECONSTRUCTION_STEPS, FIRST_RATE = 20, 0.05  # of the short training before a choice is measured
SHORT_IMITATION = 40
CORRECTIONS = 6  # of the bytes, by exporting
SPARE = 0.003  # of the budget, left free after each file that is above it
CLOSE = 0.015  # a file that is this little below the budget is taken


def choose_channels_and_bits(
    model: nn.Module,
    batches: Batches,
    file_bytes: int,
    *,
    widths: Sequence[int] = JOINT_WIDTHS,
    ratios: Sequence[float] = JOINT_RATIOS,
    criterion: Criterion = l2,
    task: Task | None = None,
    check: bool = True,
    target: Target = X86,
    skip: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    sensitivities: JointSensitivities | None = None,
) -> JointPlan:
    """Choose how many channels stay in each group and how many bits the weights of each layer take, together.

    The size of a layer in the file is the product of its bits, the channels it makes and the channels it reads. What the model
    loses is measured for each group at each width and for each layer at each number of bits alone, each after its repair in
    closed form (least squares; GPTQ), and the losses are taken to add up. The choice is then exact: a mixed-integer program
    (scipy's `milp`). Losses of the two kinds do not add up exactly, and training makes up for more of the one than of the
    other. So the program is solved with several exchange rates between them, with and without the fewest bits, and with the
    same bits everywhere; each result is pruned, quantized, shortly trained to imitate the float model, and measured; the best
    is taken.
    GETA (Qu et al., CVPR 2025, arXiv 2502.16638) chooses both during one training; this takes no training and no labels.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch; a fourth of them judges, at least 8 (all of them where there are fewer
            than 16 in all).
        file_bytes: the most bytes of the exported ONNX file, which is met as measured.
        widths: bits to choose from, 2 to 8.
        ratios: fractions of a group's channels that may be removed, in (0, 1), to the nearest channel; none is always possible.
        criterion: chooses which channels of a group go, see `prune.criteria`.
        task: its metric on its validation data judges the choices instead of the outputs; criteria read its data.
        check: measure choices. False takes the program's, which takes no training.
        target, skip: as in `quantize_static`. ignore: dotted names of modules whose channels all stay.
        sensitivities: of an earlier plan for the same model, data and settings, which are then not measured again.

    Raises SettingError for settings out of range, and for a budget below the least that is possible, which it names; DataError
    and ModelError as `plan_channels` and `quantize_static`.
    """
    how = JointSettings(
        file_bytes=file_bytes, widths=tuple(widths), ratios=tuple(ratios), criterion=criterion, task=task, target=target,
        skip=tuple(skip), ignore=tuple(ignore),
    )  # fmt: skip
    search = _JointSearch(model, batches, how, sensitivities)
    return search.plan(check=check)


@dataclass(frozen=True, kw_only=True)
class JointSettings:
    """The settings of `choose_channels_and_bits`. Raises SettingError for those out of range."""

    file_bytes: int
    widths: tuple[int, ...]
    ratios: tuple[float, ...]
    criterion: Criterion
    task: Task | None
    target: Target
    skip: tuple[str, ...]
    ignore: tuple[str, ...]

    def __post_init__(self) -> None:
        where = "choose_channels_and_bits"
        if not isinstance(self.file_bytes, int) or self.file_bytes < 1:
            raise SettingError(f"{where}(file_bytes=...): wanted a whole number of bytes >= 1, got {self.file_bytes!r}")
        if not self.widths or any(not isinstance(bits, int) or not 2 <= bits <= 8 for bits in self.widths):
            raise SettingError(f"{where}(widths=...): wanted whole numbers of 2..8, got {self.widths!r}")
        if any(not isinstance(ratio, int | float) or not 0 < ratio < 1 for ratio in self.ratios):
            raise SettingError(f"{where}(ratios=...): wanted fractions in (0, 1), got {self.ratios!r}")
        check_criterion(self.criterion, where, CHANNEL_EVIDENCE)
        check_target(self.target, where)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What the program chose. file_bytes: of the exported file."""

    kept: tuple[int, ...]
    bits: tuple[int, ...]
    channels: Plan
    file_bytes: int


@dataclass(frozen=True)
class _Judged:
    """Data to repair and train on, and to judge on. others: whether the latter are other samples."""

    fit: list[Inputs]
    judge: list[Inputs]
    others: bool
    rows: int = field(default=1)


class _JointSearch:
    """One model, its groups and layers, and what they lose.

    It works on a copy in eval mode: in train mode, the norm of a spectral norm moves each time that its weight is read.
    """

    def __init__(self, model: nn.Module, batches: Batches, how: JointSettings, sensitivities: JointSensitivities | None) -> None:
        where = "choose_channels_and_bits"
        check_is_module(model, where)
        self.model, self.how = copy_model(model).eval(), how
        self.example, stream = first_and_all(batches, where)
        captured, origin, _ = prepare_graph(self.model, self.example, how.target, how.skip)
        quantized = build_quantized(self.model, self.example, how.target, MinMax, skip=how.skip, prepared=(captured, origin))
        self.layers = layers_by_name(quantized)
        self.data = _judged(list(stream), max(1, CALIBRATION_BYTES // quantized.row_bytes))
        analysis, prefix, macs = analyze_channels(self.model, self.example, where=where, ignore=how.ignore)
        self.analysis: ChannelAnalysis = analysis
        stored = {captured.name_in_model(name): weight for name, weight in quantized.body.named_parameters()}
        numbers = {captured.name_in_model(part.weight): i for i, parts in enumerate(self.layers.values()) for part in parts}
        self.weights: list[StoredWeight] = stored_weights(self.model, analysis, stored, numbers)
        if sensitivities is None:
            score_groups_(analysis.groups, self.model, prefix, how.criterion, unscaled, how.task, 3072, where=where)
            sensitivities = self._measured_sensitivities(quantized, macs)
        self.sensitivities = sensitivities
        self.fixed = 0.0  # bytes of the file that are not modelled; found by exporting
        self.exported: dict[tuple[tuple[int, ...], tuple[int, ...]], _Choice] = {}

    def _measured_sensitivities(self, quantized: Quantized, macs: int) -> JointSensitivities:
        error = OutputError(self.model, self.data.judge, self.data.rows)
        measuring = Measuring(self.model, self.data.fit, error)
        kept = [sorted({g.size - round(r * g.size) for r in self.how.ratios} - {0, g.size}) for g in self.analysis.groups]
        return JointSensitivities(
            groups=tuple(measuring.groups(self.analysis, macs, kept)),
            layers=tuple(measuring.layers(quantized, self.layers, sorted(set(self.how.widths)))),
        )

    def plan(self, *, check: bool) -> JointPlan:
        """The best choice as a plan."""
        found = list(self._choices(every=check))
        measured, judge = list[MeasuredJointChoice](), ""
        if check:
            loss = self._loss()
            for name, choice in progress_bar(found, desc="measure choices"):
                lost = loss(self._trained(choice))
                measured.append(
                    MeasuredJointChoice(name=name, kept=choice.kept, bits=choice.bits, file_bytes=choice.file_bytes, lost=lost)
                )
            best = min(range(len(found)), key=lambda i: measured[i].lost)
            others = "" if self.how.task is not None or self.data.others else ", the same that showed the sensitivities"
            judge = f"{loss.name}, {loss.samples} samples{others}"
            found, measured = [found[best]], sorted(measured, key=lambda choice: choice.lost)
        choice = found[0][1]
        return JointPlan(
            ratios=self._ratios(choice.kept),
            bits=self._bits(choice.bits),
            channels=choice.channels,
            criterion=self.how.criterion,
            file_bytes=choice.file_bytes,
            budget=self.how.file_bytes,
            predicted=self._options().loss(choice.kept, choice.bits),
            sensitivities=self.sensitivities,
            measured=tuple(measured),
            judge=judge,
        )

    def _choices(self, *, every: bool) -> Iterator[tuple[str, _Choice]]:
        """Choices within the budget, each once, with how they were made; the first only, unless `every`."""
        first = self._within_budget(self._options())
        if first is None:
            least = self._least()
            raise SettingError(
                f"choose_channels_and_bits(file_bytes=...): the least that these ratios and widths allow is"
                f" {least:,} bytes, got {self.how.file_bytes:,}"
            )
        yield "losses add up", first
        seen = {(first.kept, first.bits)}
        for name, options in self._variants() if every else ():
            choice = self._within_budget(options)
            if choice is not None and (choice.kept, choice.bits) not in seen:
                seen.add((choice.kept, choice.bits))
                yield name, choice

    def _variants(self) -> Iterator[tuple[str, Options]]:
        widths = sorted(set(self.how.widths))
        for least in widths[:2]:
            for rate in EXCHANGE_RATES if least == widths[0] else EXCHANGE_RATES[:2]:
                name = f"losses by rounding count {rate:g} times" if rate != 1 else "losses add up"
                yield name + (f", {least} bits at least" if least > widths[0] else ""), self._options(rate, least=least)
        for width in widths[1:3]:
            yield f"{width} bits everywhere", self._options(least=width, most=width)
        everything = self._options()
        whole = tuple({group.size: 0.0} for group in self.sensitivities.groups)
        yield "all channels", Options(groups=whole, layers=everything.layers, weights=everything.weights)

    def _options(self, rate: float = 1.0, *, least: int = 0, most: int = 8) -> Options:
        """What can be chosen. rate: what a loss by rounding counts. least, most: bits."""
        return Options(
            groups=tuple(group.loss for group in self.sensitivities.groups),
            layers=tuple(
                {bits: rate * loss for bits, loss in layer.loss.items() if least <= bits <= most}
                for layer in self.sensitivities.layers
            ),
            weights=tuple(self.weights),
        )

    def _within_budget(self, options: Options) -> _Choice | None:
        """The program's choice whose file is within the budget as exported, as close to it as some exports come."""
        best: _Choice | None = None
        if not self.fixed:
            sizes, widths = [g.size for g in self.sensitivities.groups], [max(self.how.widths)] * len(self.layers)
            self.fixed = self._exported(sizes, widths).file_bytes - modelled_bytes(self.weights, sizes, widths)
        spare = 0.0
        for _ in range(CORRECTIONS):
            found = best_choice(options, self.how.file_bytes - self.fixed - spare)
            if found is None or (best is not None and found == (best.kept, best.bits)):
                break
            choice = self._exported(*found)
            self.fixed = choice.file_bytes - modelled_bytes(self.weights, *found)
            if choice.file_bytes > self.how.file_bytes:
                spare += SPARE * self.how.file_bytes  # the operators that unpack weights take more for some bits
            elif best is None or choice.file_bytes > best.file_bytes:
                best = choice
            if best is not None and best.file_bytes >= (1 - CLOSE) * self.how.file_bytes:
                break
        return best

    def _least(self) -> int:
        """Bytes of the smallest file."""
        kept = [min(group.loss) for group in self.sensitivities.groups]
        return self._exported(kept, [min(layer.loss) for layer in self.sensitivities.layers]).file_bytes

    def _ratios(self, kept: Sequence[int]) -> dict[str, float]:
        return {g.layer: 1 - k / g.size for g, k in zip(self.sensitivities.groups, kept, strict=True) if k < g.size}

    def _bits(self, bits: Sequence[int]) -> dict[str, Bits]:
        return {layer.layer: Bits(weights=width) for layer, width in zip(self.sensitivities.layers, bits, strict=True)}

    def _exported(self, kept: Sequence[int], bits: Sequence[int]) -> _Choice:
        """The choice with its plan, which is proved, and the bytes of its file; each is exported once."""
        key = tuple(kept), tuple(bits)
        if key not in self.exported:
            self.exported[key] = self._export(*key)
        return self.exported[key]

    def _export(self, kept: tuple[int, ...], bits: tuple[int, ...]) -> _Choice:
        channels = plan_channels(
            self.model, self.example, keep(channels=1.0), criterion=self.how.criterion, task=self.how.task,
            ratios=self._ratios(kept), ignore=self.how.ignore,
        )  # fmt: skip
        quantized = self._quantized(apply_(copy_model(self.model), channels), bits, [self.example])
        with tempfile.TemporaryDirectory() as folder:
            path = export_onnx(quantized, Path(folder) / "candidate.onnx", self.example)
            size = sum(part.stat().st_size for part in path.parent.iterdir())
        return _Choice(kept=kept, bits=bits, channels=channels, file_bytes=size)

    def _quantized(self, model: nn.Module, bits: Sequence[int], inputs: Sequence[Inputs]) -> Quantized:
        quantized = quantize_static(model, inputs, bits=self._bits(bits), target=self.how.target, skip=self.how.skip)
        assert isinstance(quantized, Quantized)
        return quantized

    def _trained(self, choice: _Choice) -> Quantized:
        """The model pruned, repaired, quantized, and shortly trained to imitate the float model."""
        small = repaired(self.model, choice.channels, self.data.fit)
        quantized = self._quantized(small, choice.bits, self.data.fit)
        reconstruct_blocks_(quantized, self.data.fit, steps=RECONSTRUCTION_STEPS, rate=FIRST_RATE)
        imitate_float_(quantized, self.model, self.data.fit, steps=SHORT_IMITATION)
        return quantized

    def _loss(self) -> MetricLoss | OutputLoss:
        where = "choose_channels_and_bits"
        if self.how.task is not None:
            return MetricLoss(self.model, self.how.task, lambda quantized: quantized, where=where)
        return OutputLoss(self.model, list(in_chunks(self.data.judge, self.data.rows)), where=where)


def _judged(batches: Sequence[Inputs], rows: int) -> _Judged:
    """A fourth of the samples judges, the others show; the same where there are too few."""
    count = sum(map(batch_size, batches))
    joined = joined_samples(batches, count)
    found = row_count(joined)
    judges = max(LEAST_SAMPLES, (found or 0) // JUDGED)
    if found is None or found < 2 * LEAST_SAMPLES:
        return _Judged(list(batches), list(batches), others=False, rows=rows)
    size = max(batch_size(batches[0]), 2)
    fit = list(in_chunks([take_rows(joined, slice(0, found - judges))], size))
    return _Judged(fit, [take_rows(joined, slice(found - judges, found))], others=True, rows=rows)
