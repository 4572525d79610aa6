"""Training with few bits on CIFAR-10: accuracy of the executed file, its size, and the time of the training.

    python benchmarks/low_bit_qat.py --data CIFAR10 --checkpoints FOLDER --arms W4A4 W2A8 --epochs 5
    python benchmarks/low_bit_qat.py --data CIFAR10 --checkpoints FOLDER --network vit --arms W4A4 --epochs 1
    python benchmarks/low_bit_qat.py --photographs FOLDER --network face --arms W4A8 W4A4 --epochs 60

W4A4 ...  `QAT(bits=..., learned=True)`: bits of weights and of what the layers read; sums of residual blocks keep 8 bits
          (`Bits(shortcuts=8)`), and so do the first and the last layer. BatchNorm statistics are frozen after 80 % of the steps.
W1A1      `quant.qat.Binarize`: signs of weights and inputs, factors for channels, rows and columns, in all layers but the first
          and the last. `WeightQuant` stores the signs in 1 bit and these two in 8; the file computes in float.

Batch 128, crops and flips, cosine; half the task's loss and half the distance to the float model's predictions, the default; in
W2A2 also the squared distance to its features behind each of the three stages (hints). SGD with rate 0.01, momentum 0.9 and
weight decay 1e-4 for W4A4 and W2A8, Adam with rate 1e-3 for W2A2 and 4e-3 for W1A1.

`--network vit`: the transformer that `low_bit.py` trains, read from `--out`; its arms have Adam with rate 1e-4 and no hints.

`--network face`: the face detector without labels, by the float network's outputs alone, on the photographs of `budgets.py`, 16
images a step, statistics of BatchNorm as they are; Adam with rate 5e-4. Quality is F1 in % on the 200 photographs of
`real_networks.py`. No W2A2, no W1A1.

What is not trained again is kept in `low_bit_qat.json` and `.md` beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from budgets import detector
from low_bit import ends, transformer
from quantize_cifar import MEAN, STD, draw, trained
from real_networks import executed, networks
from vision import Images, cifar10

import compresskit as ck
from compresskit.base.stage import Stage
from compresskit.quant import Bits, WeightQuant
from compresskit.quant.numerics.block_grid import BlockScheme
from compresskit.quant.qat import Binarize, binarize_, sign_formats

HERE = Path(__file__).parent
NETWORKS = ("resnet20", "resnet56", "vit", "face")
EIGHT = Bits(weights=8, activations=8)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
ADAM = partial(torch.optim.Adam, lr=1e-3)
ADAM_OF_TRANSFORMER = partial(torch.optim.Adam, lr=1e-4)
#: The default objective, and hints: what the float model has behind each stage.
HINTS = partial(
    ck.imitate, temperature=1.0, weight=0.5, task_weight=0.5, terms=[ck.distill.Term(ck.distill.losses.hint, "layer?")]
)
ARMS: dict[str, tuple[Bits, Callable[..., torch.optim.Optimizer]]] = {
    "W4A8": (Bits(weights=4), SGD),
    "W4A4": (Bits(weights=4, activations=4, shortcuts=8), SGD),
    "W2A8": (Bits(weights=2), SGD),
    "W2A2": (Bits(weights=2, activations=2, shortcuts=8), ADAM),
    "W1A1": (Bits(weights=1, activations=1), partial(torch.optim.Adam, lr=4e-3)),
}


def arm(name: str, data: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm, and measure the executed file. An interrupted training goes on where it was."""
    bits, optimizer = ARMS[name]
    epochs, seed, folder = args.epochs, args.seed, args.out / f"{args.network}-{name}-{args.epochs}-{args.seed}"
    model = transformer(args) if args.network == "vit" else trained(args.network, args.checkpoints)
    optimizer = ADAM_OF_TRANSFORMER if args.network == "vit" else optimizer
    pixels, labels = data["train"]
    train = Images(pixels, labels, 128, MEAN, STD, augment=4, flip=True, shuffle=True)
    test, answers = data["test"]
    drawn = draw(pixels, seed)
    task = ck.Task(train=train, val=Images(test, answers, 500, MEAN, STD), calibration=[(x, None) for x in drawn])
    stages: tuple[Stage, ...]
    if name == "W1A1":
        half = ck.imitate(temperature=1.0, weight=0.5, task_weight=0.5)
        train_signs = ck.Train(epochs=epochs, optimizer=optimizer, objective=half, validate_every=0)
        formats = sign_formats(binarize_(copy.deepcopy(model), drawn[0]))
        by_row = BlockScheme(bits=8, block_size=None)
        stages = Binarize(finetune=train_signs), WeightQuant(scheme=by_row, convolutions=by_row, overrides=formats)
    else:
        settings: dict[str, Any] = {"objective": HINTS()} if name == "W2A2" and args.network != "vit" else {}
        stages = (
            ck.QAT(
                epochs=epochs,
                bits={"": bits} | dict.fromkeys(ends(model), EIGHT),
                learned=True,
                optimizer=optimizer,
                validate_every=0,
                **settings,
            ),
        )
    recipe = ck.Recipe(*stages, seed=seed, export="last", on_epoch=lambda report: print(name, report, flush=True))
    rows = recipe.run(model, task, folder).rows
    return {"top1": 100 * rows[-1].metric} | about(folder, rows, args)


