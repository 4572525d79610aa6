"""Which releases of ONNX Runtime read the files, and with which results: six models in two opsets, one process a release.

Writes `old_runtimes.json` and `old_runtimes.md` beside this file. `--runtimes FOLDER` holds one folder for each release, made by

    pip install --no-deps --target FOLDER/1.16.3 onnxruntime==1.16.3 numpy==1.26.4

(numpy 1 before 1.19). Each file is run on the same inputs by every release and by the one that is installed; the difference is in
steps of 1/255 of the range of the outputs. A minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant.weight_only import MATMUL_NBITS

HERE = Path(__file__).parent
RUN = """
import sys, numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
np.save(sys.argv[3], session.run(None, {session.get_inputs()[0].name: np.load(sys.argv[2])})[0])
"""


class Network(nn.Module):
    """A convolutional network with the activations of MobileNetV3 and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.Hardswish(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6(), nn.Conv2d(16, 32, 1), nn.SiLU(),
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.gelu(self.norm(self.body(x).mean((2, 3)))))


class Text(nn.Module):
    """An embedding, a transformer layer and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu")
        self.recurrent, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.layer(self.table(ids)))[0])


def models() -> dict[str, tuple[nn.Module, Tensor, dict[str, Any]]]:
    """Name -> (model, inputs, settings of its export)."""
    torch.manual_seed(0)
    images, ids = torch.randn(8, 3, 32, 32), torch.randint(0, 40, (4, 9))
    network, text, lengths = Network().eval(), Text().eval(), (0, 1)
    return {
        "float network": (network, images, {}),
        "static int8 network": (ck.quant.quantize_static(network, images), images, {}),
        "float text": (text, ids, {"dynamic": lengths}),
        "dynamic int8 text": (ck.quant.quantize_dynamic(text, ids, dynamic=lengths), ids, {}),
        "int4 weights, DEQUANTIZE_LINEAR": (ck.quant.quantize_weights(text, ids, dynamic=lengths), ids, {}),
        "int4 weights, MATMUL_NBITS": (
            ck.quant.quantize_weights(text, ids, dynamic=lengths, embeddings=None, storage=MATMUL_NBITS), ids, {}
        ),
    }  # fmt: skip


def outputs_of(path: Path, inputs: Path, release: Path | None) -> np.ndarray | None:
    """The outputs of a file in a release of onnxruntime, or in the one that is installed; None where it is not read."""
    made = path.with_suffix(".npy")
    made.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if release is None else {"PYTHONPATH": str(release)})
    command = [sys.executable, "-c", RUN, str(path), str(inputs), str(made)]
    subprocess.run(command, env=environment, capture_output=True, check=False)
    return np.load(made) if made.exists() else None


def rows(releases: list[Path], folder: Path) -> list[dict[str, Any]]:
    """One row for each model and opset: what `audit` says, and the error in each release, None where it is not read."""
    found = []
    for name, (model, inputs, settings) in models().items():
        np.save(folder / "inputs.npy", inputs.numpy())
        for opset in (None, "lowest"):
            path = ck.export_onnx(model, folder / "m.onnx", inputs, opset=opset, **settings)  # type: ignore[arg-type]
            said, wanted = ck.audit(path), outputs_of(path, folder / "inputs.npy", None)
            assert wanted is not None, name
            errors = {}
            for release in releases:
                got = outputs_of(path, folder / "inputs.npy", release)
                errors[release.name] = None if got is None else float(np.abs(got - wanted).max() / np.ptp(wanted) * 255)
            found.append({"model": name, "opset": said.opset, "oldest": said.oldest_runtime, "errors": errors})
            print(found[-1], flush=True)
    return found


def table(result: dict[str, Any]) -> str:
    """The Markdown page."""
    releases = list(result["rows"][0]["errors"])
    lines = [
        "Largest difference from the installed release, in steps of 1/255 of the range of the outputs; - where a release does",
        "not read the file. `audit` names the oldest release that should. The first line of each model is the default opset,",
        'the second `opset="lowest"`.',
        "",
        f"| model | opset | audit | {' | '.join(releases)} |",
        f"|---|--:|--:|{'--:|' * len(releases)}",
    ]
    for row in result["rows"]:
        cells = ["-" if e is None else "same bits" if e == 0 else f"{e:.1g}" for e in row["errors"].values()]
        lines.append(f"| {row['model']} | {row['opset']} | {row['oldest']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{result['versions']}", ""])


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", type=Path, required=True, help="folder with one folder of packages for each release")
    releases = sorted(parser.parse_args().runtimes.iterdir(), key=lambda path: [int(n) for n in path.name.split(".")])
    with tempfile.TemporaryDirectory() as folder:
        measured = rows(releases, Path(folder))
    result = {"rows": measured, "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}}
    (HERE / "old_runtimes.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "old_runtimes.md").write_text(table(result))


if __name__ == "__main__":
    main()
