"""Cost of keeping masked weights at zero in a training step: ResNet-20, batch 128, 90 % of the weights removed, one thread.

Writes `mask_cost.json` and `mask_cost.md` beside this file. The work of the masks (gradients of removed weights dropped, weights
set to zero again after the update) is timed where it happens, in CPU time of the process, because the difference of two
whole steps is smaller than the noise of a shared machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.graph import masks as engine  # noqa: E402
from compresskit.prune import enforce_masks_, plan_mask  # noqa: E402

spent = 0.0


def timed(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its CPU time added to `spent`."""

    def run(*args: Any) -> Any:
        global spent
        begin = time.process_time()
        result = work(*args)
        spent += time.process_time() - begin
        return result

    return run


def cost(policy: ck.mixed.Policy, steps: int, batch_size: int) -> dict[str, Any]:
    """Seconds of a step, and of the masks in it."""
    global spent
    torch.manual_seed(0)
    x, y = torch.randn(batch_size, 3, 32, 32), torch.arange(batch_size) % 10
    model = CifarResNet(20)
    plan_mask(model, ck.remove(weights=0.9)).apply_(model)
    run = ck.mixed.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), policy)
    release = enforce_masks_(model, run)
    run.after_update[:] = [timed(hook) for hook in run.after_update]
    shares, whole = [], []
    for step in range(steps + 2):
        begin, spent = time.process_time(), 0.0
        run.backward(F.cross_entropy(run(x), y))
        run.step()
        took = time.process_time() - begin
        if step >= 2:
            shares.append(spent / (took - spent))
            whole.append(took)
    del release
    return {"policy": policy.name, "step_ms": statistics.median(whole) * 1000, "cost": statistics.median(shares),
            "largest": max(shares), "steps": steps}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine._masked_gradient = timed(engine._masked_gradient)
    rows = [cost(policy, args.steps, args.batch_size) for policy in (ck.mixed.FP32, ck.mixed.SPLIT_BF16)]
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": 1, "batch": args.batch_size}
    (HERE / "mask_cost.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = ["| policy | step, CPU ms | masks, of the rest of the step | largest of the steps |", "|---|--:|--:|--:|"]
    lines += [f"| {r['policy']} | {r['step_ms']:.0f} | {r['cost']:.2%} | {r['largest']:.2%} |" for r in rows]
    (HERE / "mask_cost.md").write_text("\n".join([*lines, "", f"Medians of {args.steps} steps. {about}"]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
