"""Run the recipes as their users do, and keep what each printed, its figures, its time and the machine.

    python benchmarks/gallery.py                                                     # those that need no data
    python benchmarks/gallery.py --data FOLDER --cifar CIFAR10 --only mnist.py sst2_text.py

--data    holds `MNIST/`, `sst2/` and `cifar10_resnet/` with trained networks.
--cifar   an image folder with train/<class>/* and test/<class>/*.

Settings that differ from a recipe's own make it end in minutes on one core, and stand in the command that is shown. Writes
`gallery.json` beside this file; recipes that are not run again are kept. `docs/make_gallery.py` makes `recipes/README.md` of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch

HERE = Path(__file__).parent
RECIPES = HERE.parent / "recipes"
#: Arguments of each recipe; DATA and CIFAR10 stand for the folders that are given here.
CASES = {
    "digits.py": "",
    "mnist.py": "--data DATA",
    "cifar10_resnet.py": "--data CIFAR10 --from DATA/cifar10_resnet/resnet20-jpeg-88.02.safetensors --epochs 6",
    "sparse_digits.py": "",
    "lottery_ticket.py": "",
    "cifar10_fast.py": "--data CIFAR10 --depth 10 --width 1 --epochs 2 --goal 0.5",
    "imagenette.py": "--data CIFAR10 --size 32 --widths 32 64 128 --limit 8000",
    "transfer.py": "--data CIFAR10 --weights none --size 32 --epochs 2 --limit 2000",
    "semi_supervised.py": "",
    "distillation_token.py": "",
    "cifar10_distill.py": "--data CIFAR10 --teacher DATA/cifar10_resnet/resnet56-jpeg-89.79.safetensors --depth 8 --epochs 2",
    "super_resolution.py": "",
    "face_detector.py": "",
    "sst2_text.py": "--data DATA/sst2 --epochs 6",
    "pretrained_distillation.py": "--data DATA/sst2 --epochs 2 --pretrain 2 --imitate 2",
    "paraphrase.py": "",
    "word_lm.py": "--data DATA/sst2 --epochs 2",
    "text_transformer.py": "--data DATA/sst2 --epochs 2",
    "text_lstm.py": "--data DATA/sst2 --epochs 6",
}
WITHOUT_OUT = {"lottery_ticket.py", "cifar10_fast.py", "imagenette.py", "semi_supervised.py"}


def run(name: str, data: str, cifar: str) -> dict[str, Any]:
    """Run one recipe in a folder of its own."""
    given = CASES[name]
    arguments = given.replace("CIFAR10", cifar).replace("DATA", data).split()
    with tempfile.TemporaryDirectory() as folder:
        out = [] if name in WITHOUT_OUT else ["--out", f"{folder}/run"]
        begin = time.perf_counter()
        command = [sys.executable, str(RECIPES / name), *arguments, *out]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        reports = sorted(Path(folder).rglob("report.json"), key=lambda path: path.stat().st_mtime)
        report: dict[str, Any] = json.loads(reports[-1].read_text()) if reports else {"rows": [], "metric": {"name": "accuracy"}}
    rows = [{key: row[key] for key in ("stage", "metric", "bytes", "latency_ms", "verified")} for row in report["rows"]]
    printed = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("model: ")]
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    flags = Path("/proc/cpuinfo").read_text()
    about["machine"] = f"{platform.machine()}, {'AVX512-VNNI' if 'avx512_vnni' in flags else 'no VNNI'}"
    metric = report["metric"]["name"]
    return {"arguments": given, "seconds": seconds, "metric": metric, "rows": rows, "printed": printed, "about": about}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="folder with MNIST/, sst2/ and cifar10_resnet/")
    parser.add_argument("--cifar", default="", help="folder with train/<class>/* and test/<class>/*")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), help="recipes to run; all for which there is data")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    path = HERE / "gallery.json"
    for name, given in CASES.items():
        if name not in (args.only or CASES) or ("DATA" in given and not args.data) or ("CIFAR10" in given and not args.cifar):
            continue
        found = json.loads(path.read_text()) if path.exists() else {}
        found[name] = run(name, args.data, args.cifar)
        path.write_text(json.dumps({name: found[name] for name in CASES if name in found}, indent=1) + "\n")
        print(f"{name}: {found[name]['seconds']:.0f} s", *found[name]["printed"][-8:], sep="\n", flush=True)


if __name__ == "__main__":
    main()
