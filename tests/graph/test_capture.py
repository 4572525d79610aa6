"""Capturing a model as a graph."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, build, image
from row_networks import GRAPH_DIMS, Frames, Graph, graph_inputs
from torch import fx, nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture, check_runs
from compresskit.measure import session


def test_any_number_of_inputs() -> None:
    class Many(nn.Module):
        def forward(self, *args):
            return sum(args)

    graph = capture(Many(), (torch.randn(2, 3), torch.randn(2, 3))).module
    x = torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(graph(*x), x[0] + x[1])


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_captured_graphs_compute_what_their_models_compute(kind) -> None:
    model = build(kind).train()
    captured = capture(model, image(1))
    assert model.training
    assert captured.dynamic
    graph = captured.module.eval()
    names = {n for n, _ in model.named_parameters()}
    assert {n for n, _ in graph.named_parameters()} <= names
    model.eval()
    x = image(5)
    with torch.no_grad():
        torch.testing.assert_close(graph(*x), model(*x))
    for node in graph.graph.nodes:
        assert not str(node.target).split(".")[1:2] or not str(node.target).split(".")[1].endswith("_"), node.target
    copy.deepcopy(graph).train()(*x).sum().backward()


def test_in_place_writes_are_made_functional() -> None:
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, :1] = 0
            y += x
            return F.relu(y, inplace=True)

    graph = capture(InPlace(), (torch.randn(2, 3),)).module
    assert not any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes)
    x = torch.randn(7, 3)
    torch.testing.assert_close(graph(x), InPlace()(x))


def test_the_graph_until_the_line_that_cannot_be_captured_is_not_written(capsys) -> None:
    class Branch(nn.Module):
        def forward(self, x):
            print("tracing", file=sys.stderr)
            return x * 2 if (x > 0).all() else x

    with pytest.raises(ModelError, match=r"at .*x \* 2 if \(x > 0\).all\(\) else x"):
        capture(Branch(), torch.randn(2, 3))
    written = capsys.readouterr()
    assert written.out == ""
    assert set(written.err.split()) == {"tracing"}


def test_the_message_names_the_line_that_cannot_be_captured() -> None:
    class Branch(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(ModelError, match=r"(?s)Branch cannot be captured.*test_capture\.py:\d+ in forward.*inside='backbone'"):
        capture(Branch(), (torch.randn(2, 3),))


def test_a_submodule_is_captured_with_the_inputs_it_receives() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = networks.Chain()

        def forward(self, x):
            y = self.backbone(x * 2)
            return y[y.sum(1) > 0]

    captured = capture(Outer(), image(3), inside="backbone")
    assert captured.prefix == "backbone"
    assert captured.shapes[captured.inputs[0]] == (2, 3, 16, 16)
    with pytest.raises(ModelError, match=r"has no such module; its own are \['backbone'\]"):
        capture(Outer(), image(3), inside="neck")


def test_an_example_that_does_not_run_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Chain does not run on the example \(inputs of shape \[\(2, 5\)\]\)"):
        capture(networks.Chain(), (torch.randn(2, 5),))


class Rows(nn.Module):
    """Notes the number of rows of every call, and takes `only` rows where it is given."""

    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.only, self.seen = only, SimpleNamespace(rows=[])  # what is in an object is not put back

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.rows.append(len(x))
        return x + y if self.only is None else (x + y).reshape(self.only, -1)


def test_two_rows_are_enough_to_see_that_a_model_runs() -> None:
    x = torch.randn(8, 3)
    for only, other, seen in ((None, x, [2]), (8, x, [2, 8]), (None, x[:1], [8])):
        model = Rows(only)
        check_runs(model, (x, other))
        assert model.seen.rows == seen, "inputs of eight rows each; a model of eight rows; inputs that do not share their rows"


def test_inputs_of_which_two_rows_do_not_run_stay_whole(tmp_path) -> None:
    model, example = Graph().eval(), graph_inputs()
    captured = capture(model, example, dynamic=GRAPH_DIMS)
    assert [len(value) for value in captured.example] == [12, 2]
    file = ck.export_onnx(model, tmp_path / "graph.onnx", example, dynamic=GRAPH_DIMS)
    assert ck.verify_onnx(file, model, [graph_inputs(5, 9), graph_inputs(20, 50)]).passed
    assert len(capture(Frames(), torch.randn(8, 6)).example[0]) == 8
    assert len(capture(Frames(), torch.randn(8, 6), dynamic=()).example[0]) == 8
    assert len(capture(nn.Linear(6, 3), torch.randn(8, 6)).example[0]) == 2


def test_a_script_module_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(8, 4))
    for refused in (capture, lambda model, example: ck.quant.quantize_static(model, [example])):
        with pytest.raises(ModelError, match="Linear is a TorchScript module, .* wanted the nn.Module that it was scripted"):
            refused(scripted, (torch.randn(2, 8),))


def test_an_output_that_is_no_tensor_is_named() -> None:
    class Cache:
        def __init__(self, key):
            self.key = key

    class Head(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"logits": y, "past_key_values": Cache(y)}

    message = r"(?s)An output of the model is of the class .*Cache, wanted tensors.*`model.config.use_cache = False`"
    with pytest.raises(ModelError, match=message):
        capture(Head(8, 4).eval(), (torch.randn(2, 8),))


class Stateful(nn.Module):
    """A streaming network: a frame and a state of (h and c, rows, width)."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)

    def forward(self, x, state):
        h, c = self.cell(x, (state[0], state[1]))
        return h, torch.stack([h, c])


