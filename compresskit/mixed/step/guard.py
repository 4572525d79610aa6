"""While a run lasts, the optimizer's own methods are the run's: they work as the run does, or raise, and never do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compresskit.base.errors import SettingError, TrainingError


class OptimizerGuard:
    """Lets an optimizer step only inside `run.step`, and leads its `zero_grad` and `add_param_group` to the run.

    The optimizer owns masters, but gradients are on the model's weights: its own `step` would leave half weights where they are,
    or take gradients with their loss scale, and its own `zero_grad` would drop nothing.

    is_open: whether the run is in its step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, zero_grad: Callable[..., None], add_group: Callable[[dict[str, Any]], None]
    ) -> None:
        self.optimizer, self.is_open = optimizer, False
        own = vars(optimizer)
        if isinstance(earlier := own.get("guard_of_run"), OptimizerGuard):
            earlier.release()  # prepare was called again
        own["guard_of_run"] = self
        # A wrapper that never called Optimizer.__init__ has no hooks.
        hooks = "_optimizer_step_pre_hooks" in own
        self._handle = optimizer.register_step_pre_hook(self._before_step) if hooks else None
        self._replaced = {name: own[name] for name in ("zero_grad", "add_param_group") if name in own}
        own["zero_grad"], own["add_param_group"] = zero_grad, add_group
        self.count_tensors()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the optimizer step inside the block."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a param group by the optimizer's own method."""
        kept = vars(self.optimizer).pop("add_param_group")
        try:
            self.optimizer.add_param_group(group)
        finally:
            vars(self.optimizer)["add_param_group"] = kept

    def count_tensors(self) -> None:
        """Note how many tensors the optimizer has."""
        self._tensors = self._count()

    def check_groups(self) -> None:
        """Refuse tensors that reached the optimizer past the run: they would never get a gradient."""
        if (count := self._count()) > self._tensors:
            raise SettingError(
                f"step: {count - self._tensors} tensors were put into the optimizer's param_groups by hand and would never move;"
                " give them to run.add_group"
            )

    def release(self) -> None:
        """Give the optimizer its own methods back."""
        if self._handle is not None:
            self._handle.remove()
        own = vars(self.optimizer)
        for name in ("zero_grad", "add_param_group", "guard_of_run"):
            own.pop(name, None)
        for name, method in self._replaced.items():
            own[name] = method

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _before_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.is_open:
            raise TrainingError(
                f"optimizer.step(): {type(self.optimizer).__name__} belongs to a run of mixed.prepare, and by itself would skip"
                " the loss scale, the clipping and the model's half weights; call run.step() in its place, or run.finish()"
                " first; a loop that steps an optimizer itself takes mixed.RunOptimizer(run)"
            )
