"""Channel pruning of ResNet-20 and ResNet-56 on CIFAR-10: accuracy against speed-up, ours and Torch-Pruning side by side.

Both start from the same trained checkpoints, use the same images, and are fine-tuned by the same loop. Torch-Pruning is measured
where it is installed (`pip install torch-pruning`). Each row is written to `prune_cifar.json` beside this file when it is done,
so that a run can be stopped and continued; `prune_cifar.md` is made from it. Accuracies are on all test images, after the last
step; everything runs under bf16 autocast, or with `--fp32` in fp32, for processors without bf16.

    raw     right after the cut
    +BN     after label-free re-estimation of BatchNorm from 3072 shuffled training images
    tuned   after 2 short epochs of 39 batches of 128, one cycle to a learning rate of 0.02

ResNet-56 is also trained for whole epochs, one cycle to 0.05 as for its checkpoint: dense; pruned; pruned with the dense network
of as many epochs as teacher; and with blocks removed instead of channels, its teacher the checkpoint: in fp32 from before `Depth`
refitted the layers that are left; and on a later version with the mean of the teacher's predictions of each image and its mirror
image, besides features, once in a cycle to 0.02; the fit read 512 images then, and 2,048 before the training of 30 epochs.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compresskit as ck

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))
from vision import CifarResNet, Images, cifar10  # noqa: E402

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
EXAMPLE = (torch.zeros(2, 3, 32, 32),)


@dataclass(frozen=True)
class Short:
    """The first batches of a shuffled loader: a short epoch."""

    loader: Images
    batches: int

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _, batch in zip(range(self.batches), self.loader, strict=False):
            yield batch


@dataclass(frozen=True)
class Setup:
    """Data for one network, and its trained state."""

    depth: int
    start: Path
    folder: Path
    data: dict[str, tuple[Tensor, Tensor]]
    autocast: bool = True

    def model(self) -> nn.Module:
        model = CifarResNet(self.depth)
        model.load_state_dict(load_file(self.start))
        return model.eval()

    def task(self, batches: int | None) -> ck.Task:
        train = Images(*self.data["train"], 128, MEAN, STD, augment=4, flip=True, shuffle=True)
        calibration = Short(Images(*self.data["train"], 128, MEAN, STD, shuffle=True), 24)
        val = Images(*self.data["test"], 500, MEAN, STD)
        return ck.Task(train=train if batches is None else Short(train, batches), val=val, calibration=calibration)


def load(folder: str | None, cache: Path | None) -> dict[str, tuple[Tensor, Tensor]]:
    """CIFAR-10; decoded images are kept in `cache`, a safetensors file."""
    if cache is not None and cache.exists():
        stored = load_file(cache)
        return {split: (stored[f"{split}.images"], stored[f"{split}.labels"]) for split in ("train", "test")}
    if folder is None:
        raise SystemExit("give the images: --data FOLDER")
    data = cifar10(folder, None)
    if cache is not None:
        save_file({f"{s}.{k}": v for s, pair in data.items() for k, v in zip(("images", "labels"), pair, strict=True)}, cache)
    return data


def begin(args: argparse.Namespace) -> dict[str, tuple[Tensor, Tensor]]:
    """Set the threads, make the folder `--out`, and load the images, the first `--limit` of each split where it is given."""
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    data = load(args.data, args.out / "images.safetensors")
    return {split: (images[: args.limit], labels[: args.limit]) for split, (images, labels) in data.items()}


def accuracy(setup: Setup, model: nn.Module) -> float:
    """Top-1 in percent on the test images, under the same autocast for everybody."""

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.autocast):
            return model.eval()(x)

    return 100 * ck.evaluate(run, setup.task(None))


def train(setup: Setup, model: nn.Module, seed: int, epochs: int, lr: float = 0.05, **distill: Any) -> float:
    """Fine-tune in place for whole epochs, one cycle to `lr` (0: the 78 steps, to 0.02); the accuracy after the last step."""
    torch.manual_seed(seed)
    precision = ck.mixed.AMP_BF16 if setup.autocast else ck.mixed.FP32
    settings: dict[str, Any] = {"schedule": ck.lr.OneCycle(), "precision": precision}
    settings |= {"epochs": epochs, "optimizer": partial(SGD, lr=lr)} if epochs else {"epochs": 2, "optimizer": SGD}
    how = ck.Distill(**settings, **distill) if distill else ck.Train(**settings)
    how(model, setup.task(None if epochs else 39))
    return accuracy(setup, model)


def rebatched(setup: Setup, model: nn.Module, seed: int) -> None:
    """The same label-free statistics for everybody."""
    torch.manual_seed(seed)
    ck.prune.reestimate_batchnorm_(model, (batch[:1] for batch in setup.task(None).batches("calibration")))


def columns(setup: Setup, model: nn.Module, seed: int) -> dict[str, Any]:
    """raw, re-estimated and tuned accuracy of a model right after its cut."""
    row: dict[str, Any] = {"macs": ck.count_macs(model, EXAMPLE), "parameters": ck.count_parameters(model)}
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    row["raw"] = accuracy(setup, model)
    rebatched(setup, model, seed)
    row["bn"] = accuracy(setup, model)
    row["tuned"] = train(setup, model, seed, epochs=0)
    return row


# -- Torch-Pruning


def peer_settings() -> dict[str, tuple[Any, bool]]:
    """Torch-Pruning's settings that were best in a column of an earlier, wider comparison: (importance, global ranking)."""
    import torch_pruning as tp

    return {
        "L2, local": (tp.importance.GroupMagnitudeImportance(p=2), False),
        "L2, global": (tp.importance.GroupMagnitudeImportance(p=2), True),
        "Taylor, global": (tp.importance.GroupTaylorImportance(), True),
        "FPGM, global": (tp.importance.FPGMImportance(), True),
    }


