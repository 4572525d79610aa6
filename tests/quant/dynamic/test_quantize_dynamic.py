"""Dynamic quantization: rounded at run time as ONNX Runtime does, multiplied in integers by the file."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import oracles
import pytest
import torch
import torch.nn.functional as F
from row_networks import (
    GRAPH_DIMS,
    MASKED_DIMS,
    MEMORY_DIMS,
    Frames,
    Graph,
    Masked,
    Memory,
    TimeFirst,
    graph_inputs,
    masked_inputs,
)
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.export.check.profile.optimized_graph import optimized_model
from compresskit.measure import numpy_inputs, session
from compresskit.quant import Scheme, diagnose, quantize_dynamic
from compresskit.quant.dynamic import quantize_dynamic as dynamic_module
from compresskit.quant.dynamic.insert_dynamic import build_dynamic
from compresskit.quant.dynamic.quantize_dynamic import DynamicQuant
from compresskit.quant.numerics.targets import X86, X86_NO_VNNI

GRIDS = {
    "symmetric": Scheme(signed=True, symmetric=True, per_channel=True),
    "asymmetric": Scheme(signed=True, per_channel=True),
    "per_tensor": Scheme(signed=True, symmetric=True),
    "seven_bits": Scheme(bits=7, signed=True, symmetric=True, per_channel=True),
}


class Mlp(nn.Module):
    """Three layers that read one value, a product with a constant, and one of two activations."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 32), nn.Linear(24, 32), nn.Linear(24, 32, bias=False)
        self.out, self.table = nn.Linear(32, 10), nn.Parameter(torch.randn(10, 7))

    def forward(self, x):
        y = torch.relu(self.a(x)) + self.b(x) * self.c(x)
        y = y @ (y.transpose(1, 2) @ y).softmax(2)
        return self.out(y) @ self.table


class Words(nn.Module):
    def __init__(self, kind=nn.LSTM, **how):
        super().__init__()
        self.words, self.layer = nn.Embedding(40, 16), kind(16, 24, **how)

    def forward(self, ids):
        return self.layer(self.words(ids))


def numpy_dynamic_quantize(x):
    """DynamicQuantizeLinear as the standard writes it."""
    low, high = min(np.float32(0), x.min()), max(np.float32(0), x.max())
    scale = np.float32(1) if low == high else np.float32((high - low) / np.float32(255))
    zero_point = np.rint(np.clip(-low / scale, 0, 255)).astype(np.uint8)
    q = np.clip(np.rint(x / scale) + np.float32(zero_point), 0, 255).astype(np.uint8)
    return q, scale, zero_point


def numpy_weight(w, axis):
    """Symmetric int8, a scale for each output, with which neighbours along the inputs sum to 128 steps at most."""
    pairs = np.abs(np.stack([w.take(range(i, w.shape[1 - axis] - 1 + i, 2), 1 - axis) for i in (0, 1)]).sum(0))
    scale = np.maximum(np.abs(w).max(1 - axis, keepdims=True) / 127, pairs.max(1 - axis, keepdims=True) / 128).astype(np.float32)
    return np.clip(np.rint(w / scale), -127, 127), scale


def executed(file, inputs, **how):
    run = session(file, **how)
    return run.run(None, numpy_inputs(run, inputs))


def check(model, example, batches, folder, **how):
    """Quantize, export and prove a model; the file and the quantized model."""
    quantized = quantize_dynamic(model, example, dynamic=(0, 1), **how)
    file = ck.export_onnx(quantized, folder / "q.onnx", example)
    proof = ck.verify_onnx(file, quantized, batches)
    assert proof.passed, proof
    return file, quantized


