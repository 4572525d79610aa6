"""A trained ResNet-56 made small and fast in four epochs: one recipe, beside two libraries chained by hand.

    python benchmarks/chain_cifar.py --data CIFAR10 --checkpoints FOLDER --out runs/chain

Every arm starts from the same checkpoint, sees the same images for four epochs (batch 128, crops and flips, SGD, autocast in
bf16), or as many as its name says, and ends in a file that runs in int8. `by hand`: Torch-Pruning cuts half of the MACs (L2 norms
of groups, global), cross-entropy for four epochs, then onnxruntime's quantizer, per channel, on 512 images. The others are
recipes of this library, whose training imitates the network as it was; `mirrored`: the mean of its predictions of each image and
its mirror image. `to 4 bits`: blocks are chosen by `after_training` and by their time in integers, weights of the two later
stages have 4 bits, and all epochs are quantization-aware; `hints` compares features, too. Rows with `Depth(latency=...)` are from
before it refitted the layers that are left, those of `13 blocks left` that are not `mirrored` from when the fit read 512 images.
`Depth(13 blocks left)` names the blocks that go, so that every seed and machine has the same network: those that such a budget
chose in one run. Channels inside the blocks of the third stage go then, by sixteens, of which kernels make good use, until the
file is small enough; with 11 blocks left those of the second stage, too, by eights. Top-1 is that of the executed file on the
10,000 test images, after the last epoch. Latency: one image, one thread, all files in turn, as ratios to the fp32 file of the
checkpoint. Minutes: of the arm, on `--threads` cores, rough where the machine does other work.

Arms and seeds that are in `chain_cifar.json` are kept. Writes it and `chain_cifar.md` beside this file, but not with `--limit`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from prune_cifar import HINTS, MEAN, STD, Setup, begin, peer_cut, peer_settings
from quantize_cifar import DEPTHS, checkpoint_of, draw, executed, theirs
from torch import Tensor, nn
from vision import Images

import compresskit as ck
from compresskit.distill import mirror
from compresskit.measure import latency
from compresskit.prune.depth import Depth
from compresskit.prune.depth.importance import after_training, output_error

HERE = Path(__file__).parent
X = (torch.zeros(1, 3, 32, 32),)
SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4, nesterov=True)
EIGHT, FOUR = ck.quant.Bits(weights=8), ck.quant.Bits(weights=4)


def tune(epochs: int, lr: float) -> ck.Train:
    return ck.Train(
        epochs=epochs, optimizer=partial(SGD, lr=lr), schedule=ck.lr.OneCycle(), precision=ck.mixed.AMP_BF16,
        objective=ck.imitate(), validate_every=0, channels_last=True,
    )  # fmt: skip


def qat(epochs: int, lr: float, **settings: Any) -> ck.QAT:
    return ck.QAT(
        epochs=epochs, optimizer=partial(SGD, lr=lr), **{"schedule": ck.lr.Cosine(), "objective": ck.imitate()} | settings,
        precision=ck.mixed.AMP_BF16, validate_every=0, channels_last=True,
    )  # fmt: skip


IN_INTEGERS = partial(ck.quant.quantize_static, bits=FOUR)
#: Weights of 4 bits in the two later stages, which hold nearly all of them.
BITS = {"": FOUR, "conv1": EIGHT, "layer1": EIGHT, "linear": EIGHT}
WEIGHTED_HINTS = [replace(term, weight=3) for term in HINTS]


def to_four_bits(latency: float, **settings: Any) -> list[ck.Stage]:
    """Blocks removed until so much of the latency in integers stays, then a quantization-aware training with these settings."""
    return [
        Depth(budget=ck.keep(latency=latency), importance=after_training, form=IN_INTEGERS),
        qat(4, 0.02, schedule=ck.lr.OneCycle(), bits=BITS, **settings),
    ]


def named_blocks(left: dict[str, set[int]], cut: ck.Prune, epochs: int, lr: float = 0.02, **settings: Any) -> list[ck.Stage]:
    """Blocks that stay, by stage, channels cut inside them, and a quantization-aware training that compares features."""
    gone = tuple(f"{stage}.{number}" for stage, numbers in left.items() for number in range(9) if number not in numbers)
    objective = ck.imitate(terms=HINTS, **settings)
    return [Depth(blocks=gone), cut, qat(epochs, lr, schedule=ck.lr.OneCycle(), bits=BITS, objective=objective)]


THIRTEEN = {"layer1": {6}, "layer2": {0, 3, 4, 5}, "layer3": {0, 1, 2, 3, 4, 6, 7, 8}}
ELEVEN = THIRTEEN | {"layer3": {0, 1, 2, 4, 6, 7}}
BY_SIXTEENS = ck.Prune(budget=ck.keep(parameters=0.91), ignore=("conv1", "layer1", "layer2", "linear"), round_to=16)
TO_HALF = ck.Prune(budget=ck.keep(parameters=0.535), ignore=("conv1", "layer1", "linear"))


RECIPES: dict[str, list[ck.Stage]] = {
    "Prune(macs=0.5), QAT": [ck.Prune(budget=ck.keep(macs=0.5), finetune=tune(2, 0.05)), qat(2, 0.01)],
    "Depth(latency=0.36), QAT": [
        Depth(budget=ck.keep(latency=0.36), importance=output_error, finetune=tune(3, 0.05)),
        qat(1, 0.01),
    ],
    "Depth(latency=0.42), QAT to 4 bits": to_four_bits(0.42),
    "Depth(latency=0.45), QAT to 4 bits": to_four_bits(0.45),
    "Depth(latency=0.40), QAT to 4 bits, hints": to_four_bits(0.40, objective=ck.imitate(terms=WEIGHTED_HINTS)),
    "Depth(13 blocks left), Prune, QAT to 4 bits, hints": named_blocks(THIRTEEN, BY_SIXTEENS, 4),
    "Depth(13 blocks left), Prune, QAT to 4 bits, hints, mirrored": named_blocks(
        THIRTEEN, BY_SIXTEENS, 4, teacher_views=[mirror]
    ),
    "Depth(11 blocks left), Prune, QAT to 4 bits, hints, 20 epochs": named_blocks(ELEVEN, TO_HALF, 20, 0.05),
}
BY_HAND = "by hand"


@dataclass(frozen=True)
class Bench:
    """The data, the start, and the folder of the files."""

    setup: Setup
    out: Path

    def top1(self, file: Path) -> float:
        images, labels = self.setup.data["test"]
        answers = executed(file, Images(images, labels, 500, MEAN, STD)).argmax(1)
        return float(100 * (answers == labels).float().mean())

    def samples(self, seed: int) -> list[Tensor]:
        return draw(self.setup.data["train"][0], seed)

    def run(self, arm: str, seed: int) -> dict[str, Any]:
        """One arm with one seed: its file, and what it took."""
        file = self.out / f"{arm.replace(' ', '_')}-{seed}.onnx"
        begin = time.perf_counter()
        torch.manual_seed(seed)
        macs = self.by_hand(file, seed) if arm == BY_HAND else self.by_recipe(arm, file, seed)
        minutes = (time.perf_counter() - begin) / 60
        return {"top1": self.top1(file), "bytes": file.stat().st_size, "macs": macs, "minutes": minutes}

    def by_recipe(self, arm: str, file: Path, seed: int) -> int:
        task = self.setup.task(None)
        folder = self.out / file.stem
        result = ck.Recipe(*RECIPES[arm], seed=seed).run(
            self.setup.model(), ck.Task(train=task.train, val=task.val, calibration=task.calibration), out=folder
        )
        file.write_bytes((folder / "model.onnx").read_bytes())
        print(result, flush=True)
        return result.rows[-1].macs

    def by_hand(self, file: Path, seed: int) -> int:
        model = peer_cut(self.setup, peer_settings()["L2, global"], 0.5, seed)
        task = self.setup.task(None)
        steps = 4 * len(task.train)  # type: ignore[arg-type]
        optimizer = SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        model.train()
        for _ in range(4):
            for x, y in task.train:  # type: ignore[union-attr]
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        theirs(model.eval(), self.samples(seed), file)
        return ck.count_macs(model, X)


def speeds(rows: dict[str, dict[str, Any]], start: Path, file_of: Callable[[str], Path]) -> None:
    """Add to each row the latency of its file as a share of the float one's, all measured in turn."""
    names = [name for name in rows if file_of(name).exists()]
    first, *others = latency([start, *map(file_of, names)], X, seconds=2)
    for name, milliseconds in zip(names, others, strict=True):
        rows[name]["latency"] = milliseconds / first


