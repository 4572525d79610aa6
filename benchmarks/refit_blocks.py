"""Residual blocks removed without a training: what fitting the layers that are left gives, on trained networks of CIFAR-10.

    python benchmarks/refit_blocks.py --data CIFAR10 --checkpoints FOLDER --out runs/refit

Blocks are removed in the order of `plan_blocks` (`importance=output_error` or `after_training`, by MACs). BatchNorm alone: its
statistics are re-estimated on 3,072 images. Refitted: `refit_stream_` reads as many images as `Depth` gives it, 2,048,
first. Neither reads a label. Top-1 in percent on the 10,000 test images, in float32; seconds: of the fit, on `--threads` cores.

Writes `refit_blocks.json` and `refit_blocks.md` beside this file, but not with `--limit`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from prune_cifar import EXAMPLE, Setup, accuracy, begin, rebatched
from quantize_cifar import DEPTHS, checkpoint_of

from compresskit.graph.surgery import copy_model
from compresskit.prune.depth import costs, importance, plan_blocks, refit_stream_
from compresskit.prune.depth.depth_stage import FITTED_SAMPLES

HERE = Path(__file__).parent
REMOVED = {"resnet20": (1, 2, 3, 4), "resnet56": (3, 6, 9, 12, 14)}
IMPORTANCES = {"output_error": importance.output_error, "after_training": importance.after_training}


def rows_of(network: str, setup: Setup, name: str) -> list[dict[str, Any]]:
    """Each number of removed blocks: top-1 with BatchNorm re-estimated, and with layers refitted."""
    dense, task = setup.model(), setup.task(None)
    torch.manual_seed(0)
    order = plan_blocks(dense, EXAMPLE, blocks=max(REMOVED[network]), importance=IMPORTANCES[name], cost=costs.macs, task=task)
    rows = []
    for count in REMOVED[network]:
        plan = plan_blocks(dense, EXAMPLE, blocks=order.paths[:count], cost=costs.macs, task=task, samples=1)
        row: dict[str, Any] = {"network": network, "importance": name, "removed": count, "macs": plan.macs / plan.macs_before}
        for column in ("batchnorm", "refitted"):
            model = plan.apply_(copy_model(dense))
            if column == "refitted":
                torch.manual_seed(0)
                batches = itertools.islice(task.batches("calibration"), FITTED_SAMPLES // 128)
                begin = time.perf_counter()
                refit_stream_(model, dense, plan.paths, (batch[:1] for batch in batches))
                row["seconds"] = time.perf_counter() - begin
            rebatched(setup, model, 0)
            row[column] = accuracy(setup, model)
        print(row, flush=True)
        rows.append(row)
    return rows


def table(found: dict[str, Any]) -> str:
    lines = [
        "| network | importance | blocks removed | MACs | top-1 %, BatchNorm alone | refitted | seconds |",
        f"|---|---|{'--:|' * 5}",
    ]
    lines += [
        f"| {row['network']} | {row['importance']} | {row['removed']} | {row['macs']:.2f} | {row['batchnorm']:.2f}"
        f" | {row['refitted']:.2f} | {row['seconds']:.0f} |"
        for row in found["rows"]
    ]
    whole = ", ".join(f"{network} {top1:.2f} %" for network, top1 in found["whole"].items())
    return "\n".join([*lines, "", f"Whole: {whole}. torch {found['torch']}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/refit"), help="where decoded images are kept")
    parser.add_argument("--networks", nargs="*", choices=list(REMOVED), default=list(REMOVED))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="images of each split, to try things out; writes no figures")
    args = parser.parse_args()
    data = begin(args)
    found: dict[str, Any] = {"torch": torch.__version__, "whole": {}, "rows": []}
    for network in args.networks:
        setup = Setup(DEPTHS[network], checkpoint_of(network, args.checkpoints), args.out, data, autocast=False)
        found["whole"][network] = accuracy(setup, setup.model())
        for name in IMPORTANCES:
            found["rows"] += rows_of(network, setup, name)
    if not args.limit:
        (HERE / "refit_blocks.json").write_text(json.dumps(found, indent=1) + "\n")
        (HERE / "refit_blocks.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
