"""int8 of trained CIFAR-10 networks: ours against onnxruntime's quantizer in its best setting, and fp32; then QAT.

    python benchmarks/quantize_cifar.py --data CIFAR10 --checkpoints FOLDER            # static quantization: accuracy
    python benchmarks/quantize_cifar.py --data CIFAR10 --checkpoints FOLDER --latency  # time, on an idle machine
    python benchmarks/quantize_cifar.py --data CIFAR10 --checkpoints FOLDER --qat      # two epochs, hours on two cores

static   three draws of 512 training images each, the same for both (onnxruntime: pre-processed, per channel, uint8 activations).
         top-1, agreement and SQNR (of the outputs, against fp32, dB) of the *executed* files over the 10,000 test images; peak
         memory is what quantizing adds to a process that has the model, the images and the libraries loaded.
agree    our files against the simulation: fraction of values within one output step for the file as written, and of equal
         classes for the optimized one.
latency  ratio to fp32, one thread, all files measured in turn; and the training step of one captured graph (batch 128, with
         BatchNorm not folded), rounding on as a ratio to rounding off.
qat      2 epochs of SGD (rate 0.01, cosine, batch 128, crops and flips) for the float model with its loss and for `QAT` with
         its defaults; with ranges and BatchNorm statistics frozen earlier or later and gradients clipped to 1; other objectives.
         A seed is that of the order and the crops of the images, and of the calibration images.

Writes `quantize_cifar.json` and `.md` beside this file; figures that are not measured again are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from safetensors.torch import load_file
from torch import Tensor, nn

import compresskit as ck
from compresskit.measure import latency, numpy_inputs, session
from compresskit.train.objective import Supervised

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))
from vision import CifarResNet, Images, cifar10  # noqa: E402

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
DEPTHS = {"resnet20": 20, "resnet56": 56}
X = (torch.zeros(2, 3, 32, 32),)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Batches one by one, in the interface of onnxruntime's calibration."""

    def __init__(self, name: str, batches: list[Tensor]) -> None:
        self.batches = iter([{name: x.numpy()} for x in batches])

    def get_next(self) -> Any:
        return next(self.batches, None)


def checkpoint_of(name: str, checkpoints: Path) -> Path:
    found = sorted(checkpoints.glob(f"{name}-*.safetensors"))
    if not found:
        raise SystemExit(f"{checkpoints}: no {name}-*.safetensors there")
    return found[-1]


def trained(name: str, checkpoints: Path) -> nn.Module:
    model = CifarResNet(DEPTHS[name])
    model.load_state_dict(load_file(checkpoint_of(name, checkpoints)))
    return model.eval()


