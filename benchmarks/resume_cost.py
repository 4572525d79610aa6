"""Cost of checkpoints during a training: fraction of the time of ResNet-20 at the default interval, and peak memory.

The images are random, as neither figure depends on what is learned. Writes resume_cost.json and resume_cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compresskit as ck
from compresskit.base.progress import Progress

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

INTERVAL = ck.Every().seconds


class Saves(logging.Handler):
    """A log handler that collects how long each save took."""

    def __init__(self) -> None:
        super().__init__()
        self.milliseconds: list[float] = []
        self.megabytes: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("%s: saved"):
            _, _, megabytes, milliseconds = record.args  # type: ignore[misc]
            self.megabytes.append(float(megabytes))  # type: ignore[arg-type]
            self.milliseconds.append(float(milliseconds))  # type: ignore[arg-type]


def listening() -> Saves:
    saves = Saves()
    logger = logging.getLogger("compresskit.base.progress")
    logger.setLevel(logging.INFO)
    logger.addHandler(saves)
    return saves


def time_share(seconds: float) -> dict[str, Any]:
    """Train ResNet-20 for about so many seconds at the default interval, with SGD as the recipes do."""
    train = [(torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))] * 390
    saves = listening()
    stop = [time.perf_counter() + seconds, 0]

    def enough(step: int, steps: int) -> None:
        stop[1] = step
        if time.perf_counter() > stop[0]:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        task = ck.Task(train=train, val=train, progress=Progress(folder=Path(folder) / "progress", key="resume cost"))
        how = ck.Train(epochs=1000, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), precision=ck.mixed.MASTER_BF16)
        begin = time.perf_counter()
        with contextlib.suppress(KeyboardInterrupt):
            ck.fit_(CifarResNet(20), task, how, after_step=[enough])
        total = time.perf_counter() - begin
    return {
        "interval_s": INTERVAL,
        "trained_s": round(total, 1),
        "steps": stop[1],
        "saves": len(saves.milliseconds),
        "save_ms": [round(ms, 1) for ms in saves.milliseconds],
        "megabytes": round(max(saves.megabytes), 2),
        "share": round(sum(saves.milliseconds) / 1e3 / total, 6),
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The peak memory of the process while this ran."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = resident()
        self.done = False

    def run(self) -> None:
        while not self.done:
            self.most = max(self.most, resident())
            time.sleep(0.0005)


def memory(width: int = 4096, layers: int = 4) -> dict[str, Any]:
    """Save a large model under AdamW once and watch the memory."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    run = ck.mixed.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ck.mixed.FP32)
    run.backward(run(torch.randn(2, width)).square().mean())
    run.step()
    parameters = sum(p.numel() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        training = Progress(folder=Path(folder) / "progress", key="memory").training("memory")
        peak = Peak()
        peak.start()
        training.save({"run": run.state_dict(copy=False)}, 1)
        peak.done = True
        peak.join()
    kept = 12 * parameters
    return {
        "parameters": parameters,
        "model_and_optimizer_mb": round(kept / 1e6, 1),
        "extra_mb": round((peak.most - peak.before) / 1e6, 1),
        "extra_share": round((peak.most - peak.before) / kept, 4),
        "seconds": round(training.save_time, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200, help="of training")
    args = parser.parse_args()
    found = {"torch": torch.__version__, "threads": torch.get_num_threads(), "memory": memory(),
             "resnet20": time_share(args.seconds)}  # fmt: skip
    (HERE / "resume_cost.json").write_text(json.dumps(found, indent=1) + "\n")
    share, peak = found["resnet20"], found["memory"]
    assert isinstance(share, dict)
    assert isinstance(peak, dict)
    times = share["save_ms"]
    (HERE / "resume_cost.md").write_text(
        f"""# What saving on the way costs

Written by `benchmarks/resume_cost.py`; {found["threads"]} threads, torch {found["torch"]}.

| | reached | wanted |
|---|--:|--:|
| share of the training time of ResNet-20, saved every {INTERVAL:g} s | {share["share"]:.3%} | <= 1 % |
| memory while saving, above what it was, as a share of model and optimizer | {peak["extra_share"]:.1%} | <= 110 % |

ResNet-20: batches of 128, SGD, bf16 with masters; {share["saves"]} saves of {share["megabytes"]} MB in {share["trained_s"]} s,
{min(times):.0f} to {max(times):.0f} ms each. Memory: {peak["parameters"] / 1e6:.0f} M parameters under AdamW; their
{peak["model_and_optimizer_mb"]:.0f} MB were written, hashed and synced in {peak["seconds"]} s, in {peak["extra_mb"]} MB.
"""
    )


if __name__ == "__main__":
    main()
