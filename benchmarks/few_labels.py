"""Networks that learn from few labels and from data without labels, as two recipes print them, over several seeds.

    python benchmarks/few_labels.py --data FOLDER

`FOLDER` holds `train.tsv` and `dev.tsv` of sentences, a sentence, a tab and 0 or 1 a line. Runs `recipes/semi_supervised.py` and
`recipes/pretrained_distillation.py` with their own settings, once a seed, and writes `few_labels.json` and `.md`. Metrics are of
the last epoch, on samples that no network was trained on.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"
SEMI, STAGES = "100 labels of handwritten digits", "1,000 labelled sentences"
#: What a row of the table is.
ROWS = {
    SEMI: {
        "labels alone": "a network without convolutions, labels alone",
        "labels alone, moved": "the same, images moved at random",
        "with unlabelled images": "the same, soft predictions of three networks for the images without labels",
        "a teacher": "one of these three: half the parameters, 14 times the operations",
    },
    STAGES: {
        "alone": "the compact transformer, fine-tuned alone",
        "stages": "the same in three stages: masked words, imitation without labels, fine-tuning",
        "teacher": "the teacher, fine-tuned alone",
    },
}


def digits(seeds: int) -> dict[str, list[float]]:
    """Accuracies of each row."""
    printed = _run("semi_supervised.py", "--seeds", str(seeds))
    return {
        name: [float(one) for one in found[1].split(", ")]
        for name in ROWS[SEMI]
        if (found := re.search(rf"^{re.escape(name)}  .*of seeds: (.*)$", printed, re.M))
    }


def sentences(data: str, seeds: int) -> dict[str, list[float]]:
    """Accuracies of each row."""
    found: dict[str, list[float]] = {name: [] for name in ROWS[STAGES]}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            printed = _run("pretrained_distillation.py", "--data", data, "--seed", str(seed), "--out", folder)
            report = json.loads((Path(folder) / "report.json").read_text())
        found["stages"].append(report["rows"][-1]["metric"])
        for name, pattern in (("teacher", r"^teacher: (.*)$"), ("alone", r"^compact model, fine-tuned alone: (.*)$")):
            found[name] += [float(one) for one in re.findall(pattern, printed, re.M)]
    return found


def _run(name: str, *arguments: str) -> str:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, str(RECIPES / name), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    print(f"{name} {' '.join(arguments)}: {time.perf_counter() - begin:.0f} s\n{done.stdout}", flush=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found = {SEMI: digits(args.seeds), STAGES: sentences(args.data, args.seeds)}
    where = f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread"
    (HERE / "few_labels.json").write_text(json.dumps({"where": where, "rows": ROWS, "accuracy": found}, indent=1) + "\n")
    lines = ["# Few labels, and data without labels", "", f"Accuracy in %, mean and each of {args.seeds} seeds. {where}.", ""]
    for what, rows in found.items():
        lines += [f"## {what}", "", "| network and training | mean | seeds |", "|---|--:|---|"]
        for name, metrics in rows.items():
            each = ", ".join(f"{100 * metric:.2f}" for metric in metrics)
            lines.append(f"| {ROWS[what][name]} | {100 * statistics.mean(metrics):.2f} | {each} |")
        lines.append("")
    (HERE / "few_labels.md").write_text("\n".join(lines[:-1]) + "\n")


if __name__ == "__main__":
    main()
