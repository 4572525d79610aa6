"""Matrices in few bits: what is stored, what files compute, GPTQ and scaling, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import get_tensor
from compresskit.measure import numpy_inputs, session
from compresskit.quant import BlockScheme, quantize_weights
from compresskit.quant.numerics.block_grid import BlockQuantizer, WeightMatrix
from compresskit.quant.numerics.error_feedback import rounded_in_turn
from compresskit.quant.weight_only import DEQUANTIZE_LINEAR, MATMUL_NBITS, MATMUL_NBITS_INT8, gptq, round_to_nearest
from compresskit.quant.weight_only.weight_model import block_quantizers

WORDS, WIDTH = 200, 52


class Reader(nn.Module):
    """Ids (N, T) to (N, 5): a table, a transformer layer, a product by a parameter, `addmm`, a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.inner = nn.Parameter(torch.randn(width, 40) / width**0.5)
        self.mixed, self.shift = nn.Parameter(torch.randn(40, 32) / 6), nn.Parameter(torch.randn(32))
        self.head = nn.Linear(32, 5)

    def forward(self, ids):
        x = self.body(self.words(ids)).mean(1) @ self.inner
        return self.head(torch.addmm(self.shift, F.relu(x), self.mixed))


def ids(n: int = 8, length: int = 12):
    return (torch.randint(0, WORDS, (n, length)),)


def ran(path, inputs, *, optimize=True):
    runtime = session(path, optimize=optimize)
    return torch.from_numpy(runtime.run(None, numpy_inputs(runtime, inputs))[0])


CASES = [
    (BlockScheme(bits=4, block_size=32), DEQUANTIZE_LINEAR),
    (BlockScheme(bits=4, block_size=64, symmetric=False), DEQUANTIZE_LINEAR),
    (BlockScheme(bits=8, block_size=None), DEQUANTIZE_LINEAR),
    (BlockScheme(bits=8, block_size=128, symmetric=False), DEQUANTIZE_LINEAR),
    (BlockScheme(bits=3, block_size=None, symmetric=False), DEQUANTIZE_LINEAR),
    (BlockScheme(bits=4, block_size=32), MATMUL_NBITS),
    (BlockScheme(bits=2, block_size=16, symmetric=False), MATMUL_NBITS),
    (BlockScheme(bits=6, block_size=None), MATMUL_NBITS),
    (BlockScheme(bits=4, block_size=64, symmetric=False), MATMUL_NBITS_INT8),
    (BlockScheme(bits=8, block_size=None), MATMUL_NBITS_INT8),
]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("scheme", "storage"), CASES, ids=str)
def test_files_compute_what_the_model_does(scheme, storage, tmp_path) -> None:
    model = Reader().eval()
    table = replace(scheme, block_size=16) if scheme.bits == 4 else BlockScheme(bits=8, block_size=None)
    quantized = quantize_weights(model, ids(), scheme=scheme, storage=storage, embeddings=table, dynamic=(0, 1))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids())
    other = ids(6, 9)  # another batch, another length
    with torch.no_grad():
        wanted = quantized(*other)
    if storage is not MATMUL_NBITS_INT8:  # whose rounding of inputs may fall to the other side of a tie
        torch.testing.assert_close(ran(path, other, optimize=False), wanted, atol=2e-6, rtol=1e-5)
    proof = ck.verify_onnx(path, quantized, [other])
    assert proof.passed, proof
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert ("MatMulNBits" in kinds) == storage.onnxruntime
    assert ("DequantizeLinear" in kinds) == (not storage.onnxruntime)
    if storage is MATMUL_NBITS:
        assert proof.optimized.largest < 0.01


