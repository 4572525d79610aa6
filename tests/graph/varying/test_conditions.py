"""Code that decides by the sizes of its inputs: a graph follows one branch, and a warning says for which sizes it is right."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture, module_path
from compresskit.graph.varying.condition_syntax import holds
from compresskit.graph.varying.other_traces import traced_after_other_sizes, traced_by_code
from compresskit.measure import session

TOKENS, IMAGE = (torch.randn(4, 8, 4),), (torch.randn(2, 3, 16, 16),)


class Net(nn.Module):
    """A linear layer, and code of a test."""

    def __init__(self, code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(4, 4), code

    def forward(self, x):
        return self.code(self.layer(x), x)


class PadToEight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 8, 8), nn.ConvTranspose2d(8, 3, 8, 8)

    def forward(self, x):
        height, width = x.shape[-2:]
        if -height % 8 or -width % 8:
            x = F.pad(x, (0, -width % 8, 0, -height % 8))
        return self.up(self.down(x))[..., :height, :width]


class GrowingTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.longest = nn.Linear(4, 4), 0

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table = torch.arange(self.longest).float()[:, None].sin()
        return self.layer(x) + self.table[: x.shape[1]]


class Positions(nn.Module):
    """Takes no more than 12 steps, as its graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.positions = nn.Linear(4, 4), nn.Parameter(torch.randn(12, 4))

    def forward(self, x):
        return self.layer(x) + self.positions[: x.shape[1]]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, mask):
        return self.layer(x) * mask[..., None]


class Memory(nn.Module):
    """Attends to a memory that is time first; the kernel of the LSTM ends the process where batches differ in size."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.keys = nn.LSTM(4, 8, batch_first=True), nn.Linear(6, 8)

    def forward(self, x, memory):
        keys = self.keys(memory)
        return (self.lstm(x)[0] @ keys.permute(1, 2, 0)).softmax(-1) @ keys.transpose(0, 1)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        x += 1
        return self.layer(x) if x.shape[0] < 99 else x


def kind(module: nn.Module) -> nn.Module:
    """The module as the only one of its class: there is one warning for a class."""
    module.__class__ = type(type(module).__name__, (type(module),), {})
    return module


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("model", "example", "dynamic", "where"),
    [
        (Net(lambda y, x: y if x.shape[1] > 10 else 2 * y), TOKENS, (0, 1), r"x\.size\(1\) <= 10; .* \[\(2, 11, 4\)\]"),
        (Net(lambda y, x: (y if x.shape[1] > 10 else 2 * y).masked_fill(torch.arange(4) < 1, -1e9)), TOKENS, (0, 1), r"<= 10;"),
        (Net(lambda y, x: y if x.shape[1] == 14 else 2 * y), TOKENS, (0, 1), r"x\.size\(1\) != 14"),
        (Net(lambda y, x: y if x.shape[0] > 5 else 2 * y), TOKENS, (0,), r"x\.size\(0\) <= 5"),
        (Net(lambda y, x: y if x.shape[0] == 1 else 2 * y), TOKENS, (0,), r"no size that varies is 1; .* \[\(1, 8, 4\)\]"),
        (Net(lambda y, x: y - y.mean(1, keepdim=True) if x.shape[1] > 1 else y), TOKENS, (0, 1), r"\[\(2, 1, 4\)\]"),
        (PadToEight(), IMAGE, (0, 2, 3), r"x\.size\(2\)\) % 8\) == 0 and .*x\.size\(3\)\) % 8\) == 0; .*\[\(2, 3, 15, 15\)\]"),
        (GrowingTable(), TOKENS, (0, 1), r"x\.size\(1\) <= 8; for inputs of shape \[\(2, 9, 4\)\]"),
    ],
    ids=["longer", "longer beside fills", "one length", "rows", "one row", "one step", "padding", "table"],
)  # fmt: skip
def test_a_warning_says_for_which_sizes_a_graph_is_right(model, example, dynamic, where, tmp_path) -> None:
    model = kind(model).eval()
    with pytest.warns(UserWarning, match=rf"decides by the sizes of its inputs: .* right only where .*{where}"):
        ck.export_onnx(model, tmp_path / "f.onnx", example, dynamic=dynamic)
    capture(model, example, dynamic=dynamic)  # it is said once
    with pytest.warns(UserWarning, match=where):
        capture(kind(model), example, dynamic=dynamic)


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (lambda y, x: y[:, : int(x.shape[1] * 0.5)], r"math.trunc\(0.5\*torch.sym_float\(x.size\(1\)\)\) == 4"),
        (lambda y, x: y / torch.as_tensor(x.shape[1] / 2.0), r"torch.sym_float\(x.size\(1\)\)"),
    ],
)
def test_sizes_that_become_numbers_are_warned_of(code, where) -> None:
    with pytest.warns(UserWarning, match=f"right only where .*{where}"):
        capture(kind(Net(code)).eval(), TOKENS, dynamic=(0, 1))


@pytest.mark.parametrize(
    ("model", "example", "dynamic"),
    [
        (Positions(), TOKENS, (0, 1)),
        (TwoInputs(), {"mask": torch.ones(4, 8), "x": TOKENS[0]}, (0, 1)),
        (nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.MaxPool2d(2)), IMAGE, (0, 2, 3)),
        (Memory(), (*TOKENS, torch.randn(10, 4, 6)), {"x": {0: "batch"}, "memory": {0: "slots", 1: "batch"}}),
        (Net(lambda y, x: y * 2 if x.shape[1] > 10 else y + y), TOKENS, (0, 1)),
        (Net(lambda y, x: y if x.shape[1] > 10 else 2 * y), TOKENS, (0,)),
        (Net(lambda y, x: (y if x.shape[0] > 5 else 2 * y) + torch.rand(())), TOKENS, (0,)),
    ],
    ids=["positions", "two inputs", "convolution", "memory", "equal branches", "fixed", "random"],
)
def test_conditions_on_which_nothing_depends_are_not_warned_of(model, example, dynamic) -> None:
    model = kind(model).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(model, example, dynamic=dynamic)
    assert not [str(w.message) for w in caught if "decides by the sizes" in str(w.message)]


def test_a_model_whose_table_grows_is_left_as_it_was() -> None:
    model = kind(GrowingTable()).eval()
    wanted = model(*TOKENS)
    with pytest.warns(UserWarning, match="the largest where a table grows"):
        capture(model, TOKENS, dynamic=(0, 1))
    assert model.longest == len(model.table) == 8
    assert torch.equal(model(*TOKENS), wanted)


class EndOfText(nn.Module):
    """Reads the rows at one token; torch asserts of the graph that there are two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids):
        y = self.table(ids)
        return y[ids.eq(2), :].view(y.size(0), -1, y.size(-1))[:, -1]


