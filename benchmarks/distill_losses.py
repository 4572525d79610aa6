"""Time and peak memory of every distillation loss, forward and backward, at batch 64 and 256 and at a vocabulary of 32,000.

Writes `distill_losses.json` and `distill_losses.md` beside this file. One thread; times are medians; memory is the peak
beside the inputs, by torch's profiler. The two losses with a simpler implementation to compare with are timed in turn with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from compresskit.distill.losses import LOGIT_LOSSES, LOSSES, TARGET_LOSSES
from compresskit.distill.losses.contrastive import MemoryBank

Loss = Callable[[Tensor, Tensor], Tensor]

HERE = Path(__file__).parent
SHAPES = {
    "attention_transfer": (128, 16, 16),
    "hcl": (128, 16, 16),
    "attention_scores": (4, 32, 32),
    "attention_kl": (4, 32, 32),
    "relation_kl": (4, 32, 64),
}


def naive_rkd_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Distances from the (N, N, D) tensor of differences, for comparison."""

    def distances(f: Tensor) -> Tensor:
        d = ((f[:, None] - f[None, :]).square().sum(2) + 1e-12).sqrt()
        return d / d.mean()

    return F.smooth_l1_loss(distances(student), distances(teacher))


def naive_rkd_angle(student: Tensor, teacher: Tensor) -> Tensor:
    """Angles from the (N, N, D) tensor of unit differences, as it is usually written, for comparison."""

    def angles(f: Tensor) -> Tensor:
        d = F.normalize(f[None, :] - f[:, None], dim=2)
        return d @ d.mT

    return F.smooth_l1_loss(angles(student), angles(teacher))


def measure(loss: Loss, student: Tensor, teacher: Tensor, repeats: int) -> tuple[float, float]:
    """Median milliseconds, and peak megabytes."""
    leaf = student.clone().requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss(leaf, teacher).backward()
    raw = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in sorted((e for e in raw if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    times = []
    for _ in range(repeats):
        leaf.grad = None
        begin = time.perf_counter()
        loss(leaf, teacher).backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3, most / 1e6


def labelled(loss: Callable[..., Tensor]) -> Loss:
    """Give labels to a loss that needs them."""

    def call(student: Tensor, teacher: Tensor) -> Tensor:
        return loss(student, teacher, torch.arange(len(student)) % student.shape[1])

    call.__name__ = loss.__name__
    return call


def contrast(student: Tensor, teacher: Tensor) -> Tensor:
    """CRD with the paper's settings: 16,384 negatives from a bank of 50,000 samples, 128 dimensions each."""
    return BANK(student, teacher, torch.arange(len(student)))


BANK = MemoryBank(samples=50_000, width=128, negatives=16_384)
RIVALS = [
    ("chunked_soft_targets", "soft_targets", (256, 32000)),
    ("rkd_distance", "naive_rkd_distance", (64, 2048)),
    ("rkd_angle", "naive_rkd_angle", (64, 2048)),
]


def compare(ours: Loss, theirs: Loss, shape: tuple[int, ...], repeats: int) -> dict[str, float]:
    """How many times less memory and time, the two measured in turn."""
    student, teacher = torch.randn(2, *shape)
    both = [[measure(loss, student, teacher, 1) for loss in (ours, theirs)] for _ in range(repeats)]
    mine, other = (list(zip(*column, strict=True)) for column in zip(*both, strict=True))
    return {
        "memory": statistics.median(other[1]) / statistics.median(mine[1]),
        "time": statistics.median(other[0]) / statistics.median(mine[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each loss")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary: list[Loss] = [*LOGIT_LOSSES, *map(labelled, TARGET_LOSSES)]
    cases: list[tuple[Loss, tuple[int, ...]]] = [(loss, (n, 32000)) for loss in vocabulary for n in (64, 256)]
    inside = [loss for loss in LOSSES if loss not in LOGIT_LOSSES]
    cases += [(loss, (n, *SHAPES.get(getattr(loss, "__name__", ""), (2048,)))) for loss in inside for n in (64, 256)]
    naive: list[Loss] = [naive_rkd_distance, naive_rkd_angle]
    cases += [(contrast, (64, 128)), *((loss, (64, 2048)) for loss in naive)]
    rows, lines = [], ["| loss | shape | ms | peak MB |", "|---|---|--:|--:|"]
    for loss, shape in cases:
        student, teacher = torch.randn(2, *shape)
        milliseconds, megabytes = measure(loss, student, teacher, args.repeats)
        name = getattr(loss, "__name__", repr(loss))
        rows.append({"loss": name, "shape": list(shape), "ms": milliseconds, "peak_mb": megabytes})
        lines.append(f"| {name} | {'x'.join(map(str, shape))} | {milliseconds:.2f} | {megabytes:.2f} |")
    named = {getattr(loss, "__name__", ""): loss for loss, _ in cases}
    bars = {f"{a} / {b}": compare(named[a], named[b], shape, args.repeats) for a, b, shape in RIVALS}
    lines += ["", "| loss / rival | times less memory | times faster |", "|---|--:|--:|"]
    lines += [f"| {name} | {bar['memory']:.1f} | {bar['time']:.2f} |" for name, bar in bars.items()]
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    lines += ["", f"Forward and backward, one thread, fp32. {versions}"]
    record = {"versions": versions, "rows": rows, "bars": bars}
    (HERE / "distill_losses.json").write_text(json.dumps(record, indent=1) + "\n")
    (HERE / "distill_losses.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
