"""A model, an optimizer and a policy, run together: cast, scale, check, unscale, clip, update, copy back.

run = prepare(model, optimizer, MASTER_BF16, clip=1.0)
for x, y in loader:
    run.backward(loss_fn(run(x), y))      # inputs cast, outputs fp32, loss scaled
    run.step()                            # gradients to fp32, check, clip, update masters, copy back, zero
run.finish()                              # an fp32 model again, from its masters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.mixed.checks import check_backend, check_model, check_numbers, wants_closure
from compresskit.mixed.formats.casts import cast
from compresskit.mixed.formats.fp8 import Converted, to_float8
from compresskit.mixed.formats.parallel import check_casts, check_sharded, check_shards, check_sync, is_sharded
from compresskit.mixed.formats.policy import FP32, Policy
from compresskit.mixed.formats.tf32 import tf32
from compresskit.mixed.groups import add_group_
from compresskit.mixed.optim.ema import Average
from compresskit.mixed.optim.schedule import Scheduled
from compresskit.mixed.state import load_state, state_of
from compresskit.mixed.stats import stats_of
from compresskit.mixed.step.accumulate import Sums
from compresskit.mixed.step.compiled import Compiled
from compresskit.mixed.step.flat import Flat
from compresskit.mixed.step.masters import Weights
from compresskit.mixed.step.scaler import LossScaler, make_scalers
from compresskit.mixed.step.update import Late
from compresskit.mixed.steps import step_, step_closure_


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Policy = FP32,
    *,
    clip: float | None = None,
    losses: Sequence[str] = (),
    scaler: Callable[[], LossScaler] | None = None,
    flat: bool = False,
    backend: Literal["foreach", "compiled"] = "foreach",
) -> Run:
    """Put a model and its optimizer under a policy.

    Args:
        model: an fp32 model, not yet wrapped in DistributedDataParallel.
        optimizer: any `torch.optim` optimizer over (some of) its parameters; param groups stay as they are.
        policy: the numbers to train in.
        clip: largest norm of all gradients together, measured on unscaled fp32 gradients.
        losses: names of losses that each have a scale of their own, for `run.backward(loss, scaler=name)`.
        scaler: makes a loss scaler in the place of the policy's, such as `partial(LossScaler, interval=500)`.
        flat: keep the masters of each param group in one flat tensor; bit-equal to separate ones, and refused for optimizers
            that are not elementwise.
        backend: "foreach" steps any torch optimizer; "compiled" does the step of AdamW, SGD and Lion in one pass, and falls back
            with a warning where no compiler is.

    Raises ModelError for a wrapped or half model, SettingError for parameters that are not the model's.
    """
    return Run(model, optimizer, policy, clip=clip, losses=losses, scaler=scaler, flat=flat, backend=backend)


class Run:
    """See `prepare`. Called like the model; `step` is the optimizer step of the policy."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        *,
        clip: float | None = None,
        losses: Sequence[str] = (),
        scaler: Callable[[], LossScaler] | None = None,
        flat: bool = False,
        backend: Literal["foreach", "compiled"] = "foreach",
    ) -> None:
        if clip is not None and clip <= 0:
            raise SettingError(f"clip must be positive, got {clip}")
        check_model(model, optimizer)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        check_numbers(policy, optimizer, self.device)
        one_pass = check_backend(policy, optimizer, self.device, flat=flat, backend=backend)
        self.scalers = make_scalers(policy, losses, scaler, self.device)
        self.float8 = _to_float8(model, policy)
        if is_sharded(model):
            check_shards(model, optimizer)
            policy = _sharded(model, policy, flat=flat, one_pass=one_pass)
        self.optimizer, self.policy, self.clip = optimizer, policy, clip
        self.grad_norm: Tensor | None = None
        self.after_update: list[Callable[[], None]] = []
        self._model = model
        self._weights = Weights(model, optimizer, policy, self.device)
        self._compiled = Compiled(self._weights, optimizer) if one_pass else None
        self._weights.fp32_grads_(on=not one_pass)
        self._flat = Flat(self._weights, optimizer) if flat else None
        self._schedules: list[Scheduled] = []
        self._averages: list[Average] = []
        self._sums, self._used = Sums(), set[str]()
        self._micro: int | None = None
        self._passes, self._apart = 0, False
        self._needs_closure = wants_closure(optimizer)
        self._late = Late(2, self.device)
        self._skips = torch.zeros((), dtype=torch.int64, device=self.device)
        self._bad: Tensor | None = None
        self._bad_names: list[str] = []

    def __repr__(self) -> str:
        lines = [f"{type(self.optimizer).__name__} on {self.device}, {self.policy}"]
        return "\n".join([*lines, *([str(self.float8)] if self.float8 else [])])

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; of several losses, the first's."""
        return next(iter(self.scalers.values()), None)

    @property
    def model(self) -> nn.Module:
        """What `run(x)` calls. Assign it back after wrapping it: `run.model = DistributedDataParallel(run.model)`."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # Its buckets have the dtype of the weights; fp32 gradients fail with "Expected BFloat16, got Float".
            self._weights.fp32_grads_(on=False)
        self._model = model

    @property
    def skipped(self) -> Tensor:
        """How many steps were skipped, on the device; right for fused optimizers too, whose `step` always returns."""
        return self._skips

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in fp32 for inputs in any floating dtype."""
        half, auto, output_dtype = self.policy.param_dtype, self.policy.autocast_dtype, self.policy.output_dtype
        if half is not None and self.policy.cast_inputs:
            args, kwargs = cast(args, half), cast(kwargs, half)
        autocast = torch.autocast(self.device.type, dtype=auto) if auto is not None else nullcontext()
        with autocast, tf32(self.policy.tf32):
            output = self._model(*args, **kwargs)
        return output if (half is None and auto is None) or output_dtype is None else cast(output, output_dtype)

    def backward(self, loss: Tensor, *, scaler: str | None = None) -> None:
        """Gradients of the scaled loss; may be called several times before `step`, and then sums in fp32.

        `scaler` names the loss where `prepare(losses=...)` declared several; each is unscaled by its own scale at once.
        """
        check_sync(self._model)
        chosen = self._chosen(scaler)
        loss = loss.float() if self._micro is None else loss.float() / self._micro
        several = len(self.scalers) > 1
        if self._passes and (several or self._apart or not self._weights.fp32_grads):
            self._sums.hold(self._weights.names)
        with tf32(self.policy.tf32):
            (loss if chosen is None else loss * chosen.scale).backward()
        self._passes += 1
        if (several or self._apart) and chosen is not None:
            self._sums.hold(self._weights.names, chosen)

    def _chosen(self, name: str | None) -> LossScaler | None:
        if not self.scalers:
            return None
        if (name or "") not in self.scalers:
            declared = ", ".join(key for key in self.scalers if key) or "none; declare them with prepare(losses=...)"
            raise SettingError(f"backward(scaler={name!r}): the declared losses are: {declared}")
        chosen = self.scalers[name or ""]
        if (name or "") not in self._used:
            self._used.add(name or "")
            chosen.found_inf.zero_()
        return chosen

    @contextmanager
    def accumulate(self, count: int) -> Iterator[None]:
        """Let the next `count` backward passes make one step: each weighs 1 / count, and the sum is taken in fp32."""
        if not isinstance(count, int) or count < 1:
            raise SettingError(f"accumulate: wanted a whole number >= 1 of backward passes, got {count}")
        if self._micro is not None:
            raise SettingError("accumulate: a block is open already; blocks do not nest")
        self._micro, before = count, self._passes
        try:
            yield
        finally:
            self._micro = None
        if self._passes - before != count:
            raise SettingError(f"accumulate({count}): {self._passes - before} backward passes were made in the block; each"
                               f" counted as 1/{count} of the step")  # fmt: skip

    def unscaled(self) -> dict[str, Tensor]:
        """The gradients of this step by parameter name, in fp32 and unscaled, as `step` will take them.

        To look at, or to change in place (a clipping of one's own): `parameter.grad` itself stays scaled and may be half, and is
        emptied by this. Where one is not finite the step will be skipped, under a loss scale.
        """
        only = self.scaler if len(self.scalers) == 1 and self._used and not self._apart else None
        self._sums.hold(self._weights.names, only)
        self._apart = True
        names = self._weights.names
        return {names[p]: grad for p, grad in self._sums.held.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step; skipped, and counted as such, where a gradient overflowed under a loss scale.

        `closure` is for optimizers that evaluate the loss themselves (LBFGS): it calls the model and `backward` and returns the
        loss; refused under a dynamic scale, which would change between evaluations.
        """
        if closure is not None:
            return step_closure_(self, closure)
        if self._needs_closure:
            raise SettingError(f"step: {type(self.optimizer).__name__} evaluates the loss itself; give run.step(closure)")
        return step_(self)

    def add_group(self, group: dict[str, Any]) -> None:
        """Give the optimizer another param group: parameters of the model that it did not have, or that are new in the model.

        New parameters are cast as the policy says, and get masters. Between steps only.
        """
        add_group_(self, group)

    def schedule(self, scheduler: Any, on: Literal["attempt", "success"] = "attempt") -> Any:
        """Let `run.step` drive a torch scheduler, at every step or only at those that were not skipped; see `Scheduled`."""
        self._schedules.append(Scheduled(scheduler=scheduler, on=on))
        return scheduler

    def average(self, decay: float = 0.999) -> Average:
        """An exponential moving average of the masters, taken in at every step from now on; see `Average`."""
        self._averages.append(Average(self.named_masters(), decay))
        return self._averages[-1]

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """All that a bit-exact resume needs, in fp32 and by parameter name; plain data. `copy`: not the tensors in use."""
        return state_of(self, copy=copy)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state, of another policy too: weights and optimizer state go through fp32.

        Raises CheckpointError for the state of another model, before anything is changed.
        """
        load_state(self, state)

    def masters(self) -> list[Tensor]:
        """What the optimizer updates, in the order of the parameters: fp32 masters where there are any, else the parameters.

        SPLIT, KAHAN and SR have theirs only inside `step`, where hooks of `after_update` may change them; at any other time
        these are copies.
        """
        full = self._weights.full()
        return [full[p] for p in self._weights.names]

    def named_masters(self) -> dict[str, Tensor]:
        """`masters` by the name of their parameter."""
        return dict(zip(self._weights.names.values(), self.masters(), strict=True))

    def stats(self) -> dict[str, Any]:
        """Loss scale, skipped steps and last gradient norm; reads the device.

        At the scale's floor, after an overflow, "nonfinite" names the first parameters whose gradients are not finite. Where
        the optimizer is fused this is known one step late.
        """
        return stats_of(self)

    def finish(self) -> nn.Module:
        """Hand the fp32 model back: weights from the masters, the optimizer on the parameters again."""
        for part in (self._flat, self._compiled):
            if part is not None:
                part.finish()
        self._weights.fp32_grads_(on=False)
        self._weights.finish()
        if self.float8 is not None:
            self.float8.undo()
            self.float8 = None
        return self._model


def _to_float8(model: nn.Module, policy: Policy) -> Converted | None:
    """Linear layers to fp8 where the policy says so, but for those that it keeps in fp32."""
    if policy.fp8 is None:
        return None
    kinds = tuple(kind for kind in policy.keep_fp32 if isinstance(kind, type))
    modules = {name for name, module in model.named_modules() if name in policy.keep_fp32 or isinstance(module, kinds)}
    return to_float8(model, fp8=policy.fp8, skip=sorted(modules))


def _sharded(model: nn.Module, policy: Policy, *, flat: bool, one_pass: bool) -> Policy:
    """The policy of a model under FSDP2, which casts by itself and whose fp32 shards are the masters."""
    check_sharded(policy)
    check_casts(model, policy)
    if flat or one_pass:
        raise SettingError("prepare: FSDP2 lays its shards out itself; leave flat=True and backend='compiled' out")
    return replace(policy, param_dtype=None, master=False, cast_inputs=False)
