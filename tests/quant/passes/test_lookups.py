"""Lookups of rows: in tables that are a layer's weight, too, and in tables of their own, stored in integers."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.graph.masks import Masks
from compresskit.quant import prepare_qat, quantize_dynamic, quantize_static
from compresskit.quant.measured_placement import latency_search
from compresskit.quant.measured_placement.uneven_tables import loses_columns
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.quant.numerics.dynamic_quantizers import RowQuantizer
from compresskit.quant.numerics.targets import TENSORRT, X86_NO_VNNI
from compresskit.quant.serialize import rebuild, record


class Tied(nn.Module):
    """Ids (N, T) to a score of each word, by the table that they are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(300, 32), nn.Linear(32, 300, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.words(ids)))


@pytest.mark.parametrize("trained", [False, True], ids=["static", "trained"])
def test_a_tied_table_is_stored_once_in_integers(trained, tmp_path) -> None:
    """The lookup returns rounded rows in PyTorch, too; in training, the table has the gradient of both."""
    torch.manual_seed(0)
    ids, other = torch.randint(300, (4, 5)), torch.randint(300, (3, 7))
    if trained:
        quantized = prepare_qat(Tied(), [ids], dynamic=(0, 1)).train()
        quantized(ids).sum().backward()
        table = quantized.body.get_parameter("head.weight")
        assert bool(table.grad.any(1).all())
        quantized.convert_()
        quantized.eval()
    else:
        quantized = quantize_static(Tied().eval(), [ids], dynamic=(0, 1))
    assert "its table is the weight of head" in str(quantized.placement)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    tables = [t for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= 300 * 32]
    assert [(t.data_type, list(t.dims)) for t in tables] == [(onnx.TensorProto.INT8, [300, 32])]
    assert ck.verify_onnx(path, quantized, [(other,)]).passed


def lookup_and_layer(quantized):
    found = {node.target: node for node in quantized.body.graph.nodes}
    return found[torch.ops.aten.embedding.default], found[torch.ops.aten.linear.default]


def test_a_lookup_reads_no_weight_of_few_bits() -> None:
    ids = torch.randint(300, (4, 5))
    quantized = quantize_static(Tied().eval(), [ids], bits={"": Bits(weights=4)})
    lookup = next(node for node in quantized.body.graph.nodes if node.target is torch.ops.aten.embedding.default)
    assert lookup.args[0].op == "get_attr"
    assert "decodes rows" not in str(quantized.placement)


def test_a_lookup_reads_a_weight_of_the_bits_of_the_target(tmp_path) -> None:
    ids = torch.randint(300, (4, 5))
    quantized = quantize_static(Tied().eval(), [ids], target=X86_NO_VNNI, dynamic=(0, 1))
    assert lookup_and_layer(quantized)[0].args[0].op == "call_module"
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    assert sum(np.prod(t.dims) >= 300 * 32 for t in onnx.load(path).graph.initializer) == 1
    assert ck.verify_onnx(path, quantized, [(ids,)]).passed


@pytest.mark.parametrize("skip", ["words", "embedding"])
def test_a_lookup_that_the_user_skips_stays_float(skip, tmp_path) -> None:
    """By its module or by its value: the layer runs in integers all the same."""
    ids = torch.randint(300, (4, 5))
    quantized = quantize_static(Tied().eval(), [ids], skip=(skip,))
    lookup, layer = lookup_and_layer(quantized)
    assert lookup.args[0].op == "get_attr"
    assert layer.args[1].op == "call_module"
    assert quantized.placement.floating["embedding"] == "skipped by the user"
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    kinds = {t.data_type for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= 300 * 32}
    assert kinds == {onnx.TensorProto.INT8, onnx.TensorProto.FLOAT}
    assert ck.verify_onnx(path, quantized, [(ids,)]).passed


class TiedTwice(Tied):
    """The layer stands before the second lookup, and twice."""

    def forward(self, ids):
        first = self.head(torch.tanh(self.words(ids)))
        return self.head(torch.sigmoid(self.words(first.argmax(-1))))