def without_labels(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One arm of the face detector, which imitates the float network."""
    ((_, network),) = networks(argparse.Namespace(data=args.photographs, networks=["face"], cifar=None, checkpoints=None))
    model, task, train = detector(network, argparse.Namespace(data=args.photographs, steps=1))
    folder = args.out / f"face-{name}-{args.epochs}-{args.seed}"
    stage = ck.QAT(
        epochs=args.epochs,
        bits={"": ARMS[name][0]} | dict.fromkeys(ends(model), EIGHT),
        learned=True,
        optimizer=partial(torch.optim.Adam, lr=5e-4),
        objective=train.objective,
        freeze=0.0,
        validate_every=0,
    )
    recipe = ck.Recipe(stage, seed=args.seed, export="last", on_epoch=lambda report: print(name, report, flush=True))
    rows = recipe.run(model, task, folder).rows
    return {"top1": network.quality(executed(folder / "model.onnx"))} | about(folder, rows, args)


def about(folder: Path, rows: Any, args: argparse.Namespace) -> dict[str, Any]:
    path = folder / "model.onnx"
    return {
        "bytes": path.stat().st_size,
        "integers": ck.audit(path).integer_fraction,
        "epochs": args.epochs,
        "seed": args.seed,
        "minutes": sum(row.seconds for row in rows[1:]) / 60,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    static = json.loads((HERE / "low_bit.json").read_text())["networks"]
    lines = [
        "| network | arm | epochs | top-1 or F1, % | lost | file, KiB | of int8 | in integers | minutes |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for network, rows in found.items():
        after = {(row["weights"], row["way"]): row for row in static[network]}
        whole, start = after["8", "nearest"]["bytes"], after["fp32", ""]["quality"]
        lines.append(f"| {network} | fp32 | | {start:.2f} | | | | | |")
        for name, row in rows.items():
            cells = [network, name, row["epochs"], f"{row['top1']:.2f}", f"{start - row['top1']:.2f}"]
            cells += [f"{row['bytes'] / 1024:.0f}", f"{row['bytes'] / whole:.3f}", f"{row['integers']:.0%}"]
            cells.append(f"{row['minutes']:.0f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += [
        "",
        "CIFAR-10: 10,000 test images; face: 200 photographs. Executed in ONNX Runtime. Minutes: one core, beside other jobs.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", dest="cifar", type=Path, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--photographs", type=Path, help="networks.py with `load(name)` and photographs in images/, for face")
    parser.add_argument("--network", choices=NETWORKS, default="resnet20")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the images, their crops, and the calibration images")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = {} if args.network == "face" else cifar10(str(args.cifar), None)
    path = HERE / "low_bit_qat.json"
    for name in args.arms:
        row = without_labels(name, args) if args.network == "face" else arm(name, data, args)
        found = json.loads(path.read_text()) if path.exists() else {}
        rows = found.get(args.network, {}) | {name: row}
        found[args.network] = {key: rows[key] for key in ARMS if key in rows}
        found = {key: found[key] for key in NETWORKS if key in found}
        path.write_text(json.dumps(found, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(found))
        print(name, row, flush=True)


if __name__ == "__main__":
    main()
