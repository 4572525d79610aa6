"""Sparse learning: objectives that empty channels during training, so that cutting them afterwards costs little.

Prune(budget=keep(macs=0.5), learn=Train(epochs=10, objective=group_lasso(strength=1e-4)))
Train(epochs=10, objective=greg(plan_channels(model, example, keep(macs=0.5))))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.objective import Losses, LossFunction, Objective, as_objective
from compresskit.base.task import Task
from compresskit.graph.surgery import get_tensor, owner
from compresskit.prune.channels.plan_channels import analyze_channels
from compresskit.prune.structure.groups import NORM_LAYERS, ChannelGroup
from compresskit.prune.structure.plan import Plan
from compresskit.train.objective import Supervised


class Wrapper(Objective):
    """An objective that adds to the losses of another, `objective`, and passes the calls of the training loop on to it."""

    objective: Objective

    def advance(self, done: float) -> None:
        """Pass it on."""
        self.objective.advance(done)

    def close(self) -> None:
        """Pass it on."""
        self.objective.close()

    def resume_state(self) -> Any:
        """State of the objective inside."""
        return self.objective.resume_state()

    def resume_from_(self, state: Any) -> None:
        """Pass it on."""
        self.objective.resume_from_(state)


@dataclass(frozen=True, kw_only=True)
class GroupLasso(Wrapper):
    """An objective with a penalty on the norm of every channel; see `group_lasso`."""

    objective: Objective = field(default_factory=Supervised)
    strength: float = 1e-4
    ignore: tuple[str, ...] = ()
    groups: tuple[ChannelGroup, ...] = field(default=(), repr=False)
    model: nn.Module | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.strength > 0:
            raise SettingError(f"group_lasso(strength=...): wanted a positive number, got {self.strength}")

    def bind(self, model: nn.Module, task: Task) -> GroupLasso:
        """The same objective for a model whose groups are found, and a task."""
        analysis, _, _ = analyze_channels(model, task.example(), ignore=self.ignore)
        return GroupLasso(
            objective=self.objective.bind(model, task), strength=self.strength, groups=tuple(analysis.groups), model=model
        )

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        assert self.model is not None, "bind first"
        penalty = torch.stack([_norms(group, self.model).sum() for group in self.groups]).sum()
        return {**self.objective(model, batch), "group_lasso": self.strength * penalty}


def group_lasso(
    objective: Objective | LossFunction | None = None, *, strength: float = 1e-4, ignore: tuple[str, ...] = ()
) -> GroupLasso:
    """The objective (by default the task's loss) and a group lasso on channels (Wen et al., 1608.03665, eq. 4).

    For every channel that could be cut, the Euclidean norm of all weights that would vanish with it, the factors of its norms
    included, times `strength` and the square root of their number: whole channels are driven to zero, together in all layers.
    """
    return GroupLasso(objective=_inner(objective), strength=strength, ignore=ignore)


def _inner(objective: Objective | LossFunction | None) -> Objective:
    return Supervised() if objective is None else as_objective(objective)


def _norms(group: ChannelGroup, model: nn.Module) -> Tensor:
    """(units,) root of the number of values times their Euclidean norm; differentiable."""
    squares, count = [], 0
    for (name, dim, _), indices in group.indices.items():
        tensor = get_tensor(model, name)
        module, leaf = owner(model, name)
        if not isinstance(tensor, nn.Parameter) or (
            tensor.ndim < 2 and not (isinstance(module, NORM_LAYERS) and leaf == "weight")
        ):
            continue
        rows = tensor.float().movedim(dim, 0)[indices.to(tensor.device)].reshape(group.size, -1)
        squares.append(rows.square().sum(1))
        count += rows.shape[1]
    # The gradient of a norm is not defined at zero; a channel that got there stays.
    return (count * torch.stack(squares).sum(0) + 1e-12).sqrt()


@dataclass(kw_only=True)
class GReg(Wrapper):
    """An objective with a growing penalty on the channels of a plan; see `greg`."""

    plan: Plan
    objective: Objective = field(default_factory=Supervised)
    growth: float = 1e-4
    model: nn.Module | None = field(default=None, repr=False)
    calls: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if not self.growth > 0:
            raise SettingError(f"greg(growth=...): wanted a positive number, got {self.growth}")

    def bind(self, model: nn.Module, task: Task) -> GReg:
        """The same objective for a model and a task, at the beginning of its growth."""
        return GReg(plan=self.plan, objective=self.objective.bind(model, task), growth=self.growth, model=model)

    def resume_state(self) -> dict[str, Any]:
        """The number of calls, and the state of the objective inside."""
        return {"calls": self.calls, "inside": self.objective.resume_state()}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Take it over."""
        self.calls = state["calls"]
        if state["inside"] is not None:
            self.objective.resume_from_(state["inside"])

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        assert self.model is not None, "bind first"
        self.calls += 1
        squares = [
            tensor.float().index_select(dim, torch.tensor(gone, device=tensor.device)).square().sum()
            for name, dims in self.plan.remove.items()
            if isinstance(tensor := get_tensor(self.model, name), nn.Parameter) and tensor.ndim > 1
            for dim, gone in dims.items()
        ]
        penalty = torch.stack(squares).sum() if squares else torch.zeros(())
        return {**self.objective(model, batch), "greg": 0.5 * self.growth * self.calls * penalty}


def greg(plan: Plan, objective: Objective | LossFunction | None = None, *, growth: float = 1e-4) -> GReg:
    """The objective and a weight decay on just the channels that a plan will remove, which grows by `growth` with every batch:
    the model moves what they did elsewhere before they go (GReg-1; Wang et al., 2012.09243).
    """
    return GReg(plan=plan, objective=_inner(objective), growth=growth)
