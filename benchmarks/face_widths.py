"""How fast the face detector becomes by width alone: the least that a ceiling on its latency can ask for.

    python benchmarks/face_widths.py --data FOLDER

FOLDER: as for `real_networks.py`. `narrow(width=...)` makes every layer so narrow whose channels may go, to single channels;
nothing is trained, so that these rows say what such files take, not what they find. Each width in float, in integers by the
rules of `X86`, and as measured (`choose="measure"`). 320 x 240, one image, one thread, all files in turn, three rounds, medians.

Writes `face_widths.json` and `face_widths.md` beside this file (`--out`), whose rows are of a processor with AMX;
`face_widths_vnni.*` are those of one with VNNI alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from real_networks import networks
from torch import nn

import compresskit as ck
from compresskit.measure import latency
from compresskit.prune.depth.narrow import narrow

HERE = Path(__file__).parent
WIDTHS = (1.0, 0.5, 0.25, 0.125)
ROUNDS = 3


def forms(model: nn.Module, x: torch.Tensor, name: str, folder: Path) -> dict[str, Path]:
    """The files of one width."""
    with_rules = ck.quant.quantize_static(model, [(x,)], choose="rules")
    measured = ck.quant.quantize_static(model, [(x,)], choose="measure")
    made = {"float": model, "int8": with_rules, "int8, measured": measured}
    return {form: ck.export_onnx(some, folder / f"{name}-{form}.onnx", (x[:1],)) for form, some in made.items()}


def measure(model: nn.Module, x: torch.Tensor, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    files: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        for width in WIDTHS:
            small = model if width == 1 else narrow(model, (x[:1],), width=width, round_to=1).eval()
            counts = {"macs": ck.count_macs(small, (x[:1],)), "parameters": sum(p.numel() for p in small.parameters())}
            for form, file in forms(small, x, f"{width:g}", Path(folder)).items():
                files.append(file)
                rows.append({"width": width, "form": form} | counts)
        rounds = [latency(files, (x[:1],), seconds=seconds) for _ in range(ROUNDS)]
    for row, times in zip(rows, zip(*rounds, strict=True), strict=True):
        row["milliseconds"] = statistics.median(times)
        row["latency"] = statistics.median(t / one[0] for t, one in zip(times, rounds, strict=True))
    return rows


def table(found: dict[str, Any]) -> str:
    lines = ["| width | MACs, M | parameters | form | ms | latency |", "|--:|--:|--:|---|--:|--:|"]
    lines += [
        f"| {row['width']:g} | {row['macs'] / 1e6:.1f} | {row['parameters']} | {row['form']} | {row['milliseconds']:.3f}"
        f" | {row['latency']:.3f} |"
        for row in found["rows"]
    ]
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    return "\n".join([*lines, "", f"Latency: as a share of that of the float file as it is. {about}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="networks.py, images/")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each file is timed in each round, at most")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of the figures")
    args = parser.parse_args()
    ((_, network),) = networks(argparse.Namespace(data=args.data, networks=["face"], cifar=None, checkpoints=None))
    rows = measure(network.model.eval(), network.draws[0][0][:2], args.seconds)
    about = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "machine": platform.machine()}
    found = {"about": about, "rows": rows}
    (args.out / "face_widths.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "face_widths.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
