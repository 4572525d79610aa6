"""Two processes against one: the time of training ResNet-20, and the metrics of `recipes/digits.py`. No GPU.

`--only times` and `--only digits` measure one of the two and keep the figures of the other. Writes processes.json and
processes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import compresskit as ck
from compresskit.base import distributed

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"
sys.path.insert(0, str(RECIPES))

from vision import CifarResNet  # noqa: E402

STEPS, WARM, ROUNDS = 16, 4, 3


def launch(count: int, threads: int, *command: str) -> str:
    """What a script prints, as one process or as several that torchrun starts."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent), "PYTHONWARNINGS": "ignore"}
    start = [sys.executable]
    if count > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.run([*start, *command], env=environment, capture_output=True, text=True, check=True).stdout


def worker(*, exact: bool) -> None:
    """Train ResNet-20 for some steps of 128 images; process 0 prints the seconds of a step."""
    torch.manual_seed(0)
    times: list[float] = []
    with distributed.process_group("cpu"):
        batch = (torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
        task = ck.Task(train=[batch] * STEPS, val=[batch])
        how = ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), exact=exact)
        ck.fit_(CifarResNet(20), task, how, after_step=[lambda step, steps: times.append(time.perf_counter())])
        if distributed.rank() == 0:
            print(f"step {(times[-1] - times[WARM]) / (STEPS - 1 - WARM)}")


#: Processes, threads of each, and what the worker is told.
WAYS = {
    "one process, one thread": (1, 1, ()),
    "one process, two threads": (1, 2, ()),
    "two processes, one thread each": (2, 1, ()),
    "two processes, one thread each, exact=True": (2, 1, ("--exact",)),
}


def times() -> dict[str, float]:
    """Seconds of a step in each way, the median of rounds in turn."""
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, (count, threads, told) in WAYS.items():
            said = launch(count, threads, __file__, "--worker", *told)
            found[name].append(float(said.split("step ")[1].split()[0]))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def digits(seeds: int) -> dict[str, Any]:
    """The metric of every stage for each seed, one process and two."""
    found: dict[str, Any] = {"one": {}, "two": {}}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            for name, count, threads in (("one", 1, 1), ("two", 2, 1)):
                out = Path(folder) / name
                launch(count, threads, str(RECIPES / "digits.py"), "--out", str(out), "--seed", str(seed))
                for row in json.loads((out / "report.json").read_text())["rows"]:
                    found[name].setdefault(row["stage"], []).append(row["metric"])
    last = list(found["one"])[-1]
    found["points"] = 100 * (statistics.mean(found["two"][last]) - statistics.mean(found["one"][last]))
    return found


def page(found: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Two processes against one",
        "",
        "Written by `benchmarks/processes.py`; gloo, two cores, no GPU.",
        "",
    ]
    if "times" in found:
        first = next(iter(found["times"].values()))
        lines += ["| a step of ResNet-20, 128 images, fp32 | seconds | faster |", "|---|--:|--:|"]
        lines += [f"| {name} | {seconds:.3f} | {first / seconds:.2f}x |" for name, seconds in found["times"].items()]
        lines += [""]
    if "digits" in found:
        d = found["digits"]
        lines += ["| `recipes/digits.py` | one process | two processes |", "|---|--:|--:|"]
        for stage in d["one"]:
            cells = [f"{statistics.mean(d[n][stage]):.4f} ({', '.join(f'{v:.4f}' for v in d[n][stage])})" for n in ("one", "two")]
            lines.append(f"| {stage} | {' | '.join(cells)} |")
        lines += [
            "",
            f"Mean and each seed. The last stage differs by {d['points']:+.2f} points (wanted: within 0.3).",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", choices=["times", "digits"], help="measure one of the two")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the digits")
    parser.add_argument("--worker", action="store_true", help="what the processes do that are timed")
    parser.add_argument("--exact", action="store_true", help="of the worker: BatchNorm over the rows of both")
    args = parser.parse_args()
    if args.worker:
        worker(exact=args.exact)
        return
    path = HERE / "processes.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if args.only != "digits":
        found["times"] = times()
    if args.only != "times":
        found["digits"] = digits(args.seeds)
    path.write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "processes.md").write_text(page(found))


if __name__ == "__main__":
    main()