def peer_cut(setup: Setup, setting: tuple[Any, bool], share: float, seed: int, round_to: int | None = None) -> nn.Module:
    """Torch-Pruning at a share of the MACs, found by bisecting its channel ratio; the residual chain ignored, since it cannot cut
    padded shortcuts.
    """
    import torch_pruning as tp

    importance, everywhere = setting
    torch.manual_seed(seed)
    scored = setup.model()
    if isinstance(importance, tp.importance.GroupTaylorImportance):
        for x, y in Short(setup.task(None).batches("train"), 8):  # type: ignore[arg-type]  # gradients add up over 1024 images
            nn.functional.cross_entropy(scored(x), y).backward()
    total = ck.count_macs(setup.model(), EXAMPLE)
    low, high = 0.0, 1.0
    best: nn.Module | None = None
    while high - low > 0.004:
        model = copy.deepcopy(scored)
        for old, new in zip(scored.parameters(), model.parameters(), strict=True):
            new.grad = None if old.grad is None else old.grad.clone()
        ratio = (low + high) / 2
        keep = [m for name, m in model.named_modules() if name in ("conv1", "linear") or name.endswith("conv2")]
        tp.pruner.BasePruner(
            model, EXAMPLE[0], importance=importance, pruning_ratio=ratio, global_pruning=everywhere, isomorphic=False,
            ignored_layers=keep, in_channel_groups={}, out_channel_groups={}, round_to=round_to,
        ).step()  # fmt: skip
        model.zero_grad(set_to_none=True)
        if ck.count_macs(model, EXAMPLE) <= share * total:
            best, high = model, ratio
        else:
            low = ratio
    assert best is not None
    return best.eval()


# -- ours


