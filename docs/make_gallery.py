"""Write `recipes/README.md` and `recipes/pictures/` from `benchmarks/gallery.json`: `python docs/make_gallery.py`.

What a recipe shows, and which data it takes, is said here; its command, figures, time and machine are those of a run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from compresskit.measure.charts import Chart, Series, draw, svg

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURES = ROOT / "recipes" / "README.md", ROOT / "recipes" / "pictures"
BUNDLED, DRAWN = "part of scikit-learn", "drawn in the script, or `--data DIR` with pictures"
CIFAR = "`--data DIR`: torchvision's CIFAR-10, or `train/<class>/*` and `test/<class>/*`"
FOLDER = "`--data DIR`: `train/<class>/*` and `val/<class>/*` or `test/<class>/*`"
SENTENCES = (
    "`--data DIR` (`data/sst2` where it is not given): `train.tsv` and `dev.tsv`, a sentence, a tab and 0 or 1 a line;"
    " nothing is downloaded"
)
#: Recipe -> what it shows, its data.
SHOWS = {
    "digits.py": (
        "train in bf16 with fp32 masters (fp32 where the processor has no bf16), distil into a smaller network, prune, quantize",
        BUNDLED,
    ),
    "mnist.py": ("train, prune to 30 % of the MACs, quantize", "`--data DIR`: torchvision's MNIST, downloaded where missing"),
    "cifar10_resnet.py": ("ResNet-20 to -56 with parameter-free shortcuts; `--from` starts from a trained checkpoint", CIFAR),
    "sparse_digits.py": (
        "remove 90 % of the weights on a cubic schedule and keep them at zero through distillation and QAT to int8;"
        " `--dense-sparse-dense`",
        BUNDLED,
    ),
    "lottery_ticket.py": (
        "lottery tickets by rounds of training, masking and rewinding, compared with random masks of the same ratio",
        BUNDLED,
    ),
    "cifar10_fast.py": (
        "a wide residual network with one cycle and with a constant rate: seconds to a stated accuracy",
        CIFAR,
    ),
    "imagenette.py": (
        "a plain network on any image folder, one epoch under three precision policies; accuracy, time, memory",
        FOLDER,
    ),
    "transfer.py": (
        "a torchvision network with a new head: freeze, train, unfreeze, static int8, and QAT where that loses too much",
        FOLDER,
    ),
    "semi_supervised.py": (
        "100 labels and 1,157 images without: a cheap student of a few networks' soft predictions, beside the labels alone",
        BUNDLED,
    ),
    "distillation_token.py": ("a vision transformer with DeiT's distillation token under a convolutional teacher", BUNDLED),
    "cifar10_distill.py": (
        "distil ResNet-56 into ResNet-20; `--terms dkd at rkd ...` chooses the losses, `--teacher` a trained checkpoint",
        CIFAR,
    ),
    "super_resolution.py": (
        "train (or load, `--from`) a network that enlarges pictures, quantize it with label-free remedies; PSNR before and after",
        DRAWN,
    ),
    "face_detector.py": (
        "train (or load, `--from`) a detector of separable convolutions, quantize it with label-free remedies; the metric is the F1 of"
        " boxes; `--choose measure --threads 2` leaves float what is faster so",
        DRAWN,
    ),
    "sst2_text.py": (
        "distil a small transformer for sentiment into a bidirectional LSTM; vocabulary built from the data",
        SENTENCES,
    ),
    "pretrained_distillation.py": (
        "three stages for a compact transformer: masked words, imitation without labels, fine-tuning; beside fine-tuning alone",
        SENTENCES,
    ),
    "paraphrase.py": (
        "whether two sentences say the same, by a transformer in bf16, quantized dynamically; the metric is an F1",
        "made of a small grammar, or `--data DIR`: `train.tsv` and `dev.tsv`, two sentences and 0 or 1 a line, with tabs",
    ),
    "word_lm.py": (
        "a word-level LSTM language model; `--precision`; perplexity of the dynamic int8 file",
        f"{SENTENCES}; labels are not read",
    ),
    "text_transformer.py": (
        "train a transformer in bf16, distil it into a smaller one, quantize that dynamically; files take any batch size and"
        " length",
        SENTENCES,
    ),
    "text_lstm.py": (
        "train a transformer in bf16, distil it into an LSTM, which ONNX Runtime runs in int8, and quantize that dynamically",
        SENTENCES,
    ),
}
HEAD = """\
# Recipes

Each recipe is one screen of Python. `--help` explains every option; a run that is started again continues where it was interrupted. Figures, times
and pictures are of the runs below, which `benchmarks/gallery.py` started as a user would, with the settings that stand beside them; this page
is written from them by `python docs/make_gallery.py`. They are short runs of small networks on one machine, to show what to expect;
[results](../docs/results.md) are measured with more care.
"""
TAIL = """\
## On several processes

`vision.py` holds what the image recipes share, `text.py` what those on sentences share.

All of them run unchanged on several processes:

```
torchrun --nproc-per-node=2 recipes/digits.py
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 recipes/digits.py --out SHARED/digits
```

