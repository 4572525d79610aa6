"""Plan which residual blocks to remove: find them, measure importance and cost, choose greedily, prove."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, nn

from compresskit.base.budget import Budget, Quantity, check_budget, percents, takes_budget
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import AnyInputs, as_inputs, calibration_inputs
from compresskit.base.progress import progress_bar
from compresskit.base.settings import stands_in
from compresskit.base.task import Inputs, Task
from compresskit.graph.surgery import frozen_copy
from compresskit.measure import count_macs, count_parameters
from compresskit.prune.channels.candidates import ExportedCandidates, Form
from compresskit.prune.channels.plan_channels import check_prunable
from compresskit.prune.channels.resources import measured_quantity
from compresskit.prune.depth.block_plan import BlockLine, BlockPlan
from compresskit.prune.depth.costs import Cost, macs, milliseconds, times_alone, whole_milliseconds
from compresskit.prune.depth.find_blocks import Blocks, find_blocks, inside, outermost
from compresskit.prune.depth.importance import BlockScoring, Importance, after_training, original_predictions
from compresskit.prune.depth.prove_blocks import blocks_that_cannot_go, check_blocks, failing_alone, remove_blocks_
from compresskit.prune.structure.repeatable import alike_rows

#: Quantities that a budget of blocks may be one of.
BLOCK_QUANTITIES: tuple[Quantity, ...] = ("latency", "macs", "parameters", "bytes")
MOST_MEASURED = 6  # candidates that are exported and measured for one budget
MOST_LOCKED = 6  # reasons that a refusal lists
ORDER_ROUNDS = 8  # measurements of all importances, of which each decides on an equal part of the blocks of an order


@takes_budget(*BLOCK_QUANTITIES)
def plan_blocks(
    model: nn.Module,
    example: AnyInputs,
    budget: Budget | None = None,
    *,
    blocks: int | tuple[str, ...] | None = None,
    importance: Importance = after_training,
    cost: Cost = milliseconds,
    form: Form | None = None,
    task: Task | None = None,
    samples: int = 256,
    ignore: tuple[str, ...] = (),
) -> BlockPlan:
    """Decide which residual blocks to remove. The model is not changed: `BlockPlan.apply_` does that.

    Again and again the block goes whose importance is lowest for what it costs, with the importances measured anew, until the
    budget is met; those without which it is met all the same stay after all. The plan is proved on a copy: without the blocks the
    model gives what it gives with their branches at zero. A norm between a block's input and its output, as in BERT, goes with
    it.

    Args:
        model: a float model. example: its inputs, a tensor or a tuple or mapping of inputs.
        budget: how much stays: `ck.keep(latency=0.7)`, macs, parameters or bytes.
        blocks: in the place of a budget, how many blocks to remove, or their dotted names.
        importance: what is lost without a block, see `prune.depth.importance`.
        cost: what is saved without a block, see `prune.depth.costs`; by default its measured milliseconds.
        form: `(module, inputs) -> module`, what a later stage makes of the model, such as `quant.quantize_static`: milliseconds
            and bytes are then measured in that form, those of the whole model, too. None measures them in float.
        task: data for the importance, its calibration (or training) batches; None measures on the example.
        samples: how many samples the importance reads.
        ignore: dotted names of modules that stay, with all blocks inside.

    Raises:
        SettingError: a setting is out of range.
        ModelError: there is no block to remove, or the budget cannot be met.
    """
    check_depth(budget, blocks, samples, "plan_blocks")
    check_measures("plan_blocks", importance=importance, cost=cost, form=form)
    inputs = as_inputs(example)
    check_prunable(model, inputs, "plan_blocks")
    batches = [inputs] if task is None else list(calibration_inputs(task, samples, "read blocks"))
    found = find_blocks(model, inputs, ignore=tuple(ignore))
    found = found.without(blocks_that_cannot_go(model, found.removable, inputs))
    while True:
        planner = _Planner(model, inputs, found, importance, cost, form, task, batches, samples)
        chosen = planner.named(blocks) if isinstance(blocks, tuple) else planner.chosen(budget, blocks or 0)
        plan = planner.plan(chosen)
        failure = check_blocks(model, plan.paths, inputs) if plan.blocks else None
        if failure is None:
            return planner.measured(plan, budget)
        found = _locked(model, inputs, found, plan, failure)


def order_blocks(
    model: nn.Module,
    example: AnyInputs,
    *,
    importance: Importance = after_training,
    cost: Cost = milliseconds,
    task: Task | None = None,
    samples: int = 256,
) -> tuple[str, ...]:
    """The blocks that can go, in the order in which they do: least importance for what it saves first.

    As `plan_blocks` chooses, but with the importances measured anew `ORDER_ROUNDS` times, not after every block. Blocks inside of
    others are left out, and so are those without which the model is not what it was with their branches at zero.

    Args: as in `plan_blocks`.
    Returns: dotted names; none where no block can go.
    Raises ModelError for a model that cannot be traced.
    """
    check_measures("order_blocks", None, importance=importance, cost=cost)
    inputs = as_inputs(example)
    check_prunable(model, inputs, "order_blocks")
    found = find_blocks(model, inputs)
    found = found.without(blocks_that_cannot_go(model, found.removable, inputs))
    outer = list(outermost(tuple(found.removable)))
    if outer and check_blocks(model, outer, inputs) is not None:
        found = found.without(failing_alone(model, found.removable, inputs))
        outer = list(outermost(tuple(found.removable)))
    if not outer:
        return ()
    found = replace(found, removable={path: found.removable[path] for path in outer})
    batches = [inputs] if task is None else list(calibration_inputs(task, samples, "read blocks"))
    return _Planner(model, inputs, found, importance, cost, None, task, batches, samples).order()


def check_depth(budget: Budget | None, blocks: int | tuple[str, ...] | None, samples: int, where: str) -> None:
    """Raise SettingError unless there is a budget or blocks, of the right kind."""
    if (budget is None) == (blocks is None):
        raise SettingError(f"{where}(): wanted either budget=ck.keep(latency=0.7), or blocks=, a number or a tuple of names")
    if budget is not None:
        check_budget(budget, f"{where}(budget=...)", BLOCK_QUANTITIES)
    named = isinstance(blocks, tuple) and blocks and all(isinstance(name, str) for name in blocks)
    if blocks is not None and not named and not (type(blocks) is int and blocks >= 1):
        raise SettingError(f"{where}(blocks=...): wanted a whole number >= 1, or a tuple of dotted names, got {blocks!r}")
    if type(samples) is not int or samples < 1:
        raise SettingError(f"{where}(samples=...): wanted a whole number >= 1, got {samples!r}")


def check_measures(where: str, form: object, **functions: object) -> None:
    """Raise SettingError where a setting is no function; `form` may be None."""
    for name, value in (functions if form is None else functions | {"form": form}).items():
        if not callable(value):
            raise SettingError(f"{where}({name}=...): wanted a function of prune.depth, got {value!r}")


def check_removable(model: nn.Module, found: Blocks) -> None:
    """Raise ModelError where a model has no block that can be removed."""
    if found.removable:
        return
    some = [f"{path}: {reason}" for path, reason in list(found.locked.items())[:MOST_LOCKED]]
    raise ModelError(
        f"{type(model).__name__} has no residual block that can be removed: wanted modules that add their input to what they"
        f" compute and keep its shape; it has {'; '.join(some) or 'none'}; remove channels with Prune instead"
    )


def _locked(model: nn.Module, inputs: Inputs, found: Blocks, plan: BlockPlan, failure: str) -> Blocks:
    """The blocks without those whose removal fails alone; ModelError where only all of them together fail."""
    bad = failing_alone(model, plan.paths, inputs)
    if not bad:
        raise ModelError(f"{type(model).__name__} without {', '.join(plan.paths)}: {failure}; leave one of them with ignore=")
    return found.without(bad)


@dataclass
class _Planner:
    """Greedy selection for one model."""

    model: nn.Module
    inputs: Inputs
    found: Blocks
    importance: Importance
    cost: Cost
    form: Form | None
    task: Task | None
    batches: list[Inputs]
    samples: int
    lines: dict[str, BlockLine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_removable(self.model, self.found)

    @cached_property
    def times(self) -> dict[str, float] | None:
        """Milliseconds of every block; None where the ranking is by something else, or a block cannot be measured alone."""
        return times_alone(self.model, self.inputs, self.found.removable, self.form) if self.cost is milliseconds else None

    @cached_property
    def costs(self) -> dict[str, float]:
        """What every block saves, in the unit of the ranking."""
        if self.times is not None:
            return self.times
        cost = macs if self.cost is milliseconds else self.cost
        return cost(self.model, self.inputs, self.found.removable)

    @cached_property
    def milliseconds(self) -> float:
        """Of the whole model, in the form of its blocks."""
        return whole_milliseconds(self.model, self.inputs, self.form)

    @cached_property
    def predictions(self) -> list[Tensor]:
        """Of the original model, for every batch."""
        return original_predictions(frozen_copy(self.model), self.batches, self.task)

    def without(self, paths: tuple[str, ...]) -> nn.Module:
        """A frozen copy of the model without some blocks."""
        return remove_blocks_(frozen_copy(self.model), [self.found.removable[path] for path in paths])

    def named(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The blocks that the user named; SettingError where one cannot be removed."""
        for name in names:
            if name not in self.found.removable:
                why = self.found.locked.get(name, "it is no residual block")
                have = ", ".join(self.found.removable)
                raise SettingError(f"blocks=({name!r}, ...): it cannot be removed: {why}; there are: {have}")
        scores = self._scores((), list(dict.fromkeys(names)))
        self.lines = {n: BlockLine(path=n, importance=scores[n], cost=self.costs[n]) for n in scores}
        return outermost(tuple(scores))

    def chosen(self, budget: Budget | None, count: int) -> tuple[str, ...]:
        """Blocks in the order of their removal, as many as meet the budget by counting, or `count` of them."""
        removed: tuple[str, ...] = ()
        with progress_bar(total=count or None, desc="choose blocks", unit="block") as bar:
            while len(removed) < count if budget is None else self._kept(removed, budget) > budget.kept * (1 + 1e-9):
                step = self._next(removed)
                if step is None:
                    raise ModelError(self._refusal(budget, count, removed))
                removed = outermost((*removed, step))
                bar.update()
        return removed if budget is None else self._needed(removed, budget)

    def _needed(self, removed: tuple[str, ...], budget: Budget) -> tuple[str, ...]:
        """Removed blocks without those that may stay after all, since later ones save more; the most important stay first."""
        for path in sorted(removed, key=lambda each: self.lines[each].importance, reverse=True):
            fewer = tuple(other for other in removed if other != path)
            if self._kept(fewer, budget) <= budget.kept * (1 + 1e-9):
                removed = fewer
        return removed

    def _next(self, removed: tuple[str, ...]) -> str | None:
        """The block with the lowest importance for its cost; None where none is left."""
        left = [p for p in self.found.removable if not stands_in(p, removed)]
        if not left:
            return None
        best, importance = self._ranked(removed, left)[0]
        self.lines[best] = BlockLine(path=best, importance=importance, cost=self.costs[best])
        return best

    def order(self) -> tuple[str, ...]:
        """All blocks, none of which is inside of another, in the order in which they go."""
        removed: tuple[str, ...] = ()
        at_once = math.ceil(len(self.found.removable) / ORDER_ROUNDS)
        with progress_bar(total=len(self.found.removable), desc="order blocks", unit="block") as bar:
            while left := [path for path in self.found.removable if path not in removed]:
                removed += tuple(path for path, _ in self._ranked(removed, left)[:at_once])
                bar.update(len(removed) - bar.n)
        return removed

    def _ranked(self, removed: tuple[str, ...], paths: list[str]) -> list[tuple[str, float]]:
        """Blocks with their importances without those that were removed, the lowest importance for its cost first."""
        scores = self._scores(removed, paths)

        def price(path: str) -> float:
            inside = sum(self.costs[done] for done in removed if done.startswith(f"{path}."))
            saved = max(self.costs[path] - inside, 1e-12)
            return scores[path] / saved if scores[path] > 0 else scores[path] * saved

        return [(path, scores[path]) for path in sorted(paths, key=price)]

    def _scores(self, removed: tuple[str, ...], paths: list[str]) -> dict[str, float]:
        return self.importance(
            BlockScoring(
                model=self.without(removed),
                blocks=[self.found.removable[path] for path in paths],
                batches=self.batches,
                predictions=self.predictions,
                task=self.task,
                samples=self.samples,
            )
        )

    def _kept(self, removed: tuple[str, ...], budget: Budget) -> float:
        """Fraction that stays, counted: of parameters for bytes, of milliseconds for a latency, which `measured` then corrects.

        Of MACs for a latency where costs are no milliseconds.
        """
        if budget.quantity == "latency" and self.times is not None:
            return 1 - sum(self.times[path] for path in removed) / self.milliseconds
        unit = count_parameters if budget.quantity in ("parameters", "bytes") else self._macs
        return unit(self.without(removed)) / max(1, unit(self.model))

    @cached_property
    def counted(self) -> Inputs:
        """What MACs are counted on, again and again: they are of one sample, and counting is slow."""
        return alike_rows(self.model, self.inputs, 2)

    def _macs(self, model: nn.Module) -> int:
        return count_macs(model, self.counted)

    def _refusal(self, budget: Budget | None, count: int, removed: tuple[str, ...]) -> str:
        wish, reached = f"{count} blocks to remove", f"there are only {len(removed)}"
        if budget is not None:
            wanted, least = percents(budget.kept, self._kept(removed, budget))
            wish, reached = f"{wanted} of the {budget.quantity}", f"only {least} can be reached"
        some = [f"{path}: {reason}" for path, reason in list(self.found.locked.items())[:MOST_LOCKED]]
        return f"{type(self.model).__name__}: wanted {wish}, {reached}; locked: {'; '.join(some) or 'none'}; ask for less"

    def plan(self, paths: tuple[str, ...]) -> BlockPlan:
        """The plan that removes some blocks."""
        blocks = tuple(self.found.removable[path] for path in paths)
        sizes = {
            f"{path}.{name}": tuple(p.shape)
            for path in paths
            for name, p in self.model.get_submodule(path).named_parameters(remove_duplicate=False)
        }
        return BlockPlan(
            blocks=blocks,
            lines=tuple(self.lines[path] for path in paths),
            unit="saved" if self.times is None else "ms",
            sizes=sizes,
            macs=self._macs(self.without(paths)),
            macs_before=self._macs(self.model),
            kept=len(outermost(tuple(p for p in self.found.removable if p not in paths and not inside(p, paths)))),
            locked=self.found.locked,
        )

    def measured(self, plan: BlockPlan, budget: Budget | None) -> BlockPlan:
        """The plan; for a budget that is measured, with as many blocks as the exported files need."""
        if budget is None or (quantity := measured_quantity(budget)) is None:
            return plan
        order, best, grew = plan.paths, None, False
        with ExportedCandidates(self.model, self.inputs, quantity, self.form) as candidates:
            for _ in range(MOST_MEASURED):
                reached, note = candidates.measure(self.without(order))
                if reached <= budget.kept:
                    best = self.plan(order).noted(note)
                    if grew or len(order) < 2:
                        break
                    order = order[:-1]  # counting may have removed more than it takes
                    continue
                if best is not None or (step := self._next(order)) is None:
                    break
                order, grew = outermost((*order, step)), True
        failure = None if best is None else check_blocks(self.model, best.paths, self.inputs)
        if best is None or failure is not None:
            wanted, least = percents(budget.kept, reached)
            raise ModelError(
                f"{type(self.model).__name__}: wanted {wanted} of the {quantity}; the least that was measured is"
                f" {least}, without {', '.join(order)}{'' if failure is None else f' ({failure})'}; ask for less"
            )
        return best