def test_rows_of_a_state_vary_with_those_of_the_input() -> None:
    model, example = Stateful().eval(), (torch.randn(5, 6), torch.randn(2, 5, 8))
    captured = capture(model, example, dynamic={"x": {0: "batch"}, "state": {1: "batch"}})
    for rows in (1, 3, 7):
        inputs = torch.randn(rows, 6), torch.randn(2, rows, 8)
        torch.testing.assert_close(captured.module(*inputs), model(*inputs))


def test_a_state_whose_rows_were_not_named_is_explained() -> None:
    with pytest.raises(ModelError, match=r'dynamic=\{"x": \{0: "batch"\}, "state": \{1: "batch"\}\}'):
        capture(Stateful().eval(), (torch.randn(5, 6), torch.randn(2, 5, 8)))


X = torch.randn(4, 3, 8, 8)


def stateful(write, *, read=True):
    """A new class of model, since a class is warned of once, whose forward writes its buffer `n` by a function."""

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("n", torch.zeros(2))

        def forward(self, x):
            write(self)
            y = self.conv(x).relu()
            return y + self.n[0] if read else y

    return Stream().eval()


def add(model):
    model.n += 1


def replace(model):
    model.n = model.n * 0.9 + 0.1


def write_a_part(model):
    model.n[:1] = model.n[:1] + 1


@pytest.mark.parametrize("write", [add, replace, write_a_part])
def test_a_state_is_frozen_as_it_is_with_a_warning_and_does_not_move(write, tmp_path) -> None:
    for make in (
        lambda model: capture(model, X).module,
        lambda model: capture(nn.Sequential(model, nn.ReLU()), X, inside="0").module,
        lambda model: ck.quant.quantize_static(model, [X]),
        lambda model: ck.export_onnx(model, tmp_path / "m.onnx", X, opset="lowest"),
    ):
        model = stateful(write)
        buffer = model.n
        with pytest.warns(
            UserWarning, match=r"^Stream: forward writes the buffers \['n'\].* make it an input and an output"
        ) as seen:
            made = make(model)
        assert len(seen) == 1
        assert model.n is buffer
        assert not model.n.any()
        if isinstance(made, fx.GraphModule):
            torch.testing.assert_close(made(X), model(X))
        if isinstance(made, Path):
            file = session(made)
            (output,) = file.run(None, {file.get_inputs()[0].name: X.numpy()})
            torch.testing.assert_close(torch.from_numpy(output), model(X), atol=1e-5, rtol=1e-4)


def test_a_class_is_warned_of_once(tmp_path) -> None:
    model = stateful(add)
    with pytest.warns(UserWarning, match="forward writes the buffers"):
        capture(model, X)
    capture(model, X)
    ck.export_onnx(model, tmp_path / "m.onnx", X)
    assert not model.n.any()


def test_a_counter_that_no_output_reads_is_no_state() -> None:
    model = stateful(add, read=False)
    capture(model, X)
    assert not model.n.any()


def test_a_table_that_the_first_run_makes_stays() -> None:
    def make_table(model):
        if not getattr(model, "made", False):
            model.n, model.made = torch.ones(2), True

    model = stateful(make_table)
    graph = capture(model, X).module
    assert model.n.all(), "the attribute says that it is there"
    torch.testing.assert_close(graph(X), model(X))


def test_the_statistics_of_batchnorm_are_no_state() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    capture(model, X)
    assert model[1].num_batches_tracked == 0


def test_a_state_in_attributes_is_frozen_as_it_is_with_a_warning_and_does_not_move(tmp_path) -> None:
    for make in (
        lambda model: capture(model, X),
        lambda model: ck.export_onnx(model, tmp_path / "m.onnx", X),
    ):

        class Stream(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.mean, self.steps = nn.Conv2d(3, 4, 3), torch.zeros(1), 0

            def forward(self, x):
                y = self.conv(x)
                self.mean, self.steps = 0.9 * self.mean + y.mean(), self.steps + 1
                return y + self.mean * self.steps

        model = Stream().eval()
        mean = model.mean
        with pytest.warns(UserWarning, match=r"^Stream: forward writes the attributes \['mean', 'steps'\], which its outputs"):
            make(model)
        assert model.mean is mean
        assert model.steps == 0


def test_a_hidden_state_that_begins_as_none_is_captured_at_its_beginning(tmp_path) -> None:
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.state = nn.LSTM(8, 8, batch_first=True), None

        def forward(self, x):
            y, self.state = self.lstm(x, self.state)
            return y

    model, x = Hidden().eval(), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match="forward writes the attributes \\['state'\\]"):
        path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    assert model.state is None
    assert ck.verify_onnx(path, model, [x]).passed
    assert model.state is None


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory"), ModuleNotFoundError("No module named 'a'")])
def test_what_torch_cannot_read_is_no_fault_of_the_model(error, monkeypatch) -> None:
    def export(*_, **__):
        raise error

    monkeypatch.setattr(torch.export, "export", export)
    with pytest.raises(ModelError, match=r"Let torch find what it reads there; if the working directory was deleted") as said:
        capture(nn.Linear(4, 2), (torch.ones(2, 4),))
    assert type(error).__name__ in str(said.value)
    assert "values of tensors" not in str(said.value)