def draw(images: Tensor, seed: int, samples: int = 512) -> list[Tensor]:
    """Calibration images, in batches of 64."""
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:samples]
    x = (images[chosen].float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    return list(x.split(64))


def ours(model: nn.Module, batches: list[Tensor], path: Path) -> Any:
    quantized = ck.quant.quantize_static(model, [(x,) for x in batches])
    ck.export_onnx(quantized, path, X)
    return quantized


def theirs(model: nn.Module, batches: list[Tensor], path: Path) -> None:
    start, pre = path.with_suffix(".fp32.onnx"), path.with_suffix(".pre.onnx")
    ck.export_onnx(model, start, X)
    quant_pre_process(str(start), str(pre), skip_symbolic_shape=True)
    quantize_static(
        str(pre), str(path), Reader(session(start).get_inputs()[0].name, batches), per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip


def cost(way: str, model: nn.Module, batches: list[Tensor], path: Path, answer: Any) -> None:
    """In a process of its own: seconds, and MiB that the peak grew."""
    torch.set_num_threads(1)
    with torch.no_grad():
        model(batches[0][:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    {"ours": ours, "ort": theirs}[way](model, batches, path)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer.put((time.perf_counter() - begin, (after - before) / 1024))


def layer_costs(way: str, model: nn.Module, batches: list[Tensor], path: Path) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=cost, args=(way, model, batches, path, answer))
    process.start()
    seconds, memory = answer.get(timeout=3600)
    process.join()
    return seconds, memory


def executed(path: Path, images: Images, *, optimize: bool = True) -> Tensor:
    runtime = session(path, optimize=optimize)
    return torch.cat([torch.from_numpy(runtime.run(None, numpy_inputs(runtime, (x,)))[0]) for x, _ in images])


def compared(outputs: Tensor, wanted: Tensor, labels: Tensor) -> dict[str, float]:
    noise = (wanted - outputs).square().sum()
    return {
        "top1": 100 * (outputs.argmax(1) == labels).double().mean().item(),
        "agreement": 100 * (outputs.argmax(1) == wanted.argmax(1)).double().mean().item(),
        "sqnr": float(10 * torch.log10(wanted.square().sum() / noise)),
    }


def static(model: nn.Module, images: Tensor, test: Images, draws: int, folder: Path) -> dict[str, Any]:
    labels = test.labels
    with torch.no_grad():
        wanted = torch.cat([model(x) for x, _ in test])
    rows: dict[str, Any] = {"fp32": compared(wanted, wanted, labels) | {"sqnr": None}, "ours": [], "ort": []}
    rows["fp32"]["kib"] = ck.export_onnx(model, folder / "fp32.onnx", X).stat().st_size / 1024
    for seed in range(draws):
        batches = draw(images, seed)
        quantized = ours(model, batches, folder / "ours.onnx")
        theirs(model, batches, folder / "ort.onnx")
        for name in ("ours", "ort"):
            path = folder / f"{name}.onnx"
            outputs = executed(path, test)
            row = compared(outputs, wanted, labels) | {"kib": path.stat().st_size / 1024}
            if name == "ours":
                with torch.no_grad():
                    simulated = torch.cat([quantized(x) for x, _ in test])
                step = (simulated.amax() - simulated.amin()) / 255
                apart = (executed(path, test, optimize=False) - simulated).abs() / step
                row["within_one_step"] = 100 * (apart <= 1).double().mean().item()
                row["executed_as_simulated"] = 100 * (outputs.argmax(1) == simulated.argmax(1)).double().mean().item()
            rows[name].append(row)
    batches = draw(images, 0)
    for name in ("ours", "ort"):
        rows[f"{name}_seconds"], rows[f"{name}_mib"] = layer_costs(name, model, batches, folder / f"cost_{name}.onnx")
    return rows


def latencies(model: nn.Module, images: Tensor, folder: Path, seconds: float) -> dict[str, Any]:
    batches = draw(images, 0, samples=64)
    files = [ck.export_onnx(model, folder / "fp32.onnx", X), folder / "ours.onnx", folder / "ort.onnx"]
    ours(model, batches, files[1])
    theirs(model, batches, files[2])
    times = {b: latency(files, (batches[0][:b],), seconds=seconds) for b in (1, 32)}
    return {f"b{b}": {"fp32_ms": t[0], "ours": t[1] / t[0], "ort": t[2] / t[0]} for b, t in times.items()}


def steps(model: nn.Module, x: Tensor, labels: Tensor, rounds: int = 7) -> dict[str, Any]:
    """Seconds of a training step of one captured graph, rounding off and on, in turn; medians."""
    kinds: dict[str, Any] = {}
    for kind in ("float", "following", "held", "learned"):
        graph = ck.quant.prepare_qat(copy.deepcopy(model), [(x,)], learned=kind == "learned")
        if kind == "float":
            graph.observe_(False)
            graph.enable_(False)
        if kind == "held":
            graph.freeze_statistics_()
        kinds[kind] = (graph, torch.optim.SGD(graph.parameters(), lr=1e-3, momentum=0.9), [])
    for turn in range(rounds + 1):
        for graph, optimizer, times in kinds.values():
            begin = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(graph(x), labels).backward()
            optimizer.step()
            if turn:
                times.append(time.perf_counter() - begin)
    seconds = {kind: sorted(times)[len(times) // 2] for kind, (_, _, times) in kinds.items()}
    return {"float_seconds": seconds["float"]} | {kind: s / seconds["float"] for kind, s in seconds.items() if kind != "float"}


def training(
    model: nn.Module, data: dict[str, Any], test: Images, args: argparse.Namespace, folder: Path, keep: Callable[[Any], None]
) -> None:
    pixels, labels = (v[: args.limit] for v in data["train"])
    train = Images(pixels, labels, 128, MEAN, STD, augment=4, flip=True, shuffle=True)
    settings: dict[str, Any] = {
        "epochs": args.epochs,
        "optimizer": partial(torch.optim.SGD, lr=args.rate, momentum=0.9, weight_decay=1e-4),
        "precision": ck.mixed.AMP_BF16 if args.bf16 else ck.mixed.FP32,
    }
    early: dict[str, Any] = {"freeze": 0.5, "clip": 1.0}
    arms: dict[str, Any] = {
        "float": ck.Train(**settings),
        "qat": ck.QAT(**settings),
        "qat, held at 0.9": ck.QAT(**settings, freeze=0.9),
        "qat, held at 0.5, clipped": ck.QAT(**settings, **early),
        "qat, held at 0.5, clipped, nine tenths imitation": ck.QAT(
            **settings, **early, objective=ck.imitate(temperature=1.0, weight=0.9, task_weight=0.1)
        ),
        "qat, held at 0.5, clipped, task loss": ck.QAT(**settings, **early, objective=Supervised()),
        "qat, learned": ck.QAT(**settings, learned=True),
    }
    for name, how in arms.items():
        if args.arms and name not in args.arms:
            continue
        row: dict[str, Any] = {
            "epochs": args.epochs,
            "rate": args.rate,
            "bf16": args.bf16,
            "images": len(train.images),
            "top1": [],
        }
        begin = time.perf_counter()
        for seed in range(args.seeds):
            task = ck.Task(train=train, val=test, calibration=[(x, None) for x in draw(data["train"][0], seed)])
            torch.manual_seed(seed)
            path = ck.export_onnx(how(copy.deepcopy(model), task), folder / "trained.onnx", X)
            row["top1"].append(100 * (executed(path, test).argmax(1) == test.labels).double().mean().item())
            print(name, seed, row["top1"][-1], flush=True)
        keep({name: row | {"seconds": (time.perf_counter() - begin) / args.seeds}})


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def table(result: dict[str, Any]) -> str:
    lines = ["# int8 on CIFAR-10, measured", "", "```", *str(__doc__).split("\n\n")[2].splitlines(), "```", ""]
    if "static" in result:
        lines += ["| network | file | top-1 | agreement | SQNR dB | KiB | seconds | peak MiB | within a step | as simulated |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for name, rows in result.get("static", {}).items():
        lines.append(f"| {name} | fp32 | {rows['fp32']['top1']:.2f} | | | {rows['fp32']['kib']:.0f} | | | | |")
        for way in ("ours", "ort"):
            each = " / ".join(f"{row['top1']:.2f}" for row in rows[way])
            cells = [f"{mean(rows[way], key):.{digits}f}" for key, digits in (("agreement", 2), ("sqnr", 1), ("kib", 0))]
            cells += [f"{rows[f'{way}_seconds']:.1f}", f"{rows[f'{way}_mib']:.0f}"]
            extra = ("within_one_step", "executed_as_simulated") if way == "ours" else ()
            cells += [f"{min(row[key] for row in rows[way]):.2f} %" for key in extra] or ["", ""]
            lines.append(f"| {name} | {way} | {mean(rows[way], 'top1'):.2f} ({each}) | {' | '.join(cells)} |")
    if "latency" in result:
        lines += ["", "| network | batch | fp32 ms | ours | onnxruntime |", "|---|--:|--:|--:|--:|"]
    for name, rows in result.get("latency", {}).items():
        for batch, row in rows.items():
            lines.append(f"| {name} | {batch[1:]} | {row['fp32_ms']:.2f} | {row['ours']:.3f} | {row['ort']:.3f} |")
    if "steps" in result:
        lines += [
            "",
            "| network | float step s | QAT, ranges following | QAT, held still | QAT, learned scales |",
            "|---|--:|--:|--:|--:|",
        ]
    for name, row in result.get("steps", {}).items():
        ratios = " | ".join(f"{row[kind]:.2f}" for kind in ("following", "held", "learned"))
        lines.append(f"| {name} | {row['float_seconds']:.2f} | {ratios} |")
    if "qat" in result:
        lines += ["", "| network | trained | epochs | top-1 | minutes |", "|---|---|--:|--:|--:|"]
    for name, rows in result.get("qat", {}).items():
        for arm, row in rows.items():
            how = f"{row['epochs']} x {row['images']} images{', bf16' if row['bf16'] else ''}"
            each = " / ".join(f"{top1:.2f}" for top1 in row["top1"])
            lines.append(f"| {name} | {arm} | {how} | {statistics.mean(row['top1']):.2f} ({each}) | {row['seconds'] / 60:.0f} |")
    lines += ["", f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}."]
    return "\n".join(lines) + "\n"


def keep(path: Path, part: str, name: str, row: dict[str, Any]) -> None:
    """Write what is new, and keep what is there."""
    result = json.loads(path.read_text()) if path.exists() else {}
    result.setdefault(part, {}).setdefault(name, {}).update(row)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: an image folder, or torchvision's own layout")
    parser.add_argument("--checkpoints", required=True, type=Path, help="folder with <network>-*.safetensors")
    parser.add_argument("--networks", nargs="+", default=list(DEPTHS), choices=list(DEPTHS))
    parser.add_argument("--latency", action="store_true", help="only time the files")
    parser.add_argument("--qat", action="store_true", help="only train")
    parser.add_argument("--arms", nargs="*", default=(), help="only these rows of --qat")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row of --qat")
    parser.add_argument("--draws", type=int, default=3, help="calibration draws")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--bf16", action="store_true", help="train under bf16 autocast, all arms")
    parser.add_argument("--limit", type=int, default=None, help="training images")
    parser.add_argument("--seconds", type=float, default=3, help="timing of each file")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch; onnxruntime has one")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    data = cifar10(args.data, 512 if args.latency else None)
    test = Images(*data["test"], 500, MEAN, STD)
    path = args.out / "quantize_cifar.json"
    for name in args.networks:
        model = trained(name, args.checkpoints)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if args.latency:
                keep(path, "latency", name, latencies(model, data["train"][0], folder, args.seconds))
                if name == args.networks[0]:
                    x, labels = next(iter(Images(*data["train"], 128, MEAN, STD)))
                    keep(path, "steps", name, steps(model, x, labels))
            elif args.qat:
                training(model, data, test, args, folder, partial(keep, path, "qat", name))
            else:
                keep(path, "static", name, static(model, data["train"][0], test, args.draws, folder))
    print(table(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