def test_assertions_that_a_file_does_not_have_are_not_warned_of(tmp_path) -> None:
    ids = torch.randint(3, 50, (4, 6))
    ids[:, -1] = 2
    model = kind(EndOfText()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = ck.export_onnx(model, tmp_path / "f.onnx", (ids,), dynamic=(0, 1))
    assert ck.verify_onnx(path, model, [(ids,), (ids[:1],)]).passed


def test_a_graph_that_fails_at_other_sizes_prints_nothing(capfd) -> None:
    with pytest.warns(UserWarning, match=r"right only where \(\(3 \+ x\.size\(1\)\) // 4\) == 2"):
        capture(kind(Net(lambda y, x: sum(part.sum(1) for part in y.split(4, 1)))).eval(), TOKENS, dynamic=(0, 1))
    assert capfd.readouterr().err == ""


def test_parts_that_nothing_reads_are_no_condition() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(kind(Net(lambda y, x: y.split(4, 1)[0])).eval(), TOKENS, dynamic=(0, 1))


class Anchors(nn.Module):
    """Makes a table for the sizes of the last call, as heads of detectors do, and remembers them."""

    def __init__(self, rows: bool) -> None:
        super().__init__()
        self.layer, self.rows, self.shape, self.table = nn.Conv2d(3, 4, 3, padding=1), rows, None, torch.empty(0)

    def forward(self, x):
        y = self.layer(x)
        shape = y.shape if self.rows else y.shape[2:]
        if self.shape != shape:
            self.table = torch.arange(y.shape[-1], dtype=y.dtype).view(1, 1, 1, -1) + torch.zeros_like(y[:, :1])
            self.table, self.shape = self.table if self.rows else self.table[:1], shape
        return y + self.table


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(("rows", "dynamic"), [(True, (0,)), (True, (0, 2, 3)), (False, (0, 2, 3))])
def test_a_model_that_remembers_sizes_is_captured_for_others(rows, dynamic, called, tmp_path) -> None:
    model = kind(Anchors(rows)).eval()
    if called:
        model(*IMAGE)
    before = dict(vars(model))
    path = ck.export_onnx(model, tmp_path / "f.onnx", IMAGE, dynamic=dynamic)
    if called:
        assert vars(model) == before
    others = [torch.randn(3, 3, 16, 16), torch.randn(5, 3, 12, 20) if 2 in dynamic else torch.randn(1, 3, 16, 16)]
    assert ck.verify_onnx(path, model, [IMAGE, *[(x,) for x in others]]).passed


def test_a_graph_is_not_run_at_other_sizes(monkeypatch) -> None:
    """It has no branches, and its recurrent operators would end the process where rows of their states are others."""
    module = capture(kind(Positions()).eval(), TOKENS, dynamic=(0, 1)).module
    monkeypatch.setattr("compresskit.graph.varying.conditions.OtherSizes", lambda *args: pytest.fail("it was run"))
    capture(module, TOKENS, dynamic=(0, 1))


def test_neither_inputs_nor_buffers_are_written() -> None:
    model, x = kind(WritesItsInput()).eval(), torch.randn(4, 4)
    before = x.clone()
    capture(model, x)
    assert torch.equal(x, before)
    assert not model.count


class Table:
    """Of numbers, which takes the place in memory of one that is gone."""


class Remade(nn.Module):
    """Makes its table anew in each call, with the id of the last one where that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x):
        last, self.table = id(self.table), None
        others = []
        while id(made := Table()) != last and len(others) < 1000:
            others.append(made)
        self.table = made
        return x


def test_a_table_in_the_memory_of_the_last_one_is_another() -> None:
    error = RuntimeError("You marked L['x'].size()[0] as dynamic but your code specialized it to be a constant (4)")
    assert traced_after_other_sizes(error, Remade(), (torch.zeros(4),), [(0, 0)], lambda: "traced") == "traced"
    assert traced_after_other_sizes(error, nn.ReLU(), (torch.zeros(4),), [(0, 0)], lambda: "traced") is None


class Backcast(nn.Module):
    """Takes lengths of tensors for sizes, as forecasters and masks of lengths do, around layers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.steps, self.last = nn.Linear(8, 12), nn.LSTM(2, 6, batch_first=True), nn.Linear(6, 3)
        self.register_buffer("scale", torch.randn(6))

    def forward(self, x, lengths=None):
        y = self.steps(self.graph(x).relu().reshape(len(x), -1, 2))[0] * self.scale
        if lengths is not None:
            y = y * (torch.arange(y.shape[1]).expand(len(lengths), -1) < lengths[:, None])[..., None]
        return {"forecast": self.last(y), "steps": 6}


def test_lengths_of_tensors_are_sizes_that_vary(tmp_path) -> None:
    torch.manual_seed(0)
    model = Backcast().eval()
    inputs = [{"lengths": torch.arange(rows) % 6, "x": torch.randn(rows, 8)} for rows in (4, 7, 1)]
    before = {module: list(vars(module)) for module in model.modules()}
    captured = capture(model, inputs[0])
    assert {module: list(vars(module)) for module in model.modules()} == before
    layers = {module_path(node) for node in captured.module.graph.nodes if str(node.target).startswith(("aten.lin", "aten.lstm"))}
    assert layers == {"graph", "steps", "last"}
    assert {captured.name_in_model(name) for name, _ in captured.module.named_parameters()} == set(dict(model.named_parameters()))
    quantized = ck.quant.quantize_static(model, [inputs[0]])
    assert {"linear", "linear_1"} <= set(quantized.placement.integer)
    pruned = ck.prune.apply_(Backcast().eval(), ck.prune.plan_channels(model, inputs[0], budget=ck.keep(macs=0.8), round_to=1))
    for exported in (model, quantized, pruned):
        path = ck.export_onnx(exported, tmp_path / "f.onnx", inputs[0])
        assert ck.verify_onnx(path, exported, inputs).passed


@pytest.mark.parametrize(
    "code",
    [
        lambda y, x: F.interpolate(y, size=(int(float(x.shape[2]) / 2), int(x.shape[3]))),
        lambda y, x: y * torch.tensor([float(x.shape[2]) - 1, float(x.shape[3])]).sum(),
    ],
    ids=["half the size", "a tensor of sizes"],
)
def test_numbers_made_of_sizes_are_sizes_that_vary(code, tmp_path) -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            return code(self.layer(x), x)

    model = Resized().eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", IMAGE, dynamic=(0, 2, 3)))
    for x in (*IMAGE, torch.randn(1, 3, 19, 26)):
        (got,) = run.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-4, atol=1e-4)