@pytest.mark.parametrize("values", [torch.randn(7, 5), -torch.rand(4, 3) - 1, torch.rand(6) + 2, torch.zeros(3)])
def test_dynamic_rounding_equals_the_onnx_standard(values) -> None:
    quantized = quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),))
    rounding = next(q for q in quantized.quantizers() if type(q).__name__ == "DynamicActivation")
    q, scale, zero_point = numpy_dynamic_quantize(values.numpy())
    wanted = (q.astype(np.float32) - np.float32(zero_point)) * scale
    np.testing.assert_array_equal(rounding(values).numpy(), wanted)
    leaf = values.clone().requires_grad_()
    rounding(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_a_linear_layer_equals_integers_in_numpy(tmp_path) -> None:
    layer = nn.Linear(24, 10)
    file, quantized = check(layer, (torch.randn(2, 3, 24),), [(torch.randn(3, 7, 24),)], tmp_path)
    x = torch.randn(4, 5, 24)
    q, scale, zero_point = numpy_dynamic_quantize(x.numpy())
    w, steps = numpy_weight(layer.weight.detach().numpy(), 0)
    sums = (q.astype(np.int64) - int(zero_point)) @ w.T.astype(np.int64)
    wanted = sums.astype(np.float32) * (scale * steps.T) + layer.bias.detach().numpy()
    np.testing.assert_allclose(quantized(x).detach().numpy(), wanted, atol=2e-6)
    np.testing.assert_allclose(executed(file, (x,))[0], wanted, atol=2e-6)
    np.testing.assert_allclose(executed(file, (x,), optimize=False)[0], wanted, atol=2e-6)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("grid", GRIDS)
def test_file_equals_simulation(grid, tmp_path) -> None:
    model = Mlp().eval()
    file, quantized = check(model, (torch.randn(2, 5, 24),), [(torch.randn(3, 8, 24),)], tmp_path, weights=GRIDS[grid])
    x = (torch.randn(1, 6, 24),)
    np.testing.assert_allclose(executed(file, x)[0], quantized(*x).detach().numpy(), atol=2e-5)
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    assert oracles.sqnr(wanted, got) > 20


def test_the_runtime_fuses_products_and_rounds_a_value_once(tmp_path) -> None:
    file, quantized = check(Mlp(), (torch.randn(2, 5, 24),), [(torch.randn(3, 8, 24),)], tmp_path)
    written = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert written["MatMulInteger"] == 5
    assert written["DynamicQuantizeLinear"] == 3  # a, b and c read one value
    fused = Counter(node.op_type for node in optimized_model(file).graph.node)
    assert fused["MatMulIntegerToFloat"] == 3
    assert fused["DynamicQuantizeMatMul"] == 2
    assert not fused["MatMulInteger"]
    assert not fused["Cast"]
    reasons = quantized.placement.floating
    assert {reasons["matmul"], reasons["matmul_1"]} == {"both of its operands are computed: there is no weight to store"}
    assert ck.audit(file).integer_fraction == 1.0
    assert str(quantized.placement.coverage).startswith("5 of 7 layers in integers")
    stored = {onnx.TensorProto.DataType.Name(t.data_type): t for t in onnx.load(file).graph.initializer if len(t.dims) > 1}
    assert set(stored) == {"INT8"}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"proj_size": 8},
        {"num_layers": 2, "dropout": 0.3, "bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("grid", ["symmetric", "asymmetric", "per_tensor"])
def test_lstm_runs_in_integers(how, grid, tmp_path) -> None:
    model = Words(**how).eval()
    batches = [(torch.randint(40, (3, 7)),), (torch.randint(40, (1, 2)),)]
    file, quantized = check(model, (torch.randint(40, (2, 5)),), batches, tmp_path, weights=GRIDS[grid])
    kinds = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert kinds["DynamicQuantizeLSTM"] == how.get("num_layers", 1)
    assert not kinds["LSTM"]
    for batch in batches:
        for got, wanted in zip(executed(file, batch), torch.utils._pytree.tree_leaves(quantized(*batch)), strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), atol=2e-5)
        a, b = model(*batch)[0].flatten(), quantized(*batch)[0].flatten()
        assert F.cosine_similarity(a, b, dim=0) > 0.999
    assert ck.audit(file).integer_fraction > (0.7 if "proj_size" in how else 0.99)
    assert quantized.placement.coverage.macs[0] == quantized.placement.coverage.macs[1] > 0


