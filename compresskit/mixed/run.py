"""Train a model under a precision policy: cast, scale, check, unscale, clip, update, copy back.

run = prepare(model, optimizer, MASTER_BF16, clip=1.0)
for x, y in loader:
    run.backward(loss_fn(run(x), y))      # inputs cast, outputs fp32, loss scaled
    run.step()                            # gradients to fp32, check, clip, update masters, copy back, zero
run.finish()                              # an fp32 model again, from its masters
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, SettingError, TrainingError
from compresskit.mixed.checks import (
    StepForm,
    capturing_cuda_graph,
    check_accumulation,
    check_clip,
    check_closure,
    check_cuda_graph,
    check_model,
    check_no_overflow,
    check_policy,
    new_parameters,
    requires_closure,
    step_form,
)
from compresskit.mixed.dtype_errors import naming_dtype_errors
from compresskit.mixed.formats.casts import cast_floating, in_fp32
from compresskit.mixed.formats.fp8 import Fp8Conversion, convert_by_policy
from compresskit.mixed.formats.levels import require_policy
from compresskit.mixed.formats.parallel import check_sync, is_sharded, shard_by_name, sharded_policy
from compresskit.mixed.formats.policy import FP32, Policy
from compresskit.mixed.formats.tf32 import tf32
from compresskit.mixed.optim.ema import WeightEMA
from compresskit.mixed.optim.schedule import RunScheduler
from compresskit.mixed.state import STATE_VERSION, OptimizerState, check_form_of_state
from compresskit.mixed.step.accumulate import GradientAccumulator
from compresskit.mixed.step.compiled import CompiledStep
from compresskit.mixed.step.flat import FlatMasters
from compresskit.mixed.step.guard import OptimizerGuard
from compresskit.mixed.step.masters import MasterWeights
from compresskit.mixed.step.overflow import OverflowTracker
from compresskit.mixed.step.parts import choose_step
from compresskit.mixed.step.scaler import LossScaler, make_scalers
from compresskit.mixed.step.update import UnscaleAndClip, skips_on_device, update_

Scheduler = TypeVar("Scheduler")


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Policy = FP32,
    *,
    clip: float | None = None,
    losses: Sequence[str] = (),
    scaler: Callable[[], LossScaler] | None = None,
    flat: bool = False,
    backend: Literal["foreach", "compiled"] | None = None,
) -> Run:
    """Cast a model and give its optimizer fp32 masters, as a policy says; both are changed in place until `run.finish()`.

    Gradients that the parameters have from before are dropped, but for those that wait for the step of another run.

    Args:
        model: an fp32 model, or a half one under a half policy; not yet wrapped in DistributedDataParallel.
        optimizer: any `torch.optim` optimizer over (some of) its parameters; param groups stay as they are.
        policy: the number formats to train in.
        clip: largest 2-norm of all gradients together, measured on unscaled fp32 gradients; None does not clip.
        losses: names of losses that each have a scale of their own, for `run.backward(loss, scaler=name)`.
        scaler: makes a loss scaler instead of the policy's, such as `partial(LossScaler, interval=500)`.
        flat: keep the masters of each param group in one flat tensor, bit-equal to separate ones; for elementwise optimizers.
        backend: "foreach" steps any torch optimizer; "compiled" AdamW, SGD and Lion in one pass, from half gradients as they are.
            None is that pass, from fp32 ones, for a million bf16 weights without masters on a CPU with a compiler; `repr` says.

    Returns:
        The run, to be called like the model.

    Raises:
        ModelError: for a wrapped model, and one in other dtypes than the policy can start from.
        SettingError: for an optimizer over other parameters, and for settings that do not go together.
    """
    require_policy(policy, "prepare(policy=...)")
    check_clip(clip, "prepare")
    check_model(model, optimizer, policy)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    check_policy(policy, optimizer, device)
    form = step_form(policy, optimizer, device, flat=flat, backend=backend)
    scalers = make_scalers(policy, losses, scaler, device)
    float8 = convert_by_policy(model, policy)
    if is_sharded(model):
        policy = sharded_policy(model, optimizer, policy, flat=flat, compiled=form.compiled)
    return Run(model, optimizer, policy, device=device, clip=clip, scalers=scalers, float8=float8, form=form)


class Run:
    """A model in training under a policy, made by `prepare`. Call it like the model.

    Attributes:
        optimizer, policy, clip, device: as given to `prepare`.
        scalers: loss scalers by name of their loss; empty without a loss scale.
        float8: which layers were converted to fp8; None for other policies.
        grad_norm: 2-norm of the last step's unscaled gradients, where `clip` is set.
        after_update: functions to call after the optimizer's update and before masters are copied to the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: Policy,
        *,
        device: torch.device,
        clip: float | None,
        scalers: dict[str, LossScaler],
        float8: Fp8Conversion | None,
        form: StepForm,
    ) -> None:
        self.optimizer, self.policy, self.device, self.clip, self._model = optimizer, policy, device, clip, model
        self.scalers, self.float8, self._form = scalers, float8, form
        self.grad_norm: Tensor | None = None
        self.after_update: list[Callable[[], None]] = []
        self._weights = MasterWeights(model, optimizer, policy, device)
        self._weights.use_fp32_gradients_(enabled=form.fp32_gradients)
        self._compiled = CompiledStep(self._weights, optimizer) if form.compiled else None
        self._flat = FlatMasters(self._weights, optimizer) if form.flat else None
        self._optimizer_state = OptimizerState(optimizer, self._weights, self._flat)
        self._overflow = OverflowTracker(scalers, device)
        self._schedulers: list[RunScheduler] = []
        self._emas: list[WeightEMA] = []
        self._accumulator = GradientAccumulator()
        self._micro_batches: int | None = None  # inside `accumulate`: how many backward passes make a step
        self._backward_passes = 0  # since the last step
        self._unscaled = False  # whether `unscaled` has taken this step's gradients out of the loss scale
        self._requires_closure, self._sharded, self._finished = requires_closure(optimizer), is_sharded(model), False
        self._weights.record_()
        self._guard = OptimizerGuard(optimizer, zero_grad=self.zero_grad, add_group=self.add_group)

    def __repr__(self) -> str:
        end = ("; a step is one compiled pass" if self._form.compiled else "") + (f"\n{self.float8}" if self.float8 else "")
        return f"{type(self.optimizer).__name__} on {self.device}, {self.policy}{end}"

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler; of several losses, the first's."""
        return next(iter(self.scalers.values()), None)

    @property
    def model(self) -> nn.Module:
        """The model that `run(x)` calls. Assign it after wrapping it: `run.model = DistributedDataParallel(run.model)`."""
        return self._model

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._weights.wrapped_in_(model)
        self._model = model

    @property
    def skipped(self) -> Tensor:
        """How many steps were skipped, a tensor on the device; right for fused optimizers too, whose `step` always returns."""
        return self._overflow.skipped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, in fp32 for inputs of any floating dtype; TrainingError where its code makes other dtypes meet."""
        self._check_running()
        half, auto, output_dtype = self.policy.param_dtype, self.policy.autocast_dtype, self.policy.output_dtype
        if half is not None and self.policy.cast_inputs:
            args, kwargs = cast_floating(args, half), cast_floating(kwargs, half)
        autocast = torch.autocast(self.device.type, dtype=auto) if auto is not None else nullcontext()
        watching = self._weights.buffers.watching(self._model)
        with naming_dtype_errors(self._weights.model, self.policy), autocast, tf32(self.policy.tf32), watching:
            output = self._model(*args, **kwargs)
        casts = half is not None or auto is not None or self._sharded
        return cast_floating(output, output_dtype) if casts and output_dtype is not None else output

    def backward(self, loss: Tensor, *, scaler: str | None = None) -> None:
        """Compute the gradients of the scaled loss; several calls before `step` are summed in fp32.

        Args:
            loss: a scalar.
            scaler: name of the loss, where `prepare(losses=...)` declared several; each is unscaled by its own scale at once.

        Raises:
            SettingError: for a name that was not declared, and inside DDP's `no_sync`.
        """
        self._check_running()
        check_sync(self._model)
        chosen = self._overflow.use(scaler or "")
        loss = in_fp32(loss) if self._micro_batches is None else in_fp32(loss) / self._micro_batches
        several = len(self.scalers) > 1
        if self._backward_passes and (several or self._unscaled or not self._weights.fp32_gradients):
            self._accumulator.take(self._weights.gradients.parameters())
        with tf32(self.policy.tf32), self._weights.gradients.backward(scaled=chosen is not None):
            (loss if chosen is None else loss * chosen.scale).backward()
        self._backward_passes += 1
        if (several or self._unscaled) and chosen is not None:
            self._accumulator.take(self._weights.gradients.parameters(), chosen)

    @contextmanager
    def accumulate(self, count: int) -> Iterator[None]:
        """Let the `count` backward passes of a block make one step: each weighs 1 / count, and the sum is taken in fp32.

        A block that an error ends leaves no gradients: it can be made again.

        Raises:
            SettingError: where the block makes another number of passes.
        """
        check_accumulation(count, is_open=self._micro_batches is not None)
        self._micro_batches, before = count, self._backward_passes
        try:
            yield
            if (made := self._backward_passes - before) != count:
                raise SettingError(
                    f"accumulate({count}): {made} backward passes were made in the block; each counted as 1/{count} of the step"
                )
        except BaseException:
            self.zero_grad()
            raise
        finally:
            self._micro_batches = None

    def unscaled(self, *, zeros: Container[str] = ()) -> dict[str, Tensor]:
        """The gradients of this step by parameter name, in fp32 and unscaled, as `step` will take them.

        They may be read, or changed in place (such as by another clipping). Parameters named in `zeros` that have none get zeros.
        `parameter.grad` itself stays scaled and may be half, and is emptied by this. Under a loss scale a gradient that is not
        finite still skips the step.
        """
        only = self.scaler if len(self.scalers) == 1 and self._overflow.used and not self._unscaled else None
        self._accumulator.take(self._weights.gradients.parameters(), only)
        self._unscaled = True
        for parameter in (p for p, name in self._weights.names.items() if name in zeros):
            self._accumulator.totals.setdefault(parameter, in_fp32(torch.zeros_like(parameter)))
        return {self._weights.names[p]: grad for p, grad in self._accumulator.totals.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimizer step; it is skipped, and counted as such, where a gradient overflowed under a loss scale.

        Args:
            closure: for optimizers that evaluate the loss themselves (LBFGS): calls the model and `backward` and returns the
                loss. Refused under a dynamic scale, which would change between evaluations.

        Returns:
            With a closure, what the optimizer returns; else None.
        """
        self._check_running()
        self._guard.check_groups()
        if closure is not None:
            return self._step_with_closure(closure)
        if self._requires_closure:
            raise SettingError(f"step: {type(self.optimizer).__name__} evaluates the loss itself; give run.step(closure)")
        self._weights.compared = False
        if captured := capturing_cuda_graph(self.device):
            check_cuda_graph(self.optimizer, scaled=bool(self.scalers), compiled=self._compiled is not None)
        else:
            self._adopt_writes()
        with self._guard.stepping():
            unscale, ran = self._update_compiled(self._compiled) if self._compiled is not None else self._update_foreach()
        if self.clip is not None:
            self.grad_norm = unscale.norm
        skipped = False if captured else self._skipped_for_schedulers(ran=ran)
        if unscale.found_inf is not None:
            self._overflow.update(unscale.found_inf, self._weights, read=not ran, captured=captured)
        self._end_step(skipped=skipped)
        return None

    def _update_foreach(self) -> tuple[UnscaleAndClip, bool]:
        """Update by the torch optimizer; False where the host knows that the step was skipped."""
        unscale = self._gather_gradients()
        step = choose_step(self._weights, self.optimizer, whole=bool(self.after_update or self._emas))
        ran = update_(self.optimizer, unscale, step)
        if ran:
            self._run_after_update(unscale.found_inf)
            self._weights.write_back()
        return unscale, ran

    def _update_compiled(self, compiled: CompiledStep) -> tuple[UnscaleAndClip, bool]:
        """Update by the compiled pass, which skips on the device."""
        raw = self._weights.raw_gradients(self._accumulator.collect())
        unscale = self._unscale_and_clip(list(raw.values()))
        compiled.update(unscale, raw)
        self._weights.record_()
        if self.after_update or self._emas:
            self._weights.materialize_masters()
            self._run_after_update(unscale.found_inf)
            self._weights.write_back(count=False)
        return unscale, True

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        separate = self._flat is None and self._compiled is None
        check_closure(self.policy, self.scalers.values(), separate_weights=separate)
        self._adopt_writes()

        def evaluate() -> Any:
            self._weights.write_back(count=False)  # the optimizer may have moved the masters since the last evaluation
            self._clear_gradients()
            with torch.enable_grad():
                loss = closure()
            self._weights.adopt_writes_()
            unscale = self._gather_gradients()
            unscale.apply_()
            self.grad_norm = unscale.norm if self.clip is not None else None
            check_no_overflow(unscale.found_inf, self.policy)
            return loss

        with self._guard.stepping():
            result = self.optimizer.step(evaluate)
            self._run_after_update(None)
        self._weights.write_back()
        self._end_step(skipped=False)
        return result

    def _gather_gradients(self) -> UnscaleAndClip:
        """Give every tensor of the optimizer its gradient."""
        self._weights.gather_gradients(self._accumulator.collect())
        if self._flat is not None:
            self._flat.gather_gradients()
            flat = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            return self._unscale_and_clip(flat)
        return self._unscale_and_clip([grad for _, grad in self._weights.step_gradients])

    def _unscale_and_clip(self, grads: list[Tensor]) -> UnscaleAndClip:
        used = list(self._overflow.used.values())
        # With several scalers, `backward` has unscaled each loss's gradients; those of a single one are unscaled here.
        scale = used[0].scale if len(self.scalers) == 1 and used and not self._unscaled else None
        clipped = [grad for _, grad in self._weights.step_gradients]
        return UnscaleAndClip(grads, scale, self._overflow.found_inf(), self.clip, clipped)

    def _run_after_update(self, found_inf: Tensor | None) -> None:
        for hook in self.after_update:
            hook()
            self._weights.compared = False  # a hook may write into weights
        masters = self.named_masters() if self._emas else {}
        for ema in self._emas:
            ema.update(masters, found_inf)

    def _skipped_for_schedulers(self, *, ran: bool) -> bool:
        """Whether this step was skipped; where only the device knows, whether the one before was."""
        if not ran:
            return True
        if not self.scalers or not any(scheduler.on == "success" for scheduler in self._schedulers):
            return False
        return (self._compiled is not None or skips_on_device(self.optimizer)) and self._overflow.last_overflowed()

    def _end_step(self, *, skipped: bool) -> None:
        for scheduler in self._schedulers:
            scheduler.advance(skipped=skipped)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self._weights.zero_grad_()
        self._overflow.used.clear()
        self._backward_passes, self._unscaled = 0, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, as `optimizer.zero_grad()` does too while the run lasts; zeros are not kept."""
        self._accumulator.totals.clear()
        self._clear_gradients()

    def _check_running(self) -> None:
        if self._finished:
            raise TrainingError("run: finish() has ended it, and the model is fp32 again; call the model, or prepare it anew")
        self._weights.check_dtypes()

    def _adopt_writes(self, *, compare: bool = False) -> None:
        """Take over what the user wrote into the weights; not in the middle of a step, nor while averages are in their place."""
        if not self._finished and not self._guard.is_open and not any(ema.in_use for ema in self._emas):
            self._weights.adopt_writes_(compare=compare)

    def add_group(self, group: dict[str, Any]) -> None:
        """Give the optimizer another param group: parameters that it did not have, or that are new in the model.

        New parameters are cast as the policy says, and get masters. To be called between steps.

        Raises:
            SettingError: for parameters of another model, or that the optimizer has already.
        """
        weights = self._weights
        parameters = new_parameters(group, weights.model, weights.optimized)
        if self._backward_passes:
            raise SettingError("add_group: gradients wait for their step; call it after step()")
        had_halves = bool(weights.halves)
        gone = weights.forget_removed_(flat=self._flat is not None)
        weights.cast_new_parameters()
        weights.use_fp32_gradients_(enabled=weights.fp32_gradients if had_halves else self._form.fp32_gradients)
        weights.add_optimized(parameters)
        masters: dict[Any, Tensor] = {half.parameter: half.master for half in weights.halves}
        self._guard.add_param_group({**group, "params": [masters.get(p, p) for p in parameters]})
        if self._flat is not None:
            self._flat.add_group(self.optimizer.param_groups[-1])
        self._guard.count_tensors()
        if self._compiled is not None:
            self._compiled.find_masters()
        weights.record_()
        for ema in self._emas:
            ema.forget(gone)
            ema.add_new(self.named_masters())

    def schedule(self, scheduler: Scheduler, on: Literal["attempt", "success"] = "attempt") -> Scheduler:
        """Let `run.step` step a torch scheduler, at every step or only after those that were not skipped; see `RunScheduler`."""
        self._schedulers.append(RunScheduler(scheduler=scheduler, optimizer=self.optimizer, on=on))
        return scheduler

    def ema(self, decay: float = 0.999) -> WeightEMA:
        """Start an exponential moving average of the masters, which every step updates; see `WeightEMA`."""
        self._emas.append(WeightEMA(self.named_masters(), decay))
        return self._emas[-1]

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """The state that a bit-exact resume needs, in fp32 and by parameter name, as tensors and plain values.

        Args:
            copy: False returns the tensors in use, for a state that is written at once.

        Raises:
            CheckpointError: between `backward` and `step`.
        """
        weights = self._weights
        if weights.gradients.waiting or self._backward_passes:
            raise CheckpointError("state_dict: gradients wait for their step and would be lost; call it after step()")
        self._adopt_writes(compare=True)
        keep: Callable[[Tensor], Tensor] = (lambda value: value.detach().clone()) if copy else Tensor.detach
        return {
            "version": STATE_VERSION,
            "policy": self.policy.name,
            **weights.state_dict(keep),
            "optimizer": self._optimizer_state.state_dict(keep),
            **self._overflow.state_dict(keep),
            "schedules": [(deepcopy if copy else dict)(each.scheduler.state_dict()) for each in self._schedulers],
            "emas": [{name: keep(value) for name, value in ema.values.items()} for ema in self._emas],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, of another policy too, through fp32; under FSDP2 of whole tensors as well as of shards.

        Gradients that wait for their step are dropped.

        Raises:
            CheckpointError: for the state of another model or optimizer, before anything is changed.
        """
        check_form_of_state(state, schedules=len(self._schedulers), emas=len(self._emas))
        self._weights.check_state(state := shard_by_name(state, self._model))
        self._optimizer_state.check(state["optimizer"])
        self.zero_grad()  # those that wait are of the weights before
        self._weights.load_state_dict(state)
        self._optimizer_state.load_state_dict(state["optimizer"], same_policy=state["policy"] == self.policy.name)
        self._overflow.load_state_dict(state)
        for scheduler, saved in zip(self._schedulers, state["schedules"], strict=True):
            scheduler.scheduler.load_state_dict(deepcopy(saved))
        for ema, values in zip(self._emas, state["emas"], strict=True):
            ema.load_(values)

    def masters(self) -> list[Tensor]:
        """What the optimizer updates, in the order of the parameters: fp32 masters where there are any, else the parameters.

        SPLIT, KAHAN and SR have them only inside `step`, for hooks of `after_update` to change; at other times these are copies.
        """
        return list(self.named_masters().values())

    def named_masters(self) -> dict[str, Tensor]:
        """`masters` by the name of their parameter."""
        self._adopt_writes()
        return {self._weights.names[p]: value for p, value in self._weights.fp32_values().items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the model that was prepared, which no wrapper of it changes."""
        return {name: parameter for parameter, name in self._weights.names.items()}

    def stats(self) -> dict[str, Any]:
        """Loss scale, skipped steps and last gradient norm; reads the device.

        After an overflow at the scale's floor, "nonfinite" names the first parameters of it, a step late with a fused optimizer.
        """
        norm = {} if self.grad_norm is None else {"grad_norm": self.grad_norm.item()}
        return self._overflow.stats() | norm

    def finish(self) -> nn.Module:
        """Return the fp32 model: weights from the masters, the optimizer on the model's parameters again."""
        if self._finished:
            return self._model
        self._adopt_writes(compare=True)
        self._finished = True
        self._guard.release()
        for part in (self._flat, self._compiled):
            if part is not None:
                part.finish()
        self._weights.use_fp32_gradients_(enabled=False)
        self._weights.finish()
        if self.float8 is not None:
            self.float8.undo()
            self.float8 = None
        return self._model