def test_conditions_of_code_that_is_read_are_warned_of() -> None:
    class Decides(nn.Module):
        def forward(self, x, mask):
            if mask.shape[1] > 10:
                return x.expand(len(x), -1) * 2
            return x.expand(len(x), -1)

    inputs = {"mask": torch.randn(4, 6), "x": torch.randn(4, 3)}
    dynamic = {"x": {0: "batch"}, "mask": {0: "batch", 1: "length"}}
    with pytest.warns(UserWarning, match=r"right only where mask\.size\(1\) <= 10; for inputs of shape .*\(4, 11\)|\(2, 11\)"):
        capture(Decides(), inputs, dynamic=dynamic)


def test_code_that_is_read_gives_what_the_model_gives() -> None:
    error = RuntimeError("You marked L['x'].size()[0] as dynamic but your code specialized it to be a constant (4)")
    x = torch.randn(4, 3)
    programs = {kind: torch.export.export(kind(), (x,)) for kind in (nn.ReLU, nn.Sigmoid)}
    for kind_of, program in programs.items():
        found = traced_by_code(error, nn.ReLU(), (x,), [(0, 0)], lambda program=program: program)
        assert found is (program if kind_of is nn.ReLU else None)
    assert traced_by_code(RuntimeError("other"), nn.ReLU(), (x,), [(0, 0)], lambda: programs[nn.ReLU]) is None