@pytest.mark.parametrize("scheme", [BlockScheme(), BlockScheme(symmetric=False), BlockScheme(bits=8, block_size=64)], ids=str)
def test_stored_integers_decode_to_the_weights(scheme, tmp_path) -> None:
    model = Reader().eval()
    quantized = quantize_weights(model, ids(), scheme=scheme)
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", ids()))
    stored = {tensor.name: tensor for tensor in file.graph.initializer}
    nodes = [n for n in file.graph.node if n.op_type == "DequantizeLinear" and "linear1" in n.input[0]]
    assert len(nodes) == 1
    arrays = [onnx.numpy_helper.to_array(stored[name]).astype(np.float64) for name in nodes[0].input if name]
    rounded, integers, scales, points = oracles.blocks(
        model.body.layers[0].linear1.weight.detach(), scheme.bits, scheme.block_size, scheme.symmetric
    )
    np.testing.assert_array_equal(arrays[0].T, integers)
    np.testing.assert_allclose(arrays[1].T, scales, rtol=1e-6)
    if not scheme.symmetric:
        np.testing.assert_array_equal(arrays[2].T, points)
    np.testing.assert_allclose(get_tensor(quantized.body, "body.layers.0.linear1.weight").detach(), rounded, atol=1e-6)
    narrow = "INT4" if scheme.symmetric else "UINT4"
    assert onnx.TensorProto.DataType.Name(stored[nodes[0].input[0]].data_type) == (narrow if scheme.bits == 4 else "INT8")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(2, 8),
    st.sampled_from([16, 32, None]),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_rounding_to_nearest_equals_numpy(channels, inputs, bits, block, symmetric, seed) -> None:
    weight = torch.randn(channels, inputs, generator=torch.Generator().manual_seed(seed))
    scheme = BlockScheme(bits=bits, block_size=block, symmetric=symmetric)
    rounded, scale, zero_point = round_to_nearest(WeightMatrix(weight, scheme, None, lambda: torch.empty(0)))
    wanted, integers, scales, points = oracles.blocks(weight, bits, block, symmetric)
    np.testing.assert_allclose(rounded, wanted, atol=1e-6)
    np.testing.assert_allclose(scale, scales, rtol=1e-6)
    np.testing.assert_array_equal(zero_point, points)
    quantizer = BlockQuantizer(scheme, (channels, inputs), 1)
    quantizer.set_grid_(scale, zero_point)
    quantizer.enabled = True
    torch.testing.assert_close(quantizer(rounded), rounded, atol=0, rtol=0)  # what is on the grid stays
    np.testing.assert_array_equal(quantizer.integers(weight), integers)