def test_a_tied_table_is_rounded_once_in_a_run(tmp_path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(300, (4, 5))
    for model in (Tied(), TiedTwice()):
        quantized, calls = quantize_static(model.eval(), [ids], dynamic=(0, 1)), []
        lookup, layer = lookup_and_layer(quantized)
        assert lookup.args[0] is layer.args[1]
        handle = quantized.body.get_submodule(layer.args[1].target).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        quantized(ids)
        handle.remove()
        assert len(calls) == 1
        path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
        assert ck.verify_onnx(path, quantized, [(ids,)]).passed


class Words(nn.Module):
    """Ids (N, T) to four numbers, by a table of words and one of positions."""

    def __init__(self, words: int = 300, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Embedding(8, width)
        self.conv, self.head = nn.Conv1d(width, 16, 3, padding=1), nn.Linear(16, 4)

    def embedded(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids):
        return self.head(torch.relu(self.conv(self.embedded(ids).transpose(1, 2))).mean(2))


def stored_tables(path, values: int = 300 * 32):
    return [(t.data_type, list(t.dims)) for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= values]


def table_quantizer(quantized):
    """What rounds the rows that are looked up in the table of words, or None."""
    lookup = next(node for node in quantized.body.graph.nodes if node.name == "embedding")
    readers = [quantized.body.get_submodule(user.target) for user in lookup.users if user.op == "call_module"]
    return next((module for module in readers if isinstance(module, RowQuantizer)), None)


@pytest.mark.parametrize("trained", [False, True], ids=["static", "trained"])
def test_a_table_that_is_only_looked_up_is_stored_in_integers(trained, tmp_path) -> None:
    """The table of positions is too small to gain by it. In training, rows that were looked up get a gradient, padding none."""
    torch.manual_seed(0)
    ids, other = torch.randint(1, 300, (4, 8)), torch.randint(300, (3, 8))
    ids[:, -1] = 0
    if trained:
        quantized = prepare_qat(Words(), [ids]).train()
        quantized(ids).sum().backward()
        changed = quantized.body.get_parameter("words.weight").grad.any(1)
        assert changed.nonzero().flatten().tolist() == sorted(set(ids.flatten().tolist()) - {0})
        quantized.convert_()
        quantized.eval()
    else:
        quantized = quantize_static(Words().eval(), [ids])
    reasons = quantized.placement.floating
    assert reasons["embedding"] == "it decodes rows of its table's integers"
    assert reasons["embedding_1"].startswith("no rule for")
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    assert stored_tables(path) == [(onnx.TensorProto.INT8, [300, 32])]
    assert ck.verify_onnx(path, quantized, [(other,)]).passed


def test_rows_have_scales_of_their_own() -> None:
    """One row that is a thousand times larger costs the others nothing."""
    torch.manual_seed(0)
    model = Words().eval()
    with torch.no_grad():
        model.words.weight[7] *= 1000
    quantized = quantize_static(model, [torch.randint(8, 300, (4, 8))])
    exact = model.words.weight.detach()
    rows = table_quantizer(quantized)(exact[8:], exact)
    assert (rows - exact[8:]).square().sum() < 1e-4 * exact[8:].square().sum()
    assert not torch.equal(rows, exact[8:])


class WordsAndMean(Words):
    """The table is read by something else, too."""

    def embedded(self, ids):
        return super().embedded(ids) - self.words.weight.mean(0)


class HalfAsked(Words):
    """A second module of the same table, which a user may name."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Embedding(300, 32)
        self.again.weight = self.words.weight

    def embedded(self, ids):
        return super().embedded(ids) + self.again(ids.flip(1))


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (Words, {"skip": ("words",)}),
        (Words, {"skip": ("embedding",)}),
        (Words, {"target": TENSORRT}),
        (WordsAndMean, {}),
        (HalfAsked, {"skip": ("again",)}),
        (lambda: Words(300, 1), {}),
        (lambda: nn.Sequential(Words(300, 4), nn.Linear(4, 20000), nn.ReLU(), nn.Linear(20000, 4)), {}),
    ],
    ids=["module", "value", "runtime", "read by others", "one lookup of two", "a column", "little of the weights"],
)
def test_tables_that_stay_float(model, settings) -> None:
    torch.manual_seed(0)
    quantized = quantize_static(model().eval(), [torch.randint(300, (4, 8))], **settings)
    assert table_quantizer(quantized) is None


@pytest.mark.parametrize("settings", [{"bits": {"": Bits(weights=4)}}, {"target": X86_NO_VNNI}], ids=["layers", "no VNNI"])
def test_bits_of_layers_are_none_of_tables(settings, tmp_path) -> None:
    """A table has eight: fewer are a choice for layers, or keep products from overflowing."""
    ids = torch.randint(300, (4, 8))
    quantized = quantize_static(Words().eval(), [ids], **settings)
    assert table_quantizer(quantized).table.scheme.bits == 8
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    assert ck.verify_onnx(path, quantized, [(ids,)]).passed


def test_a_record_of_before_tables_were_rounded_is_read() -> None:
    torch.manual_seed(0)
    ids, model = torch.randint(300, (4, 8)), Words().eval()
    quantized = quantize_static(model, [ids])
    saved = json.loads(json.dumps(record(quantized)))
    assert table_quantizer(rebuild(Words(), saved)) is not None
    saved["placement"]["floating"]["embedding"] = "no rule for aten.embedding.default"
    assert table_quantizer(rebuild(Words(), saved)) is None


def test_a_table_that_two_lookups_read_is_stored_once(tmp_path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(300, (4, 8))
    quantized = quantize_static(HalfAsked().eval(), [ids])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    assert stored_tables(path) == [(onnx.TensorProto.INT8, [300, 32])]
    assert ck.verify_onnx(path, quantized, [(ids,)]).passed


def test_no_more_of_a_masked_table_is_zero_than_the_mask_says(tmp_path) -> None:
    torch.manual_seed(0)
    ids, model = torch.randint(300, (4, 8)), Words().eval()
    with torch.no_grad():
        model.words.weight[:, ::4] *= 1e-4  # would be rounded to zero
        model.words.weight[:, 1] = 0
    Masks({"words.weight": model.words.weight != 0}).apply_(model)
    path = ck.export_onnx(quantize_static(model, [ids]), tmp_path / "q.onnx", ids)
    (table,) = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if list(t.dims) == [300, 32]]
    assert ((table == 0) == (model.words.weight == 0).numpy()).all()


def test_a_call_does_not_round_the_whole_table() -> None:
    """Of hundreds of thousands of rows, a batch reads few."""
    torch.manual_seed(0)
    quantized, rows = quantize_static(Words().eval(), [torch.randint(300, (4, 8))]), []
    handle = table_quantizer(quantized).table.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    quantized(torch.randint(300, (2, 8)))
    handle.remove()
    assert rows == [16]


class Features(nn.Module):
    """Rows of features in their own units, which BatchNorm evens out."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        units = torch.tensor([1000.0, 100.0, 1.0, 1.0] if trained else [1.0, 1.0, 1.0, 1.0])
        self.features = nn.Embedding.from_pretrained(torch.rand(300, 4) * units)
        self.norm, self.hidden, self.out = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, ids):
        return self.out(torch.relu(self.hidden(self.norm(self.features(ids)))))


@pytest.mark.parametrize("way", [quantize_static, quantize_dynamic, prepare_qat])
def test_a_table_whose_columns_differ_in_size_stays_float(way, tmp_path) -> None:
    """Steps of prices are larger than all rates. A folder says so, since the model that it is loaded into has other values."""
    torch.manual_seed(0)
    model, ids = Features(), torch.randint(300, (64,))
    for _ in range(50):
        model(torch.randint(300, (256,)))
    model.eval()
    quantized = way(model, [ids])
    quantized = quantized.convert_() or quantized if way is prepare_qat else quantized
    assert table_quantizer(quantized) is None
    assert quantized.placement.floating["embedding"].startswith("one scale for each row loses columns")
    error = (quantized(ids) - model(ids)).square().sum() / model(ids).square().sum()
    assert error < 1e-2
    ck.save(quantized.eval(), tmp_path / "saved")
    assert torch.equal(ck.load(Features(trained=False), tmp_path / "saved")(ids), quantized(ids))


@pytest.mark.parametrize("way", [quantize_static, quantize_dynamic])
def test_a_table_with_a_column_that_does_not_matter_is_rounded(way) -> None:
    """As training may leave it small: what it loses changes no output."""
    torch.manual_seed(0)
    model, ids = Words().eval(), torch.randint(300, (8, 8))
    with torch.no_grad():
        model.words.weight[:, 5] *= 1e-3
    assert loses_columns(model.words.weight)
    assert table_quantizer(way(model, [ids])) is not None


def test_a_folder_rounds_a_table_whatever_the_model_holds_that_it_is_loaded_into(tmp_path) -> None:
    torch.manual_seed(0)
    model, ids = Features(trained=False).eval(), torch.randint(300, (64,))
    quantized = quantize_static(model, [ids])
    assert table_quantizer(quantized) is not None
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(Features(), tmp_path / "saved")(ids), quantized(ids))