def our_cut(setup: Setup, share: float, seed: int) -> nn.Module:
    """The stage with its defaults, but for BatchNorm, which the caller re-estimates: what it is right after the cut."""
    torch.manual_seed(seed)
    model, task = setup.model(), setup.task(None)
    settings = ck.Prune(budget=ck.keep(macs=share))
    plan = ck.prune.plan_channels(model, task.example(), budget=ck.keep(macs=share), criterion=settings.criterion, task=task)
    cut = ck.prune.apply_(copy.deepcopy(model), plan)
    ck.prune.reconstruct_(cut, model, plan, (batch[:1] for batch in task.batches("calibration")))  # type: ignore[index]
    return cut


def blocks_cut(setup: Setup, share: float, seed: int) -> nn.Module:
    """Residual blocks removed, those first that matter least once the rest is trained."""
    torch.manual_seed(seed)
    stage = ck.prune.depth.Depth(budget=ck.keep(macs=share), importance=ck.prune.depth.importance.after_training)
    return stage(setup.model(), setup.task(None))


#: Features of the residual stream, whose width pruning does not change.
HINTS = tuple(ck.distill.Term(ck.distill.losses.hint, f"layer{i}") for i in (1, 2, 3))
DKD = partial(ck.distill.losses.dkd, alpha=1.0, beta=2.0, temperature=4.0)


@dataclass(frozen=True)
class Longer:
    """How ResNet-56 is trained for whole epochs.

    cut: makes the network that is trained; None trains the dense one, and keeps it. teacher: "dense" after as many epochs, or the
    "checkpoint"; None trains by labels. distill: settings of `ck.Distill`, by default soft targets. lr: the cycle's top.
    """

    cut: Callable[[Setup, float, int], nn.Module] | None = our_cut
    teacher: str | None = "dense"
    distill: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.05


MIRRORED = "blocks removed, taught by the checkpoint on mirrored images, too, and hints"
BY_MIRRORED = Longer(cut=blocks_cut, teacher="checkpoint", distill={"terms": HINTS, "teacher_views": (ck.distill.mirror,)})
LONGER = {
    "dense": Longer(cut=None, teacher=None),
    "pruned": Longer(teacher=None),
    "taught": Longer(),
    "taught by DKD and hints": Longer(distill={"loss": DKD, "weight": 1.0, "task_weight": 1.0, "terms": HINTS}),
    "taught on mixtures, and hints": Longer(distill={"weight": 1.0, "task_weight": 0.0, "mixup": 0.4, "terms": HINTS}),
    "blocks removed, taught by the checkpoint": Longer(cut=blocks_cut, teacher="checkpoint"),
    MIRRORED: BY_MIRRORED,
    f"{MIRRORED}, to a rate of 0.02": replace(BY_MIRRORED, lr=0.02),
}


def longer(setup: Setup, kind: str, share: float, epochs: int, seed: int) -> dict[str, Any]:
    """A row of `LONGER`. The dense network is kept beside the decoded images."""
    how = LONGER[kind]
    model = setup.model() if how.cut is None else how.cut(setup, share, seed)
    row: dict[str, Any] = {"macs": ck.count_macs(model, EXAMPLE)}
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    row["raw"] = accuracy(setup, model)
    if how.cut is not None:
        rebatched(setup, model, seed)
        row["bn"] = accuracy(setup, model)
    kept = setup.folder / f"resnet{setup.depth}-dense-{epochs}-epochs-{seed}.safetensors"
    distill: dict[str, Any] = {}
    if how.teacher is not None:
        teacher = setup.model()
        if how.teacher == "dense":
            teacher.load_state_dict(load_file(kept))
        distill = {"teacher": teacher.to(memory_format=torch.channels_last), **how.distill}  # type: ignore[call-overload]
    row |= {"epochs": epochs, "tuned": train(setup, model, seed, epochs, how.lr, **distill)}
    if how.cut is None:
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, kept)
    return row


# -- speed