def test_an_lstm_has_a_scale_for_each_matrix_unless_more_are_asked_for(tmp_path) -> None:
    model, example = Words().eval(), (torch.randint(40, (2, 5)),)
    sizes = []
    for weights in (None, ck.quant.X86.weights):
        quantized = quantize_dynamic(model, example, weights=weights)
        ck.save(quantized, tmp_path / "saved")
        loaded = ck.load(Words().eval(), tmp_path / "saved")
        assert torch.equal(quantized(*example)[0], loaded(*example)[0])
        file = onnx.load(ck.export_onnx(loaded, tmp_path / "m.onnx", example))
        (node,) = [node for node in file.graph.node if node.op_type == "DynamicQuantizeLSTM"]
        stored = {t.name: t for t in file.graph.initializer}
        sizes.append([int(np.prod(stored[node.input[i]].dims)) for i in (8, 10)])
    hidden = model.layer.hidden_size
    assert sizes == [[1, 1], [4 * hidden, 4 * hidden]]


@pytest.mark.parametrize(("kind", "name"), [(nn.GRU, "GRU"), (nn.RNN, "RNN")])
def test_gru_and_rnn_store_integers_and_say_that_they_compute_in_float(kind, name, tmp_path) -> None:
    model = Words(kind, num_layers=2, batch_first=True).eval()
    batch = (torch.randint(40, (3, 7)),)
    file, quantized = check(model, (torch.randint(40, (2, 5)),), [batch], tmp_path)
    assert any("no integer kernel for" in reason for reason in quantized.placement.floating.values())
    assert sum(t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 3 for t in onnx.load(file).graph.initializer) == 4
    kinds = Counter(node.op_type for node in optimized_model(file).graph.node)
    assert kinds[name] == 2
    assert kinds["Cast"] <= 1  # that of the embedding: the weights are decoded once, when the file is loaded
    np.testing.assert_allclose(executed(file, batch)[0], quantized(*batch)[0].detach().numpy(), atol=2e-5)


def test_tied_table_is_stored_once(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(300, 32), nn.Linear(32, 300, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.words(ids)))

    file, _ = check(Tied(), (torch.randint(300, (2, 5)),), [(torch.randint(300, (3, 7)),)], tmp_path)
    tables = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert [list(t.dims) for t in tables] == [[300, 32]]


def test_convolutions_are_quantized_on_request(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)).eval()
    x = (torch.randn(2, 3, 16, 16),)
    with pytest.raises(ModelError, match="conv is quantized on request only"):
        quantize_dynamic(model, x)
    quantized = quantize_dynamic(model, x, operators=("conv",))
    file = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert ck.verify_onnx(file, quantized, [(torch.randn(3, 3, 16, 16),)]).passed
    assert Counter(node.op_type for node in onnx.load(file).graph.node)["ConvInteger"] == 2


def test_weights_for_no_vnni_do_not_saturate(tmp_path) -> None:
    file, _ = check(nn.Linear(24, 10), (torch.randn(2, 3, 24),), [(torch.randn(3, 7, 24),)], tmp_path, target=X86_NO_VNNI)
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.INT8]
    assert max(int(np.abs(w.astype(int)).max()) for w in stored) == 63


