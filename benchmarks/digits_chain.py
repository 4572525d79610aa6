"""The digits recipe over several seeds: size, latency and metric of the int8 file against the fp32 file of its first stage.

Writes `digits_chain.json` and `digits_chain.md` beside this file. Latencies are medians in ONNX Runtime, one thread,
batch 1; the files of a run are measured in turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many runs")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of the first training")
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                HERE.parent / "recipes" / "digits.py",
                "--seed",
                seed,
                "--epochs",
                args.epochs,
                "--out",
                folder + "/run",
            ]
            subprocess.run([str(part) for part in command], check=True)
            runs.append(json.loads((Path(folder) / "run" / "report.json").read_text())["rows"])
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    lines = [
        "| seed | stage | metric | params | file KiB | smaller | latency ms | faster | verified |",
        "|--:|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for seed, rows in enumerate(runs):
        for row in rows:
            smaller, faster = rows[0]["bytes"] / row["bytes"], rows[0]["latency_ms"] / row["latency_ms"]
            lines.append(
                f"| {seed} | {row['stage']} | {row['metric']:.4f} | {row['parameters']} | {row['bytes'] / 1024:.1f}"
                f" | {smaller:.1f}x | {row['latency_ms']:.3f} | {faster:.2f}x | {row['verified']} |"
            )
    last = [(rows[0], rows[-1]) for rows in runs]
    mean = {
        "smaller": statistics.mean(a["bytes"] / b["bytes"] for a, b in last),
        "faster": statistics.mean(a["latency_ms"] / b["latency_ms"] for a, b in last),
        "metric_first": statistics.mean(a["metric"] for a, _ in last),
        "metric_last": statistics.mean(b["metric"] for _, b in last),
    }
    lines += ["", f"Mean of {len(runs)} seeds: {mean['smaller']:.1f}x smaller, {mean['faster']:.2f}x faster, metric"
              f" {mean['metric_first']:.4f} -> {mean['metric_last']:.4f}. {versions}"]  # fmt: skip
    (HERE / "digits_chain.json").write_text(json.dumps({"versions": versions, "mean": mean, "runs": runs}, indent=1) + "\n")
    (HERE / "digits_chain.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
