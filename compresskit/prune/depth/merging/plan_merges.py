"""Plan which runs of convolutions become one: find them, measure importance and cost, choose, prove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from compresskit.base.budget import Budget, Quantity, check_budget, percents, takes_budget
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import AnyInputs, as_inputs, calibration_inputs
from compresskit.base.task import Inputs, Task
from compresskit.graph.surgery import frozen_copy
from compresskit.measure import count_macs, count_parameters
from compresskit.prune.channels.candidates import ExportedCandidates
from compresskit.prune.channels.plan_channels import check_prunable
from compresskit.prune.depth import importance as block_importance
from compresskit.prune.depth.importance import original_predictions
from compresskit.prune.depth.merging.choose_runs import least_important
from compresskit.prune.depth.merging.find_runs import FoundRuns, find_runs
from compresskit.prune.depth.merging.merge_costs import MergeCost, saved_macs, saved_milliseconds
from compresskit.prune.depth.merging.merge_importance import MergeImportance, MergeScoring, merged_error
from compresskit.prune.depth.merging.merge_plan import MergeLine, MergePlan
from compresskit.prune.depth.merging.merge_runs import (
    ConvolutionRun,
    gather_,
    geometry_of_layer,
    merge_,
    merged_geometry,
    sizes_in,
)
from compresskit.prune.depth.merging.prove_merges import check_merges, runs_that_cannot_go
from compresskit.prune.structure.repeatable import timed_rows

#: Quantities that a budget of merged runs may be one of.
MERGE_QUANTITIES: tuple[Quantity, ...] = ("latency", "macs", "parameters")
MOST_EXPORTED = 6  # candidates that are exported and measured for one budget
MOST_LISTED_RUNS = 6  # that a refusal lists
LONGEST_RUN = 8
MOST_MORE_MACS = 0.1  # of the model's, that one convolution may take and yet be expected to be faster


@takes_budget(*MERGE_QUANTITIES)
def plan_merges(
    model: nn.Module,
    example: AnyInputs,
    budget: Budget | None = None,
    *,
    runs: int | tuple[str, ...] | None = None,
    importance: MergeImportance = merged_error,
    cost: MergeCost = saved_milliseconds,
    longest: int = 3,
    shrink: bool = False,
    task: Task | None = None,
    samples: int = 256,
    ignore: tuple[str, ...] = (),
) -> MergePlan:
    """Decide which convolutions lose the activation between them and become one. The model is not changed: `MergePlan.apply_`
    does that.

    A run that is not faster as one convolution is never merged. Of the others those are chosen whose importances sum to least
    while enough is saved, no two of the same layers; a latency is then measured on the exported file, and the choice corrected.
    The plan is proved on a copy: merged, the model gives what its graph gives without the activations, padded before the first.

    Args:
        model: a float model. example: its inputs, a tensor or a tuple or mapping of inputs.
        budget: how much stays: `ck.keep(latency=0.7)`, macs or parameters.
        runs: in the place of a budget, how many runs to merge, or their names, such as `("conv1 + conv2",)`.
        importance: what is lost without the activations, see `prune.depth.merging.merge_importance`.
        cost: what one convolution saves, see `prune.depth.merging.merge_costs`; by default measured milliseconds.
        longest: the most convolutions that become one.
        shrink: whether one layer of a run may become 1x1, so that 3x3 and 3x3 become 3x3, not 5x5: faster, and more is lost.
        task: data for the importance, its calibration (or training) batches; None measures on the example.
        samples: how many samples the importance reads.
        ignore: dotted names of modules that stay, with all layers inside.

    Raises:
        SettingError: a setting is out of range.
        ModelError: there is no run to merge, or the budget cannot be met.
    """
    check_merging(budget, runs, importance, longest, samples, "plan_merges")
    inputs = as_inputs(example)
    check_prunable(model, inputs, "plan_merges")
    batches = [inputs] if task is None else list(calibration_inputs(task, samples, "read runs"))
    found = find_runs(model, inputs, longest=longest, shrink=shrink, ignore=tuple(ignore))
    found = found.without(runs_that_cannot_go(model, found, inputs))
    while True:
        planner = _MergePlanner(model, inputs, found, importance, cost, task, batches)
        plan = planner.named(runs) if isinstance(runs, tuple) else planner.chosen(budget, runs)
        failure = check_merges(model, plan.runs, inputs) if plan.runs else None
        if failure is None:
            return plan
        bad = {run.name: why for run in plan.runs if (why := check_merges(model, [run], inputs)) is not None}
        if not bad:
            raise ModelError(
                f"{type(model).__name__} with {', '.join(plan.names)} merged: {failure}; leave one of them with ignore="
            )
        found = found.without(bad)


def check_merging(
    budget: Budget | None, runs: int | tuple[str, ...] | None, importance: object, longest: int, samples: int, where: str
) -> None:
    """Raise SettingError unless there is a budget or runs, of the right kind, and the other settings are in range."""
    if (budget is None) == (runs is None):
        raise SettingError(f"{where}(): wanted either budget=ck.keep(latency=0.7), or runs=, a number or a tuple of names")
    if budget is not None:
        check_budget(budget, f"{where}(budget=...)", MERGE_QUANTITIES)
    names = isinstance(runs, tuple) and runs and all(isinstance(name, str) for name in runs)
    if runs is not None and not names and not (type(runs) is int and runs >= 1):
        raise SettingError(f"{where}(runs=...): wanted a whole number >= 1, or a tuple of names, got {runs!r}")
    measures = block_importance
    of_blocks = (measures.after_training, measures.output_error, measures.influence, measures.first_order)
    if not callable(importance) or importance in of_blocks:
        raise SettingError(
            f"{where}(importance=...): wanted a function of prune.depth.merging.merge_importance, such as merged_error, got"
            f" {importance!r}"
        )
    if type(longest) is not int or not 2 <= longest <= LONGEST_RUN:
        raise SettingError(f"{where}(longest=...): wanted a whole number from 2 to {LONGEST_RUN}, got {longest!r}")
    if type(samples) is not int or samples < 1:
        raise SettingError(f"{where}(samples=...): wanted a whole number >= 1, got {samples!r}")


def rank_runs(model: nn.Module, task: Task, *, samples: int = 256, least: float = 0.0) -> tuple[str, ...]:
    """Names of runs that can be merged together, no two of the same layers: what is worth least for its milliseconds first.

    Args:
        model: a float model. task: its example, and data for the importance.
        samples: how many samples the importance reads.
        least: milliseconds of one sample that a run must save, so that noise does not decide.

    Raises ModelError where the model cannot be captured.
    """
    inputs = task.example()
    one = timed_rows(model, inputs)
    found = find_runs(model, inputs)
    found = found.without(runs_that_cannot_go(model, found, inputs))
    if not found.runs:
        return ()
    heavy = -MOST_MORE_MACS * count_macs(model, one)
    light = {name: found.runs[name] for name, macs in saved_macs(model, one, found.runs).items() if macs >= heavy}
    saved = saved_milliseconds(model, one, light) if light else {}
    found = found.without({name: "it saves too little" for name in found.runs if saved.get(name, least) <= least})
    most = least_important(found.runs, saved, saved) or ()  # importance is measured of those that save most together
    faster = {name: found.runs[name] for name in most}
    if not faster:
        return ()
    frozen, batches = frozen_copy(model), list(calibration_inputs(task, samples, "read runs"))
    predictions = original_predictions(frozen, batches, task)
    scoring = MergeScoring(model=frozen, runs=[*faster.values()], batches=batches, predictions=predictions, task=task)
    scores = merged_error(scoring)
    chosen = [faster[name] for name in sorted(faster, key=lambda name: max(scores[name], 0.0) / saved[name])]
    if check_merges(model, chosen, inputs) is not None:
        chosen = [run for run in chosen if check_merges(model, [run], inputs) is None]
        while chosen and check_merges(model, chosen, inputs) is not None:
            chosen.pop()
    return tuple(run.name for run in chosen)


@dataclass
class _MergePlanner:
    """Selection of runs for one model."""

    model: nn.Module
    inputs: Inputs
    found: FoundRuns
    importance: MergeImportance
    cost: MergeCost
    task: Task | None
    batches: list[Inputs]

    def __post_init__(self) -> None:
        if not self.found.runs:
            raise ModelError(
                f"{type(self.model).__name__} has no convolutions that can be merged: wanted a convolution whose output one other"
                f" convolution alone reads, through BatchNorm and an activation; it has {self._reasons() or 'none'}; remove"
                " channels with Prune or blocks with depth.Depth instead"
            )

    @cached_property
    def costs(self) -> dict[str, float]:
        """What every run saves."""
        return self.cost(self.model, self.inputs, self.found.runs)

    @cached_property
    def faster(self) -> dict[str, ConvolutionRun]:
        """The runs that save something."""
        return {name: run for name, run in self.found.runs.items() if self.costs[name] > 0}

    @cached_property
    def predictions(self) -> list[Tensor]:
        """Of the original model, for every batch."""
        return original_predictions(frozen_copy(self.model), self.batches, self.task)

    def scores(self, runs: list[ConvolutionRun]) -> dict[str, float]:
        """The importance of runs."""
        return self.importance(
            MergeScoring(
                model=frozen_copy(self.model), runs=runs, batches=self.batches, predictions=self.predictions, task=self.task
            )
        )

    @cached_property
    def importances(self) -> dict[str, float]:
        """Of the runs that save something."""
        return self.scores(list(self.faster.values()))

    def merged(self, names: tuple[str, ...]) -> nn.Module:
        """A frozen copy of the model with some runs merged."""
        return merge_(gather_(frozen_copy(self.model), [self.found.runs[name] for name in names]))

    def named(self, names: tuple[str, ...]) -> MergePlan:
        """The plan of the runs that the user named; SettingError where one cannot be merged."""
        for name in names:
            if name not in self.found.runs:
                why = self.found.locked.get(name, "it is no run of convolutions")
                raise SettingError(f"runs=({name!r}, ...): it cannot be merged: {why}; there are: {', '.join(self.found.runs)}")
        layers = [path for name in dict.fromkeys(names) for path in self.found.runs[name].layers]
        if twice := next((path for path in layers if layers.count(path) > 1), None):
            raise SettingError(f"runs=: {twice} is in two of {', '.join(names)}; name each layer once")
        slower = [name for name in names if self.costs[name] <= 0]
        if slower:
            raise SettingError(
                f"runs=({slower[0]!r}, ...): one convolution is not faster, it saves {self.costs[slower[0]]:.3g} {self._unit};"
                " leave it out, or count with cost=depth.merging.saved_macs"
            )
        chosen = tuple(dict.fromkeys(names))
        return self._plan(chosen, self.scores([self.found.runs[name] for name in chosen]))

    def chosen(self, budget: Budget | None, count: int | None) -> MergePlan:
        """The plan that meets a budget, or of so many runs. ModelError where there is none."""
        if budget is not None and budget.quantity == "latency":
            return self._measured(budget)
        if budget is None:
            names = least_important(self.faster, self.importances, self.costs, count=count)
            if names is None:
                each = dict.fromkeys(self.faster, 1.0)
                most = least_important(self.faster, each, each) or ()
                raise ModelError(self._refusal(f"{count} runs to merge", f"at most {len(most)} can be at once"))
            return self._plan(names)
        counted = self._counter(budget)
        before = counted(self.model)
        saved = {name: float(before - counted(self.merged((name,)))) for name in self.faster}
        names = least_important(self.faster, self.importances, saved, needed=before * budget.removed)
        if names is None:
            most = least_important(self.faster, self.importances, saved) or ()
            wanted, least = percents(budget.kept, 1 - sum(saved[name] for name in most) / before)
            raise ModelError(self._refusal(f"{wanted} of the {budget.quantity}", f"only {least} can be reached"))
        return self._plan(names)

    def _counter(self, budget: Budget) -> Callable[[nn.Module], int]:
        return count_parameters if budget.quantity == "parameters" else lambda model: count_macs(model, self.inputs)

    def _most(self) -> tuple[str, ...]:
        """The runs that save most together."""
        return least_important(self.faster, self.costs, self.costs) or ()

    def _measured(self, budget: Budget) -> MergePlan:
        """The least important runs whose exported file meets a latency: what runs save alone is scaled to what files show."""
        order = self._most()
        if not order:
            raise ModelError(self._refusal(f"{budget.kept:.1%} of the latency", "no run is faster as one convolution"))
        best, low, tried = None, 0.0, set[tuple[str, ...]]()
        needed = high = sum(self.costs[name] for name in order)
        with ExportedCandidates(self.model, self.inputs, "latency") as candidates:
            for _ in range(MOST_EXPORTED):
                tried.add(order)
                reached, note = candidates.measure(self.merged(order))
                saving = sum(self.costs[name] for name in order)
                if reached <= budget.kept:
                    best, high = (order, note), saving
                elif best is None:
                    wish, least = percents(budget.kept, reached)
                    raise ModelError(self._refusal(f"{wish} of the latency", f"the least that was measured is {least}"))
                else:
                    low = saving
                wanted = saving * budget.removed / max(1 - reached, 1e-3)
                needed = wanted if low < wanted < high else (low + high) / 2
                order = least_important(self.faster, self.importances, self.costs, needed=needed) or order
                if order in tried:
                    break
        assert best is not None
        return self._plan(best[0]).noted(best[1])

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in list(self.found.locked.items())[:MOST_LISTED_RUNS])

    @property
    def _unit(self) -> str:
        return "ms" if self.cost is saved_milliseconds else "of its cost"

    def _slower(self) -> dict[str, str]:
        return {
            name: f"one convolution is not faster, it saves {self.costs[name]:.3g} {self._unit}"
            for name in self.found.runs
            if name not in self.faster
        }

    def _refusal(self, wish: str, reached: str) -> str:
        locked = [f"{name}: {reason}" for name, reason in (self._slower() | self.found.locked).items()]
        some = "; ".join(locked[:MOST_LISTED_RUNS]) or "none"
        hint = "" if any(run.shrunk for run in self.found.runs.values()) else ", or allow shrink=True"
        return f"{type(self.model).__name__}: wanted {wish}, {reached}; locked: {some}; ask for less{hint}"

    def _plan(self, names: tuple[str, ...], scores: dict[str, float] | None = None) -> MergePlan:
        scores = self.importances if scores is None else scores
        runs = tuple(self.found.runs[name] for name in names)
        layers = [[self._layer(path) for path in run.layers] for run in runs]
        return MergePlan(
            runs=runs,
            lines=tuple(MergeLine(name=name, importance=scores[name], cost=self.costs[name]) for name in names),
            unit=self._unit,
            kernels=tuple(
                merged_geometry(sizes_in(run, [geometry_of_layer(layer) for layer in each])).kernel
                for run, each in zip(runs, layers, strict=True)
            ),
            sizes={
                path: tuple(layer.weight.shape)
                for run, each in zip(runs, layers, strict=True)
                for path, layer in zip(run.layers, each, strict=True)
            },
            macs=count_macs(self.merged(names), self.inputs),
            macs_before=count_macs(self.model, self.inputs),
            convolutions=len(self.found.convolutions),
            locked=self._slower() | self.found.locked,
        )

    def _layer(self, path: str) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
        layer = self.model.get_submodule(path)
        assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return layer
