"""What holding masks costs a training step: ResNet-20, batch 128, 90 % of the weights removed, against the same step without.

Writes `mask_cost.json` and `mask_cost.md` beside this file. The two steps are timed in turn, in many short rounds whose order
alternates, and the share is the median over rounds of the ratio of neighbours, which is robust against other load.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.prune import hold_, plan_mask  # noqa: E402


def stepper(policy: ck.mixed.Policy, *, masked: bool, x: torch.Tensor, y: torch.Tensor):  # type: ignore[no-untyped-def]
    """A function that makes one training step."""
    torch.manual_seed(0)
    model = CifarResNet(20)
    plan_mask(model, 0.9).apply_(model)
    if not masked:
        ck.prune.detach_(model)
    run = ck.mixed.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), policy)
    hold_(model, run)

    def step() -> float:
        begin = time.perf_counter()
        run.backward(F.cross_entropy(run(x), y))
        run.step()
        return time.perf_counter() - begin

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of steps")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x, y = torch.randn(args.batch_size, 3, 32, 32), torch.arange(args.batch_size) % 10
    rows = []
    for policy in (ck.mixed.FP32, ck.mixed.SPLIT_BF16):
        bare, held = (stepper(policy, masked=masked, x=x, y=y) for masked in (False, True))
        for step in (bare, held):
            step()
        ratios, times = [], []
        for turn in range(args.rounds):
            first, second = (bare, held) if turn % 2 == 0 else (held, bare)
            a, b = first(), second()
            without, with_masks = (a, b) if turn % 2 == 0 else (b, a)
            ratios.append(with_masks / without)
            times.append(without)
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append({"policy": policy.name, "step_ms": statistics.median(times) * 1000, "cost": statistics.median(ratios) - 1,
                     "quartiles": [q - 1 for q in (quartiles[0], quartiles[2])], "rounds": args.rounds})  # fmt: skip
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": args.threads, "batch": args.batch_size}
    (HERE / "mask_cost.json").write_text(json.dumps({"about": about, "rows": copy.deepcopy(rows)}, indent=1) + "\n")
    lines = ["| policy | step ms | masks cost | quartiles |", "|---|--:|--:|---|"]
    lines += [
        f"| {r['policy']} | {r['step_ms']:.1f} | {r['cost']:+.1%} | {r['quartiles'][0]:+.1%} to {r['quartiles'][1]:+.1%} |"
        for r in rows
    ]
    (HERE / "mask_cost.md").write_text("\n".join([*lines, "", f"{args.rounds} pairs of steps each. {about}"]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
