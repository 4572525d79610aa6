"""How well the latency of files that were never run is predicted from the operators of files that were, in fp32 and int8.

For each network, the files that a search measures first (the dense one, channels pruned to 70, 50, 35, 25 and 15 % of the MACs,
each in fp32 and in int8) are timed and profiled, and a `LatencyModel` is made of them. The candidates are others: a random share
of the MACs stays, of channels by random scores or by magnitude, in some after residual blocks went. They are predicted, and then
timed in turn with all other files, every other one in int8. Beside it, a line through the MACs of the same files for each
precision. Weights are random.

Writes `latency_model.json` and `latency_model.md` beside this file (`--out`); `latency_model_amx.*` are those of a processor with
AMX. `--quick`: three candidates of one network.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from scipy.optimize import nnls
from torch import nn
from torchvision.models import mobilenet_v2
from torchvision.models.vision_transformer import VisionTransformer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))

from vision import CifarResNet  # noqa: E402

import compresskit as ck  # noqa: E402
from compresskit.base.errors import CompressError  # noqa: E402
from compresskit.measure import latency  # noqa: E402
from compresskit.prune import criteria, depth  # noqa: E402
from compresskit.search.latency.latency_model import LatencyModel, prediction_error  # noqa: E402
from compresskit.search.latency.operators import measure_operators, read_operators  # noqa: E402

KEPT = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15)  # MACs of the files that are known
FEW = 3  # of them, for the second column
PRECISIONS = ("fp32", "int8")


def vit() -> nn.Module:
    return VisionTransformer(image_size=64, patch_size=8, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10)


NETWORKS: dict[str, tuple[Callable[[], Any], int]] = {
    "ResNet-56, 32 x 32": (lambda: CifarResNet(56), 32),
    "MobileNetV2, 96 x 96": (lambda: mobilenet_v2(num_classes=10), 96),
    "ViT of 6 layers, 64 x 64": (vit, 64),
}


@dataclass(frozen=True, kw_only=True)
class File:
    """An exported file. macs: of the model, for one sample. known: whether it is one of those that the model is made of."""

    path: Path
    precision: str
    macs: int
    known: bool


def candidate(model: nn.Module, x: torch.Tensor, generator: np.random.Generator) -> nn.Module:
    """A copy of a model with random parts gone."""
    model, kept = copy.deepcopy(model), generator.uniform(0.1, 0.95)
    blocks = list(depth.find_blocks(model, (x,)).removable)
    if blocks and generator.random() < 0.3:
        gone = generator.choice(blocks, size=generator.integers(1, max(2, len(blocks) // 3)), replace=False)
        names = tuple(n for n in map(str, gone) if not any(n.startswith(f"{other}.") for other in map(str, gone)))
        try:
            depth.plan_blocks(model, x, blocks=names).apply_(model)
        except CompressError as error:
            print(f"  {len(names)} blocks stay: {error}")
    scores = partial(criteria.random_scores, seed=int(generator.integers(2**31)))
    criterion = scores if generator.random() < 0.5 else criteria.l2
    return ck.prune.apply_(
        model, ck.prune.plan_channels(model, x, ck.keep(macs=kept), criterion=criterion, round_to=8 if kept >= 0.5 else 4)
    )


def export(model: nn.Module, x: torch.Tensor, folder: Path, name: str, precisions: tuple[str, ...], *, known: bool) -> list[File]:
    """The files of a model, one for each precision."""
    macs, files = ck.count_macs(model, x[:1]), []
    for precision in precisions:
        made = model if precision == "fp32" else ck.quant.quantize_static(model, x)
        path = ck.export_onnx(made, folder / f"{name}-{precision}.onnx", x)
        files.append(File(path=path, precision=precision, macs=macs, known=known))
    return files


def make_files(name: str, count: int, seed: int, folder: Path) -> list[File]:
    build, size = NETWORKS[name]
    torch.manual_seed(seed)
    generator, x = np.random.default_rng(seed), torch.randn(4, 3, size, size)
    model = build().eval()
    files = []
    for kept in KEPT:
        small = copy.deepcopy(model)
        if kept < 1:
            plan = ck.prune.plan_channels(small, x, ck.keep(macs=kept), round_to=8 if kept >= 0.5 else 4)
            small = ck.prune.apply_(small, plan)
        files += export(small, x, folder, f"known-{kept}", PRECISIONS, known=True)
    for i in range(count):
        made, precision = candidate(model, x, generator), PRECISIONS[i % len(PRECISIONS)]
        files += export(made, x, folder, f"unseen-{i}", (precision,), known=False)
    return files


def by_macs(files: list[File], times: dict[Path, float], precision: str) -> Any:
    """Milliseconds as a line through the MACs of known files, by relative least squares."""
    rows = np.array([[1.0, f.macs] for f in files if f.precision == precision])
    measured = np.array([times[f.path] for f in files if f.precision == precision])
    factors, _ = nnls(rows / measured[:, None], np.ones(len(rows)))
    return lambda macs: float(factors @ [1.0, macs])


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    files, x = make_files(name, args.candidates, args.seed, folder), torch.randn(1, 3, NETWORKS[name][1], NETWORKS[name][1])
    made = time.perf_counter()
    times = dict(zip([f.path for f in files], latency([f.path for f in files], x, seconds=args.seconds), strict=True))
    known, unseen = [f for f in files if f.known], [f for f in files if not f.known]
    profile = partial(measure_operators, inputs=x, threads=1, seconds=2 * args.seconds)
    measured = [profile(file.path, milliseconds=times[file.path]) for file in known]
    whole, few = LatencyModel(measured), LatencyModel(measured[: FEW * len(PRECISIONS)])
    lines = {precision: by_macs(known, times, precision) for precision in PRECISIONS}
    rows = []
    for file in unseen:
        operators = read_operators(file.path, x)
        rows.append(
            {
                "precision": file.precision,
                "macs": file.macs,
                "milliseconds": times[file.path],
                "predicted": whole.predict(operators),
                "predicted_few": few.predict(operators),
                "by_macs": lines[file.precision](file.macs),
            }
        )
        print(f"{file.path.name}: {rows[-1]}", flush=True)
    stated = whole.error()
    print(f"{name}: {stated}; made in {made - begin:.0f} s, all in {time.perf_counter() - begin:.0f} s", flush=True)
    return {"stated": None if stated is None else asdict(stated), "rows": rows, "seconds": time.perf_counter() - begin}


def error_cells(rows: list[dict[str, Any]], column: str) -> str:
    """Median and ninth decile of the relative errors of a column, in %."""
    found = prediction_error([abs(row[column] / row["milliseconds"] - 1) for row in rows if row[column] is not None])
    return "- | -" if found is None else f"{100 * found.median:.1f} | {100 * found.ninth:.1f}"


def table(found: dict[str, Any]) -> str:
    """The committed page."""
    everything = [row for network in found["networks"].values() for row in network["rows"]]
    spread = [row["milliseconds"] for row in everything]
    lines = [
        "# Latencies of files that were not run, from the operators of others",
        "",
        f"Relative errors in %, median and nine of ten, of {len(everything)} candidates of {min(spread):.2f} to "
        f"{max(spread):.2f} ms, one thread, batch 1. {found['where']}. See the head of `latency_model.py`.",
        "",
        "*stated*: what the model says of itself, each known file predicted from the others. *few*: made of "
        f"{FEW * len(PRECISIONS)} files in the place of {len(KEPT) * len(PRECISIONS)}. *MACs*: a line through the MACs of the"
        " same files.",
        "",
        "| network | precision | files | median | 9 of 10 | stated | 9 of 10 | few | 9 of 10 | MACs | 9 of 10 |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, network in [*found["networks"].items(), ("all", None)]:
        for precision in PRECISIONS if network else ("both",):
            rows = everything if network is None else [row for row in network["rows"] if row["precision"] == precision]
            said = "- | -"
            if network and network["stated"]:
                said = f"{100 * network['stated']['median']:.1f} | {100 * network['stated']['ninth']:.1f}"
            cells = [error_cells(rows, "predicted"), said, error_cells(rows, "predicted_few"), error_cells(rows, "by_macs")]
            lines.append(f"| {name} | {precision} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=20, help="of each network (default 20)")
    parser.add_argument("--networks", default="", help="only those with this in their names")
    parser.add_argument("--seconds", type=float, default=0.6, help="to measure each file (default 0.6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three candidates of one network")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--keep", type=Path, help="folder where the files stay")
    args = parser.parse_args()
    names = [name for name in NETWORKS if args.networks.lower() in name.lower()]
    if args.quick:
        names, args.candidates, args.seconds = names[-1:], 3, 0.1
    torch.set_num_threads(1)
    found: dict[str, Any] = {"networks": {}}
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep / str(list(NETWORKS).index(name)) if args.keep else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            found["networks"][name] = measure(name, args, folder)
    found["where"] = (
        f"{platform.processor() or platform.machine()}, ONNX Runtime {onnxruntime.__version__}, torch {torch.__version__}"
    )
    found["settings"] = {"candidates": args.candidates, "seconds": args.seconds, "seed": args.seed, "known": KEPT}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "latency_model.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "latency_model.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
