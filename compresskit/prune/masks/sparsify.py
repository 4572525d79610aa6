"""`Sparsify` and `Densify`: the stages that put masks on a model, at once or on a schedule, and take them off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from compresskit.base.budget import Budget, Budgeted, Quantity, remove
from compresskit.base.errors import SettingError
from compresskit.base.inputs import calibration_inputs
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import Masks, detach_masks_, masks_of
from compresskit.graph.surgery import frozen_copy
from compresskit.prune.allocations import Allocation, check_allocation
from compresskit.prune.criteria import EVIDENCE, WEIGHT_EVIDENCE, Criterion, check_criterion, l2, needs_of, reads_calibration
from compresskit.prune.masks.gradual import GradualMasks
from compresskit.prune.masks.maskable import by_tensor, fitting, maskable, unmasked_weights
from compresskit.prune.masks.plan_mask import MASK_QUANTITIES, check_pattern, plan_mask, removed_fraction
from compresskit.prune.masks.rewind import Rewind
from compresskit.prune.patterns import UNSTRUCTURED, Pattern
from compresskit.prune.schedules import RatioSchedule, check_schedule
from compresskit.train.batchnorm import norms_with_statistics, reestimate_batchnorm_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sparsify(Budgeted, Stage):
    """Set weights to zero under masks, which all later stages keep at zero.

    Args:
        budget: how many of the maskable weights to remove, such as `ck.remove(weights=0.9)`; left out where the pattern (N:M) or
            the allocation prescribes ratios.
        pattern, criterion, allocation, protect, include: see `plan_mask`.
        finetune: training under the masks, with a learning-rate schedule of its own; None trains nothing and re-estimates
            BatchNorm statistics.
        schedule: when weights are removed during fine-tuning, such as `schedules.Cubic()`; None removes all of them before it.
        until: fraction of the fine-tuning after which the masks no longer change.
        updates: how often they change until then.
        regrow: fraction of the remaining weights that is dropped and regrown by gradient at an update (RigL, 1911.11134: 0.3).
        memory: on a schedule, scores of criteria that read gradients are summed over the steps and multiplied by this after each
            update (1 sums over the whole training, as movement pruning does; 0 starts anew).
        rewind: reset the remaining weights to an earlier point of the preceding training: `rewind(to=0.33)`.
        samples: samples for criteria that read data, and for BatchNorm statistics.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = MASK_QUANTITIES
    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"float"})

    budget: Budget | None = None
    pattern: Pattern = UNSTRUCTURED
    criterion: Criterion = l2
    allocation: Allocation | Mapping[str, float] | None = None
    protect: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    finetune: Train | None = None
    schedule: RatioSchedule | None = None
    until: float = 0.7
    updates: int = 30
    regrow: float = 0.0
    memory: float = 1.0
    rewind: Rewind | None = None
    samples: int = 1024

    def __post_init__(self) -> None:
        check_field_types(self)
        check_pattern(self.pattern, "Sparsify")
        check_allocation(self.allocation, "Sparsify")
        if isinstance(self.allocation, Mapping):
            if self.budget is not None or self.pattern.fixed is not None:
                raise SettingError(
                    "Sparsify(allocation=...): a ratio for each layer leaves no room for budget= or an N:M pattern"
                )
        else:
            removed_fraction(self.budget, self.pattern, "Sparsify")
        check_criterion(self.criterion, "Sparsify", WEIGHT_EVIDENCE)
        if self.schedule is not None:
            check_schedule(self.schedule, "Sparsify")
            if other := needs_of(self.criterion) - {"gradients"}:
                raise SettingError(
                    f"Sparsify(schedule=...): a schedule cannot follow a criterion that reads {EVIDENCE[min(other)]}; leave"
                    " schedule out, or take another"
                )
        if self.finetune is None and (self.schedule is not None or self.rewind is not None):
            given = "schedule" if self.schedule is not None else "rewind"
            raise SettingError(f"Sparsify({given}=...): it is part of a training; pass finetune=Train(...)")
        if self.rewind is not None and (self.schedule is not None or not isinstance(self.rewind, Rewind)):
            raise SettingError(f"Sparsify(rewind=...): wanted rewind(to=...) and no schedule, got {self.rewind!r}")
        if self.rewind is not None and self.finetune is not None:
            self.rewind.rest(self.finetune)  # raises where its schedule has no rest
        if not 0 < self.until <= 1:
            raise SettingError(f"Sparsify(until=...): wanted a fraction of the training in (0, 1], got {self.until}")
        if self.updates < 1 or self.samples < 1:
            raise SettingError(f"Sparsify(updates=..., samples=...): wanted at least 1, got {self.updates} and {self.samples}")
        if not 0 <= self.regrow < 1 or not 0 <= self.memory <= 1:
            raise SettingError(
                f"Sparsify(regrow=..., memory=...): wanted regrow in [0, 1), memory in [0, 1], got {self.regrow}, {self.memory}"
            )
        if self.regrow and (self.schedule is None or self.pattern.fixed is not None):
            raise SettingError("Sparsify(regrow=...): growing needs a schedule, such as schedules.Constant(), and no N:M pattern")

    @property
    def rewinds_to(self) -> float | None:
        """The fraction of the preceding training that `rewind` asks for."""
        return None if self.rewind is None else self.rewind.to

    def calibration_samples(self, model: nn.Module) -> int:
        averages = self.schedule is None and self.rewind is None and norms_with_statistics(model)
        return self.samples if reads_calibration(self.criterion) or averages else 0

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        guided = task if task.reference is not None else replace(task, reference=frozen_copy(model))
        masks = self._first_masks(model, task)
        log.info("%s", masks)
        if self.rewind is not None:
            self.rewind.apply_(model, task)
        masks.apply_(model)
        if self.schedule is None and self.rewind is None:
            reestimate_batchnorm_(model, calibration_inputs(task, self.samples, "re-estimate BatchNorm"))
        if self.finetune is not None:
            train = self.finetune if self.rewind is None else self.rewind.rest(self.finetune)
            gradual = None if self.schedule is None else self._gradual(model)
            if gradual is None:
                fit_(model, guided, train, label="sparsify")
            else:
                fit_(
                    model, guided, train, setup=gradual.setup, after_step=[gradual.count], resumables=[gradual], label="sparsify"
                )
                if not gradual.finished:
                    replace(self, schedule=None, regrow=0.0, finetune=None)(model, task)
        return model.eval()

    def _first_masks(self, model: nn.Module, task: Task) -> Masks:
        """The masks before fine-tuning: the final ones, or the first of the schedule."""
        budget, allocation = self.budget, self.allocation
        if self.schedule is not None and self._largest_ratio(0.0) == 0:
            # Nothing is removed yet, so nothing is scored; masks of the model stay.
            old = masks_of(model)
            weights, left = fitting(model, self.pattern, self.protect, self.include, self._ratios(model))
            masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
            masks |= {} if old is None else dict(old.masks)
            return Masks(dict(sorted(masks.items())), left, unmasked_weights(model, masks))
        if self.schedule is not None and isinstance(allocation, Mapping):
            allocation = {name: self.schedule(0.0, end=r) for name, r in allocation.items()}
        elif self.schedule is not None and budget is not None and self.pattern.fixed is None:
            budget = remove(weights=self.schedule(0.0, end=budget.removed))
        return plan_mask(
            model,
            budget,
            pattern=self.pattern,
            criterion=self.criterion,
            allocation=allocation,
            protect=self.protect,
            include=self.include,
            task=task,
            samples=self.samples,
        )

    def _largest_ratio(self, done: float) -> float:
        """The largest ratio of any layer at a point of the schedule."""
        assert self.schedule is not None
        ends = self.allocation.values() if isinstance(self.allocation, Mapping) else [self._ratio()]
        return max(self.schedule(done, end=end) for end in ends)

    def _ratio(self) -> float:
        """The ratio of all layers together; 0 where each layer has its own."""
        return 0.0 if isinstance(self.allocation, Mapping) else removed_fraction(self.budget, self.pattern, "Sparsify")

    def _ratios(self, model: nn.Module) -> dict[str, float] | None:
        """Ratios by tensor, if the allocation prescribes them."""
        return by_tensor(model, self.allocation, self.include) if isinstance(self.allocation, Mapping) else None

    def _gradual(self, model: nn.Module) -> GradualMasks:
        assert self.schedule is not None
        ratios = self._ratios(model)
        names = [
            n
            for n, w in maskable(model, self.protect, self.include).items()
            if not self.pattern.fits(w.shape) and (ratios is None or n in ratios)
        ]
        return GradualMasks(
            model=model,
            pattern=self.pattern,
            criterion=self.criterion,
            schedule=self.schedule,
            ratio=self._ratio(),
            ratios=None if ratios is None else {name: ratios[name] for name in names},
            allocation=None if isinstance(self.allocation, Mapping) else self.allocation,
            until=self.until,
            updates=self.updates,
            swap=self.regrow,
            memory=self.memory,
            names=tuple(names),
        )


@dataclass(frozen=True, kw_only=True)
class Densify(Stage):
    """Remove the masks: all weights may change again, those at zero included.

    Between `Sparsify` and another training it makes dense-sparse-dense (Han et al., 1607.04381).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    restores: ClassVar[frozenset[str]] = frozenset({"dense"})

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        if masks_of(model) is None:
            warnings.warn(f"Densify: this {type(model).__name__} carries no masks; nothing was done", stacklevel=2)
        detach_masks_(model)
        return model