@pytest.mark.parametrize(("beside_float", "kept"), [(1.0, True), (4.0, False)])
def test_measurement_leaves_tables_float_where_integers_buy_no_time(beside_float, kept, monkeypatch) -> None:
    """Else their integers are for the size."""

    def latency(paths, inputs, *, threads, seconds):
        def one(path):
            if path.name == "float.onnx":
                return beside_float
            stored = {tuple(t.dims): t.data_type for t in onnx.load(path).graph.initializer}
            layers = [shape for shape in ((16, 32, 3), (4, 16)) if stored.get(shape) == onnx.TensorProto.INT8]
            return 3.5 - len(layers) - (stored[300, 32] == onnx.TensorProto.FLOAT) / 2

        return [one(path) for path in paths]

    monkeypatch.setattr(latency_search, "latency", latency)
    monkeypatch.setattr(latency_search, "predicted_placements", lambda *_: [])
    quantized = quantize_static(Words().eval(), [torch.randint(300, (4, 8))], choose="measure")
    assert (table_quantizer(quantized) is None) == kept
    assert ("lookups in rounded tables in float" in str(quantized.placement)) == kept


def test_sparse_gradients_keep_the_zeros_of_a_table() -> None:
    """Those of rows that were looked up; the padding row is zero from the beginning."""
    torch.manual_seed(0)

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(300, 32, padding_idx=0, sparse=True), nn.Linear(32, 2)

        def forward(self, ids):
            return self.out(self.words(ids).mean(1))

    model = Sparse()
    with torch.no_grad():
        model.words.weight[:, 3] = 0
    batches = [(torch.randint(300, (16, 5)), torch.randint(2, (16,))) for _ in range(3)]
    task = ck.Task(train=batches, val=batches)
    before = model.words.weight.detach().clone()
    trained = ck.QAT(epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))(model, task)
    after = trained.body.get_parameter("words.weight").detach()
    assert torch.equal(after == 0, before == 0)
    assert not torch.equal(after, before)


def test_a_lookup_with_max_norm_is_refused_where_it_would_train() -> None:
    model, ids = nn.Sequential(nn.Embedding(300, 32, max_norm=1.0), nn.Linear(32, 8)), torch.randint(300, (4, 8))
    with pytest.raises(
        ck.ModelError, match=r"prepare_qat: 0 looks up with max_norm, of which torch has no gradient .*max_norm=None"
    ):
        prepare_qat(model, [ids])
    model[0].weight.requires_grad_(False)
    prepare_qat(model, [ids])
