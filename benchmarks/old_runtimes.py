"""Which releases of ONNX Runtime read the files, and with which results: eight models in two opsets, one process a release.

And the first release that loads each operator whose kernels `audit` takes for younger than its opset, in a file of one operator.

Writes `old_runtimes.json` and `old_runtimes.md` beside this file. `--runtimes FOLDER` holds one folder for each release, made by

    pip install --no-deps --target FOLDER/1.16.3 onnxruntime==1.16.3 numpy==1.26.4

(numpy 1 before 1.19). Each file is run on the same inputs by every release and by the one that is installed; the difference is in
steps of 1/255 of the range of the outputs. A few minutes.
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
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import compresskit as ck
from compresskit.export.check.oldest_runtime import BY_OPSET, BY_TYPE, oldest_runtime
from compresskit.export.check.profile.optimized_graph import inferred_graph, value_types
from compresskit.quant import Bits
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

LOAD = """
import sys, pathlib, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
for path in pathlib.Path(sys.argv[1]).glob("*.onnx"):
    try:
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        print(path.stem)
    except Exception:
        pass
"""
SHAPE = [1, 4, 4, 4]
#: Operator -> its inputs behind the first: what has the first one's type by its shape, constants by their values.
MORE_INPUTS: dict[str, list[Any]] = {
    "Where": [SHAPE], "ConvInteger": [[4, 4, 1, 1]], "DeformConv": [[4, 4, 1, 1], [1, 2, 4, 4]],
    "TopK": [np.array([2])], "QuantizeLinear": [np.float32(0.1)], "DequantizeLinear": [np.float32(0.1)],
}  # fmt: skip
MORE_INPUTS |= {name: [SHAPE] for name in "Add Sub Mul Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min".split()}
ATTRIBUTES = {"DepthToSpace": {"blocksize": 2}, "SpaceToDepth": {"blocksize": 2}, "LpNormalization": {"axis": 1}}
IR_VERSIONS = {13: 7, 14: 7, 19: 9, 21: 10, 22: 10, 23: 11}  # of the opsets of one operator's files


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


class Upsampling(nn.Module):
    """What moves integers: a transposed convolution, a pixel shuffle, padding, pooling, nearest neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(2, 8, 1)
        self.reflect, self.head = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pixel_shuffle(self.up(self.first(x).relu()).relu(), 2)
        x = nn.functional.pad(nn.functional.max_pool2d(self.last(x).relu(), 2), (1, 1))
        return self.head(nn.functional.interpolate(self.reflect(x).relu(), scale_factor=2.0).mean((2, 3)))


def models() -> dict[str, tuple[nn.Module, Tensor, dict[str, Any]]]:
    """Name -> (model, inputs, settings of its export)."""
    torch.manual_seed(0)
    images, ids = torch.randn(8, 3, 32, 32), torch.randint(0, 40, (4, 9))
    network, up, text, lengths = Network().eval(), Upsampling().eval(), Text().eval(), (0, 1)
    return {
        "float network": (network, images, {}),
        "static int8 network": (ck.quant.quantize_static(network, images), images, {}),
        "static int8 upsampling": (ck.quant.quantize_static(up, images), images, {}),
        "static int8 network, int4 weights": (ck.quant.quantize_static(network, images, bits=Bits(weights=4)), images, {}),
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


def one_operator(kind: str, dtype: str, opset: int) -> onnx.ModelProto | None:
    """A file of one operator on a type; None where onnx has no such operator in the opset."""
    code, more = getattr(TensorProto, dtype), MORE_INPUTS.get(kind, [])
    given, stored = [helper.make_tensor_value_info("x", code, SHAPE)], []
    for i, value in enumerate(more):
        if isinstance(value, list):
            given.append(helper.make_tensor_value_info(f"v{i}", code, value))
        else:
            stored.append(onnx.numpy_helper.from_array(value, f"v{i}"))
    names = ["x", *(f"v{i}" for i in range(len(more)))]
    attributes: dict[str, Any] = ATTRIBUTES.get(kind, {})
    if kind == "Cast":
        attributes = {"to": TensorProto.FLOAT}
    if kind == "Where":
        given.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, SHAPE))
        names.insert(0, "condition")
    if kind == "CastLike":
        given.append(helper.make_tensor_value_info("like", TensorProto.FLOAT, SHAPE))
        names.append("like")
    if kind == "QuantizeLinear" and dtype != "FLOAT":
        given[0] = helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE)
        given.append(helper.make_tensor_value_info("zero", code, []))
        names.append("zero")
    made = [f"y{i}" for i in range(2 if kind == "TopK" else 1)]
    results = [helper.make_empty_tensor_value_info(name) for name in made]
    graph = helper.make_graph([helper.make_node(kind, names, made, **attributes)], "one", given, results, stored)
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSIONS[opset])
    try:
        file = onnx.shape_inference.infer_shapes(file, check_type=True, strict_mode=True)
        onnx.checker.check_model(file)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    return file


def kernels(releases: list[Path], folder: Path) -> list[dict[str, Any]]:
    """One row for each operator and type: what `audit` says, and the first release that loads its file."""
    folder.mkdir()
    by_type = [(kind, dtype, (13, 14, 21)) for kinds, dtypes, _ in BY_TYPE for kind in kinds.split() for dtype in dtypes.split()]
    found = []
    for kind, dtype, opsets in [*by_type, *((kind, "FLOAT", (opset,)) for kind, opset, _ in BY_OPSET)]:
        opset, file = next(
            (n, made) for n in opsets if (made := one_operator(kind, dtype, n)) is not None
        )  # the lowest that has it
        name, said = f"{kind}-{dtype}", oldest_runtime(file, value_types(inferred_graph(file)))
        onnx.save(file, folder / f"{name}.onnx")
        found.append({"name": name, "operator": kind, "type": dtype.lower(), "opset": opset, "oldest": said, "loads": None})
    for release in reversed(releases):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(release)}
        command = [sys.executable, "-c", LOAD, str(folder)]
        loaded = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout.split()
        for row in found:
            row["loads"] = release.name if row["name"] in loaded else row["loads"]
    return [{key: value for key, value in row.items() if key != "name"} for row in found]


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
    lines += [
        "",
        "Files of one operator on a type: the first of these releases that loads it.",
        "",
        "| operator | type | opset | audit | loads from |",
        "|---|---|--:|--:|--:|",
        *(
            f"| {k['operator']} | {k['type']} | {k['opset']} | {k['oldest']} | {k['loads'] or 'none'} |"
            for k in result["kernels"]
        ),
    ]
    return "\n".join([*lines, "", f"{result['versions']}", ""])


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", type=Path, required=True, help="folder with one folder of packages for each release")
    releases = sorted(parser.parse_args().runtimes.iterdir(), key=lambda path: [int(n) for n in path.name.split(".")])
    with tempfile.TemporaryDirectory() as folder:
        measured, loaded = rows(releases, Path(folder)), kernels(releases, Path(folder) / "kernels")
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    result = {"rows": measured, "kernels": loaded, "versions": versions}
    (HERE / "old_runtimes.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "old_runtimes.md").write_text(table(result))


if __name__ == "__main__":
    main()
