"""Weights of few bits after training, without labels: accuracy of the executed file, its size, and the time it took.

    python benchmarks/low_bit.py --cifar CIFAR10 --checkpoints FOLDER                              ResNet-20
    python benchmarks/low_bit.py --data FOLDER --networks face                                     the face detector
    python benchmarks/low_bit.py --cifar CIFAR10 --checkpoints FOLDER --networks vit --out FOLDER  a small transformer
    python benchmarks/low_bit.py ... --networks resnet56 --widths 4 3 --ways nearest learned       these rows, measured again

nearest   quantize_static(bits=Bits(weights=...)), each weight to the nearest step
learned   the same, then reconstruct_blocks_ (BRECQ with QDrop)
tuned     the same, then imitate_float_: all layers at once, to give the float network's outputs
mixed     bits of each layer by choose_bits(check=False), the mean as many, each weight to the nearest step
mixed, checked   the same by choose_bits, which measures its choice beside others and uniform bits
mixed, learned   as mixed, then the rounding learned
onnxruntime, AIMET, ModelOpt, MCT: what others make of the same network, batches and bits, see `low_bit_peers.py`

All layers have these bits, the first and the last one too; activations have 8, but 4 in rows `4, A4`, where the first and the
last layer and sums of residual paths keep 8. What is calibrated on and what is measured: `real_networks.py`, with its first
draw. ResNets and transformer: top-1 in %; face detector: F1 in %. The transformer (6 layers of width 96, patches of 4 x 4) is
trained here, 10 epochs under the ResNet-20 as its teacher, where `--out` has no `vit.safetensors`.

Writes `low_bit.json` and `low_bit.md` beside this file; what is not measured again stays.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from low_bit_peers import BY_PEER, covers
from quantize_cifar import DEPTHS, MEAN, STD, trained
from real_networks import Network, cifar, executed, float_run, networks
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import VisionTransformer
from vision import CifarResNet, Images, cifar10

import compresskit as ck
from compresskit.quant import Bits

HERE = Path(__file__).parent
WIDTHS = {"8": Bits(weights=8), "4": Bits(weights=4), "3": Bits(weights=3), "2": Bits(weights=2)}
BOTH = "4, A4"  # bits of weights and of activations
AVERAGES = (4.0, 3.0)
WAYS = ("nearest", "learned", "tuned", "mixed", "mixed, checked", "mixed, learned", *BY_PEER)
Row = dict[str, Any]


def published(name: str, checkpoints: Path) -> nn.Module:
    """A network of the authors' file, which ends in .th."""
    saved = torch.load(checkpoints / name, map_location="cpu", weights_only=True)
    model = CifarResNet(DEPTHS[name.partition("-")[0]])
    model.load_state_dict({key.removeprefix("module."): value for key, value in saved["state_dict"].items()})
    return model.eval()


def transformer(args: argparse.Namespace) -> nn.Module:
    """A small vision transformer, trained on CIFAR-10 or read from where it was kept."""
    torch.manual_seed(0)
    model = VisionTransformer(32, 4, num_layers=6, num_heads=3, hidden_dim=96, mlp_dim=384, num_classes=10)
    kept = args.out / "vit.safetensors"
    if not kept.exists():
        data = cifar10(str(args.cifar), None)
        batches = Images(*data["train"], 128, MEAN, STD, augment=4, flip=True, shuffle=True)
        train = ck.Train(
            epochs=10, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.05), schedule=ck.lr.OneCycle(),
            precision=ck.mixed.AMP_BF16, objective=ck.imitate(trained("resnet20", args.checkpoints)), validate_every=0,
        )  # fmt: skip
        model = train(model, ck.Task(train=batches, val=Images(*data["test"], 500, MEAN, STD)))
        save_file(model.state_dict(), kept)
    model.load_state_dict(load_file(kept))
    return model.eval()


