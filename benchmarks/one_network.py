"""One network, every technique: size, latency, accuracy and time of ResNet-20 (and ResNet-8) on CIFAR-10.

    python benchmarks/one_network.py --data CIFAR10 --checkpoints FOLDER --out runs/one_network

compressed  a trained ResNet-20, as it is, quantized without training (static, dynamic, weights alone), and with one epoch of
            training for what needs it: QAT, half of the MACs by channels, by whole blocks and by low rank, 80 % zeros. All of
            these imitate the network as it was (`imitate()`), SGD.
taught      a ResNet-8, three epochs from the same start: alone, and under the ResNet-20 by responses (soft targets), features
            (hints) and relations (RKD), the last two with soft targets.
precision   a ResNet-8, three epochs from the same start: fp32, autocast in bf16, bf16 weights with and without fp32 masters.

The row of `Depth` is from before it refitted the layers that are left and chose blocks by `after_training`.

Batch 128, crops and flips. Accuracies are top-1 of the executed file on the 10,000 test images, of the last epoch, one seed.
Latencies: one image, one thread, all files of a table measured in turn. Times are rough where the machine is shared. Arms
that are finished stay in the folder; an interrupted one goes on. Writes `one_network.json` and `.md` beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from quantize_cifar import MEAN, STD, draw, trained
from torch import nn
from vision import CifarResNet, Images, cifar10

import compresskit as ck
from compresskit import distill as kd
from compresskit.measure import latency
from compresskit.prune.depth import Depth
from compresskit.prune.low_rank import LowRank
from compresskit.quant import BlockScheme, WeightQuant

HERE = Path(__file__).parent
X = (torch.zeros(1, 3, 32, 32),)
SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, nesterov=True)
TUNE = ck.Train(epochs=1, optimizer=partial(SGD, lr=0.02), schedule=ck.lr.OneCycle(), precision=ck.mixed.AMP_BF16,
                objective=ck.imitate(), validate_every=0)  # fmt: skip
BY_CHANNEL = BlockScheme(bits=8, block_size=None)
FRESH: dict[str, Any] = {"epochs": 3, "optimizer": partial(SGD, lr=0.1), "schedule": ck.lr.OneCycle(), "validate_every": 0}
HALF = FRESH | {"precision": ck.mixed.AMP_BF16}
HINTS = kd.Term(kd.losses.hint, "layer2", weight=10.0, adapt=kd.project)
RELATIONS = [kd.Term(kd.losses.rkd_distance, "linear:in", weight=25.0), kd.Term(kd.losses.rkd_angle, "linear:in", weight=50.0)]
SMALL = partial(CifarResNet, 8)

COMPRESSED: dict[str, ck.Stage | None] = {
    "float": None,
    "`StaticQuant`": ck.StaticQuant(),
    "`DynamicQuant`": ck.DynamicQuant(),
    "`QAT`": ck.QAT(
        epochs=1, optimizer=partial(SGD, lr=0.002), schedule=ck.lr.Cosine(), objective=ck.imitate(), validate_every=0
    ),
    "`WeightQuant`, 8 bits by channel": WeightQuant(scheme=BY_CHANNEL, convolutions=BY_CHANNEL),
    "`Prune`, channels": ck.Prune(budget=ck.keep(macs=0.5), criterion=ck.prune.criteria.taylor, finetune=TUNE),
    "`Depth`, blocks": Depth(budget=ck.keep(macs=0.5), finetune=TUNE),
    "`LowRank`": LowRank(budget=ck.keep(macs=0.5), finetune=TUNE),
    "`Sparsify`, 80 % zeros": ck.Sparsify(budget=ck.remove(weights=0.8), finetune=TUNE),
}
TAUGHT: dict[str, ck.Stage] = {
    "alone": ck.Train(**HALF),
    "responses: soft targets": ck.Distill(student=SMALL, weight=0.9, task_weight=0.1, **HALF),
    "features: hints": ck.Distill(student=SMALL, terms=[HINTS], weight=0.9, task_weight=0.1, **HALF),
    "relations: RKD": ck.Distill(student=SMALL, terms=RELATIONS, weight=0.9, task_weight=0.1, **HALF),
}
PRECISION: dict[str, ck.Stage] = {
    "FP32": ck.Train(**FRESH),
    "AMP_BF16 (autocast)": ck.Train(**HALF),
    "MASTER_BF16 (bf16 weights, fp32 masters)": ck.Train(**FRESH, precision=ck.mixed.MASTER_BF16),
    "PURE_BF16 (bf16 weights alone)": ck.Train(**FRESH, precision=ck.mixed.PURE_BF16),
}


def measured(
    arms: dict[str, Any], start: Callable[[str], nn.Module], task: ck.Task, out: Path, samples: list[Any]
) -> list[dict[str, Any]]:
    """Run each arm as a recipe, then time the files of all of them in turn."""
    rows, files = [], []
    for number, (name, stage) in enumerate(arms.items()):
        folder = out / f"{number}"
        model = start(name)
        if stage is None:
            folder.mkdir(parents=True, exist_ok=True)
            files.append(ck.export_onnx(model, folder / "model.onnx", X))
            row: dict[str, Any] = {"metric": ck.evaluate(model, task), "seconds": None, "macs": ck.count_macs(model, X)}
        else:
            result = ck.Recipe(stage, seed=0).run(model, ck.Task(train=task.train, val=task.val, calibration=samples), out=folder)
            last = result.rows[-1]
            files.append(folder / "model.onnx")
            row = {"metric": last.metric, "seconds": last.seconds, "macs": last.macs, "zipped": last.zipped}
        rows.append({"arm": name, "bytes": files[-1].stat().st_size} | row)
        print(rows[-1], flush=True)
    for row, milliseconds in zip(rows, latency(files, X), strict=True):
        row["latency_ms"] = milliseconds
    return rows


def table(found: dict[str, Any]) -> str:
    parts = []
    for title, rows in found["tables"].items():
        lines = [f"## {title}", "", "| arm | file, KiB | latency | MACs, M | top-1 % | time, s |", "|---|--:|--:|--:|--:|--:|"]
        for row in rows:
            size = f"{row['bytes'] / 1024:.0f}" + (f", {row['zipped'] / 1024:.0f} in a zip" if row.get("zipped") else "")
            ratio = row["latency_ms"] / rows[0]["latency_ms"]
            time = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
            lines.append(
                f"| {row['arm']} | {size} | {ratio:.2f} | {row['macs'] / 1e6:.1f} | {100 * row['metric']:.2f} | {time} |"
            )
        parts.append("\n".join(lines))
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    return (
        "\n\n".join([*parts, f"One seed, one thread, a machine that others used, too, so that times are rough; {about}."]) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/one_network"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = cifar10(args.data, None)
    train = Images(*data["train"], 128, MEAN, STD, augment=4, flip=True, shuffle=True)
    task = ck.Task(train=train, val=Images(*data["test"], 500, MEAN, STD))
    samples = [(x, None) for x in draw(data["train"][0], 0)]
    teacher = trained("resnet20", args.checkpoints)

    def small(name: str) -> nn.Module:
        torch.manual_seed(0)
        return SMALL()

    def taught(name: str) -> nn.Module:
        return small(name) if name == "alone" else copy.deepcopy(teacher)

    tables: dict[str, tuple[dict[str, Any], Callable[[str], nn.Module], str]] = {
        "ResNet-20, compressed": (COMPRESSED, lambda name: copy.deepcopy(teacher), "compressed"),
        "ResNet-8, taught": (TAUGHT, taught, "taught"),
        "ResNet-8, precision": (PRECISION, small, "precision"),
    }
    found: dict[str, Any] = {"about": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}, "tables": {}}
    found["about"]["python"] = platform.python_version()
    for title, (arms, start, folder) in tables.items():
        found["tables"][title] = measured(arms, start, task, args.out / folder, samples)
    (HERE / "one_network.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "one_network.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