def test_what_stays_float_is_named() -> None:
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.zero, self.pair = nn.Linear(8, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
            self.up = nn.ConvTranspose1d(8, 8, 2)
            nn.init.zeros_(self.zero.weight)

        def forward(self, x):
            y = self.zero(self.a(x))
            return self.up(self.pair(x, y).unsqueeze(2))

    placement = quantize_dynamic(Mixed(), (torch.randn(4, 8),)).placement
    reasons = {placement.layers[name]: reason for name, reason in placement.floating.items()}
    assert reasons["zero"] == "its weights are all zero"
    assert "transposed convolutions" in reasons["up"]
    assert reasons["pair"]
    skipped = quantize_dynamic(Mixed(), (torch.randn(4, 8),), skip=("pair",)).placement
    assert "skipped by the user" in skipped.floating.values()


def test_bad_inputs_models_and_settings_are_refused() -> None:
    quantized = quantize_dynamic(Mlp(), (torch.randn(2, 5, 24),), dynamic=(0, 1))
    with pytest.raises(DataError, match=r"no elements, got \[\(2, 0, 24\)\]"):
        quantized(torch.randn(2, 0, 24))
    with pytest.raises(DataError, match=r"wanted torch.float32 inputs, got torch.int64"):
        quantized(torch.ones(2, 5, 24, dtype=torch.int64))
    with pytest.raises(ModelError, match="does not run on the example.*int64"):
        quantize_dynamic(Mlp(), (torch.ones(2, 5, 24, dtype=torch.int64),))
    with pytest.raises(ModelError, match="nothing of it can be quantized dynamically"):
        quantize_dynamic(nn.Sequential(nn.ReLU()), (torch.randn(2, 5),))
    with pytest.raises(ModelError, match="is quantized already"):
        quantize_dynamic(quantized, (torch.randn(2, 5, 24),))
    with pytest.raises(SettingError, match="dynamic quantization knows"):
        quantize_dynamic(Mlp(), (torch.randn(2, 5, 24),), operators=("linaer",))
    with pytest.raises(SettingError, match="no operator of the model stands in a module of that name"):
        quantize_dynamic(Mlp(), (torch.randn(2, 5, 24),), skip=("z",))


@pytest.mark.parametrize("shape", [(3, 1, 1, 7), (7, 7), None], ids=str)
def test_attention_is_one_operator(shape, tmp_path) -> None:
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x, mask=None):
            q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
            y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            return self.norm(x + self.out(y))

    mask = () if shape is None else (torch.rand(shape) > 0.3,)
    if mask:
        mask[0][..., 0] = True
    x = torch.randn(3, 7, 16)
    dynamic = {"x": {0: "rows", 1: "steps"}} if not mask else {"x": {0: "rows"}, "mask": {0: "rows"} if len(shape) == 4 else {}}
    quantized = quantize_dynamic(Heads().eval(), (x, *mask), dynamic=dynamic)
    file = ck.export_onnx(quantized, tmp_path / "q.onnx", (x, *mask))
    assert ck.verify_onnx(file, quantized, [(x, *mask)]).passed
    np.testing.assert_allclose(executed(file, (x, *mask))[0], quantized(x, *mask).detach().numpy(), atol=1e-4)
    kinds = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert (kinds["Attention"], kinds["Transpose"], kinds["Sum"]) == (1, 0, 1)


@pytest.mark.parametrize("make", [Mlp, Words])
def test_diagnose_measures_dynamic_models(make) -> None:
    inputs = (torch.randn(3, 6, 24),) if make is Mlp else (torch.randint(40, (6, 3)),)
    quantized = quantize_dynamic(make().eval(), inputs, dynamic=(0, 1))
    found = diagnose(quantized, [inputs])
    assert 20 < found.sqnr < 80
    rows = {row.layer: row for row in found.rows}
    if make is Mlp:
        assert all(20 < n < 80 for n in (rows["a"].sqnr, rows["a"].weights, rows["a"].activations))


def test_a_saved_model_loads_to_the_same_outputs(tmp_path) -> None:
    model = Words(bidirectional=True).eval()
    quantized = quantize_dynamic(model, (torch.randint(40, (5, 2)),), dynamic=(0, 1), weights=GRIDS["asymmetric"])
    ck.save(quantized, tmp_path / "saved")
    loaded = ck.load(Words(bidirectional=True), tmp_path / "saved")
    ids = torch.randint(40, (9, 3))
    assert torch.equal(quantized(ids)[0], loaded(ids)[0])
    assert str(loaded.placement) == str(quantized.placement)


def test_trains_through_the_rounding() -> None:
    quantized = quantize_dynamic(Words(), (torch.randint(40, (5, 2)),), dynamic=(0, 1)).train()
    quantized(torch.randint(40, (7, 3)))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in quantized.parameters())


def test_the_stage_runs_in_a_recipe(tmp_path) -> None:
    x, y = torch.randn(64, 12, 8), torch.randint(3, (64,))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0].mean(1))

    loader = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    recipe = ck.Recipe(ck.Train(epochs=1), DynamicQuant(dynamic=(0, 1)))
    result = recipe.run(Net(), ck.Task(train=loader, val=loader), out=tmp_path / "run")
    assert result.rows[-1].bytes < result.rows[0].bytes
    assert "DynamicQuantizeLSTM" in {node.op_type for node in onnx.load(result.onnx).graph.node}
    with pytest.raises(ck.StageOrderError):
        ck.Recipe(DynamicQuant(), ck.Prune(budget=ck.keep(macs=0.5)))


