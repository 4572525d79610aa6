"""Sparse learning: objectives that drive channels to zero during training, so that removing them costs little accuracy.

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
from compresskit.base.objective import Losses, LossFunction, Objective, Wrapper, as_objective, bound
from compresskit.base.task import Task
from compresskit.graph.surgery import get_tensor, owner
from compresskit.prune.channels.plan_channels import analyze_channels
from compresskit.prune.structure.groups import NORM_LAYERS, ChannelGroup
from compresskit.prune.structure.plan import Plan
from compresskit.train.objective import Supervised


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
        """Return the objective for a model, whose groups of channels are found here, and a task."""
        analysis, _, _ = analyze_channels(model, task.example(), where="group_lasso", ignore=self.ignore)
        return GroupLasso(
            objective=self.objective.bind(model, task), strength=self.strength, groups=tuple(analysis.groups), model=model
        )

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        model_in_training = bound(self.model, self)
        penalty = torch.stack([_norms(group, model_in_training).sum() for group in self.groups]).sum()
        return {**self.objective(model, batch), "group_lasso": self.strength * penalty}


def group_lasso(
    objective: Objective | LossFunction | None = None, *, strength: float = 1e-4, ignore: tuple[str, ...] = ()
) -> GroupLasso:
    """Add a group lasso on channels to an objective (Wen et al., 1608.03665, eq. 4).

    The loss "group_lasso" is `strength` times the sum over channels that can be removed of sqrt(n) * norm: the Euclidean norm of
    the n weights that would be removed with the channel, scales of normalization layers included. It drives whole channels to
    zero, in all layers at once.

    Args:
        objective: the objective, or a loss function; by default the task's loss.
        strength: weight of the penalty.
        ignore: names of modules whose channels get no penalty.

    Raises: SettingError for a strength that is not positive, and in training for a module that does not exist.
    """
    return GroupLasso(objective=_inner(objective), strength=strength, ignore=ignore)


def _inner(objective: Objective | LossFunction | None) -> Objective:
    return Supervised() if objective is None else as_objective(objective)


def _norms(group: ChannelGroup, model: nn.Module) -> Tensor:
    """(units,) Euclidean norm of the weights of each unit times the root of their number; differentiable."""
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
    # The gradient of a norm is not defined at zero; with the constant it is 0, and a channel at zero stays at zero.
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
        """Return the objective for a model and a task, with the penalty at its start."""
        return GReg(plan=self.plan, objective=self.objective.bind(model, task), growth=self.growth, model=model)

    def resume_state(self) -> dict[str, Any]:
        """The number of calls, and the state of the inner objective."""
        return {"calls": self.calls, "inside": self.objective.resume_state()}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Restore the number of calls and the inner objective from `resume_state()`."""
        self.calls = state["calls"]
        if state["inside"] is not None:
            self.objective.resume_from_(state["inside"])

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        whole = bound(self.model, self)
        self.calls += 1
        squares = [
            tensor.float().index_select(dim, torch.tensor(removed, device=tensor.device)).square().sum()
            for name, dims in self.plan.remove.items()
            if isinstance(tensor := get_tensor(whole, name), nn.Parameter) and tensor.ndim > 1
            for dim, removed in dims.items()
        ]
        penalty = torch.stack(squares).sum() if squares else torch.zeros(())
        return {**self.objective(model, batch), "greg": 0.5 * self.growth * self.calls * penalty}


def greg(plan: Plan, objective: Objective | LossFunction | None = None, *, growth: float = 1e-4) -> GReg:
    """Add a growing weight decay on the channels that a plan removes to an objective (GReg-1; Wang et al., 2012.09243).

    The loss "greg" is 0.5 * factor * the sum of squares of the weights to remove. The factor grows by `growth` with every batch,
    so that the rest of the model can take over before the channels are removed.

    Args:
        plan: the channels to remove, of `plan_channels`.
        objective: the objective, or a loss function; by default the task's loss.
        growth: what every batch adds to the factor.

    Raises: SettingError for a growth that is not positive.
    """
    return GReg(plan=plan, objective=_inner(objective), growth=growth)
