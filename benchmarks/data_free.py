"""Static quantization without data: ranges from inputs made of BatchNorm statistics, beside real images and noise.

    python benchmarks/data_free.py --data CIFAR10 --checkpoints FOLDER

real        512 training images, the first draw of `quantize_cifar.py`
synthetic   quant.calibration.synthesize(model, example, samples=128)
noise       512 inputs of the normal distribution, as images are after normalization

ResNet-20, weights of 8 and 4 bits, activations of 8, nothing learned. Top-1 on the 10,000 test images and SQNR on
1,000 of them, against the float network; of the executed files.

Writes `data_free.json` and `data_free.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from quantize_cifar import trained
from real_networks import cifar, decibels, executed
from torch import Tensor

import compresskit as ck
from compresskit.quant import Bits, quantize_static
from compresskit.quant.calibration import synthesize

HERE = Path(__file__).parent


def table(found: dict[str, Any]) -> str:
    lines = ["| calibrated by | inputs | weights | top-1 % | SQNR dB |", "|---|--:|--:|--:|--:|"]
    lines.append(f"| float | | | {found['float']:.2f} | |")
    for row in found["rows"]:
        cells = (row["inputs"], str(row["samples"]), f"{row['bits']} bits", f"{row['top1']:.2f}", f"{row['db']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    note = f"ResNet-20, 10,000 test images, executed in ONNX Runtime. Synthesis: {found['seconds']:.0f} s. {found['about']}"
    return "\n".join([*lines, "", note]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128, help="to synthesize")
    parser.add_argument("--steps", type=int, default=200, help="of the synthesis")
    args = parser.parse_args()
    model = trained("resnet20", args.checkpoints)
    network = cifar(model, args.data)
    began = time.perf_counter()
    made = synthesize(model, network.example, samples=args.samples, steps=args.steps)
    seconds = time.perf_counter() - began
    noise = torch.randn(512, *network.example.shape[1:], generator=torch.Generator().manual_seed(0))
    calibrations: dict[str, list[Tensor]] = {"real images": network.draws[0]}
    calibrations["synthetic inputs"] = [inputs[0] for inputs in made if isinstance(inputs, tuple)]
    calibrations["noise"] = list(noise.split(64))
    rows = []
    with torch.no_grad():
        whole = network.quality(lambda x: [model(x)])
    for bits in (8, 4):
        for name, batches in calibrations.items():
            quantized = quantize_static(model, batches, bits=Bits(weights=bits))
            with tempfile.TemporaryDirectory() as folder:
                path = ck.export_onnx(quantized, Path(folder) / "m.onnx", network.example)
                if not ck.verify_onnx(path, quantized, [(network.inputs[0][:64],)]).passed:
                    raise SystemExit(f"{name}: the file does not compute what the model does")
                run = executed(path)
                with torch.no_grad():
                    row = {"top1": network.quality(run), "db": decibels(run, network)}
            rows.append({"inputs": name, "samples": sum(map(len, batches)), "bits": bits} | row)
            print(rows[-1], flush=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "steps": args.steps}
    found = {"about": about, "float": whole, "seconds": seconds, "rows": rows}
    (HERE / "data_free.json").write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "data_free.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
