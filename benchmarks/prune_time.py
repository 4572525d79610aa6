"""Time of planning to prune half of the MACs of large torchvision models at 224 x 224, proof included, two threads; and of the
whole stage `Prune` of a ResNet-20 for CIFAR, with its 3,072 images for refitting and BatchNorm, as it is by default.

Writes `prune_time.json` and `prune_time.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torchvision

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

import compresskit as ck  # noqa: E402

NETWORKS = ("resnet152", "densenet201", "vit_b_16", "swin_t")


def measure(name: str, runs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = torchvision.models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.5))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "left": plan.macs / plan.macs_before, "groups": len(plan.lines)}


def stage(runs: int) -> list[float]:
    """Seconds of `Prune(budget=keep(macs=0.5))` of a ResNet-20, each run."""
    torch.manual_seed(0)
    batches = [(torch.randn(128, 3, 32, 32), torch.randint(10, (128,))) for _ in range(24)]
    task, seconds = ck.Task(train=batches, val=batches[:1]), []
    for _ in range(runs):
        model = CifarResNet(20).eval()
        begin = time.perf_counter()
        ck.Prune(budget=ck.keep(macs=0.5))(model, task)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="of each model")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plan_once = torchvision.models.squeezenet1_1(weights=None).eval()
    ck.prune.plan_channels(plan_once, torch.randn(1, 3, 64, 64), budget=ck.keep(macs=0.5))  # so that imports are not measured
    rows = {name: measure(name, args.runs) for name in NETWORKS}
    lines = ["| model | seconds to plan and prove, each run | share of MACs left | groups of channels |", "|---|---|--:|--:|"]
    for name, row in rows.items():
        each = ", ".join(f"{s:.1f}" for s in row["seconds"])
        lines.append(f"| {name} | {each} | {row['left']:.1%} | {row['groups']} |")
    whole = stage(args.runs)
    lines += ["", f"The stage for a ResNet-20: {', '.join(f'{s:.1f}' for s in whole)} s."]
    slowest = max(statistics.median(row["seconds"]) for row in rows.values())
    lines += ["", f"Slowest median: {slowest:.1f} s; {args.threads} threads, torch {torch.__version__}."]
    (HERE / "prune_time.json").write_text(
        json.dumps({"torch": torch.__version__, "threads": args.threads, "rows": rows, "stage": whole}, indent=1) + "\n"
    )
    (HERE / "prune_time.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