def test_an_operator_of_torch_that_makes_a_constant_is_called_that(caplog) -> None:
    class Products(nn.Module):
        def forward(self, x):
            return torch.linalg.multi_dot([x, x.t(), x])

    class Loop(nn.Module):
        def forward(self, x):
            return sum(row * 2 for row in x)

    place = r"for the constant 2 \(.*test_conditions\.py:\d+ in "
    with pytest.raises(ModelError, match=rf"should vary, but an operator of torch takes it {place}forward\); write that"):
        capture(Products(), torch.randn(3, 5))
    with pytest.raises(ModelError, match=rf"but the code takes it {place}.*, as a loop over it does.*nn\.LSTM"):
        capture(Loop(), torch.randn(3, 5))
    assert not caplog.records


def test_a_map_of_one_position_behind_many_layers_is_warned_of() -> None:
    """The conditions on the sizes of the layers in front, on which nothing depends, take trials, which run out."""
    torchvision = pytest.importorskip("torchvision")
    model = kind(torchvision.models.ShuffleNetV2([1, 1, 1], [4, 8, 8, 8, 8], num_classes=5)).eval()
    with pytest.warns(UserWarning, match=r"right only where \(1 \+ .*x\.size\(3\)\) // 32\)\) == 1 and .*\[\(2, 3, 33, 33\)\]"):
        capture(model, torch.randn(2, 3, 32, 32), dynamic=(0, 2, 3))


def test_a_size_computed_of_others_that_is_fixed_is_warned_of() -> None:
    class Pixels(nn.Module):
        def forward(self, x):
            flat = x.flatten(2)
            return sum(flat[:, :, i] * i for i in range(flat.shape[-1]))

    wanted = r"are right only where .*\(x\.size\(3\)\*x\.size\(2\)\) == 24.*; for inputs of shape \[\(2, 3, \d, \d\)\]"
    with pytest.warns(UserWarning, match=rf"Pixels decides by the sizes of its inputs: .*{wanted}"):
        capture(Pixels(), torch.randn(2, 3, 6, 4), dynamic=(0, 2, 3))


@pytest.mark.parametrize(("size", "wanted"), [(3, False), (4, True), (8, True), (9, False)])
def test_all_of_a_chain_of_comparisons_has_to_hold(size, wanted) -> None:
    assert holds("4 <= L['x'].size()[1] <= 8", {"x": torch.ones(2, size)}) is wanted
