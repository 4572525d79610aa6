"""How much damage to a file `verify_onnx` lets through: files of trained networks, changed in one place at a time.

    python benchmarks/proof_mutants.py

Six small networks are trained on the digits of scikit-learn: a perceptron, a convolutional one, a residual one with depthwise
layers, a detector whose boxes (in hundreds of pixels) and scores (0 to 1) are one tensor, and an LSTM and a transformer over the
rows. Each
is written in six forms. A mutant is a file in which one initializer or one operator is another: a channel of weights is zero,
negated, or in the place of another, a bias is lost or moved by one, a scale is a half, a zero point is off by 8, an activation
function is left out.

material    mutants that matter, on 500 images that nothing else saw: the accuracy is more than a point lower, or one of the
            outputs has less than 20 dB against the intact file
pass        those of them that `verify_onnx` takes for the model's file, given 64, 8 or 1 images
refused     intact files that it does not take

Writes `proof_mutants.json` and `proof_mutants.md` beside this file.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import compresskit as ck

HERE = Path(__file__).parent
COUNTS, MOST = (64, 8, 1), 40  # images that are verified; mutants of a file
WEIGHTS = ck.quant.BlockScheme(bits=4, block_size=16)


def block(inputs: int, outputs: int, **how: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **how), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    """A block with a depthwise layer beside what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise, self.pointwise = block(1, 16), block(16, 16, groups=16), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(F.relu(y + self.pointwise(self.depthwise(y))).amax((2, 3)))


class Detector(nn.Module):
    """A box around the ink, in hundreds of pixels, and a score for each digit, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(block(1, 16), block(16, 32, stride=2), nn.Flatten())
        self.boxes, self.scores = nn.Linear(512, 4), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.cat([100 * self.boxes(y), self.scores(y).sigmoid()], 1)


class Rows(nn.Module):
    """An LSTM, or a layer of a transformer, over the rows of an image."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.lstm = nn.LSTM(32, 32, batch_first=True) if kind == "lstm" else None
        self.layer = None if kind == "lstm" else nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.place = nn.Parameter(torch.randn(8, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.squeeze(1)) + self.place
        return self.head(self.lstm(y)[0][:, -1] if self.lstm is not None else self.layer(y).mean(1))  # type: ignore[misc]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
    ),
    "convolutions": lambda: nn.Sequential(block(1, 16), block(16, 24, stride=2), nn.Flatten(), nn.Linear(384, 10)),
    "residual": Residual,
    "detector": Detector,
    "lstm": lambda: Rows("lstm"),
    "transformer": lambda: Rows("transformer"),
}
FORMS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "float": lambda model, x: model,
    "fp16": lambda model, x: copy.deepcopy(model).half(),
    "dynamic": lambda model, x: ck.quant.quantize_dynamic(model, x),
    "static": lambda model, x: ck.quant.quantize_static(model, [x]),
    "static, 4-bit weights": lambda model, x: ck.quant.quantize_static(model, [x], bits=ck.quant.Bits(weights=4)),
    "weights alone, 4 bits": lambda model, x: ck.quant.quantize_weights(model, x, scheme=WEIGHTS),
}


def boxes_of(images: Tensor) -> Tensor:
    """(N, 4): first and last column and row with ink, in pixels of an image of 800."""
    columns, rows = ((images > 4 / 16).any(dim).squeeze(1) for dim in (2, 3))
    ends = [(v.int().argmax(1), 7 - v.flip(1).int().argmax(1)) for v in (columns, rows)]
    return 100.0 * torch.stack([ends[0][0], ends[1][0], ends[0][1] + 1, ends[1][1] + 1], 1)


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer, boxes = torch.optim.Adam(model.parameters(), lr=3e-3), boxes_of(x)
    for step in range(400):
        rows = torch.randint(len(x), (128,), generator=torch.Generator().manual_seed(step))
        output = model.train()(x[rows])
        if output.shape[1] == 14:
            digits = F.one_hot(y[rows], 10).float()
            loss = F.l1_loss(output[:, :4], boxes[rows]) / 100 + 10 * F.binary_cross_entropy(output[:, 4:], digits)
        else:
            loss = F.cross_entropy(output, y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def mutants(file: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """(what is another, the file) for changes in one place, spread over the file where there are many."""
    found: list[tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = []
    rng = np.random.default_rng(0)
    for tensor in file.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim >= 2 and values.shape[0] > 1 and values.size > 8:
            at, other = (int(i) for i in rng.choice(len(values), 2, replace=False))
            found += [("a channel is zero", tensor.name, partial(_zeroed, at=at))]
            found += [("a channel is negated", tensor.name, partial(_negated, at=at))]
            found += [("two channels are exchanged", tensor.name, partial(_exchanged, a=at, b=other))]
        elif values.ndim == 1 and len(values) > 1 and values.dtype.kind in "fi" and values.dtype != np.int64:
            largest = int(np.abs(values.astype(np.float64)).argmax())
            found += [("a bias is zero", tensor.name, partial(_zeroed, at=largest))]
            found += [("biases are moved by one", tensor.name, lambda v: np.roll(v, 1))]
        elif "scale" in tensor.name and values.dtype.kind == "f":
            found += [("a scale is a half", tensor.name, lambda v: (v * 0.5).astype(v.dtype))]
        elif "zero_point" in tensor.name and values.dtype == np.uint8:
            found += [("a zero point is off by 8", tensor.name, lambda v: np.where(v > 127, v - 8, v + 8).astype(v.dtype))]
    for i in sorted(rng.permutation(len(found))[:MOST]):
        what, name, change = found[i]
        mutant = copy.deepcopy(file)
        for tensor in mutant.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), name))
        yield what, mutant
    for i, node in enumerate(file.graph.node):
        if node.op_type in ("Relu", "Sigmoid", "Softmax"):
            mutant = copy.deepcopy(file)
            kept = onnx.helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
            mutant.graph.node[i].CopyFrom(kept)
            yield f"no {node.op_type}", mutant


