"""Blocks and channels removed together, beside channels alone, at the same measured latency: a MobileNetV2 and a transformer.

    python benchmarks/depth_width.py --data CIFAR10 --checkpoints FOLDER --out FOLDER --network vit
    python benchmarks/depth_width.py ... --network mobilenet_v2 --seeds 0 1 2

width             `Prune(budget=keep(latency=share))`, all epochs after it
depth, then width `Depth` to the square root of the share, one epoch, then `Prune` by the same factor, and the other epochs
depth             `Depth` alone

Every arm starts from the same trained network, sees the same images (batch 128, crops and flips, AdamW, autocast in bf16) and is
taught by the network as it was. Top-1: the executed float file, on the 10,000 test images, after the last epoch. Latency:
one image, one thread, all files of a network in turn, as ratios to the file of the start.

The transformer is the one that `low_bit.py` trains; the MobileNetV2 is torchvision's at half its width, with its first two
strides 1, trained for 15 epochs under the ResNet-20 as its teacher. Both are kept in `--out`. Arms and seeds that are in
`depth_width.json` are kept: the transformer's are from before `Depth` refitted the layers that are left and chose blocks by
`after_training`.
Writes it and `depth_width.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from low_bit import transformer
from prune_cifar import load
from quantize_cifar import MEAN, STD, executed, trained
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import mobilenet_v2
from vision import Images

import compresskit as ck
from compresskit.measure import latency
from compresskit.prune.depth import Depth

HERE = Path(__file__).parent
X = (torch.zeros(1, 3, 32, 32),)
NETWORKS = ("vit", "mobilenet_v2")
ARMS = ("width", "depth, then width", "depth")


def mobile(args: argparse.Namespace, data: dict[str, Any]) -> nn.Module:
    """A MobileNetV2 for 32 x 32 pixels, trained on CIFAR-10 or read from where it was kept."""
    torch.manual_seed(0)
    model = mobilenet_v2(num_classes=10, width_mult=0.5)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and name in ("features.0.0", "features.2.conv.1.0"):
            module.stride = (1, 1)
    kept = args.out / "mobilenet_v2.safetensors"
    if not kept.exists():
        train = ck.Train(
            epochs=15, optimizer=lambda p: torch.optim.AdamW(p, lr=4e-3, weight_decay=0.05), schedule=ck.lr.OneCycle(),
            precision=ck.mixed.AMP_BF16, objective=ck.imitate(trained("resnet20", args.checkpoints)), validate_every=0,
            channels_last=True,
        )  # fmt: skip
        model = train(model, task_of(data))
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, kept)
    model.load_state_dict(load_file(kept))
    return model.eval()


def task_of(data: dict[str, Any]) -> ck.Task:
    (images, labels), (test, answers) = data["train"], data["test"]
    train = Images(images, labels, 128, MEAN, STD, augment=4, flip=True, shuffle=True)
    return ck.Task(train=train, val=Images(test, answers, 500, MEAN, STD))


def recipe(arm: str, network: str, share: float, epochs: int, seed: int) -> ck.Recipe:
    rate = 5e-4 if network == "vit" else 2e-3

    def tune(count: int) -> ck.Train:
        return ck.Train(
            epochs=count, optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.05), schedule=ck.lr.OneCycle(),
            precision=ck.mixed.AMP_BF16, objective=ck.imitate(), validate_every=0, channels_last=network != "vit",
        )  # fmt: skip

    stages: list[ck.Stage]
    if arm == "depth, then width":
        part = ck.keep(latency=share**0.5)
        stages = [Depth(budget=part, finetune=tune(1)), ck.Prune(budget=part, finetune=tune(epochs - 1))]
    else:
        kind: Any = ck.Prune if arm == "width" else Depth
        stages = [kind(budget=ck.keep(latency=share), finetune=tune(epochs))]
    return ck.Recipe(*stages, seed=seed, on_epoch=lambda report: print(arm, report, flush=True))


def run(arm: str, seed: int, file: Path, data: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; its file is what counts."""
    begin, model = time.perf_counter(), start(args, data)
    result = recipe(arm, args.network, args.share, args.epochs, seed).run(model, task_of(data), out=args.out / file.stem)
    file.write_bytes((args.out / file.stem / "model.onnx").read_bytes())
    print(result, flush=True)
    minutes = (time.perf_counter() - begin) / 60
    return {"top1": top1(file, data), "macs": result.rows[-1].macs, "bytes": file.stat().st_size, "minutes": minutes}


