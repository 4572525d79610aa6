"""`Prune`: the stage that removes channels: sparse learning, one or more pruning steps with repair, fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from compresskit.base.budget import Budget, Budgeted, Quantity, check_budget, keep
from compresskit.base.distributed import on_rank_zero, world_size
from compresskit.base.errors import ModelError, SettingError
from compresskit.base.inputs import calibration_inputs
from compresskit.base.settings import check_field_types
from compresskit.base.stage import PROPERTIES, Stage
from compresskit.base.task import Task
from compresskit.graph.surgery import copy_model, frozen_copy
from compresskit.measure import count_parameters
from compresskit.prune.channels.plan_channels import check_functions, plan_channels
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.channels.resources import PRUNABLE, Limits, counted_unit, measured_quantity
from compresskit.prune.channels.sparse_learning import GReg, GroupLasso, group_lasso
from compresskit.prune.criteria import CHANNEL_EVIDENCE, Criterion, check_criterion, l2, reads_calibration
from compresskit.prune.masks.rewind import Rewind
from compresskit.prune.normalizers import Normalizer, by_mean
from compresskit.prune.rankings import Ranking, cost_aware
from compresskit.prune.schedules import Linear, RatioSchedule, check_schedule
from compresskit.prune.structure.plan import Plan, apply_
from compresskit.train.batchnorm import norms_with_statistics, reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Prune(Budgeted, Stage):
    """Remove channels, in one step or more; after each, refit layers and re-estimate BatchNorm; fine-tune at the end.

    Args:
        budget: how much stays, such as `ck.keep(macs=0.5)`; see `plan_channels`.
        criterion: scores channels, see `prune.criteria`.
        ranking, normalize: how groups of channels compete, see `plan_channels`.
        reconstruct: refit the layers that lost inputs by least squares, on calibration inputs without labels; right after pruning
            this is worth more than any criterion.
        learn: training before the first step under a penalty that empties channels. Its objective is `group_lasso(...)` or
            `greg(...)`, or any other, to which `group_lasso` is then added.
        steps: number of pruning steps.
        schedule: how much is removed after each step, see `prune.schedules`; the last step ends at the budget.
        between: training after each step but the last.
        finetune: training after the last step, with a learning-rate schedule of its own; None trains nothing.
        rewind: weights of an earlier point continue in the channels that the trained network chose (weight rewinding, Renda et
            al., 2003.02389); `finetune` then trains them. `rewind(to=0.33)` takes the weights of a third of the preceding
            training, and the rest of the schedule of `finetune`; a module, a checkpoint of your own, takes the whole schedule.
        samples: samples for criteria that read more than weights, for refitting and for BatchNorm statistics.
        round_to, minimum, ratios, ignore, inside, whole_heads: as in `plan_channels`.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = PRUNABLE
    needs: ClassVar[frozenset[str]] = PROPERTIES

    budget: Budget
    criterion: Criterion = l2
    ranking: Ranking = cost_aware
    normalize: Normalizer = by_mean
    reconstruct: bool = True
    learn: Train | None = None
    steps: int = 1
    schedule: RatioSchedule = field(default_factory=Linear)
    between: Train | None = None
    finetune: Train | None = None
    rewind: Rewind | nn.Module | None = None
    samples: int = 3072
    round_to: int = 8
    minimum: int = 1
    ratios: Mapping[str, float] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    inside: str | None = None
    whole_heads: bool = False

    def __post_init__(self) -> None:
        check_budget(self.budget, "Prune(budget=...)", PRUNABLE)
        check_field_types(self)
        Limits(round_to=self.round_to, minimum=self.minimum, ratios=self.ratios).check("Prune()")
        check_criterion(self.criterion, "Prune", CHANNEL_EVIDENCE)
        check_functions("Prune", ranking=self.ranking, normalize=self.normalize)
        check_schedule(self.schedule, "Prune")
        for name in ("samples", "steps"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SettingError(f"Prune({name}=...): wanted a whole number >= 1, got {getattr(self, name)!r}")
        if self.steps > 1 and (self.ratios or measured_quantity(self.budget)):
            raise SettingError("Prune(steps=...): more than one step wants a budget of macs, parameters or channels, no ratios=")
        if self.between is not None and self.steps == 1:
            raise SettingError("Prune(between=...): there is nothing between the cuts of one step; set steps, or use finetune")
        if self.rewind is not None and not isinstance(self.rewind, Rewind | nn.Module):
            raise SettingError(
                "Prune(rewind=...): wanted rewind(to=...), a point of the preceding training, or an earlier checkpoint of the"
                f" same network, a module, got {self.rewind!r}"
            )
        if self.rewind is not None and self.finetune is None:
            raise SettingError("Prune(rewind=...): rewound weights must be trained again; set finetune")
        if isinstance(self.rewind, Rewind) and self.finetune is not None:
            self.rewind.rest(self.finetune)  # raises where its schedule has no rest

    @property
    def rewinds_to(self) -> float | None:
        """The fraction of the preceding training that `rewind` asks for."""
        return self.rewind.to if isinstance(self.rewind, Rewind) else None

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples if self.reconstruct or norms_with_statistics(model) or reads_calibration(self.criterion) else 0

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        early, finetune = self._rewound(model, task), self.finetune
        if isinstance(self.rewind, Rewind) and finetune is not None:
            task, finetune = replace(task, snapshots=None), self.rewind.rest(finetune)
        dense = frozen_copy(model)
        guided = task if task.reference is not None else replace(task, reference=dense)
        if self.learn is not None:
            objective = self.learn.objective
            sparse = objective if isinstance(objective, GroupLasso | GReg) else group_lasso(objective)
            fit_(model, guided, self.learn, objective=sparse, label="learn sparsely")
        plans: list[Plan] = []
        kept = 1.0
        for step in range(1, self.steps + 1):
            target = self._fraction_after(step)
            if target < kept * (1 - 1e-6) or self.steps == 1:
                plan = self._plan(model, task, target / kept)
                self._check_counts(model, plan)
                plans.append(plan)
                log.info("%s", plan)
                kept = self._kept(kept, target, model, plan)
                self._apply_and_repair_(model, plan, task)
            if self.between is not None and step < self.steps:
                fit_(model, guided, self.between, label=f"step {step} of {self.steps}")
        if early is not None:
            model = replayed(early, plans).to(task.device)
        if finetune is not None:
            fit_(model, guided, finetune, label="fine-tune")
        return model.eval()

    def _rewound(self, model: nn.Module, task: Task) -> nn.Module | None:
        """The whole network with the weights of the earlier point; None without rewinding."""
        if not isinstance(self.rewind, Rewind):
            return self.rewind
        early = copy_model(model)
        self.rewind.apply_(early, task)
        return early

    def _fraction_after(self, step: int) -> float:
        """Fraction of the first model that stays after a step: never less than the budget, and exactly that after the last."""
        if step == self.steps:
            return self.budget.kept
        return max(self.budget.kept, 1 - self.schedule(step / self.steps, end=1 - self.budget.kept))

    def _plan(self, model: nn.Module, task: Task, fraction: float) -> Plan:
        def made() -> dict[str, Any]:
            return self._fresh_plan(model, task, fraction).to_json()

        if self.budget.quantity == "latency" and task.progress is not None:
            return Plan.from_json(task.progress.decide(made))  # a resumed stage keeps the plan that was measured
        return self._fresh_plan(model, task, fraction) if world_size() == 1 else Plan.from_json(on_rank_zero(made))

    def _fresh_plan(self, model: nn.Module, task: Task, fraction: float) -> Plan:
        return plan_channels(
            model,
            task.example(),
            keep(**{self.budget.quantity: fraction}),
            criterion=self.criterion,
            ranking=self.ranking,
            normalize=self.normalize,
            task=task,
            samples=self.samples,
            round_to=self.round_to,
            minimum=self.minimum,
            ratios=self.ratios,
            ignore=self.ignore,
            inside=self.inside,
            whole_heads=self.whole_heads,
        )

    def _check_counts(self, model: nn.Module, plan: Plan) -> None:
        """Raise ModelError for a budget of MACs where the model has none: nothing could go, and all would be kept."""
        if self.budget.quantity == "macs" and plan.macs_before == 0:
            raise ModelError(
                f"Prune(budget=...): wanted {self.budget.kept:.1%} of the MACs of {type(model).__name__}, which has none"
                " (lookups in tables and products of values are not counted); ask for a share of the parameters or bytes, such as"
                f" ck.keep(parameters={self.budget.kept:g})"
            )

    def _kept(self, kept: float, target: float, model: nn.Module, plan: Plan) -> float:
        """Fraction of the first model that stays after a plan, in the unit of the budget."""
        unit = counted_unit(self.budget)
        if unit == "MACs":
            return kept * plan.macs / plan.macs_before if plan.macs_before else target
        if unit == "parameters":
            return kept * count_parameters(apply_(copy_model(model), plan)) / count_parameters(model)
        # Of the channels, as many as the steps of the widths let go: often more than were to go.
        return kept * sum(line.keep for line in plan.lines) / max(1, sum(line.size for line in plan.lines))

    def _apply_and_repair_(self, model: nn.Module, plan: Plan, task: Task) -> None:
        before = frozen_copy(model) if self.reconstruct else None
        apply_(model, plan)
        if before is not None:
            reconstruct_(model, before, plan, calibration_inputs(task, self.samples, "refit"))
        reestimate_batchnorm_(model, calibration_inputs(task, self.samples, "re-estimate BatchNorm"))


def replayed(model: nn.Module, plans: Plan | list[Plan]) -> nn.Module:
    """Apply plans to a copy of another checkpoint of the same network: weight rewinding for channels.

    Args:
        model: the other checkpoint.
        plans: one plan, or those of several steps in their order.

    Raises:
        ModelError: the tensors are not those that the plans were made for.
    """
    model = copy_model(model)
    for plan in [plans] if isinstance(plans, Plan) else plans:
        apply_(model, plan)
    return model
