"""Mixed precision on a CPU, one thread. CPU-1: the step alone, 25 M parameters. CPU-2: ResNet-20 in fp32 and bf16.

A row of CPU-1 is measured in turn with the bare step, the rows of CPU-2 in turn with each other, so that other load on the
machine slows both; figures are medians of process time. Prints two tables and writes `mixed_cpu.json` and `mixed_cpu.md` beside
this file. `--smoke` tries the code in seconds on tiny sizes and writes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compresskit import mixed

HERE = Path(__file__).parent


class Stack(nn.Module):
    """Square linear layers: parameters for the optimizer, without much of a model."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


class Block(nn.Module):
    """A residual block of ResNet-20 (He et al., 1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if inputs == outputs else short

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet20() -> nn.Sequential:
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


def apex_style(model: nn.Module) -> Callable[[], None]:
    """The classic Python path of apex: copy, check on the host, unscale, step, copy back, tensor by tensor."""
    parameters = list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    model.bfloat16()

    def step() -> None:
        for p, master in zip(parameters, masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        total = sum(float(m.grad.sum()) for m in masters if m.grad is not None)
        if total == total and abs(total) != float("inf"):
            for master in masters:
                if master.grad is not None:
                    master.grad.mul_(1.0)
            optimizer.step()
            for p, master in zip(parameters, masters, strict=True):
                p.data.copy_(master)

    return step


#: From a model and its optimizer to a function that makes one step.
Maker = Callable[[nn.Module, torch.optim.Optimizer], Callable[[], None]]
BARE = "bare fused AdamW, fp32"


def makers() -> dict[str, Maker]:
    """Rows of CPU-1."""

    def bare(_model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        return lambda: (optimizer.step(), None)[1]

    def scaled(_model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))

        def step() -> None:
            scaler.step(optimizer)
            scaler.update()

        return step

    def ours(policy: mixed.Policy, **settings: Any) -> Maker:
        return lambda model, optimizer: mixed.prepare(model, optimizer, policy, **settings).step

    rows: dict[str, Maker] = {BARE: bare, "fused AdamW + torch GradScaler": scaled}
    for policy in (mixed.MASTER_BF16, mixed.SPLIT_BF16, mixed.KAHAN_BF16, mixed.SR_BF16):
        rows[f"{policy.name}, foreach"] = ours(policy, backend="foreach")
        rows[f"{policy.name}, compiled"] = ours(policy, backend="compiled")
        if policy.bf16_format:
            rows[f"{policy.name}, as it is chosen"] = ours(policy)
    rows["MASTER_BF16, foreach, clip"] = ours(mixed.MASTER_BF16, clip=1.0)
    rows["MASTER_BF16, flat"] = ours(mixed.MASTER_BF16, flat=True)
    return rows | {"apex style, bf16": lambda model, _: apex_style(model)}


def stepper(make: Maker, width: int, depth: int) -> Callable[[], float]:
    """A function that makes one step and returns its milliseconds; gradients are given anew inside, which is not timed."""
    model = Stack(width, depth)
    step = make(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    grads = [torch.randn_like(p) * 1e-3 for p in model.parameters()]

    def once() -> float:
        for p, grad in zip(model.parameters(), grads, strict=True):
            allowed = getattr(p, "grad_dtype", None) or p.dtype
            p.grad = grad if grad.dtype == allowed else grad.to(allowed)
        begin = time.process_time()
        step()
        return (time.process_time() - begin) * 1000

    return once


def cpu_1(*, smoke: bool) -> list[dict[str, Any]]:
    """Process time of one step, and times the bare one."""
    width, depth, turns = (32, 2, 4) if smoke else (1024, 24, 30)
    found, every = [], makers()
    for name, make in every.items():
        pair = stepper(every[BARE], width, depth), stepper(make, width, depth)
        spent = [[once() for once in pair] for _ in range(turns)][2:]
        bare, own = (statistics.median(times) for times in zip(*spent, strict=True))
        least = min(own for _, own in spent)
        found.append({"row": name, "ms": own, "times_bare": own / bare if bare else 0.0, "least_ms": least})
    return found


def trainer(policy: mixed.Policy | None, batch: int, *, last: bool) -> Callable[[], None]:
    """One training step of ResNet-20; None is torch.autocast in bf16 with GradScaler switched off, as torch documents it."""
    model = resnet20()
    x, y = torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    if policy is not None:
        run = mixed.prepare(model, optimizer, policy)

        def step() -> None:
            run.backward(nn.functional.cross_entropy(run(x), y))
            run.step()

        return step

    def plain() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain


def cpu_2(*, smoke: bool) -> list[dict[str, Any]]:
    """Images per second of training, like for like in memory format."""
    batch = 2 if smoke else 64
    kinds = {"FP32": mixed.FP32, "torch.autocast bf16": None, "AMP_BF16": mixed.AMP_BF16, "MASTER_BF16": mixed.MASTER_BF16}
    formats = (False, True)
    steps = {f"{name}{', channels_last' if f else ''}": trainer(p, batch, last=f) for f in formats for name, p in kinds.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(3 if smoke else 10):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if turn >= 2:
                spent[name].append(time.process_time() - begin)
    rows = []
    for name, times in spent.items():
        base = "FP32, channels_last" if "channels_last" in name else "FP32"
        ms = statistics.median(times) * 1000
        speed = statistics.median(spent[base]) * 1000 / ms
        rows.append({"row": name, "ms": ms, "images_s": batch / ms * 1000, "times_fp32": speed})
    return rows


def table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    heads = list(rows[0])
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return [title, "", *lines, *("| " + " | ".join(row) + " |" for row in cells), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; writes nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {"CPU-1": cpu_1(smoke=args.smoke), "CPU-2": cpu_2(smoke=args.smoke)}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    versions["bf16"] = str(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "unknown")())
    lines = ["# Mixed precision on a CPU, one thread", ""]
    lines += table("CPU-1: one AdamW step", results["CPU-1"]) + table("CPU-2: ResNet-20", results["CPU-2"]) + [str(versions)]
    print("\n".join(lines))
    if not args.smoke:
        (HERE / "mixed_cpu.json").write_text(json.dumps({"versions": versions, **results}, indent=1) + "\n")
        (HERE / "mixed_cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
