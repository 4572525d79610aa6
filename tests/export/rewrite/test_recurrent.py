"""LSTM, GRU and RNN: one operator in a captured graph and in a file, at any length."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.graph.capture import capture
from compresskit.graph.normalize import aten
from compresskit.measure import numpy_inputs, session

KINDS = {
    "LSTM": (nn.LSTM, {}, aten.lstm.input),
    "GRU": (nn.GRU, {}, aten.gru.input),
    "RNN": (nn.RNN, {}, aten.rnn_tanh.input),
    "RNN_relu": (nn.RNN, {"nonlinearity": "relu"}, aten.rnn_relu.input),
}
SHAPES = [
    {},
    {"bidirectional": True},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
    {"bias": False},
]
PROJECTED = [{"proj_size": 3}, {"proj_size": 3, "num_layers": 2, "bidirectional": True, "batch_first": True}]


class Layer(nn.Module):
    """Outputs and last states of a recurrent layer, which begins with zeros or with given states."""

    def __init__(self, kind, **how):
        super().__init__()
        self.layer = kind(5, 6, **how)

    def forward(self, x, h=None, c=None):
        state = None if h is None else h if c is None else (h, c)
        return self.layer(x, state)


def flat(output):
    return torch.utils._pytree.tree_leaves(output)


def states(layer: nn.RNNBase, rows: int):
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or 6, 6] if isinstance(layer, nn.LSTM) else [6]
    return tuple(torch.randn(count, rows, size) for size in sizes)


def runs(file, model, inputs) -> float:
    """Largest difference of the file from the model, over outputs and last states."""
    run = session(file)
    got = run.run(None, numpy_inputs(run, inputs))
    with torch.no_grad():
        wanted = flat(model(*inputs))
    assert len(got) == len(wanted)
    return max(float(np.abs(a - b.numpy()).max()) for a, b in zip(got, wanted, strict=True))


CASES = [(kind, how) for kind in KINDS for how in SHAPES] + [("LSTM", how) for how in PROJECTED]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # oneDNN has no kernel for them
@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
def test_the_file_of_a_recurrent_layer_equals_eager(kind, how, given, tmp_path) -> None:
    make, extra, _ = KINDS[kind]
    model = Layer(make, **how, **extra).eval()
    x = torch.randn(2, 4, 5)
    rows = 2 if how.get("batch_first") else 4
    inputs = (x, *states(model.layer, rows)) if given else (x,)
    names = ["x", "h", "c"][: len(inputs)]
    own = dict(zip(names, [{0: "a", 1: "b"}, *[{1: "a" if how.get("batch_first") else "b"}] * 2], strict=False))
    file = ck.export_onnx(model, tmp_path / "f.onnx", inputs, dynamic=own)
    for a, b in ((2, 4), (3, 7), (1, 1)):
        rows = a if how.get("batch_first") else b
        other = (torch.randn(a, b, 5), *(states(model.layer, rows) if given else ()))
        assert runs(file, model, other) < 1e-5
    operators = [node.op_type for node in onnx.load(file).graph.node]
    assert operators.count(kind.split("_")[0]) == how.get("num_layers", 1)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("given", [False, True], ids=["zeros", "given"])
@pytest.mark.parametrize(("kind", "how"), [("LSTM", PROJECTED[0]), ("LSTM", SHAPES[3]), ("GRU", SHAPES[2])], ids=str)
def test_the_file_of_a_recurrent_layer_in_half_precision(kind, how, given, tmp_path) -> None:
    model = Layer(KINDS[kind][0], **how).eval().half()
    first = [state.half() for state in states(model.layer, 2 if how.get("batch_first") else 4)] if given else []
    inputs = (torch.randn(2, 4, 5).half(), *first)
    file = ck.export_onnx(model, tmp_path / "f.onnx", inputs, dynamic=())
    assert ck.verify_onnx(file, model, [inputs]).passed


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_recurrent_layer_is_one_operator_and_trains(kind) -> None:
    make, extra, target = KINDS[kind]
    model = Layer(make, num_layers=2, bidirectional=True, **extra)
    captured = capture(model, (torch.randn(3, 2, 5),), dynamic=(0, 1)).module
    assert [node.target for node in captured.graph.nodes].count(target) == 1
    x = torch.randn(9, 4, 5)
    wanted, got = flat(model(x)), flat(captured(x))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b)
    wanted[0].square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    copied = copy.deepcopy(captured).train()
    copied.zero_grad()
    flat(copied(x))[0].square().sum().backward()
    for name, parameter in copied.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_recurrent_layers_between_other_operators(tmp_path) -> None:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.a, self.b = nn.Embedding(30, 8), nn.LSTM(8, 6, batch_first=True), nn.GRU(6, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, ids):
            y, _ = self.a(self.words(ids))
            _, last = self.b(torch.relu(y))
            return self.head(last[-1])

    model = Both().eval()
    file = ck.export_onnx(model, tmp_path / "f.onnx", (torch.randint(30, (2, 5)),), dynamic=(0, 1))
    batches = [(torch.randint(30, (3, 9)),), (torch.randint(30, (1, 2)),)]
    assert ck.verify_onnx(file, model, batches).passed
    assert all(runs(file, model, batch) < 1e-5 for batch in batches)


@pytest.mark.parametrize("made", [lambda rows: torch.full((1, rows, 6), 0.5), lambda rows: torch.zeros(1, rows, 6) + 0.5])
def test_a_first_state_that_the_code_makes_is_kept(made, tmp_path) -> None:
    class Begun(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(5, 6, batch_first=True)

        def forward(self, x):
            return self.gru(x, made(x.shape[0]))[0]

    model = Begun().eval()
    file = ck.export_onnx(model, tmp_path / "f.onnx", (torch.randn(2, 4, 5),), dynamic=(0, 1))
    assert runs(file, model, (torch.randn(3, 7, 5),)) < 1e-5


def test_computed_weights_are_refused(tmp_path) -> None:
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 6)

        def forward(self, x):
            weights = [self.lstm.weight_ih_l0 * x.mean(), *self.lstm._flat_weights[1:]]
            zeros = torch.zeros(1, x.shape[1], 6)
            return torch._VF.lstm(x, (zeros, zeros), weights, True, 1, 0.0, False, False, False)[0]

    with pytest.raises(ExportError, match="is computed while the model runs"):
        ck.export_onnx(Computed(), tmp_path / "f.onnx", (torch.randn(4, 2, 5),), dynamic=(0, 1))
