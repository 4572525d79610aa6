"""Choose the bits of each layer's weights under a budget: sensitivities, an exact choice, and a measured check of it.

sensitivity of each layer at each width -> integer program -> choices that avoid the fewest bits, and uniform bits, measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, first_and_all, some_batches
from compresskit.base.task import Inputs, Task
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.accuracy_target.bit_plan import (
    BitBudget,
    BitPlan,
    MeasuredBits,
    Sensitivity,
    Weighting,
    average_budget,
    best_widths,
    bytes_budget,
    frontier_of,
    predicted_loss,
    table_budget,
)
from compresskit.quant.accuracy_target.layer_sensitivity import (
    LayerSensitivity,
    fisher_sensitivities,
    layer_sensitivities,
    layers_by_name,
    weights_rounded,
)
from compresskit.quant.accuracy_target.losses import MetricLoss, OutputLoss
from compresskit.quant.build import build_quantized
from compresskit.quant.calibration.rows import in_chunks, row_count, take_rows
from compresskit.quant.effort.samples import LEAST_SAMPLES, OutputError, joined_samples
from compresskit.quant.model import CALIBRATION_BYTES, Quantized
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.targets import X86, Target, check_target

WIDTHS = (2, 3, 4, 5, 6, 8)
JUDGING = 4  # times as many samples judge choices as show sensitivities
CHOICES_WITHOUT_FEW_BITS = 2  # choices that leave out the fewest bits, then the two fewest
TIE_BREAK = 0.01  # of the outputs' error in %, which decides where no sample of the metric changes

CostTable = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class _Data:
    """Inputs on which sensitivities are measured, those that judge, and whether they are other samples; in parts."""

    shown: list[Inputs]
    judging: list[Inputs]
    others: bool


@no_modes_of_caller()
def choose_bits(
    model: nn.Module,
    batches: Batches,
    *,
    average: float | None = None,
    weight_bytes: int | None = None,
    cost: CostTable | None = None,
    limit: float | None = None,
    weighting: Weighting = "weights",
    widths: Sequence[int] = WIDTHS,
    sensitivity: Sensitivity = "outputs",
    task: Task | None = None,
    check: bool = True,
    target: Target = X86,
    skip: tuple[str, ...] = (),
    samples: int = 64,
) -> BitPlan:
    """Choose how many bits the weights of each layer take, such that the model loses least under a budget.

    What each layer alone loses at each width is measured or predicted, and the losses of several layers are taken to add up. The
    choice is then exact: a mixed-integer linear program (scipy's `milp`), as in HAWQ-V3 (Yao et al., arXiv 2011.10680). Losses do
    not simply add up where bits are few, so the choice is measured beside others within the same budget: without the fewest
    bits, and uniform ones. The best is taken.

    Args:
        model: any float module; it is not changed.
        batches: an iterable of inputs, or one batch. The first `samples` show sensitivities; four times as many others judge,
            the same ones where there are fewer than 8 others.
        average: the largest mean bits of a weight. Give this, `weight_bytes` or `cost` with `limit`.
        weight_bytes: the most bytes that the weights may take in the file.
        cost, limit: a table {layer: {bits: number}} of your own, such as milliseconds on your device, and its largest sum. Widths
            that it leaves out are not taken. No latency is assumed: ONNX Runtime's CPU kernels compute in int8 whatever the bits.
        weighting: "weights" counts each weight once in `average`, "macs" as often as it is multiplied: a limit of bit operations.
        widths: bits to choose from, 2 to 8.
        sensitivity: what a layer loses: "outputs", the power of the error of the outputs; "fisher", the growth of the loss by the
            Fisher information (`task.loss` on its training data, or labels drawn from the model's own predictions); "metric", the
            percent of the task's metric that is lost on its validation data, a pass over it for each layer and width.
        task: its metric on its validation data also judges the choices. Without it the outputs do, as in `repair`.
        check: measure the choice, and take another one where that loses less. False takes the program's choice, which suits
            roundings that are learned afterwards.
        target, skip: as in `quantize_static`; layers that stay float are not counted.
        samples: how many samples show sensitivities; "metric" takes the whole validation data.

    Raises SettingError for settings out of range, or a budget below the least that is possible, which it names; DataError and
    ModelError as `quantize_static`.
    """
    how = _Choosing(
        average=average, weight_bytes=weight_bytes, cost=cost, limit=limit, weighting=weighting, widths=tuple(widths),
        sensitivity=sensitivity, task=task, check=check, target=target, skip=tuple(skip), samples=samples,
    )  # fmt: skip
    return _bit_plan(model, batches, how)


@dataclass(frozen=True, kw_only=True)
class _Choosing:
    """The settings of `choose_bits`. Raises SettingError for those that do not fit."""

    average: float | None
    weight_bytes: int | None
    cost: CostTable | None
    limit: float | None
    weighting: Weighting
    widths: tuple[int, ...]
    sensitivity: Sensitivity
    task: Task | None
    check: bool
    target: Target
    skip: tuple[str, ...]
    samples: int

    def __post_init__(self) -> None:
        given = {"average": self.average, "weight_bytes": self.weight_bytes, "cost": self.cost}
        names = ", ".join(name for name, value in given.items() if value is not None)
        if list(given.values()).count(None) != 2:
            raise SettingError(f"choose_bits: wanted average=, weight_bytes= or cost=, one of them, got {names or 'none'}")
        if (self.cost is None) != (self.limit is None):
            raise SettingError("choose_bits: cost= is a table and limit= its largest sum; give both or none")
        if self.weighting not in ("weights", "macs"):
            raise SettingError(f'choose_bits(weighting=...): wanted "weights" or "macs", got {self.weighting!r}')
        if self.weighting == "macs" and self.average is None:
            raise SettingError('choose_bits(weighting="macs"): it says what the mean bits, average=, count; leave it out')
        if not self.widths or any(not isinstance(bits, int) or not 2 <= bits <= 8 for bits in self.widths):
            raise SettingError(f"choose_bits(widths=...): wanted whole numbers of 2..8, got {self.widths!r}")
        if self.samples < 1:
            raise SettingError(f"choose_bits(samples=...): wanted a whole number >= 1, got {self.samples}")
        if self.sensitivity not in ("outputs", "fisher", "metric"):
            raise SettingError(f'choose_bits(sensitivity=...): wanted "outputs", "fisher" or "metric", got {self.sensitivity!r}')
        if self.sensitivity == "metric" and self.task is None:
            raise SettingError(
                'choose_bits(sensitivity="metric"): it needs data and a metric; write task=Task(val=..., metric=...)'
            )
        check_target(self.target, "choose_bits")

    def allowed(self, names: Iterable[str]) -> dict[str, list[int]]:
        """The widths of each layer. Raises SettingError where the table of costs does not fit the layers."""
        layers, widths = list(names), set(self.widths)
        if self.cost is None:
            return {name: sorted(widths) for name in layers}
        allowed = {name: sorted(widths & set(self.cost.get(name, ()))) for name in layers}
        if missing := [name for name, bits in allowed.items() if not bits]:
            raise SettingError(
                f"choose_bits(cost=...): wanted of each layer a cost at bits of {sorted(widths)}, got none for {missing}"
            )
        if unknown := [name for name in self.cost if name not in layers]:
            raise SettingError(f"choose_bits(cost=...): no layers {unknown}; they are {layers}")
        return allowed

    def budget(self, layers: Sequence[LayerSensitivity]) -> BitBudget:
        """What the layers may cost together."""
        if self.weight_bytes is not None:
            return bytes_budget(layers, float(self.weight_bytes))
        if self.average is not None:
            return average_budget(layers, self.average, self.weighting)
        assert self.cost is not None
        assert self.limit is not None
        return table_budget(layers, self.cost, float(self.limit))


def _bit_plan(model: nn.Module, batches: Batches, how: _Choosing) -> BitPlan:
    example, stream = first_and_all(batches, "choose_bits")
    data = _split(list(stream), how.samples)
    quantized = build_quantized(model, example, how.target, MinMax, skip=how.skip).eval()
    quantized.calibrate_(data.shown)
    rows = max(1, CALIBRATION_BYTES // quantized.row_bytes)
    layers = _sensitivities(model, quantized, data, rows, how)
    budget = how.budget(layers)
    chosen, measured, judge = best_widths(layers, budget), list[MeasuredBits](), ""
    if how.check:
        loss = _judge(model, data, rows, how.task)
        measured = _measured(quantized, layers, budget, chosen, loss)
        chosen = measured[0].widths
        other = "" if how.task is not None or data.others else ", the same that showed the sensitivities"
        judge = f"{loss.name}, {loss.samples} samples{other}"
    return BitPlan(
        bits={layer.layer: Bits(weights=bits) for layer, bits in zip(layers, chosen, strict=True)},
        layers=tuple(layers),
        sensitivity=how.sensitivity,
        unit=budget.unit,
        cost=budget.of(chosen),
        predicted=predicted_loss(layers, chosen),
        frontier=frontier_of(layers, budget),
        measured=tuple(measured),
        judge=judge,
    )


def _split(batches: Sequence[Inputs], samples: int) -> _Data:
    """The samples that show sensitivities and those that judge; the same where there are too few others."""
    joined = joined_samples(batches, (1 + JUDGING) * samples)
    rows = row_count(joined)
    if rows is None or rows - samples < LEAST_SAMPLES:
        shown = joined if rows is None else take_rows(joined, slice(0, samples))
        return _Data([shown], [joined], others=False)
    return _Data([take_rows(joined, slice(0, samples))], [take_rows(joined, slice(samples, rows))], others=True)


def _sensitivities(model: nn.Module, quantized: Quantized, data: _Data, rows: int, how: _Choosing) -> list[LayerSensitivity]:
    allowed, task = how.allowed(layers_by_name(quantized)), how.task
    if how.sensitivity == "fisher":
        if task is None:
            return fisher_sensitivities(quantized, [(inputs, None) for inputs in data.shown], None, allowed)
        labelled = some_batches(task, "val" if task.train is None else "train", how.samples, "labels")
        return fisher_sensitivities(quantized, [task.split(batch) for batch in labelled], task, allowed)
    error = OutputError(model, data.shown, rows)
    if how.sensitivity == "outputs":
        return layer_sensitivities(quantized, lambda rounded: sum(error.of(rounded)), allowed)
    assert task is not None
    metric = MetricLoss(model, task, lambda rounded: rounded, where="choose_bits")

    def loss(rounded: Quantized) -> float:
        return max(0.0, metric(rounded)) + TIE_BREAK * 100 * min(1.0, sum(error.of(rounded)))

    return layer_sensitivities(quantized, loss, allowed)


def _judge(model: nn.Module, data: _Data, rows: int, task: Task | None) -> MetricLoss | OutputLoss:
    if task is not None:
        return MetricLoss(model, task, lambda rounded: rounded, where="choose_bits")
    return OutputLoss(model, list(in_chunks(data.judging, rows)), where="choose_bits")


def _measured(
    quantized: Quantized,
    layers: Sequence[LayerSensitivity],
    budget: BitBudget,
    chosen: tuple[int, ...],
    loss: Callable[[Quantized], float],
) -> list[MeasuredBits]:
    """The choice, others within the same budget, and uniform bits, all measured; the best first, of equal ones the first."""
    every = sorted({bits for layer in layers for bits in layer.noise})
    candidates = {chosen: "losses add up"}
    for least in every[1 : 1 + CHOICES_WITHOUT_FEW_BITS]:
        able = all(any(bits >= least for bits in cost) for cost in budget.costs)
        if able and sum(min(p for bits, p in cost.items() if bits >= least) for cost in budget.costs) <= budget.most:
            candidates.setdefault(best_widths(layers, budget, least=least), f"losses add up, {least} bits at least")
    uniform = [(bits,) * len(layers) for bits in every if budget.fits((bits,) * len(layers))]
    if uniform:
        candidates.setdefault(uniform[-1], f"{uniform[-1][0]} bits everywhere")
    names = [layer.layer for layer in layers]
    found = []
    for widths, name in candidates.items():
        with weights_rounded(quantized, dict(zip(names, widths, strict=True))):
            found.append(MeasuredBits(name=name, widths=widths, cost=budget.of(widths), lost=loss(quantized)))
    return sorted(found, key=lambda choice: choice.lost)
