"""Loss scaling: two networks whose fp16 training fails without it and equals fp32 with it, three seeds each.

sum    an autoencoder of handwritten digits (pixels 0..255) under the squared error summed over pixels and batch, as in the
       likelihood of a variational autoencoder: gradients overflow 65504, the weights become nan, the training diverges. A dynamic
       scale goes below 1 here (`LossScaler(floor=2**-14)`) and skips the steps that overflow before it has.
mean   a classifier of the same digits under a cross entropy of weight 1e-5, such as an auxiliary loss or a mean over many
       pixels: gradients fall below 2^-24 and are lost, and the network learns less or nothing. A dynamic scale lifts them.

Masters are fp32 in all rows, so only gradients can fail. Data: scikit-learn's digits, 1,500 to train and 297 to test. Prints
tables and writes `mixed_divergence.json` and `mixed_divergence.md` beside this file; `--smoke` makes three steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from compresskit import mixed

HERE = Path(__file__).parent
ROWS = {
    "FP32": mixed.FP32,
    "MASTER_FP16, no scale": replace(mixed.MASTER_FP16, loss_scale=None),
    "MASTER_FP16, dynamic scale": mixed.MASTER_FP16,
    "MASTER_BF16": mixed.MASTER_BF16,
}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs)
    )  # fmt: skip


def total(out: Tensor, x: Tensor, _y: Tensor) -> Tensor:
    return (out - x).square().sum()


def mean(out: Tensor, _x: Tensor, y: Tensor) -> Tensor:
    return 1e-5 * F.cross_entropy(out, y)


def train(policy: mixed.Policy, loss: Loss, data: tuple[Tensor, Tensor], *, steps: int, seed: int) -> dict[str, Any]:
    """Losses at the start and over the last ten steps, the test figure, skipped steps."""
    torch.manual_seed(seed)
    x, y = data
    model = mlp(64 if loss is total else 10)
    scaler = partial(mixed.LossScaler, floor=2.0**-14) if policy.loss_scale else None
    run = mixed.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), policy, scaler=scaler)
    losses: list[float] = []
    while len(losses) - int(run.skipped) < steps:  # a skipped step does not count
        batch = torch.randint(0, 1500, (128,))
        value = loss(run(x[batch]), x[batch], y[batch])
        run.backward(value)
        run.step()
        losses.append(value.item())
    stats = run.stats()
    with torch.no_grad():
        out = run.finish()(x[1500:])
    test = (out - x[1500:]).square().mean().item() if loss is total else (out.argmax(1) == y[1500:]).float().mean().item()
    return {"first": losses[0], "last": statistics.mean(losses[-10:]), "test": test, "scale": stats.get("scale"),
            "skipped": stats.get("skipped", 0)}  # fmt: skip


def rows(loss: Loss, data: tuple[Tensor, Tensor], *, steps: int, seeds: int) -> list[dict[str, Any]]:
    found = []
    for name, policy in ROWS.items():
        runs = [train(policy, loss, data, steps=steps, seed=seed) for seed in range(seeds)]
        finite = [run["test"] for run in runs if math.isfinite(run["last"])]
        found.append({
            "row": name,
            "seeds finite": f"{len(finite)} of {seeds}",
            "loss, first": statistics.mean(run["first"] for run in runs),
            "loss, last": statistics.mean(run["last"] for run in runs),
            "test": statistics.mean(finite) if finite else math.nan,
            "range": max(finite) - min(finite) if finite else math.nan,
            "last scale": runs[0]["scale"] or "-",
            "skipped": statistics.mean(run["skipped"] for run in runs),
            "runs": runs,
        })  # fmt: skip
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    heads = [head for head in rows[0] if head != "runs"]
    cells = [[f"{row[h]:.4g}" if isinstance(row[h], float) else str(row[h]) for h in heads] for row in rows]
    return [
        "| " + " | ".join(heads) + " |",
        "|---|" + "--:|" * (len(heads) - 1),
        *("| " + " | ".join(c) + " |" for c in cells),
        "",
    ]


def plain(value: Any) -> Any:
    """Values for JSON, which knows no nan."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three steps of one seed; writes nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # that fp16 on a CPU is slow: only numerics are measured here
    torch.set_num_threads(1)
    steps, seeds = (3, 1) if args.smoke else (60, 3)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1), torch.tensor(digits.target)
    sums = rows(total, (x * (255 / 16), y), steps=steps, seeds=seeds)
    means = rows(mean, (x / 16, y), steps=steps, seeds=seeds)
    lines = [
        "# fp16 with and without loss scaling",
        "",
        f"{steps} updates by AdamW, batch 128, {seeds} seeds, torch {torch.__version__}.",
        "",
    ]
    lines += ["Sum (test: squared error a pixel, lower is better):", "", *table(sums)]
    lines += ["Mean (test: accuracy):", "", *table(means)]
    print("\n".join(lines))
    if not args.smoke:
        record = plain({"torch": torch.__version__, "steps": steps, "sum": sums, "mean": means})
        (HERE / "mixed_divergence.json").write_text(json.dumps(record, indent=1) + "\n")
        (HERE / "mixed_divergence.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
