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
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compresskit.errors import SettingError
from compresskit.mixed.accumulate import Sums
from compresskit.mixed.average import Average
from compresskit.mixed.casts import cast
from compresskit.mixed.checks import check_backend, check_model, check_numbers
from compresskit.mixed.compiled import Compiled
from compresskit.mixed.flat import Flat
from compresskit.mixed.policy import FP32, Policy
from compresskit.mixed.scaler import LossScaler
from compresskit.mixed.schedule import Scheduled
from compresskit.mixed.state import load_state, state_of
from compresskit.mixed.stats import report_, stats_of
from compresskit.mixed.update import Divisor, Late, hands_over, update_
from compresskit.mixed.weights import Weights


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
        self.optimizer, self.policy, self.clip = optimizer, policy, clip
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        check_numbers(policy, optimizer, self.device)
        one_pass = check_backend(policy, optimizer, self.device, flat=flat, backend=backend)
        self.scalers = self._make_scalers(losses, scaler)
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
        self._passes = 0
        self._late = Late(2, self.device)
        self._skips = torch.zeros((), dtype=torch.int64, device=self.device)
        self._bad: Tensor | None = None
        self._bad_names: list[str] = []

    def _make_scalers(self, losses: Sequence[str], make: Callable[[], LossScaler] | None) -> dict[str, LossScaler]:
        if len(set(losses)) != len(losses) or isinstance(losses, str):
            raise SettingError(f"losses must be different names, such as ('generator', 'critic'), got {losses!r}")
        scale = self.policy.loss_scale
        if make is not None and scale is None:
            raise SettingError(f"Policy {self.policy.name} has no loss scale; set loss_scale='dynamic' to use a scaler")
        if scale is None:
            return {}

        def default() -> LossScaler:
            return LossScaler() if scale == "dynamic" else LossScaler.fixed(float(scale))

        return {name: (make or default)().to(self.device) for name in losses or [""]}

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
        with torch.autocast(self.device.type, dtype=auto) if auto is not None else nullcontext():
            output = self._model(*args, **kwargs)
        return output if (half is None and auto is None) or output_dtype is None else cast(output, output_dtype)

    def backward(self, loss: Tensor, *, scaler: str | None = None) -> None:
        """Gradients of the scaled loss; may be called several times before `step`, and then sums in fp32.

        `scaler` names the loss where `prepare(losses=...)` declared several; each is unscaled by its own scale at once.
        """
        chosen = self._chosen(scaler)
        loss = loss.float() if self._micro is None else loss.float() / self._micro
        several = len(self.scalers) > 1
        if self._passes and (several or not self._weights.fp32_grads):
            self._sums.hold(self._weights.names)
        (loss if chosen is None else loss * chosen.scale).backward()
        self._passes += 1
        if several and chosen is not None:
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

    def step(self) -> None:
        """One optimizer step; skipped, and counted as such, where a gradient overflowed under a loss scale."""
        held = self._sums.settle()
        if self._compiled is not None:
            raw = self._weights.raw(held)
            divisor = self._divisor(list(raw.values()))
            self._compiled.update(divisor, raw)
            if self.after_update or self._averages:
                self._weights.load()
                self._after(divisor.found_inf)
                self._weights.save(count=False)
            ran = True
        else:
            divisor = self._divisor(self._weights.gather(held, self._flat.gather if self._flat else None))
            ran = update_(self.optimizer, divisor, self._weights.load)
            if ran:
                self._after(divisor.found_inf)
                self._weights.save()
        if self.clip is not None:
            self.grad_norm = divisor.norm
        used, found = [self.scalers[name] for name in self._used], divisor.found_inf
        skipped = self._skipped_last(known=None if ran else True)
        if found is not None:
            report_(self, used, found, known=not ran)
        for scheduled in self._schedules:
            scheduled.advance(skipped=skipped)
        self._weights.zero_()
        self._used.clear()
        self._passes = 0

    def _divisor(self, grads: list[Tensor]) -> Divisor:
        used = [self.scalers[name] for name in self._used]
        found = torch.stack([s.found_inf for s in used]).amax() if used else None
        # Of several scalers each has unscaled its own gradients; a single one's are unscaled here, by what scaled them.
        scale = used[0].scale if len(self.scalers) == 1 and used else None
        return Divisor(grads, scale, found, self.clip, [grad for _, grad in self._weights.graded])

    def _after(self, found: Tensor | None) -> None:
        for hook in self.after_update:
            hook()
        masters = self.named_masters() if self._averages else {}
        for average in self._averages:
            average.update(masters, found)

    def _skipped_last(self, *, known: bool | None) -> bool:
        """Whether this step was skipped; where the device alone knows, whether the one before was."""
        if known is not None or not self.scalers or (self._compiled is None and not hands_over(self.optimizer)):
            return bool(known)
        if not any(scheduled.on == "success" for scheduled in self._schedules):
            return False
        late = self._late.read(wait=True)
        return late is not None and bool(late[0])

    def schedule(self, scheduler: Any, on: Literal["attempt", "success"] = "attempt") -> Any:
        """Let `run.step` drive a torch scheduler, at every step or only at those that were not skipped; see `Scheduled`."""
        self._schedules.append(Scheduled(scheduler=scheduler, on=on))
        return scheduler

    def average(self, decay: float = 0.999) -> Average:
        """An exponential moving average of the masters, taken in at every step from now on; see `Average`."""
        self._averages.append(Average(self.named_masters(), decay))
        return self._averages[-1]

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, in fp32 and by parameter name; loads with `weights_only=True`."""
        return state_of(self)

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
        return self._model