def speed(models: dict[str, nn.Module], example: tuple[Tensor, ...], seconds: float) -> dict[str, float]:
    """Milliseconds for one sample in ONNX Runtime, one thread, all files run in turn."""
    with tempfile.TemporaryDirectory() as folder:
        files = [ck.export_onnx(m, Path(folder) / f"{i}.onnx", example) for i, m in enumerate(models.values())]
        times = ck.measure.latency(files, (example[0][:1],), seconds=seconds, rounds=21)
    return dict(zip(models, times, strict=True))


def zoo_pair(name: str, share: float) -> tuple[dict[str, nn.Module], float]:
    """A torchvision model with random weights and its pruned copy, and how many times fewer MACs that has."""
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).eval()
    plan = ck.prune.plan_channels(model, (torch.randn(2, 3, 224, 224),), budget=ck.keep(macs=share))
    cut = ck.prune.apply_(copy.deepcopy(model), plan)
    return {"dense": model, "pruned": cut}, plan.macs_before / plan.macs


def zoo_speed(name: str, seconds: float) -> dict[str, Any]:
    """How much of the promised factor a torchvision model really gets."""
    models, promised = zoo_pair(name, 0.5)
    times = speed(models, (torch.randn(2, 3, 224, 224),), seconds)
    faster = times["dense"] / times["pruned"]
    return {"ms": times, "promised": promised, "faster": faster, "of_promised": faster / promised}


def side_by_side(setup: Setup, seconds: float) -> dict[str, Any]:
    """ResNet-20 dense, ours and Torch-Pruning's at half the MACs, in one run."""
    models = {"dense": setup.model(), "ours": our_cut(setup, 0.5, 0)}
    if installed():
        for name in ("L2, local", "L2, global"):
            models[f"Torch-Pruning {name}"] = peer_cut(setup, peer_settings()[name], 0.505 if "local" in name else 0.5, 0)
    times = speed(models, EXAMPLE, seconds)
    total = ck.count_macs(models["dense"], EXAMPLE)
    promised = {name: total / ck.count_macs(model, EXAMPLE) for name, model in models.items()}
    return {"ms": times, "promised": promised, "faster": {name: times["dense"] / t for name, t in times.items()}}


def installed() -> bool:
    """Whether Torch-Pruning is there to be measured."""
    return importlib.util.find_spec("torch_pruning") is not None


# -- the table