def start(args: argparse.Namespace, data: dict[str, Any]) -> nn.Module:
    return transformer(args) if args.network == "vit" else mobile(args, data)


def top1(file: Path, data: dict[str, Any]) -> float:
    images, labels = data["test"]
    return float(100 * (executed(file, Images(images, labels, 500, MEAN, STD)).argmax(1) == labels).float().mean())


def speeds(found: dict[str, Any], folder: Path, first: Path) -> None:
    """Latencies of all files that are there, in turn with the start's."""
    rows = [row for row in found["rows"] if (folder / row["file"]).exists()]
    base, *others = latency([first, *(folder / row["file"] for row in rows)], X, seconds=3)
    for row, milliseconds in zip(rows, others, strict=True):
        row["latency"] = milliseconds / base


def table(networks: dict[str, Any]) -> str:
    lines = ["| network | arm | share | epochs | seeds | top-1 % | latency | MACs | minutes |", "|---|---|" + "--:|" * 7]
    for name, found in networks.items():
        lines.append(f"| {name} | start | | | | {found['start']['top1']:.2f} | 1 | 1 | |")
        for key in dict.fromkeys((row["arm"], row["share"], row["epochs"]) for row in found["rows"]):
            rows = [row for row in found["rows"] if (row["arm"], row["share"], row["epochs"]) == key]
            mean = {k: statistics.mean(row[k] for row in rows) for k in ("top1", "latency", "macs", "minutes")}
            spread = f" ± {statistics.stdev(row['top1'] for row in rows):.2f}" if len(rows) > 1 else ""
            lines.append(
                f"| {name} | {key[0]} | {key[1]:g} | {key[2]} | {len(rows)} | {mean['top1']:.2f}{spread} | {mean['latency']:.3f}"
                f" | {mean['macs'] / found['start']['macs']:.2f} | {mean['minutes']:.0f} |"
            )
    lines += ["", f"CIFAR-10, executed float files, one thread; minutes beside other jobs. torch {torch.__version__}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", dest="cifar", type=Path, required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, default="vit")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["width", "depth, then width"])
    parser.add_argument("--share", type=float, default=0.5, help="of the latency that stays")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/depth_width"), help="folder of networks, runs and files")
    parser.add_argument("--latency", action="store_true", help="only the times of files that are there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    data = load(args.cifar, args.out / "images.safetensors")
    path = HERE / "depth_width.json"
    networks: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    first = ck.export_onnx(start(args, data), args.out / f"{args.network}.onnx", X)
    found = networks.setdefault(args.network, {"rows": []})
    found["start"] = {"top1": top1(first, data), "macs": ck.count_macs(start(args, data), X)}
    for seed, arm in ((seed, arm) for seed in args.seeds for arm in args.arms if not args.latency):
        name = f"{args.network}-{arm.replace(', ', '-').replace(' ', '-')}-{args.share:g}-{args.epochs}-{seed}.onnx"
        if name not in [row["file"] for row in found["rows"]]:
            settings = {"arm": arm, "share": args.share, "epochs": args.epochs, "seed": seed, "file": name}
            found["rows"].append(settings | run(arm, seed, args.out / name, data, args))
        speeds(found, args.out, first)
        path.write_text(json.dumps(networks, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(networks))
        print(table(networks), flush=True)
    if args.latency:
        speeds(found, args.out, first)
        path.write_text(json.dumps(networks, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(networks))


if __name__ == "__main__":
    main()