def correlated(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs // 4) @ torch.randn(inputs // 4, inputs) + 0.3 * torch.randn(rows, inputs)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [16, None])
@pytest.mark.parametrize("masked", [False, True])
def test_gptq_equals_the_naive_algorithm(block, symmetric, masked) -> None:
    weight, x = torch.randn(6, 40), correlated(500, 40)
    x[:, 7] = 0  # an input that never speaks
    second = (x.double().T @ x.double()) / len(x)
    mask = torch.rand(6, 40) > 0.5 if masked else None
    if mask is not None:
        weight = weight * mask
    scheme = BlockScheme(bits=3, block_size=block, symmetric=symmetric)
    rounded, scale, zero_point = gptq(WeightMatrix(weight, scheme, mask, lambda: second), columns=8)
    naive = oracles.gptq(
        weight, second, scale.double().numpy(), zero_point.numpy(), 3, block, symmetric,
        mask=None if mask is None else mask.numpy(),
    )  # fmt: skip
    np.testing.assert_allclose(rounded, naive, atol=1e-5)
    if mask is not None:
        assert not rounded[~mask].any()


@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_loses_less_than_rounding_to_nearest(ordered) -> None:
    weight, x = torch.randn(16, 96), correlated(2000, 96)
    rows = WeightMatrix(weight, BlockScheme(bits=4, block_size=32), None, lambda: (x.double().T @ x.double()) / len(x))
    lost = [float((x @ (weight - how(rows)[0]).T).square().mean()) for how in (round_to_nearest, partial(gptq, ordered=ordered))]
    assert lost[1] < 0.5 * lost[0]
    smaller = float((x @ (weight - gptq(rows, ordered=ordered, damping=100.0)[0]).T).square().mean())
    assert smaller > lost[1]  # all damping and no data: nearest again


def test_gptq_on_a_model_is_better_and_repeatable(tmp_path) -> None:
    model, data = Reader().eval(), [ids(32) for _ in range(4)]
    test = ids(64)
    with torch.no_grad():
        wanted = model(*test)
        losses = []
        for rounding in (round_to_nearest, gptq):
            quantized = quantize_weights(model, data, rounding=rounding, embeddings=None)
            losses.append(float((quantized(*test) - wanted).square().mean()))
    assert losses[1] < 0.7 * losses[0]
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", ids()), quantized, [test]).passed


class Loud(nn.Module):
    """A few inputs of the first product are far larger than the others; those of the last cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 8)
        with torch.no_grad():
            self.norm.weight[::16] = 30.0
            self.up.bias[0] += 40.0

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


def test_awq_lowers_the_error_of_inputs_with_outliers(tmp_path) -> None:
    model, data, test = Loud().eval(), [(torch.randn(64, 64),)], (torch.randn(256, 64),)
    plain = quantize_weights(model, test)
    scaled = quantize_weights(model, data, awq=True, storage=MATMUL_NBITS)  # products in float: a block of int8 knows no outliers
    with torch.no_grad():
        wanted = model(*test)
        lost = [float((q(*test) - wanted).square().mean()) for q in (plain, scaled)]
    assert lost[1] < 0.8 * lost[0]
    notes = {row.name: row.note for row in scaled.plan.rows}
    assert "folded" in notes["up.weight"]
    assert "at run time" in notes["down.weight"]
    assert scaled.origin.scaled == ("gelu",)
    path = ck.export_onnx(scaled, tmp_path / "q.onnx", test)
    assert ck.verify_onnx(path, scaled, [test]).passed
    products = [n for n in onnx.load(path).graph.node if n.op_type == "Mul"]
    assert sum("scaled_gelu" in name for n in products for name in n.input) == 1


def test_tied_tables_and_convolutions_are_rounded(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.conv = nn.Embedding(WORDS, 32), nn.Conv1d(32, 32, 3, padding=1)

        def forward(self, ids):
            return self.conv(self.words(ids).transpose(1, 2)).mean(2) @ self.words.weight.T

    model = Tied().eval()
    quantized = quantize_weights(model, ids(), convolutions=BlockScheme(bits=8, block_size=None))
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", ids()), quantized, [ids(64)]).passed
    runs = {row.name: row.runs for row in quantized.plan.rows}
    assert runs == {"words.weight": "4 bits, blocks of 32", "conv.weight": "8 bits, a scale a row"}  # as the product wants it
    left = quantize_weights(model, ids(), overrides={"words.weight": None}, convolutions=BlockScheme(bits=8, block_size=None))
    assert {row.name: row.runs for row in left.plan.rows}["words.weight"] == "float: overrides= leaves it float"
    assert "convolutions=" in str(quantize_weights(model, ids()).plan)


def test_files_shrink_as_the_plan_says(tmp_path) -> None:
    model = nn.Sequential(nn.Embedding(WORDS, 256), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    whole = ck.export_onnx(model, tmp_path / "f.onnx", ids()).stat().st_size
    for scheme, most in (
        (BlockScheme(bits=8, block_size=None), 0.27),
        (BlockScheme(bits=4, block_size=32), 0.18),
        (BlockScheme(bits=4, block_size=128), 0.16),
    ):
        for storage in (DEQUANTIZE_LINEAR, MATMUL_NBITS):
            quantized = quantize_weights(model, ids(), scheme=scheme, storage=storage)
            size = ck.export_onnx(quantized, tmp_path / "q.onnx", ids()).stat().st_size
            assert size < most * whole
            assert quantized.plan.bytes < size < quantized.plan.bytes + 10_000


def test_the_plan_lists_formats_remarks_and_reasons() -> None:
    model = Reader().eval()
    with torch.no_grad():
        model.head.weight.zero_()
    quantized = quantize_weights(
        model, ids(), skip=("body.layers.0.linear2",), overrides={"inner": BlockScheme(bits=8, block_size=None)}
    )
    text = str(quantized.plan)
    assert "52 inputs: the last block has 20, filled up with zeros" in text
    assert "all its weights are zero" in text
    assert "float: skipped by the user" in text
    rows = {row.name: row for row in quantized.plan.rows}
    assert rows["inner"].runs == "8 bits, a scale a row"
    assert 20 < rows["mixed"].sqnr < 30 < rows["inner"].sqnr
    with torch.no_grad():
        assert torch.isfinite(quantized(*ids())).all()


@pytest.mark.parametrize(
    ("scheme", "storage", "width"),
    [
        (BlockScheme(block_size=16), DEQUANTIZE_LINEAR, WIDTH),
        (BlockScheme(bits=8, block_size=None), DEQUANTIZE_LINEAR, WIDTH),
        (BlockScheme(block_size=16), MATMUL_NBITS, WIDTH),
        (BlockScheme(block_size=16), MATMUL_NBITS, 53),  # whose rows end in half a byte
        (BlockScheme(bits=2, block_size=16), MATMUL_NBITS, 53),
    ],
)
def test_the_plan_says_which_tables_are_decoded_whole(scheme, storage, width, tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, width), nn.Linear(width, 5)).eval()
    quantized = quantize_weights(model, ids(), embeddings=scheme, storage=storage, dynamic=(0, 1))
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", ids()))
    decoded = {n.output[0] for n in file.graph.node if n.op_type == "DequantizeLinear"}
    whole = any(n.op_type == "Gather" and n.input[0] in decoded for n in file.graph.node)
    assert ("all rows are decoded in every call" in quantized.plan.rows[0].note) == whole
    assert whole == (scheme.bits == 4 and (storage is DEQUANTIZE_LINEAR or width % 2 == 1))


def test_rounded_weights_train_in_steps_of_their_grid() -> None:
    quantized = quantize_weights(Reader(), ids()).train()
    F.cross_entropy(quantized(*ids()), torch.arange(8) % 5).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in quantized.named_parameters() if "norm" not in n and p.ndim > 1
    )
    before = block_quantizers(quantized.body)["inner"].integers(quantized.body.inner)
    with torch.no_grad():
        quantized.body.inner.add_(block_quantizers(quantized.body)["inner"].scale.max() * 3)
    after = block_quantizers(quantized.body)["inner"].integers(quantized.body.inner)
    assert not torch.equal(before, after)


def test_a_recipe_saves_and_reloads_it(tmp_path) -> None:
    data = [(ids(16)[0], torch.randint(0, 5, (16,))) for _ in range(3)]
    task = ck.Task(train=data, val=data)
    model = Reader()
    stage = ck.WeightQuant(rounding=gptq, awq=True, samples=16, storage=MATMUL_NBITS_INT8)
    result = ck.Recipe(stage).run(model, task, out=tmp_path / "run")
    again = ck.load(Reader(), tmp_path / "run" / "1-weightquant")
    with torch.no_grad():
        x = ids(4)
        torch.testing.assert_close(again(*x), result.model.eval()(*x), atol=0, rtol=0)
    assert str(again.plan) == str(result.model.plan)


def test_stored_zeros_are_those_of_the_masks(tmp_path) -> None:
    model = Reader().eval()
    erk = ck.prune.allocations.erk_ratios
    masks = ck.prune.plan_mask(model, ck.remove(weights=0.6), allocation=erk, include=("inner", "mixed"))
    masks.apply_(model)
    data = [ids(16)]
    quantized = quantize_weights(model, data, rounding=gptq, awq=True, scheme=BlockScheme(bits=3))
    mine = masks_of(quantized)
    assert mine is not None
    assert not mine.violations(quantized)
    for name, quantizer in block_quantizers(quantized.body).items():
        mask = mine.masks.get(f"body.{name}")
        if mask is not None:
            integers = quantizer.weight(quantizer.integers(quantized.body.get_parameter(name)))
            assert torch.equal(integers != 0, mask), name


WRONG = [
    (dict(skip="head"), r"skip=...\): wanted a tuple of texts, got 'head'"),
    (dict(strict=3), r"strict=...\): wanted True or False, got 3"),
    (dict(strict="all"), r'strict="all"\): wanted True or False: .* "all" is of quantize_static and QAT; write strict=True'),
    (dict(dynamic="x"), r"dynamic=...\): wanted dimensions, such as \(0, 2, 3\)"),
    (dict(scheme=4), r"scheme=...\): wanted a number format, such as ck.quant.BlockScheme\(bits=8, block_size=None\), got 4"),
    (dict(embeddings=8), r"embeddings=...\): wanted a number format.* or None for float, got 8"),
    (dict(overrides=["a"]), r"overrides=...\): wanted \{"),
    (dict(overrides={"inner": 4}), r"overrides=\{'inner': ...\}\): wanted a number format"),
    (dict(storage="x"), r"storage=...\): wanted a storage such as ck.quant.weight_only.MATMUL_NBITS, got 'x'"),
    (dict(rounding="gptq"), r"rounding=...\): wanted a function such as ck.quant.weight_only.gptq, got 'gptq'"),
    (dict(awq="no"), r"awq=...\): wanted True or False, got 'no'"),
]


@pytest.mark.parametrize(("settings_", "said"), [*WRONG, (dict(samples="a"), r"samples=...\): wanted a whole number")])
def test_the_stage_refuses_the_same_where_it_is_made(settings_, said) -> None:
    with pytest.raises(SettingError, match=rf"WeightQuant\({said}"):
        ck.WeightQuant(**settings_)


@pytest.mark.parametrize(
    ("settings_", "error", "said"),
    [
        (dict(batches=[]), DataError, "quantize_weights: no calibration batch"),
        (dict(skip=("nowhere",)), SettingError, "nowhere"),
        (dict(overrides={"nowhere": None}), SettingError, "the matrices are"),
        (dict(convolutions=BlockScheme()), SettingError, "one scale for each channel"),
        *((settings, SettingError, rf"quantize_weights\({said}") for settings, said in WRONG),
    ],
)
def test_bad_settings_are_refused(settings_, error, said) -> None:
    with pytest.raises(error, match=said):
        quantize_weights(Reader().eval(), **dict(batches=ids()) | settings_)


def test_nan_and_models_without_matrices_are_refused() -> None:
    model = Loud().eval()
    with pytest.raises(DataError, match="norm: what it hands on is nan or infinite on the calibration data"):
        quantize_weights(model, [(torch.full((4, 64), torch.nan),)], rounding=gptq)
    with torch.no_grad():
        model.down.weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match=r"down.weight: holds nan or infinite values"):
        quantize_weights(model, (torch.randn(4, 64),))
    with pytest.raises(ModelError, match="no matrix that can be rounded"):
        quantize_weights(nn.LayerNorm(8), (torch.randn(4, 8),))
    quantized = quantize_weights(Loud().eval(), (torch.randn(4, 64),))
    with pytest.raises(ModelError, match="quantized already"):
        quantize_weights(quantized, (torch.randn(4, 64),))
    for bad in (dict(bits=1), dict(bits=9), dict(block_size=48), dict(block_size=8)):
        with pytest.raises(SettingError, match="wanted"):
            BlockScheme(**bad)
    with pytest.raises(SettingError, match="columns >= 1"):
        gptq(WeightMatrix(torch.ones(2, 2), BlockScheme(), None, lambda: torch.eye(2)), damping=0.0)
    with pytest.raises(SettingError, match="samples"):
        ck.WeightQuant(samples=0)


def test_strict_names_what_stays_float() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(16, 16)), nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x) * self.table

    model = Odd().eval()
    assert "aten.mul.Tensor reads it" in str(quantize_weights(model, (torch.randn(16, 16),), dynamic=()).plan)
    with pytest.raises(ModelError, match="table would stay float"):
        quantize_weights(model, (torch.randn(16, 16),), dynamic=(), strict=True)


def test_layers_with_folded_batchnorm_are_rounded(tmp_path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 40), nn.BatchNorm1d(40), nn.ReLU()
    )
    x = torch.randn(16, 3, 8, 8)
    model(x)
    quantized = quantize_weights(model.eval(), x[:4], convolutions=BlockScheme(bits=8, block_size=None))
    assert len([m for m in quantized.modules() if isinstance(m, BlockQuantizer)]) == 2
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x[:4])
    torch.testing.assert_close(ran(path, (x,), optimize=False), quantized(x), rtol=1e-4, atol=1e-4)


class Looked(nn.Module):
    """A layer, or a product by a second table, that reads what it looks up; `tied`: the table is the layer's weight, too."""

    def __init__(self, kind: str, width: int = 24) -> None:
        super().__init__()
        self.kind, self.table, self.other = kind, nn.Embedding(31, width), nn.Embedding(31, 24)
        self.layer = nn.Linear(width, 24)

    def forward(self, ids):
        x = self.table(ids)
        if self.kind == "tied":
            return F.linear(F.relu(x), self.table.weight)
        return self.layer(x) if self.kind == "layer" else x @ self.other(torch.cat([ids, ids, ids[:, :6]], 1))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["layer", "product"])
