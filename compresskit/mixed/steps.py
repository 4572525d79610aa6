"""What `Run.step` does, in its two backends, and with a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.base.errors import TrainingError
from compresskit.mixed.checks import capturing, check_capture, check_closure
from compresskit.mixed.stats import report_
from compresskit.mixed.step.update import Divisor, hands_over, update_

if TYPE_CHECKING:
    from compresskit.mixed.run import Run


def step_(run: Run) -> None:
    """One optimizer step; skipped, and counted as such, where a gradient overflowed under a loss scale."""
    if captured := capturing(run.device):
        check_capture(run.optimizer, scaled=bool(run.scalers), compiled=run._compiled is not None)
    held = run._sums.settle()
    if run._compiled is not None:
        raw = run._weights.raw(held)
        divisor = _divisor(run, list(raw.values()))
        run._compiled.update(divisor, raw)
        if run.after_update or run._averages:
            run._weights.load()
            _after(run, divisor.found_inf)
            run._weights.save(count=False)
        ran = True
    else:
        divisor = _divisor(run, run._weights.gather(held, run._flat.gather if run._flat else None))
        ran = update_(run.optimizer, divisor, run._weights.load)
        if ran:
            _after(run, divisor.found_inf)
            run._weights.save()
    if run.clip is not None:
        run.grad_norm = divisor.norm
    used, found = [run.scalers[name] for name in run._used], divisor.found_inf
    skipped = False if captured else _skipped_last(run, known=None if ran else True)
    if found is not None:
        report_(run, used, found, known=not ran, captured=captured)
    for scheduled in run._schedules:
        scheduled.advance(skipped=skipped)
    _clear(run)


def step_closure_(run: Run, closure: Callable[[], Any]) -> Any:
    """A step of an optimizer that evaluates the loss itself, maybe several times; returns what the optimizer returns.

    Before each evaluation the half weights are taken from the masters, as the optimizer may have moved them.
    """
    check_closure(run)

    def evaluate() -> Any:
        run._weights.save(count=False)
        _clear(run)
        with torch.enable_grad():
            loss = closure()
        divisor = _divisor(run, run._weights.gather(run._sums.settle()))
        divisor.apply_()
        run.grad_norm = divisor.norm if run.clip is not None else None
        if divisor.found_inf is not None and divisor.found_inf.item():
            raise TrainingError(
                f"step(closure): a gradient overflowed under the fixed loss scale {run.policy.loss_scale}, and a step with a"
                " closure cannot be skipped; lower the scale, or use bf16"
            )
        return loss

    result = run.optimizer.step(evaluate)
    _after(run, None)
    run._weights.save()
    for scheduled in run._schedules:
        scheduled.advance(skipped=False)
    _clear(run)
    return result


def _clear(run: Run) -> None:
    run._weights.zero_()
    run._used.clear()
    run._passes, run._apart = 0, False


def _divisor(run: Run, grads: list[Tensor]) -> Divisor:
    used = [run.scalers[name] for name in run._used]
    found = torch.stack([s.found_inf for s in used]).amax() if used else None
    # Of several scalers each has unscaled its own gradients; a single one's are unscaled here, by what scaled them.
    scale = used[0].scale if len(run.scalers) == 1 and used and not run._apart else None
    return Divisor(grads, scale, found, run.clip, [grad for _, grad in run._weights.graded])


def _after(run: Run, found: Tensor | None) -> None:
    for hook in run.after_update:
        hook()
    masters = run.named_masters() if run._averages else {}
    for average in run._averages:
        average.update(masters, found)


def _skipped_last(run: Run, *, known: bool | None) -> bool:
    """Whether this step was skipped; where the device alone knows, whether the one before was."""
    if known is not None or not run.scalers or (run._compiled is None and not hands_over(run.optimizer)):
        return bool(known)
    if not any(scheduled.on == "success" for scheduled in run._schedules):
        return False
    late = run._late.read(wait=True)
    return late is not None and bool(late[0])