def test_an_embedding_right_before_a_linear_layer_is_quantized_with_it(tmp_path):
    ids = torch.randint(0, 20, (2, 7))
    quantized = quantize_dynamic(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)).eval(), (ids,))
    assert sorted(quantized.placement.integer.values()) == ["embedding", "linear"]
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", (ids,)), quantized, [(ids,)]).passed


class Loud(nn.Module):
    """A stack of LSTMs that reads features of very different size, the small ones with large weights: power spectrograms."""

    def __init__(self, **how):
        super().__init__()
        self.layer = nn.LSTM(6, 16, 3, bias=False, **how)
        self.head = nn.Linear(how.get("proj_size") or 16, 4, bias=False)
        with torch.no_grad():
            self.layer.weight_ih_l0.mul_(torch.tensor([1e-3, *[1e3] * 5]))

    def forward(self, x):
        return self.head(self.layer(x)[0])

    @staticmethod
    def inputs(rows=4, steps=9):
        return (torch.randn(steps, rows, 6) * torch.tensor([100.0, *[1e-3] * 5]),)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("how", [{}, {"proj_size": 8}], ids=str)
def test_an_lstm_layer_that_rounding_at_run_time_would_lose_stays_float(how, tmp_path, caplog) -> None:
    torch.manual_seed(0)
    model, example = Loud(**how).eval(), Loud.inputs()
    quantized = quantize_dynamic(model, example, dynamic=(0, 1))
    left = [name for name in quantized.placement.floating if name.rpartition(".")[2].isdigit()]
    assert left == ["recurrent.0"]
    assert "left in float: recurrent.0 (" in caplog.text
    batch = Loud.inputs(2, 5)
    assert oracles.sqnr(model(*batch).detach(), quantized(*batch).detach()) > 15
    all_rounded = build_dynamic(model, example, X86, dynamic=(0, 1))
    assert oracles.sqnr(model(*batch).detach(), all_rounded(*batch).detach()) < 10
    file = ck.export_onnx(quantized, tmp_path / "m.onnx", example)
    kinds = Counter(node.op_type for node in onnx.load(file).graph.node)
    assert (kinds["LSTM"], kinds["DynamicQuantizeLSTM"]) == (1, 2)
    assert ck.verify_onnx(file, quantized, [example, batch]).passed
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(Loud(**how).eval(), tmp_path / "saved")(*batch), quantized(*batch))


def test_outputs_that_rounding_at_run_time_loses_are_named(caplog) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight.mul_(torch.tensor([1e-3, *[1e3] * 5]))
    quantize_dynamic(model, (Loud.inputs()[0][0],))
    assert "dB against that of the float model; `quantize_to_accuracy`" in caplog.text


def memory_inputs(rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 5, 8), torch.randn(10, rows, 12)


UNEQUAL_ROWS = {
    "mask": (Masked, masked_inputs(), MASKED_DIMS, masked_inputs(3, 11)),
    "memory": (Memory, memory_inputs(), MEMORY_DIMS, memory_inputs(3)),
    "memory of a fixed batch": (Memory, memory_inputs(), (), memory_inputs()),
    "graph": (Graph, graph_inputs(), GRAPH_DIMS, graph_inputs(20, 50)),
    "frames": (Frames, (torch.randn(16, 6),), (), (torch.randn(16, 6),)),
    "time first": (TimeFirst, (torch.randn(12, 16, 6),), {"x": {1: "batch"}}, (torch.randn(12, 3, 6),)),
}


@pytest.mark.parametrize("case", UNEQUAL_ROWS)
def test_inputs_whose_first_dimensions_are_not_all_the_batch(case, tmp_path) -> None:
    kind, example, dynamic, other = UNEQUAL_ROWS[case]
    model = kind().eval()
    quantized = quantize_dynamic(model, [example], dynamic=dynamic)
    file = ck.export_onnx(quantized, tmp_path / "model.onnx", example)
    assert ck.verify_onnx(file, quantized, [other]).passed
    task = ck.Task(val=[(*example, torch.zeros(1))])
    staged = DynamicQuant(dynamic=dynamic)(model, task)
    assert staged(*other).shape == model(*other).shape