Start the second line on each machine; `--out` must be a folder that all of them share. When one process dies all of them end, and
they continue when they are started again; `--max-restarts=3` lets torchrun restart them. See [docs/runs.md](../docs/runs.md).
"""


def runs() -> dict[str, Any]:
    """What the recipes printed and measured."""
    return json.loads((ROOT / "benchmarks" / "gallery.json").read_text())


def outcome(run: dict[str, Any]) -> str:
    """The figures of a chain in a sentence; empty for a recipe that prints a table of its own."""
    rows = run["rows"]
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    smaller, faster = first["bytes"] / last["bytes"], first["latency_ms"] / last["latency_ms"]
    proof = "every file verified" if all(row["verified"] for row in rows) else "NOT every file verified"
    ratios = f", {smaller:.1f} times smaller, {faster:.2f} times faster" if len(rows) > 1 else ""
    return f"{run['metric']} {first['metric']:.4f} to {last['metric']:.4f}{ratios}; {proof}"


def minutes(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def chart(name: str, run: dict[str, Any]) -> Chart:
    """What the recipe shows, drawn: the metric of each stage against its file, or the figures that it printed."""
    if run["rows"]:
        points = [(row["bytes"] / 1024, row["metric"]) for row in run["rows"]]
        labels = [row["stage"] for row in run["rows"]]
        return draw(f"{name}: the stages", "file, KiB", run["metric"], [Series("stage", points, labels)], lines=False)
    return draw(f"{name}: what it printed", *PRINTED[name](run["printed"]), lines=name == "lottery_ticket.py")


def tickets(lines: list[str]) -> tuple[str, str, list[Series]]:
    """Accuracy of each kind of mask at each ratio."""
    names = lines[1].split()[1:]
    table = [[float(cell.rstrip("%")) for cell in line.split()] for line in lines[2:]]
    found = [Series(name, [(row[0], row[i]) for row in table], [f"{name}, {row[0]:.0f} %" for row in table])
             for i, name in enumerate(names, 1)]  # fmt: skip
    return "% of the weights removed", "test accuracy, mean of the seeds", found


def taught(lines: list[str]) -> tuple[str, str, list[Series]]:
    """Accuracies of each seed, one kind of training beside the other."""
    found = []
    for i, line in enumerate((line for line in lines if "of seeds:" in line), 1):
        name, accuracies = re.split(r"\s{2,}|(?<=\D)(?=0\.\d{4}\s)", line)[0].strip(), line.partition("of seeds:")[2]
        found.append(Series(name, [(float(i), float(a)) for a in accuracies.split(",")], [""] * len(accuracies.split(","))))
    return "kind of training, in the order below", "test accuracy, a point a seed", found


def cycles(lines: list[str]) -> tuple[str, str, list[Series]]:
    """The last accuracy of each schedule against its time."""
    pattern = re.compile(r"^(.+?)\s{2,}.*last ([\d.]+), best [\d.]+, (\d+) s in all")
    found = [match for line in lines if (match := pattern.match(line))]
    return "seconds", "test accuracy", [Series(m[1], [(float(m[3]), float(m[2]))], [m[1]]) for m in found]


def policies(lines: list[str]) -> tuple[str, str, list[Series]]:
    """Accuracy of each precision policy against its time."""
    found = [line.split() for line in lines if re.fullmatch(r"\S+\s+0\.\d+\s+[\d.]+", line)]
    return "seconds", "accuracy", [Series(name, [(float(time), float(value))], [name]) for name, value, time in found]


PRINTED = {"lottery_ticket.py": tickets, "semi_supervised.py": taught, "cifar10_fast.py": cycles, "imagenette.py": policies}


def section(name: str, run: dict[str, Any]) -> str:
    """One recipe: its command, its figures, its picture."""
    shows, _ = SHOWS[name]
    command = f"python recipes/{name} {run['arguments']}".strip()
    about = run["about"]
    machine = (
        f"{minutes(run['seconds'])} on {about['threads']} thread of {about['machine']}, torch {about['torch'].split('+')[0]}"
    )
    figures = f"\n\n{outcome(run)}." if outcome(run) else ""
    printed = "\n".join(line[:130].rstrip() for line in run["printed"] if not line.startswith("model: "))
    picture = f"![{chart(name, run).description}](pictures/{Path(name).stem}.svg)"
    return f"## {name}\n\n{shows[0].upper()}{shows[1:]}. {machine}:\n\n```\n{command}\n```\n\n```\n{printed}\n```{figures}\n\n{picture}\n"


def page() -> str:
    """The page of all recipes."""
    found = runs()
    rows = []
    for name, (shows, data) in SHOWS.items():
        time = minutes(found[name]["seconds"]) if name in found else ""
        entry = f"[`{name}`](#{name.replace('.', '')})" if name in found else f"`{name}`"
        rows.append(f"| {entry} | {shows} | {data} | {time} |")
    table = "\n".join(["| recipe | shows | data | took |", "|---|---|---|--:|", *rows])
    sections = [section(name, found[name]) for name in SHOWS if name in found]
    return "\n".join([HEAD, table, "", *sections, TAIL])


def pictures() -> dict[str, str]:
    """Name of a picture -> its SVG."""
    return {f"{Path(name).stem}.svg": svg(chart(name, run)) for name, run in runs().items()}


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURES.mkdir(exist_ok=True)
    for picture, drawn in pictures().items():
        (PICTURES / picture).write_text(drawn)