def ends(model: nn.Module) -> tuple[str, str]:
    """Names of the first and the last layer with weights."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    return names[0], names[-1]


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, Network]]:
    yield from networks(args)
    for name in args.networks:
        if name.endswith(".th"):
            yield name, cifar(published(name, args.checkpoints), args.cifar)
        if name == "vit":
            yield name, cifar(transformer(args), args.cifar)


def measured(quantized: Any, network: Network, began: float, folder: Path) -> Row:
    """What the file reaches, executed."""
    seconds, path = time.perf_counter() - began, folder / "low_bit.onnx"
    batches = network.draws[0]
    ck.export_onnx(quantized, path, (batches[0][:2],))
    ck.verify_onnx(path, quantized, [(batches[0],)])
    row = {"quality": network.quality(executed(path)), "bytes": path.stat().st_size, "seconds": seconds}
    return row | {"integers": ck.audit(path).integer_fraction}


def rows_of(network: Network, args: argparse.Namespace) -> Iterator[Row]:
    """Rows of one network. A way goes on where the one before it ended, and its seconds are of all of them."""
    model, batches = network.model, [(x,) for x in network.draws[0]]

    def learn(quantized: Any) -> None:
        ck.quant.reconstruct_blocks_(quantized, batches, steps=args.steps, rate=args.rate)

    def results(bits: str, quantized: Any, began: float, ways: Sequence[tuple[str, Callable[[Any], None]]]) -> Iterator[Row]:
        last = max((k for k, (way, _) in enumerate(ways) if way in args.ways), default=-1)
        for way, change_ in ways[: last + 1]:
            change_(quantized)
            if way in args.ways:
                yield {"weights": bits, "way": way} | measured(quantized, network, began, args.out)

    with torch.no_grad():
        yield {"weights": "fp32", "way": "", "quality": network.quality(float_run(model))}
    eight = Bits(weights=8, activations=8)
    both: dict[str, Any] = {"": Bits(weights=4, activations=4, shortcuts=8)} | dict.fromkeys(ends(model), eight)
    for width in args.widths:
        began = time.perf_counter()
        bits = both if width == BOTH else WIDTHS[width]
        quantized = ck.quant.quantize_static(model, batches, bits=bits, dynamic=network.dynamic)
        ways = [("nearest", lambda _: None), ("learned", learn)]
        ways.append(("tuned", lambda q: ck.quant.imitate_float_(q, model, batches, steps=args.tuning)))
        yield from results(width, quantized, began, ways if width != "8" else ways[:1])
        yield from by_peers(network, width, args)
    for average in AVERAGES:
        for way, change in (("mixed", lambda _: None), ("mixed, checked", lambda _: None), ("mixed, learned", learn)):
            if way in args.ways:
                began = time.perf_counter()
                plan = ck.quant.choose_bits(model, batches, average=average, check=way == "mixed, checked")
                print(plan, flush=True)
                quantized = ck.quant.quantize_static(model, batches, bits=plan.bits, dynamic=network.dynamic)
                yield from results(f"{average:g} on average", quantized, began, [(way, change)])


def by_peers(network: Network, width: str, args: argparse.Namespace) -> Iterator[Row]:
    """Rows of other quantizers at the same bits; a file only where they write one."""
    for way in (way for way in BY_PEER if way in args.ways and width != BOTH and covers(way, int(width))):
        began, path = time.perf_counter(), args.out / f"{way}.onnx"
        path.unlink(missing_ok=True)
        run = BY_PEER[way](network, network.draws[0], int(width), path)
        row = {"weights": width, "way": way, "seconds": time.perf_counter() - began}
        if path.exists():
            row |= {"bytes": path.stat().st_size, "integers": ck.audit(path).integer_fraction}
        with torch.no_grad():
            yield row | {"quality": network.quality(run)}


def put(rows: list[Row], new: Row) -> list[Row]:
    """Rows with a new one in the place of the one that it measures again, in the order of the table."""
    order = ["fp32", *WIDTHS, BOTH, *(f"{average:g} on average" for average in AVERAGES)]
    kept = [row for row in rows if (row["weights"], row["way"]) != (new["weights"], new["way"])]
    return sorted([*kept, new], key=lambda row: (order.index(row["weights"]), ["", *WAYS].index(row["way"])))


def table(found: dict[str, Any]) -> str:
    lines = [
        "| network | bits of weights | way | top-1 or F1, % | file, KiB | of int8 | in integers | seconds |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, rows in found["networks"].items():
        whole = next((row["bytes"] for row in rows if (row["weights"], row["way"]) == ("8", "nearest")), float("nan"))
        for row in rows:
            cells = [name, row["weights"], row["way"], f"{row['quality']:.2f}"]
            file = (
                [f"{row['bytes'] / 1024:.0f}", f"{row['bytes'] / whole:.3f}", f"{row['integers']:.0%}"]
                if "bytes" in row
                else [""] * 3
            )
            cells += [*file, f"{row['seconds']:.0f}" if "seconds" in row else ""]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Executed in ONNX Runtime, AIMET, ModelOpt and MCT simulated; CIFAR-10: 10,000 test images. {found['about']}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="networks.py with `load(name)` and photographs in images/, for the face detector"
    )
    parser.add_argument("--cifar", type=Path, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument(
        "--networks", nargs="+", default=["resnet20"], help="resnet20, resnet56, vit, face, or a file such as resnet20-x.th"
    )
    parser.add_argument("--widths", nargs="*", choices=[*WIDTHS, BOTH], default=[*WIDTHS, BOTH])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=60, help="of reconstruct_blocks_, for each block")
    parser.add_argument("--rate", type=float, default=5e-2)
    parser.add_argument("--tuning", type=int, default=500, help="steps of imitate_float_")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files that are measured")
    args = parser.parse_args()
    path = HERE / "low_bit.json"
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    about |= {"steps": args.steps, "rate": args.rate, "tuning": args.tuning}
    for name, network in chosen(args):
        for row in rows_of(network, args):
            found = json.loads(path.read_text()) if path.exists() else {"networks": {}}
            found["about"] = about
            found["networks"][name] = put(found["networks"].get(name, []), row)
            path.write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(table(found))
            print(name, row, flush=True)


if __name__ == "__main__":
    main()