def test_outputs_are_compared_on_rows_of_the_batch(monkeypatch) -> None:
    seen = []
    real = dynamic_module.OutputError

    def noted(model, batches, rows):
        seen.extend(tuple(batches[0][0].shape))
        return real(model, batches, rows)

    monkeypatch.setattr(dynamic_module, "OutputError", noted)
    quantize_dynamic(TimeFirst().eval(), [torch.randn(12, 16, 6)], dynamic={"x": {1: "batch"}})
    assert seen == [12, 8, 6]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (dict(skip="head"), r"skip=...\): wanted a tuple of texts, got 'head'"),
        (dict(dynamic="x"), r"dynamic=...\): wanted dimensions, such as"),
        (dict(weights=8), r"weights=...\): wanted a number format such as ck.quant.Scheme\(signed=True, symmetric=True\)"),
        (dict(operators=("linaer",)), r"operators=\['linaer'\]\): dynamic quantization knows"),
    ],
)
def test_the_stage_and_the_function_refuse_the_same(settings, said) -> None:
    with pytest.raises(SettingError, match=rf"DynamicQuant\({said}"):
        DynamicQuant(**settings)
    with pytest.raises(SettingError, match=rf"quantize_dynamic\({said}"):
        quantize_dynamic(Mlp(), (torch.randn(2, 5, 24),), **settings)
    x = (torch.randn(2, 5, 24),)
    advised = ck.quant.Scheme(signed=True, symmetric=True)
    assert quantize_dynamic(Mlp(), x, weights=advised, dynamic=(0, 1)).placement.integer


class OtherProduct(nn.Module):
    """A product by a stored weight that no integer kernel has."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.shift = kind, nn.Linear(24, 24), nn.Parameter(torch.randn(24))
        self.weight = nn.Parameter(torch.randn(3, 24, 8) if kind == "batched" else torch.randn(24, 24))

    def forward(self, x):
        x = self.layer(x)
        if self.kind == "scaled":
            return torch.addmm(self.shift, x, self.weight, beta=0.5, alpha=2)
        return x @ self.weight if self.kind == "batched" else self.weight @ x.T


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("scaled", "it scales an operand (alpha, beta)"),
        ("batched", "its stored weight, of shape [3, 24, 8], is not a matrix on the right"),
        ("left", "its stored weight, of shape [24, 24], is not a matrix on the right"),
    ],
)
def test_reasons_name_what_is_wrong_with_a_stored_weight(kind, said) -> None:
    quantized = quantize_dynamic(OtherProduct(kind).eval(), torch.randn(32, 24))
    assert any(reason.startswith(said) for reason in quantized.placement.floating.values())


def test_data_that_are_not_finite_are_named(caplog) -> None:
    x = torch.randn(8, 24)
    x[0, 0] = torch.inf
    quantize_dynamic(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 7)).eval(), x)
    assert "outputs of the float model on the example are nan or infinite" in caplog.text
    assert "leaves float what costs most" not in caplog.text


class Experts(nn.Module):
    """Each row goes to one of two layers; the first entry says which."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 16), nn.Linear(6, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        y = x.new_zeros(len(x), 16)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            (rows,) = torch.where(chosen)
            y = y.index_add(0, rows, expert(x[rows]))
        return self.head(y)


def test_an_expert_may_get_no_rows(tmp_path) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    quantized = quantize_dynamic(Experts().eval(), x)
    alone = x[x[:, 0] > 0]
    file = ck.export_onnx(quantized, tmp_path / "model.onnx", (alone,))
    assert ck.verify_onnx(file, quantized, [(x,), (alone,), (alone[:1],)]).passed
    with pytest.raises(DataError, match=r"calibration data do not reach 'experts\.1', .*skip=\('experts\.1',\)"):
        ck.quant.quantize_static(Experts().eval(), [(alone,)])
    ck.quant.quantize_static(Experts().eval(), [(alone,)], skip=("experts.1",))
