"""What a run tells of itself: scales, skips, and whom to blame once a scale sits at its floor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compresskit.mixed.step.scaler import LossScaler

if TYPE_CHECKING:
    from compresskit.mixed.run import Run


def report_(run: Run, used: list[LossScaler], found: Tensor, *, known: bool, captured: bool = False) -> None:
    """Move the scales; note the parameters to blame, once the scale sits at its floor (but not while a graph is recorded)."""
    floor = torch.stack([s.scale <= s.floor for s in used]).any()
    late = None if captured else run._late.read(wait=False)
    watch = bool(floor.item()) if known else late is not None and all(late)
    if watch and run._weights.graded:
        run._bad_names, run._bad = run._weights.nonfinite()
    run._skips += found > 0
    if not captured:  # a recorded event cannot be asked, and what a replay does is in `skipped` and the scale
        run._late.push(torch.stack([found, floor.float()]))
    for scaler in used:
        if len(run.scalers) == 1:
            scaler.found_inf.copy_(found)
        scaler.update()


def stats_of(run: Run) -> dict[str, Any]:
    """See `Run.stats`."""
    stats: dict[str, Any] = {}
    for name, scaler in run.scalers.items():
        suffix = f".{name}" if name else ""
        stats |= {f"scale{suffix}": scaler.scale.item(), f"skipped{suffix}": scaler.skipped.item()}
    if run.grad_norm is not None:
        stats["grad_norm"] = run.grad_norm.item()
    stuck = any((s.scale <= s.floor) & (s.found_inf > 0) for s in run.scalers.values())
    if stuck and run._bad is not None:
        stats["nonfinite"] = [n for n, bad in zip(run._bad_names, run._bad.tolist(), strict=True) if bad][:5]
    return stats
