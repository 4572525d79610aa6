"""A run as a torch optimizer, for loops that step one themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compresskit.mixed.checks import requires_closure
from compresskit.mixed.run import Run


class RunOptimizer(torch.optim.Optimizer):
    """The optimizer of a run, for a loop that steps an optimizer itself: Lightning, the Hugging Face Trainer, accelerate.

    It has the optimizer's param groups and state, so that schedulers work. `step`, `zero_grad` and `add_param_group` are the
    run's, and its state dict is that of the run: fp32 weights, the optimizer's state, loss scales. Losses go to `run.backward`;
    clip by `prepare(clip=...)`.

    Args:
        run: made by `prepare`.
    """

    def __init__(self, run: Run) -> None:
        super().__init__([p for group in run.optimizer.param_groups for p in group["params"]], {})
        self.run = run
        self.defaults, self.state, self.param_groups = run.optimizer.defaults, run.optimizer.state, run.optimizer.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Call the closure, which computes the loss and its gradients, and make a step of the run; return the loss."""
        if closure is not None and requires_closure(self.run.optimizer):
            return self.run.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the run another param group, of parameters of its model; see `Run.add_group`."""
        if "run" not in vars(self):
            return super().add_param_group(param_group)  # torch's own __init__ adds the groups that it gets
        return self.run.add_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step."""
        self.run.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of the run."""
        return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned; CheckpointError for that of another model or optimizer."""
        self.run.load_state_dict(state_dict)
