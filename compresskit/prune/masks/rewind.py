"""Rewinding: the weights that remain after pruning restart from their values earlier in the training (Renda et al., 2003.02389).

learning-rate rewinding     finetune=rewind(to=0.33).rest(train): keep the weights, run the rest of the schedule again
weight rewinding            Sparsify(rewind=rewind(to=0.33)): weights of a third of the training, and its schedule from there;
                            Prune(rewind=rewind(to=0.33)): the same for the channels that remain
lottery tickets             LotteryTicket: to the beginning, several times (Frankle & Carbin, 1803.03635)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from compresskit.base.budget import Budget, Budgeted, Quantity, remove
from compresskit.base.errors import SettingError
from compresskit.base.settings import check_field_types
from compresskit.base.stage import Stage
from compresskit.base.task import Task
from compresskit.graph.masks import Masks
from compresskit.prune.allocations import Allocation, check_allocation
from compresskit.prune.criteria import WEIGHT_EVIDENCE, Criterion, check_criterion, l2, reads_calibration
from compresskit.prune.masks.plan_mask import MASK_QUANTITIES, check_pattern, plan_mask, removed_fraction
from compresskit.prune.patterns import UNSTRUCTURED, Pattern
from compresskit.train.lr import tail_of
from compresskit.train.snapshots import rewind_
from compresskit.train.train import Train, fit_

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """A point of the preceding training. to: the fraction of it that was done, in [0, 1); 0 is its beginning."""

    to: float = 0.33

    def __post_init__(self) -> None:
        if not isinstance(self.to, int | float) or not 0 <= self.to < 1:
            raise SettingError(f"rewind(to=...): wanted a share of the training, in [0, 1), got {self.to}")

    def rest(self, train: Train) -> Train:
        """The same training with the rest of its learning-rate schedule, stretched over all its epochs."""
        return replace(train, schedule=tail_of(train.schedule, self.to))

    def apply_(self, model: nn.Module, task: Task) -> None:
        """Rewind the weights; raises SettingError where the preceding training kept no snapshot."""
        state = (task.snapshots or {}).get(self.to)
        if not state:
            raise SettingError(
                f"rewind(to={self.to}): no weights were kept there; in a Recipe put it directly after the training, alone give"
                f" that training Task(snapshots={{{self.to}: {{}}}}), and this stage the same task"
            )
        rewind_(model, state)


def rewind(*, to: float = 0.33) -> Rewind:
    """Rewind weights to a point of the preceding training: a setting of `Sparsify`, `Prune` and `LotteryTicket`.

    to: the fraction of that training that was done, in [0, 1).
    """
    return Rewind(to=to)


def shuffled(masks: Masks) -> Masks:
    """Masks with the same number of zeros in every tensor at random positions: the control of a lottery ticket."""
    drawn = {}
    for name, mask in masks.masks.items():
        order = torch.randperm(mask.numel()).to(mask.device)
        drawn[name] = mask.flatten()[order].view(mask.shape)
    return replace(masks, masks=drawn)


@dataclass(frozen=True, kw_only=True)
class LotteryTicket(Budgeted, Stage):
    """Find a sparse network that trains well from its initial weights: train, mask, rewind, again (Frankle & Carbin, 1803.03635).

    Args:
        budget: how many of the maskable weights to remove in the end, such as `ck.remove(weights=0.8)`; every round removes the
            same fraction of those that remain.
        train: every training, that of the final network (the ticket) included.
        rounds: how often to train, mask and rewind before it.
        rewind: to where; the beginning, or for deep networks a little later (Frankle et al., 1912.05671).
        control: `(masks) -> masks` changes the final masks before the ticket is trained: `shuffled` keeps only their ratios. A
            ticket that is no better than its control owes nothing to the choice of weights.
        pattern, criterion, allocation, protect, include, samples: see `plan_mask`.
    """

    quantities: ClassVar[tuple[Quantity, ...]] = MASK_QUANTITIES
    needs: ClassVar[frozenset[str]] = frozenset({"float"})
    keeps: ClassVar[frozenset[str]] = frozenset({"float"})

    budget: Budget | None = None
    train: Train
    rounds: int = 5
    rewind: Rewind = Rewind(to=0.0)
    control: Callable[[Masks], Masks] | None = None
    pattern: Pattern = UNSTRUCTURED
    criterion: Criterion = l2
    allocation: Allocation | Mapping[str, float] | None = None
    protect: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    samples: int = 1024

    def __post_init__(self) -> None:
        check_field_types(self)
        check_pattern(self.pattern, "LotteryTicket")
        check_allocation(self.allocation, "LotteryTicket")
        check_criterion(self.criterion, "LotteryTicket", WEIGHT_EVIDENCE)
        removed_fraction(self.budget, self.pattern, "LotteryTicket")
        if not isinstance(self.train, Train):
            raise SettingError(f"LotteryTicket(train=...): wanted Train(...), got {type(self.train).__name__}")
        if not isinstance(self.rewind, Rewind):
            raise SettingError(f"LotteryTicket(rewind=...): wanted rewind(to=...), got {self.rewind!r}")
        self.rewind.rest(self.train)  # raises where its schedule has no rest
        if self.rounds < 1:
            raise SettingError(f"LotteryTicket(rounds=...): wanted a whole number >= 1, got {self.rounds}")
        if isinstance(self.allocation, Mapping) and self.rounds > 1:
            raise SettingError("LotteryTicket(allocation=...): a ratio for each layer cannot be reached in several rounds; pass a"
                               " function such as erk_ratios, or rounds=1")  # fmt: skip
        if self.pattern.fixed is not None and self.rounds > 1:
            raise SettingError(f"LotteryTicket(rounds=...): {self.pattern} is reached in one round, got {self.rounds}")

    @property
    def starts_from_trained(self) -> bool:
        """False: it trains the incoming model, and keeps the snapshots it rewinds to itself."""
        return False

    def calibration_samples(self, model: nn.Module) -> int:
        return self.samples if reads_calibration(self.criterion) else 0

    def __call__(self, model: nn.Module, task: Task) -> nn.Module:
        model = model.to(task.device)
        own = replace(task, snapshots={self.rewind.to: {}})
        how = self.train
        for done in range(1, self.rounds + 1):
            fit_(model, own, how, label=f"round {done}/{self.rounds}")
            masks = self._plan(model, task, done / self.rounds)
            log.info("round %d: %s", done, masks)
            if done == self.rounds and self.control is not None:
                masks = self.control(masks)
            self.rewind.apply_(model, own)
            masks.apply_(model)
            how = self.rewind.rest(self.train)
        return fit_(model, own, how, label="ticket")

    def _plan(self, model: nn.Module, task: Task, done: float) -> Masks:
        own = isinstance(self.allocation, Mapping) or self.pattern.fixed is not None  # a ratio that no budget sets
        ratio = removed_fraction(self.budget, self.pattern, "LotteryTicket")
        return plan_mask(
            model,
            None if own else remove(weights=1 - (1 - ratio) ** done),
            pattern=self.pattern,
            criterion=self.criterion,
            allocation=self.allocation,
            protect=self.protect,
            include=self.include,
            task=task,
            samples=self.samples,
        )