def table(found: dict[str, Any]) -> str:
    start = found["start"]
    lines = ["| arm | seeds | top-1 % | lost | file, KiB | smaller | latency | faster | MACs | minutes |", f"|---|{'--:|' * 9}"]
    for arm in dict.fromkeys(row["arm"] for row in found["rows"].values()):
        rows = [row for row in found["rows"].values() if row["arm"] == arm]
        mean = {key: statistics.mean(row[key] for row in rows) for key in ("top1", "bytes", "latency", "macs", "minutes")}
        spread = f" ± {statistics.stdev(row['top1'] for row in rows):.2f}" if len(rows) > 1 else ""
        lines.append(
            f"| {arm} | {len(rows)} | {mean['top1']:.2f}{spread} | {start['top1'] - mean['top1']:.2f}"
            f" | {mean['bytes'] / 1024:.0f} | {start['bytes'] / mean['bytes']:.1f}x | {mean['latency']:.3f}"
            f" | {1 / mean['latency']:.2f}x"
            f" | {mean['macs'] / start['macs']:.2f} | {mean['minutes']:.0f} |"
        )
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    lines += [
        "",
        f"Start: {start['top1']:.2f} %, {start['bytes'] / 1024:.0f} KiB, {start['macs'] / 1e6:.0f} million MACs. {about}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/chain"), help="where files and runs are kept")
    parser.add_argument("--arms", nargs="*", choices=[*RECIPES, BY_HAND], default=[*RECIPES, BY_HAND])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--network", choices=list(DEPTHS), default="resnet56")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="images of each class folder's split, to try things out; writes no figures")
    args = parser.parse_args()
    data = begin(args)
    checkpoint = checkpoint_of(args.network, args.checkpoints)
    bench = Bench(Setup(DEPTHS[args.network], checkpoint, args.out, data), args.out)
    start = ck.export_onnx(bench.setup.model(), args.out / "start.onnx", X)
    path = (args.out if args.limit else HERE) / "chain_cifar.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    found["about"] = {"network": args.network, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    found["start"] = {"top1": bench.top1(start), "bytes": start.stat().st_size, "macs": ck.count_macs(bench.setup.model(), X)}
    for arm, seed in ((arm, seed) for seed in args.seeds for arm in args.arms):
        name = f"{arm}-{seed}"
        if name not in found["rows"]:
            found["rows"][name] = {"arm": arm, "seed": seed} | bench.run(arm, seed)
            speeds(found["rows"], start, lambda name: args.out / f"{name.replace(' ', '_')}.onnx")
            path.write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(found))
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
