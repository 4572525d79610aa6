"""Masks that change during training: a schedule removes more and more weights, and some may grow again (RigL).

at each of `updates` steps, on the fp32 weights that the optimizer has just updated:
    drop    the units with the lowest scores, down to (1 - swap) * (1 - ratio) of all
    grow    those with the largest gradients, up to (1 - ratio)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.distributed import all_reduce_mean_
from compresskit.graph.masks import Masks, masks_of
from compresskit.prune.allocations import Allocation
from compresskit.prune.criteria import Criterion, needs_of
from compresskit.prune.masks.plan_mask import broadcast_masks, keep_best, unit_sizes, without
from compresskit.prune.patterns import Pattern
from compresskit.prune.schedules import RatioSchedule
from compresskit.prune.scores import check_scores, weight_slices


@dataclass(kw_only=True)
class GradualMasks:
    """Updates the masks of a model while it is trained; `setup` and `count` are hooks of `fit_`.

    ratio, or ratios by tensor: at the end. until: fraction of the training after which masks no longer change. updates: how often
    they change until then. swap: fraction of the remaining weights that is dropped and regrown at an update, falling to 0 along
    half a cosine. memory: factor on the summed scores of criteria that read gradients, after each update.
    """

    model: nn.Module
    pattern: Pattern
    criterion: Criterion
    schedule: RatioSchedule
    ratio: float
    ratios: Mapping[str, float] | None
    allocation: Allocation | None
    until: float
    updates: int
    swap: float
    memory: float
    names: tuple[str, ...]
    step: int = 0
    grads: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def setup(self, run: Any, steps: int) -> Callable[[], None]:
        """Hook into a run of `steps` steps; returns a function that removes the hooks."""
        parameters = dict(self.model.named_parameters())
        carried = masks_of(self.model)
        assert carried is not None, "attach masks first"
        self.masks = {name: carried.masks[name] for name in self.names}
        before = Masks({name: mask.clone() for name, mask in self.masks.items()})
        self.floor, self.floors = before.ratio, before.ratios()
        self.parameters = {name: parameters[name] for name in self.names}
        self.last = max(1, round(self.until * steps))
        self.due = {max(1, round(i * self.last / self.updates)) for i in range(1, self.updates + 1)}
        self.reads = "gradients" in needs_of(self.criterion)
        # Before the hooks that hold masks: these must see gradients of removed weights too.
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        handles = [p.register_hook(partial(self._add_gradient, name)) for name, p in trained.items()]
        hook = partial(self._update, run)
        run.after_update.append(hook)

        def release() -> None:
            run.after_update.remove(hook)
            for handle in handles:
                handle.remove()

        return release

    def count(self, step: int, steps: int) -> None:
        """Called after every step, also after those that an overflow skipped: the schedule advances."""
        self.step = step
        self.grads.clear()

    def resume_state(self) -> dict[str, Any]:
        """Where the schedule is, and the scores that were summed so far."""
        return {"step": self.step, "due": sorted(self.due), "sums": self.sums}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Go on from what `resume_state` gave."""
        self.step, self.due, self.sums = state["step"], set(state["due"]), dict(state["sums"])

    @property
    def finished(self) -> bool:
        """Whether the last update was made; it was not if an overflow skipped all steps from there on."""
        return not self.due

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        if self.due:
            found = gradient.detach().float()
            self.grads[name] = self.grads[name] + found if name in self.grads else found

    def _update(self, run: Any) -> None:
        if not self.due:
            return
        step = self.step + 1
        weights = run.named_masters()
        scale = 1.0 if run.scaler is None else run.scaler.scale
        grads = {name: self.grads.pop(name) / scale for name in self.names if name in self.grads}
        if self.reads or step >= min(self.due):
            all_reduce_mean_(list(grads.values()))  # of all processes: what one process would see
        with torch.no_grad():
            if self.reads:
                self._add_scores({n: self._score(n, weights[n], grads) for n in self.names})
            if step < min(self.due):
                return
            self.due = {later for later in self.due if later > step}
            scores = self.sums if self.reads else {n: self._score(n, weights[n], {}) for n in self.names}
            kept = broadcast_masks(
                self._choose(min(1.0, step / self.last), without(scores, self.masks, self.pattern), weights, grads)
            )
            for name, mask in self.masks.items():
                mask.copy_(self.pattern.spread(kept[name], mask.shape))
            self.sums = {name: total * self.memory for name, total in scores.items()} if self.reads else {}

    def _score(self, name: str, weight: Tensor, grads: Mapping[str, Tensor]) -> Tensor:
        rows = weight_slices(weight, self.pattern, grad=grads.get(name, torch.zeros_like(weight)) if self.reads else None)
        return check_scores(self.criterion(rows), len(rows.weight), name).double()

    def _add_scores(self, scores: dict[str, Tensor]) -> None:
        self.sums = {name: self.sums[name] + s if name in self.sums else s for name, s in scores.items()}

    def _choose(
        self, done: float, scores: dict[str, Tensor], weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        swap = self.swap / 2 * (1 + math.cos(math.pi * done))
        ratio, shared = self._ratios_at(done, weights)
        lower = None if shared is None else {n: 1 - (1 - swap) * (1 - r) for n, r in shared.items()}
        widths = unit_sizes(scores, weights)
        kept = keep_best(scores, 1 - (1 - swap) * (1 - ratio), self.pattern, lower, widths)
        # Fewer units may remain than the ratio asks for: removed ones come back by their gradient below, not by score.
        kept = {name: k & ~scores[name].isneginf() for name, k in kept.items()}
        if self.pattern.fixed is not None:
            return kept
        found = {name: grads.get(name, torch.zeros_like(weights[name])) for name in kept}
        sizes = {n: torch.linalg.vector_norm(self.pattern.rows(g), dim=1).double() for n, g in found.items()}
        grown = {n: s.masked_fill(kept[n], math.inf) for n, s in sizes.items()}
        return keep_best(grown, ratio, self.pattern, shared, widths)

    def _ratios_at(self, done: float, weights: Mapping[str, Tensor]) -> tuple[float, Mapping[str, float] | None]:
        """The ratio at a point of the schedule, and the ratios by tensor; never less than before the training."""
        if self.ratios is not None:
            return 0.0, {name: max(self.floors[name], self.schedule(done, end=r)) for name, r in self.ratios.items()}
        ratio = max(self.floor, self.schedule(done, end=self.ratio))
        if self.allocation is None:
            return ratio, None
        shared = self.allocation({name: weights[name] for name in self.names}, ratio)
        return ratio, {name: max(self.floors[name], r) for name, r in shared.items()}
