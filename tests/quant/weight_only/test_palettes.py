"""Palettes: the centroids are those of least error, files hold as many bits as they say and compute what the model does."""

from __future__ import annotations

import doctest

import numpy as np
import onnx
import onnxruntime
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.export.check.contents import inspect_onnx
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import get_tensor
from compresskit.measure import numpy_inputs, session
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.numerics import palette
from compresskit.quant.numerics.palette import PaletteQuantizer, cluster
from compresskit.quant.weight_only import MATMUL_NBITS, Palette, gptq
from compresskit.quant.weight_only.weight_model import matrix_quantizers


def error(values, centroids) -> float:
    return float((np.abs(np.asarray(values)[:, None] - centroids).min(1) ** 2).sum())


class Mixed(nn.Module):
    """Ids (N, T) to (N, 10): a table, convolutions, one of them grouped, a linear layer, a product by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(50, 24), nn.Conv1d(24, 32, 3, padding=1)
        self.grouped, self.norm = nn.Conv1d(32, 32, 3, padding=1, groups=4), nn.BatchNorm1d(32)
        self.linear, self.inner = nn.Linear(32, 40), nn.Parameter(torch.randn(40, 10))

    def forward(self, ids):
        x = self.norm(self.grouped(F.relu(self.conv(self.words(ids).transpose(1, 2)))))
        return F.relu(self.linear(x.mean(2))) @ self.inner


def ids(n: int = 4):
    return (torch.randint(0, 50, (n, 6)),)


def with_palettes(model, chosen, **settings_):
    return quantize_weights(model, ids(), scheme=chosen, convolutions=chosen, embeddings=chosen, **settings_)


def test_docstrings_are_true() -> None:
    assert doctest.testmod(palette).failed == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 11), st.integers(1, 4), st.booleans(), st.integers(0, 10_000))
def test_clusters_have_the_least_error(many, count, tied, seed) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 6, many).astype(float) if tied else random.normal(100, 1, many)
    found = cluster(values, count)
    assert found.shape == (count,)
    assert (np.diff(found) >= 0).all()
    wanted = oracles.clusters(values, min(count, many))
    assert abs(error(values, found) - wanted) < 1e-9


def test_many_numbers_come_close_to_the_optimal_quantizer() -> None:
    values = np.random.default_rng(0).normal(size=40_000)
    # Lloyd-Max of a normal distribution (Max, 1960, table I)
    for count, wanted in ((2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497)):
        found = error(values, cluster(values, count)) / len(values)
        assert abs(found / wanted - 1) < 0.03
    np.testing.assert_array_equal(cluster(values, 16), cluster(values[::-1], 16))
    outlier = np.append(values, 100.0)
    assert error(outlier, cluster(outlier, 16)) < 1.2 * error(values, cluster(values, 15))


@pytest.mark.parametrize(("bits", "group_size"), [(1, 5), (3, None), (4, 5), (7, None)])
def test_files_compute_what_the_model_does(bits, group_size, tmp_path) -> None:
    model, chosen = Mixed().eval(), Palette(bits=bits, group_size=group_size)
    quantized = with_palettes(model, chosen)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids())
    other = ids(7)
    for optimize in (True, False):
        runtime = session(path, optimize=optimize)
        got = torch.from_numpy(runtime.run(None, numpy_inputs(runtime, other))[0])
        torch.testing.assert_close(got, quantized(*other).detach(), rtol=1e-4, atol=1e-5)
    assert ck.verify_onnx(path, quantized, [other, ids(1)]).passed
    for name, quantizer in matrix_quantizers(quantized.body).items():
        weight = get_tensor(quantized.body, name).detach()
        rows = quantizer.rows(weight)
        for part in rows.split(group_size or len(rows)):
            assert len(part.unique()) <= 2**bits
        indices, table, places = quantizer.stored(weight)
        torch.testing.assert_close(table[indices.int() + places], weight, rtol=0, atol=0)
    assert quantized.plan.bytes < path.stat().st_size < quantized.plan.bytes + 9_000


def test_groups_have_the_centroids_of_their_channels() -> None:
    model = nn.Sequential(nn.Linear(20, 7)).eval()
    quantized = quantize_weights(model, torch.randn(2, 20), scheme=Palette(bits=2, group_size=3))
    found = get_tensor(quantized.body, "0.weight").detach()
    for begin in (0, 3, 6):
        values = model[0].weight.detach()[begin : begin + 3].double().numpy()
        centroids = cluster(values.ravel(), 4)
        wanted = centroids[np.abs(values[..., None] - centroids).argmin(-1)]
        np.testing.assert_allclose(found[begin : begin + 3], wanted, rtol=1e-6)


def test_more_bits_and_smaller_groups_are_closer() -> None:
    noise = []
    for chosen in (Palette(bits=2), Palette(bits=3), Palette(bits=3, group_size=4), Palette(bits=5)):
        plan = with_palettes(Mixed().eval(), chosen).plan
        noise.append(sum(row.sqnr for row in plan.rows))
    assert noise == sorted(noise)


def test_the_runtime_computes_the_weights_when_it_loads_the_file(tmp_path) -> None:
    path = ck.export_onnx(with_palettes(Mixed().eval(), Palette(bits=3)), tmp_path / "q.onnx", ids())
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "o.onnx"), 4
    onnxruntime.InferenceSession(str(path), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "o.onnx").graph.node]
    assert kinds.count("Gather") == 1  # of the words
    assert not {"Mod", "GreaterOrEqual", "Cast", "Add"} & set(kinds)


def test_any_opset_stores_the_same_weights(tmp_path) -> None:
    quantized, sizes = with_palettes(Mixed().eval(), Palette(bits=3)), []
    for opset in (21, 18, 16):
        path = ck.export_onnx(quantized, tmp_path / f"{opset}.onnx", ids(), opset=opset)
        assert ck.verify_onnx(path, quantized, [ids(7)]).passed
        sizes.append(path.stat().st_size)
    assert max(sizes[:2]) < sizes[2] - 2_000  # bit planes need opset 18; before, an index takes a byte


def test_inspect_shows_the_weights(tmp_path) -> None:
    path = ck.export_onnx(with_palettes(Mixed().eval(), Palette(bits=2)), tmp_path / "q.onnx", ids())
    layers = {layer.operator: layer for layer in inspect_onnx(path).layers}
    assert set(layers) == {"Conv", "Gather", "Gemm", "MatMul"}
    assert layers["Gather"].dtype == "int2 palette"
    assert layers["Gather"].shape == (50, 24)
    assert layers["Gather"].bytes == 50 * 24 * 2 // 8 + 4 * 4 + 4
    assert "weight_words_weight" in layers["Gather"].weight


def test_a_recipe_saves_and_reloads_it(tmp_path) -> None:
    data = [(ids(8)[0], torch.randint(0, 10, (8,))) for _ in range(2)]
    stage = ck.WeightQuant(scheme=Palette(bits=3), convolutions=Palette(bits=2, group_size=8))
    result = ck.Recipe(stage).run(Mixed(), ck.Task(train=data, val=data), out=tmp_path / "run")
    again = ck.load(Mixed(), tmp_path / "run" / "1-weightquant")
    x = ids()
    torch.testing.assert_close(again(*x), result.model.eval()(*x), atol=0, rtol=0)
    assert str(again.plan) == str(result.model.plan)
    runs = {row.name: row.runs for row in again.plan.rows}
    assert runs["linear.weight"] == "3-bit indices, one palette"
    assert runs["conv.weight"] == "2-bit indices, a palette for 8 channels"
    assert runs["words.weight"] == "8 bits, a scale a row"


def test_tied_weights_have_one_palette(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 24)

        def forward(self, ids):
            return F.linear(self.words(ids).mean(1), self.words.weight)

    quantized = quantize_weights(Tied().eval(), ids(), scheme=Palette(bits=4), embeddings=Palette(bits=4))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids())
    assert ck.verify_onnx(path, quantized, [ids(7)]).passed
    stored = [t for t in onnx.load(path).graph.initializer if list(t.dims) == [50, 24]]
    assert [onnx.TensorProto.DataType.Name(t.data_type) for t in stored] == ["INT4"]


def test_rounded_weights_train_from_centroid_to_centroid() -> None:
    quantized = with_palettes(Mixed(), Palette(bits=2)).train()
    F.cross_entropy(quantized(*ids(8)), torch.arange(8)).backward()
    assert quantized.body.inner.grad.abs().sum() > 0
    with torch.no_grad():
        quantized.body.inner.add_(0.9)
    rounding = matrix_quantizers(quantized.body)["inner"]
    assert isinstance(rounding, PaletteQuantizer)
    rounded = rounding(quantized.body.inner)
    assert set(rounded.unique().tolist()) <= set(rounding.centroids.unique().tolist())
    assert not torch.equal(rounded, quantized.body.inner)


def test_stored_zeros_are_those_of_the_masks() -> None:
    model = Mixed().eval()
    ck.prune.plan_mask(model, ck.remove(weights=0.6), include=("linear", "inner", "conv")).apply_(model)
    quantized = with_palettes(model, Palette(bits=2))
    mine = masks_of(quantized)
    assert mine is not None
    for name, mask in mine.masks.items():
        weight = get_tensor(quantized, name)
        rounding = matrix_quantizers(quantized.body)[name.removeprefix("body.")]
        assert torch.equal(rounding(weight) != 0, mask), name
    with pytest.raises(ModelError, match="pruning left zeros in it, and a palette of one bit has two values"):
        with_palettes(model, Palette(bits=1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Palette(bits=0), r"Palette\(bits=...\): wanted 1..8, got 0"),
        (lambda: Palette(bits=9), "wanted 1..8, got 9"),
        (lambda: Palette(bits=2.5), "wanted a whole number, got 2.5"),
        (lambda: Palette(group_size=0), "wanted the number of channels that share centroids, or None, got 0"),
        (lambda: ck.WeightQuant(scheme=Palette(), rounding=gptq), r"WeightQuant\(scheme=...\): rounding=... works on the grid"),
        (lambda: ck.WeightQuant(embeddings=Palette(), storage=MATMUL_NBITS), "got a palette; leave storage=DEQUANTIZE_LINEAR"),
        (lambda: quantize_weights(Mixed().eval(), ids(), scheme=Palette(), awq=True), "inner: awq=True works on the grid"),
        (
            lambda: quantize_weights(
                Mixed().eval(), ids(), overrides={"linear.weight": Palette()}, storage=MATMUL_NBITS, embeddings=BlockScheme()
            ),
            "linear.weight: .* packs the integers of a BlockScheme",
        ),
    ],
)
def test_bad_settings_are_refused(make, said) -> None:
    with pytest.raises(SettingError, match=said):
        make()


def test_numbers_far_from_zero_have_the_same_clusters() -> None:
    numbers = np.random.default_rng(0).normal(size=400)
    np.testing.assert_allclose(cluster(numbers + 1e8, 8) - 1e8, cluster(numbers, 8), atol=1e-6)


def test_the_centroids_of_a_group_are_those_of_its_own_weights_that_stay() -> None:
    torch.manual_seed(0)
    mask = torch.stack([torch.arange(16) % 2 == n // 2 for n in range(4)])  # the two groups have other places
    rows = torch.randn(4, 16) * mask
    both = PaletteQuantizer(Palette(bits=2, group_size=2), (4, 16), 1)
    both.fit_(rows, mask, "w")
    for group in range(2):
        part = slice(2 * group, 2 * group + 2)
        alone = PaletteQuantizer(Palette(bits=2), (2, 16), 1)
        alone.fit_(rows[part], mask[part], "w")
        assert torch.equal(both.centroids[group], alone.centroids[0])


def test_zeros_of_a_mask_take_one_centroid() -> None:
    torch.manual_seed(0)
    mask = torch.arange(64).view(4, 16) % 4 == 0
    rows = (torch.randn(4, 16) + 3) * mask
    quantizer = PaletteQuantizer(Palette(bits=2), (4, 16), 1)
    quantizer.fit_(rows, mask, "w")
    kept = rows[mask].double().numpy()
    np.testing.assert_allclose(quantizer.centroids[0].numpy(), np.sort([0.0, *cluster(kept, 3)]), rtol=1e-6)
