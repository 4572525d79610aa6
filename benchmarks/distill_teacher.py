"""Cost of a teacher in the training loop: a ResNet-20 step, a ResNet-56 forward pass, and both as `imitate` runs them.

Writes `distill_teacher.json` and `distill_teacher.md` beside this file. Random images, batch 128; the three are timed in turn, so
that changes of the machine's speed affect all of them; times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.train.objective import bind_objective

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))
from vision import CifarResNet  # noqa: E402


def clocked(action: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e3


def stepper(student: nn.Module, task: ck.Task, objective: ck.Objective | None) -> Callable[[], None]:
    """One step of training on the first batch, as `fit_` does it."""
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-4, momentum=0.9)
    run = ck.mixed.prepare(student, optimizer)
    goal = bind_objective(objective, student, task)
    batch = next(iter(task.batches("train")))
    student.train()

    def step() -> None:
        run.backward(torch.stack(list(goal(run, batch).values())).sum())
        run.step()

    return step


def measure(source: nn.Module | kd.Cached, task: ck.Task, rounds: int, terms: list[kd.Term]) -> dict[str, float]:
    """Medians in milliseconds, and what `imitate` adds to a step as a fraction of the teacher's forward pass."""
    alone = stepper(CifarResNet(20), task, None)
    both = stepper(CifarResNet(20), task, kd.imitate(source, terms=terms))
    inputs, _ = task.split(next(iter(task.batches("train"))))

    def forward() -> None:
        if isinstance(source, kd.Teacher):
            source.predictions(inputs, task)

    actions = (alone, forward, both)
    times = [[clocked(action) for action in actions] for _ in range(rounds + 1)][1:]
    a, f, b = (statistics.median(column) for column in zip(*times, strict=True))
    return {"alone_ms": a, "forward_ms": f, "together_ms": b, "added_ms": b - a, "added_share": (b - a) / f if f > 1 else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each case")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    batch = torch.randn(args.batch_size, 3, 32, 32), torch.randint(0, 10, (args.batch_size,))
    task, model = ck.Task(train=[batch], val=[batch]), CifarResNet(56).eval()
    taps = [kd.Term(kd.losses.attention_transfer, "layer?")]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        stored = kd.cache(model, task, Path(folder) / "cache")
        cases: dict[str, tuple[nn.Module | kd.Cached, list[kd.Term]]] = {
            "fp32": (kd.Teacher(model), []),
            "bf16, cast once": (kd.Teacher(model, dtype=torch.bfloat16), []),
            "fp32, three taps": (kd.Teacher(model), taps),
            "cached": (stored, []),
        }
        for name, (source, terms) in cases.items():
            rows[name] = measure(source, task, args.rounds, terms)
    lines = ["| teacher | student alone ms | teacher's forward ms | together ms | added / forward |", "|---|--:|--:|--:|--:|"]
    for name, row in rows.items():
        share = f"{100 * row['added_share']:.1f} %" if row["added_share"] else f"{row['added_ms']:.1f} ms in all"
        lines.append(f"| {name} | {row['alone_ms']:.0f} | {row['forward_ms']:.0f} | {row['together_ms']:.0f} | {share} |")
    versions = {"torch": torch.__version__, "machine": platform.machine(), "threads": args.threads, "batch": args.batch_size}
    lines += ["", f"The bar for the teacher is 105 %; three taps add the losses of three feature maps to it. {versions}"]
    (HERE / "distill_teacher.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    (HERE / "distill_teacher.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