def jobs(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(key, what makes its row), in the order in which they are worth having."""
    data = load(args.data, args.cache) if args.resnet20 or args.resnet56 else {}
    folder = args.cache.parent if args.cache else Path(tempfile.gettempdir())
    if args.resnet20:
        small = Setup(20, args.resnet20, folder, data, not args.fp32)
        yield "resnet20 | dense | all channels", lambda: {"macs": ck.count_macs(small.model(), EXAMPLE),
                                                          "raw": accuracy(small, small.model())}  # fmt: skip
        for seed in range(args.seeds):
            yield f"resnet20 | compresskit | Prune(macs=0.5) | {seed}", partial(_ours, small, seed)
            for name in peer_settings() if installed() else ():
                yield f"resnet20 | Torch-Pruning | {name} | {seed}", partial(_peer, small, name, seed)
        if args.speed:
            yield "speed | resnet20", partial(side_by_side, small, args.seconds)
    if args.speed:
        for name in ("resnet18", "mobilenet_v2"):
            yield f"speed | {name}", partial(zoo_speed, name, args.seconds)
    if args.resnet56:
        large = Setup(56, args.resnet56, folder, data, not args.fp32)
        for epochs in (0, *args.epochs):
            for kind in LONGER:
                length = f"{epochs} epochs" if epochs else "78 steps"
                name = f"resnet56 | compresskit | {kind}, {length}{', fp32' if args.fp32 else ''} | 0"
                yield name, partial(longer, large, kind, 1 / 2.1, epochs, 0)


def _ours(setup: Setup, seed: int) -> dict[str, Any]:
    begin = time.process_time()
    model = our_cut(setup, 0.5, seed)
    return {"seconds": time.process_time() - begin, **columns(setup, model, seed)}


def _peer(setup: Setup, name: str, seed: int) -> dict[str, Any]:
    begin = time.process_time()
    # Local ranking has only one ratio for all widths: the nearest to half is 50.5 % of the MACs.
    model = peer_cut(setup, peer_settings()[name], 0.506 if "local" in name else 0.5, seed)
    return {"seconds": time.process_time() - begin, **columns(setup, model, seed)}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown: means and ranges over seeds."""
    lines = [
        "| network | tool | setting | seeds | MACs | raw | +BN | tuned | seconds to cut |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, row in rows.items():
        if not key.startswith("speed"):
            groups.setdefault(tuple(key.split(" | ")[:3]), []).append(row)
    for (network, tool, setting), found in groups.items():

        def cell(name: str, found: list[dict[str, Any]] = found) -> str:
            values = [row[name] for row in found if name in row]
            spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 and max(values) - min(values) > 0.004 else ""
            return f"{statistics.mean(values):.2f}{spread}" if values else "-"

        lines.append(f"| {network} | {tool} | {setting} | {len(found)} | {found[0]['macs'] / 1e6:.2f} M | {cell('raw')}"
                     f" | {cell('bn')} | {cell('tuned')} | {cell('seconds')} |")  # fmt: skip
    for key, row in rows.items():
        if key == "speed | resnet20":
            lines += ["", "| ResNet-20, one sample, one thread, ONNX Runtime | ms | MACs promise | faster |", "|---|--:|--:|--:|"]
            lines += [f"| {n} | {t:.3f} | {row['promised'][n]:.2f}x | {row['faster'][n]:.2f}x |" for n, t in row["ms"].items()]
        elif key.startswith("speed"):
            before, after = row["ms"]["dense"], row["ms"]["pruned"]
            lines += ["", f"{key.split(' | ')[1]} at 224 px: {row['promised']:.2f}x fewer MACs, {row['faster']:.2f}x faster"
                      f" ({before:.2f} to {after:.2f} ms): {row['of_promised']:.2f} of what was promised."]  # fmt: skip
    return "\n".join(lines)


def page(versions: dict[str, str], rows: dict[str, dict[str, Any]]) -> str:
    """The Markdown file. versions: of the first rows."""
    later = sorted({row["torch"] for row in rows.values() if "torch" in row} - {versions["torch"]})
    return (
        f"{table(rows)}\n\n{(__doc__ or '').strip()}\n\n{versions}{'; later rows: torch ' if later else ''}{', '.join(later)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="torchvision's CIFAR-10, or train/ and test/ folders of images")
    parser.add_argument("--cache", type=Path, help="safetensors file in which decoded images are kept")
    parser.add_argument("--resnet20", type=Path, help="safetensors file of a trained ResNet-20")
    parser.add_argument("--resnet56", type=Path, help="safetensors file of a trained ResNet-56")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every ResNet-20 row")
    parser.add_argument("--epochs", type=int, nargs="*", default=(), help="further training of ResNet-56, dense and pruned")
    parser.add_argument("--fp32", action="store_true", help="train and measure in fp32")
    parser.add_argument("--speed", action="store_true", help="also measure latencies; let the machine be quiet")
    parser.add_argument("--threads", type=int, default=1, help="that train")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time of each latency")
    parser.add_argument("--only", nargs="*", default=(), help="only rows whose key contains all of these")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    file = HERE / "prune_cifar.json"
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else {}
    for key, make in jobs(args):
        if key in rows or not all(part in key for part in args.only):
            continue
        row = make() | {"torch": torch.__version__}
        print(key, row, flush=True)
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"versions": about, "rows": {}}
        rows = kept["rows"] = kept["rows"] | {key: row}  # another run may have added rows
        file.write_text(json.dumps(kept, indent=1) + "\n")
        (HERE / "prune_cifar.md").write_text(page(kept["versions"], rows))
    print(table(rows))


if __name__ == "__main__":
    main()
