"""Weights of few bits after training, without labels: accuracy of the executed file, its size, and the time it took.

    python benchmarks/low_bit.py --data CIFAR10 --checkpoints FOLDER

nearest   quantize_static(bits=Bits(weights=...)), each weight to the nearest step
learned   the same, then reconstruct_blocks_ (BRECQ with QDrop)
tuned     the same, then imitate_float_: all layers at once, to give the float network's outputs
mixed     bits of each layer by choose_bits, the mean as many, each weight to the nearest step; then learned, too

All layers have these bits, the first and the last one too; activations have 8. Calibration: 512 training images.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from quantize_cifar import DEPTHS, MEAN, STD, X, draw, trained
from real_networks import executed
from torch import Tensor, nn
from vision import CifarResNet, cifar10

import compresskit as ck
from compresskit.quant import Bits

HERE = Path(__file__).parent
WIDTHS = (8, 4, 3, 2)


def network(name: str, checkpoints: Path) -> nn.Module:
    """The newest safetensors of a name, or, for a file name that ends in .th, that file."""
    if not name.endswith(".th"):
        return trained(name, checkpoints)
    saved = torch.load(checkpoints / name, map_location="cpu", weights_only=True)
    model = CifarResNet(DEPTHS[name.partition("-")[0]])
    model.load_state_dict({key.removeprefix("module."): value for key, value in saved["state_dict"].items()})
    return model.eval()


def top1(run: Any, test: list[tuple[Tensor, Tensor]]) -> float:
    hits = sum(int((run(x)[0].argmax(1) == labels).sum()) for x, labels in test)
    return 100 * hits / sum(len(labels) for _, labels in test)


def rows_of(
    name: str, model: nn.Module, batches: list[Tensor], test: list[tuple[Tensor, Tensor]], args: Any
) -> list[dict[str, Any]]:
    path, rows = Path(args.out) / "low_bit.onnx", []

    def add(way: str, bits: str, quantized: Any, began: float) -> None:
        seconds = time.perf_counter() - began
        ck.export_onnx(quantized, path, X)
        ck.verify_onnx(path, quantized, [(batches[0],)])
        rows.append(
            {"network": name, "weights": bits, "way": way, "top1": top1(executed(path), test), "bytes": path.stat().st_size}
            | {"seconds": seconds, "integers": ck.audit(path).integer_fraction}
        )
        print(rows[-1], flush=True)

    def learned(quantized: Any) -> Any:
        ck.quant.reconstruct_blocks_(quantized, batches, steps=args.steps, rate=args.rate)
        return quantized

    with torch.no_grad():
        rows.append({"network": name, "weights": "fp32", "way": "", "top1": top1(lambda x: [model(x)], test)})
    for width in WIDTHS:
        began = time.perf_counter()
        quantized = ck.quant.quantize_static(model, batches, bits=Bits(weights=width))
        add("nearest", str(width), quantized, began)
        if width < 8:
            add("learned", str(width), learned(quantized), began)
            ck.quant.imitate_float_(quantized, model, batches, steps=args.tuning)
            add("tuned", str(width), quantized, began)
    for average in (4.0, 3.0):
        began = time.perf_counter()
        plan = ck.quant.choose_bits(model, batches, average=average)
        quantized = ck.quant.quantize_static(model, batches, bits=plan.bits)
        add("mixed", f"{average:g} on average", quantized, began)
        add("mixed, learned", f"{average:g} on average", learned(quantized), began)
    return rows


def table(found: dict[str, Any]) -> str:
    lines = [
        "| network | bits of weights | way | top-1 % | file, KiB | of int8 | in integers | seconds |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, rows in found["networks"].items():
        whole = next(row["bytes"] for row in rows if row["weights"] == "8")
        for row in rows:
            cells = [name, row["weights"], row["way"], f"{row['top1']:.2f}"]
            if "bytes" in row:
                cells += [
                    f"{row['bytes'] / 1024:.0f}",
                    f"{row['bytes'] / whole:.3f}",
                    f"{row['integers']:.0%}",
                    f"{row['seconds']:.0f}",
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"10,000 test images, executed in ONNX Runtime. {found['about']}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=["resnet20"], help="resnet20, resnet56, or a file such as resnet20-x.th")
    parser.add_argument("--steps", type=int, default=60, help="of reconstruct_blocks_, for each block")
    parser.add_argument("--rate", type=float, default=5e-2)
    parser.add_argument("--tuning", type=int, default=500, help="steps of imitate_float_")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration images")
    parser.add_argument("--out", default=".", help="folder for the files that are measured")
    args = parser.parse_args()
    data = cifar10(args.data, None)
    images, labels = data["test"]
    test = list(
        zip(((images.float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)).split(500), labels.split(500), strict=True)
    )
    batches = draw(data["train"][0], args.seed)
    about = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    about |= {"steps": args.steps, "rate": args.rate, "tuning": args.tuning, "seed": args.seed}
    networks = {name: rows_of(name, network(name, args.checkpoints), batches, test, args) for name in args.networks}
    found = {"about": about, "networks": networks}
    (HERE / "low_bit.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "low_bit.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