def _zeroed(values: np.ndarray, at: int) -> np.ndarray:
    values[at] = 0 * values[at]
    return values


def _negated(values: np.ndarray, at: int) -> np.ndarray:
    values[at] = -values[at]
    return values


def _exchanged(values: np.ndarray, a: int, b: int) -> np.ndarray:
    values[[a, b]] = values[[b, a]]
    return values


def run(path: Path, x: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    x = x.half() if "float16" in given.type else x
    return session.run(None, {given.name: x.numpy()})[0].astype(np.float64)


def is_material(intact: np.ndarray, mutant: np.ndarray, labels: np.ndarray) -> bool:
    """Whether the accuracy of a mutant is a point lower, or an output has less than 20 dB."""
    accuracies = [(output[:, -10:].argmax(1) == labels).mean() for output in (intact, mutant)]
    power, noise = intact.var(0), np.square(np.nan_to_num(mutant - intact, nan=1e9)).mean(0)
    return bool(accuracies[0] - accuracies[1] > 0.01 or (noise > 0.01 * power + 1e-12).any())


def judge(model: nn.Module, folder: Path, x: Tensor, test: Tensor, labels: np.ndarray) -> dict[str, Any]:
    """Mutants of the file of a model: how many are material, and how many of those pass, by number of images."""
    dtype = next(model.parameters()).dtype
    path, other = ck.export_onnx(model, folder / "f.onnx", x.to(dtype)), folder / "mutant.onnx"
    found: dict[str, Any] = {"mutants": 0, "material": 0}
    found["refused"] = {n: int(not ck.verify_onnx(path, model, [x[:n].to(dtype)]).passed) for n in COUNTS}
    found["survivors"] = dict.fromkeys(COUNTS, 0) | {"what": []}
    intact = run(path, test)
    for what, mutant in mutants(onnx.load(path)):
        onnx.save(mutant, other)
        found["mutants"] += 1
        if is_material(intact, run(other, test), labels):
            found["material"] += 1
            for n in COUNTS:
                if ck.verify_onnx(other, model, [x[:n].to(dtype)]).passed:
                    found["survivors"][n] += 1
                    found["survivors"]["what"].append(f"{what}, {n} images")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["form", "files", "mutants", "material", *(f"pass with {n}" for n in COUNTS), "intact files refused"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for form in [*dict.fromkeys(row["form"] for row in rows), "all"]:
        of = [row for row in rows if form in (row["form"], "all")]
        mutants, material = (sum(row[key] for row in of) for key in ("mutants", "material"))
        passing = [sum(row["survivors"][str(n)] for row in of) for n in COUNTS]
        refused = f"{sum(sum(row['refused'].values()) for row in of)} of {len(COUNTS) * len(of)}"
        lines.append(f"| {' | '.join(map(str, [form, len(of), mutants, material, *passing, refused]))} |")
    versions = f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    return "\n".join([*lines, "", f"Trained on the digits of scikit-learn; one seed. {versions}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--out", type=Path, default=HERE / "proof_mutants.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images / 16).float()[:, None], torch.from_numpy(digits.target).long()
    x, test = images[1233:1297], images[1297:]
    rows: list[dict[str, Any]] = []
    for network in args.networks:
        torch.manual_seed(0)
        model = train(NETWORKS[network](), images[:1233], labels[:1233])
        for form in args.forms:
            with tempfile.TemporaryDirectory() as folder:
                found = judge(FORMS[form](model, x), Path(folder), x, test, labels[1297:].numpy())
            rows.append({"network": network, "form": form} | json.loads(json.dumps(found)))
            print(rows[-1], flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
