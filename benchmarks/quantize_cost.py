"""Time and memory of static quantization: ours against onnxruntime's quantizer, ResNet-50, 512 images of 224 x 224.

    python benchmarks/quantize_cost.py [--images 512] [--batch 64] [--threads 2]

Each side runs in a process of its own, from a float model to an int8 file, and reads the same seeded random images batch by
batch. ours: `quantize_static` and `export_onnx` (capture, fold, calibrate, export). onnxruntime: `quant_pre_process` and
`quantize_static`, per channel, uint8 activations, int8 weights, min-max: its fastest setting on x86; the fp32 file that it starts
from is written beforehand and not counted. Wall-clock seconds and CPU seconds (all threads) after the imports; memory: largest
resident set of the process, imports included. A third process only imports torch and builds the model.

Writes `quantize_cost.json` and `quantize_cost.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def batches(images: int, size: int) -> Iterator[np.ndarray]:
    """Seeded random images, made when they are asked for."""
    for start in range(0, images, size):
        generator = np.random.default_rng(start)
        yield generator.standard_normal((min(size, images - start), 3, 224, 224), dtype=np.float32)


def network() -> Any:
    """ResNet-50 with seeded weights and BatchNorm statistics of random images."""
    import torch
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        for x in batches(16, 8):
            model.train()(torch.from_numpy(x)[:, :, :64, :64])
    return model.eval()


def prepare(folder: Path) -> None:
    """The weights that both sides start from."""
    import torch

    import compresskit as ck

    model = network()
    ck.save(model, folder / "float")
    ck.export_onnx(model, folder / "float.onnx", (torch.randn(2, 3, 224, 224),))


def ours(args: argparse.Namespace) -> Callable[[], None]:
    """Quantize and export, once everything is imported and the model is loaded."""
    import torch
    import torchvision

    import compresskit as ck

    torch.set_num_threads(args.threads)
    model = ck.load(torchvision.models.resnet50(weights=None), args.folder / "float").eval()

    def run() -> None:
        images = ((torch.from_numpy(x),) for x in batches(args.images, args.batch))
        quantized = ck.quant.quantize_static(model, images)
        ck.export_onnx(quantized, args.folder / "ours.onnx", (torch.zeros(2, 3, 224, 224),))

    return run


def baseline(args: argparse.Namespace) -> Callable[[], None]:
    """Only the imports and the float model of our side."""
    ours(args)
    return lambda: None


def theirs(args: argparse.Namespace) -> Callable[[], None]:
    """The quantizer of onnxruntime on the fp32 file."""
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = batches(args.images, args.batch)

        def get_next(self) -> Any:
            x = next(self.batches, None)
            return None if x is None else {"x": x}

    def run() -> None:
        prepared = str(args.folder / "prepared.onnx")
        quant_pre_process(str(args.folder / "float.onnx"), prepared)
        quantize_static(
            prepared, str(args.folder / "theirs.onnx"), Reader(), per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip

    assert onnxruntime.__version__
    return run


SIDES = {"ours": ours, "onnxruntime": theirs, "imports": baseline}


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    run = SIDES[side](args)
    begin, used = time.perf_counter(), time.process_time()
    run()
    seconds, processor = time.perf_counter() - begin, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": round(seconds, 1), "processor_seconds": round(processor, 1), "peak_gib": round(peak, 2)}


def separately(side: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(args.folder), "--images", str(args.images)]
    command += ["--batch", str(args.batch), "--threads", str(args.threads)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def write(rows: dict[str, Any], args: argparse.Namespace) -> None:
    import onnxruntime
    import torch

    about = {"images": args.images, "batch": args.batch, "threads": args.threads}
    about |= {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    (HERE / "quantize_cost.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    lines = [
        "# What quantizing costs",
        "",
        f"ResNet-50, {args.images} images of 224 x 224 in batches of {args.batch}, {args.threads} threads.",
        "",
        "| | seconds | processor seconds | peak GiB | file MB |",
        "|---|--:|--:|--:|--:|",
    ]
    for side, row in rows.items():
        size = f"{row['mb']:.1f}" if "mb" in row else ""
        lines.append(f"| {side} | {row['seconds']} | {row['processor_seconds']} | {row['peak_gib']} | {size} |")
    lines += ["", "From a float model to an int8 file; see the head of `quantize_cost.py`. " + json.dumps(about)]
    (HERE / "quantize_cost.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", default=["ours", "onnxruntime", "imports"], choices=list(SIDES))
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where files are kept; a temporary one by default")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or Path(temporary)
        if not (args.folder / "float.onnx").exists():
            prepare(args.folder)
        rows: dict[str, Any] = {}
        for side in args.sides:
            rows[side] = separately(side, args)
            file = args.folder / {"ours": "ours.onnx", "onnxruntime": "theirs.onnx"}.get(side, "none")
            if file.exists():
                rows[side]["mb"] = round(file.stat().st_size / 1e6, 1)
            write(rows, args)


if __name__ == "__main__":
    main()