@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("symmetric", [False, True])
def test_products_read_looked_up_rows_with_zero_points(kind, block, symmetric, tmp_path) -> None:
    """ONNX Runtime multiplies such rows in integers by one zero point, and refused to run where each row has its own."""
    given = torch.randint(0, 31, (4, 9))
    table = BlockScheme(bits=8, block_size=block, symmetric=False)
    layer = BlockScheme(bits=8, block_size=block, symmetric=symmetric)
    quantized = quantize_weights(Looked(kind).eval(), given, scheme=layer, embeddings=table)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", given)
    assert ck.verify_onnx(path, quantized, [(given,)]).passed


@pytest.mark.parametrize("storage", [MATMUL_NBITS, DEQUANTIZE_LINEAR], ids=["nbits", "standard"])
@pytest.mark.parametrize(("width", "block"), [(23, None), (13, 16)])
def test_zero_points_of_bytes_that_equal_those_of_four_bits_stay_bytes(width, block, storage, tmp_path) -> None:
    """torch's exporter merges equal tensors: packed zero points of one block, and those of a table that cannot be packed."""
    given = torch.randint(0, 31, (4, 9))
    four = BlockScheme(bits=4, block_size=block, symmetric=False)
    quantized = quantize_weights(Looked("tied", width).eval(), given, scheme=four, embeddings=four, storage=storage)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", given)
    assert ck.verify_onnx(path, quantized, [(given,)]).passed
    kinds = {i.data_type for i in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.UINT4 in kinds


@pytest.mark.parametrize("value", [1e21, 3e38])
def test_gptq_takes_values_whose_squares_fp32_does_not_hold(value) -> None:
    x = torch.randn(4, 10, 24)
    x[0, 0, 0] = value
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 7)).eval()
    quantized = quantize_weights(model, [x], rounding=gptq)
    assert all(torch.isfinite(p).all() for p in quantized.parameters())


def test_moments_that_are_not_finite_are_refused() -> None:
    moment = torch.full((1, 4, 4), torch.inf, dtype=torch.float64)
    with pytest.raises(DataError, match="second moments .* are nan or infinite; clean the calibration data"):
        rounded_in_turn(torch.randn(1, 3, 4), moment, lambda index, ahead: ahead(1)[..., 0])


def test_outputs_that_few_bits_lose_are_named(caplog) -> None:
    """Random Fourier features: a step of a large weight turns the phase by more than a radian."""
    torch.manual_seed(0)
    features = nn.Linear(2, 16)
    nn.init.normal_(features.weight, 0.0, 300.0)

    class Turned(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.features, self.factor, self.head = features, factor, nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.sin(self.factor * self.features(x)))

    eight, x = BlockScheme(bits=8, block_size=None), torch.rand(32, 2)
    quantize_weights(Turned(0.01).eval(), x, scheme=eight)
    assert not caplog.text
    quantize_weights(Turned(1.0).eval(), x, scheme=eight)
    assert "dB against that of the float model; print(quantized.plan) says what each weight lost" in caplog.text
