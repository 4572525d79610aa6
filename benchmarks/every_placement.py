"""Every placement of the layers of a small network, in integers or float: what each takes, and how well it decides.

    python benchmarks/every_placement.py --data FOLDER --out runs/every_placement --networks pnet rnet

A choice of float layers can only be as good as the best placement, for the same remedies. For the networks of MTCNN
(`real_networks.py`, which says on what they are tested) each set of layers with weights, the small last ones taken together, is
left float, and the others are quantized with the remedies of "balanced". Latencies: one thread, each file in turn with our float
export, medians of three. Files that are finished stay in the folder; an interrupted run goes on. Writes `every_placement.json`
and `.md` beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from real_networks import Network, decibels, executed, file_of, mtcnn, processor
from tqdm.auto import tqdm

import compresskit as ck
from compresskit.measure import latency

HERE = Path(__file__).parent
#: Network of MTCNN -> names of its layers, those that are float or not together in one string.
PARTS = {
    "pnet": ("conv1", "conv2", "conv3", "conv4_1", "conv4_2"),
    "rnet": ("conv1", "conv2", "conv3", "dense4", "dense5_1 dense5_2"),
    "onet": ("conv1", "conv2", "conv3", "conv4", "dense5", "dense6_1 dense6_2 dense6_3"),
}


def sets(parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """What may be float: every set of parts but all of them."""
    chosen = [some for count in range(len(parts)) for some in itertools.combinations(parts, count)]
    return [tuple(" ".join(some).split()) for some in chosen]


def measure(network: Network, floating: tuple[str, ...], path: Path, seconds: float) -> dict[str, Any]:
    """Quantize all but some layers, and measure the file."""
    if not path.exists():
        batches = network.draws[0]
        quantized = ck.quant.quantize_static(
            network.model, [(x,) for x in batches], effort="balanced", float_macs=0, choose="rules", skip=floating,
            dynamic=network.dynamic,
        )  # fmt: skip
        ck.export_onnx(quantized, path, (batches[0][:2],))
    export = path.parent / "export.onnx"
    if not export.exists():
        ck.export_onnx(network.model, export, (network.example,))
    pairs = [latency([path, export], (network.example,), threads=1, seconds=seconds) for _ in range(3)]
    run = executed(path)
    return {
        "float": list(floating),
        "ratio": median(ours / floats for ours, floats in pairs),
        "f1": network.quality(run),
        "db": decibels(run, network),
    }


def write(result: dict[str, Any]) -> None:
    (HERE / "every_placement.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = []
    for name, rows in result["networks"].items():
        faster = [row for row in rows if row["ratio"] < 1]
        best, least = max(faster, key=lambda row: row["f1"]), float("-inf")
        lines += [
            f"{name}: {len(rows)} placements, {len(faster)} of them faster than the float file; the best of these has F1"
            f" {best['f1']:.1f} %. Those that no faster one surpasses:",
            "",
            "| in float | of the float file's latency | F1 | dB |",
            "|---|--:|--:|--:|",
        ]
        for row in sorted(rows, key=lambda row: row["ratio"]):
            if row["f1"] > least:
                least = row["f1"]
                lines.append(f"| {', '.join(row['float']) or 'none'} | {row['ratio']:.2f} | {row['f1']:.2f} | {row['db']:.1f} |")
        lines.append("")
    lines.append(f"{result['versions']}, {result['cpu']}")
    (HERE / "every_placement.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with images/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", nargs="*", default=tuple(PARTS), choices=tuple(PARTS))
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    args = parser.parse_args()
    logging.getLogger("compresskit").setLevel(logging.ERROR)
    known = HERE / "every_placement.json"
    result = json.loads(known.read_text()) if known.exists() else {"networks": {}}
    result["cpu"] = processor()
    result["versions"] = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    for name in args.networks:
        network, rows = mtcnn(name, args.data), []
        (args.out / name).mkdir(parents=True, exist_ok=True)
        for k, floating in enumerate(tqdm(sets(PARTS[name]), desc=name)):
            with torch.no_grad():
                rows.append(measure(network, floating, file_of(args.out / name, name, "placed", k), args.seconds))
        result["networks"][name] = rows
        write(result)


if __name__ == "__main__":
    main()
