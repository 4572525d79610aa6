"""Quantized models are rebuilt from files."""

from __future__ import annotations

import copy
import json
import math
import operator

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError
from compresskit.quant import Quantized, quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.accuracy_target.mixed_model import INT8, PRECISIONS, build_mixed
from compresskit.quant.dynamic.placement_dynamic import ALL_ZERO, DEFAULT_OPERATORS
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.numerics.targets import X86
from compresskit.quant.serialize import INPUT_DTYPES, rebuild, record


class Layers(nn.Module):
    """A linear layer and a product, wide enough to be cut, and a branch, a matrix and a head that may begin with zeros."""

    def __init__(self, *, zeros: bool = False) -> None:
        super().__init__()
        self.a, self.branch, self.head = nn.Linear(16, 48), nn.Linear(48, 48), nn.Linear(32, 4)
        self.bias, self.matrix = nn.Parameter(torch.zeros(32)), nn.Parameter(torch.randn(48, 32) / 7)
        for layer in (self.branch, self.head) if zeros else ():
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        x = F.relu(self.a(x))
        return self.head(F.relu(torch.addmm(self.bias, x + self.branch(x), self.matrix)))


class Words(nn.Module):
    """Of its layers, pruning cuts some and leaves others."""

    def __init__(self, kind=nn.LSTM) -> None:
        super().__init__()
        self.words, self.rnn, self.mid, self.head = nn.Embedding(40, 16), kind(16, 24), nn.Linear(24, 32), nn.Linear(32, 4)

    def forward(self, ids):
        return self.head(F.relu(self.mid(self.rnn(self.words(ids))[0])))


def ids(n: int = 4) -> torch.Tensor:
    return torch.randint(0, 40, (n, 6))


def rows(n: int = 4) -> torch.Tensor:
    return torch.randn(n, 16)


def mixed(model: nn.Module, x: torch.Tensor) -> Quantized:
    """Blocks of 8 bits, and dynamic int8."""
    return build_mixed(model, (x,), X86, {"linear": PRECISIONS[1], "linear_1": INT8, "addmm": INT8, "linear_2": INT8})


QUANTIZATIONS = {
    "dynamic": quantize_dynamic,
    "static": lambda model, x: quantize_static(model, [x]),
    "blocks": quantize_weights,
    "palettes": lambda model, x: quantize_weights(model, x, scheme=Palette(bits=3)),
    "mixed": mixed,
}


def loads(quantized: Quantized, given: nn.Module, x: torch.Tensor, folder) -> Quantized:
    """What is loaded into the model given; it is asserted that it computes the same to the bit, by the same graph."""
    ck.save(quantized, folder)
    again = ck.load(given, folder)
    assert isinstance(again, Quantized)
    with torch.no_grad():
        assert torch.equal(again(x), quantized(x))
    assert operator.eq(str(again.body.graph), str(quantized.body.graph))
    assert operator.eq(again.origin, quantized.origin)
    return again


def test_a_saved_model_is_rebuilt_to_the_bit(tmp_path) -> None:
    model = build(networks.Residual)
    quantized = quantize_static(model, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    assert isinstance(again, Quantized)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))
    assert operator.eq(str(again.placement), str(quantized.placement))


def test_a_pruned_and_quantized_model_is_rebuilt_to_the_bit(tmp_path) -> None:
    model = build(networks.Residual)
    pruned = copy.deepcopy(model)
    ck.prune.apply_(pruned, ck.prune.plan_channels(pruned, image(2), budget=ck.keep(macs=0.6), round_to=4))
    quantized = quantize_static(pruned, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)), rows),
        (networks.Residual, lambda n=4: image(n)[0]),
        (Layers, rows),
        (Words, ids),
        (lambda: Words(nn.GRU), ids),
    ],
    ids=["mlp", "convolutions", "product", "lstm", "gru"],
)
def test_a_pruned_and_dynamically_quantized_model_is_rebuilt_to_the_bit(make, inputs, tmp_path) -> None:
    """Tensors that were cut hold zeros until values are loaded, which do not tell that they stayed float."""
    model = make().eval()
    ck.prune.apply_(model, ck.prune.plan_channels(model, (inputs(2),), budget=ck.keep(macs=0.6)))
    quantized = quantize_dynamic(model, inputs(), operators=(*DEFAULT_OPERATORS, "conv"))
    again = loads(quantized, make(), inputs(8), tmp_path / "saved")
    assert ALL_ZERO not in again.placement.floating.values()
    file = ck.export_onnx(again, tmp_path / "q.onnx", inputs())
    assert ck.verify_onnx(file, quantized, [(inputs(8),)]).passed


def test_a_pruned_model_of_mixed_precision_is_rebuilt_to_the_bit(tmp_path) -> None:
    model, fresh = Layers().eval(), Layers()
    ck.prune.apply_(model, ck.prune.plan_channels(model, (rows(2),), budget=ck.keep(macs=0.6)))
    again = loads(mixed(model, rows()), fresh, rows(8), tmp_path)
    assert set(again.placement.integer) == {"linear_1", "addmm", "linear_2"}


@pytest.mark.matrix
@pytest.mark.parametrize("zeros", [False, True], ids=["weights", "some all zero"])
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_values_of_the_model_that_is_loaded_into_decide_nothing(kind, zeros, tmp_path) -> None:
    """Neither those of a new instance, whose branch and head begin with zeros or do not, nor any other ones."""
    quantized = QUANTIZATIONS[kind](Layers(zeros=zeros).eval(), rows())
    if kind in ("dynamic", "mixed"):
        floating = quantized.placement.floating
        assert [name for name, reason in floating.items() if reason == ALL_ZERO] == ["linear_1", "linear_2"] * zeros
    for begins_with_zeros in (False, True):
        loads(quantized, Layers(zeros=begins_with_zeros), rows(8), tmp_path)
    for value in (0.0, 1.0, math.nan):
        given = Layers()
        with torch.no_grad():
            for parameter in given.parameters():
                parameter.fill_(value)
        loads(quantized, given, rows(8), tmp_path)


def test_weights_are_looked_at_again_after_a_model_was_loaded(tmp_path) -> None:
    loads(quantize_dynamic(Layers().eval(), rows()), Layers(), rows(), tmp_path)
    assert quantize_dynamic(Layers(zeros=True).eval(), rows()).placement.floating["linear_2"] == ALL_ZERO


class Samples(nn.Module):
    """Takes numbers of any type, as a recorder or a table gives them, (2, 32) each or what is broadcast to that."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 4)

    def forward(self, *inputs):
        return self.head(sum((x.real if x.is_complex() else x).float().expand(2, 32) / 128 for x in inputs))


class Masked(nn.Module):
    """An LSTM over rows whose lengths come from a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids, mask):
        lengths = mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(padded)


class Bag(nn.Module):
    """Reads the rows of a batch, one after the other, with where each begins, in several forms."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(30, 8), nn.Linear(8, 4)

    def forward(self, ids, where, scale=None, *, double=False):
        y = self.head(self.words(ids, where["offsets"]))
        return y * 2 if double else y


LONG = torch.arange(20) < torch.tensor([20, 9])[:, None]  # the mask of two rows
IDS = torch.randint(1, 29, LONG.shape, generator=torch.Generator().manual_seed(0))


def plain_record(model: Quantized) -> dict:
    """The record as a file gives it back."""
    plain: dict = json.loads(json.dumps(record(model), allow_nan=False))
    return plain


def test_inputs_of_any_type_are_rebuilt() -> None:
    """With the values of masks, lengths and the like; samples of the data are not in the record."""
    numbers = torch.randn(2, 32).abs() * 60
    samples = {name: numbers.to(dtype) for name, dtype in INPUT_DTYPES.items() if name not in ("torch.bool", "torch.complex32")}
    samples |= {"pictures of two colours": (numbers > 40).float(), "the same in bytes": (numbers > 40).to(torch.uint8) * 255}
    kept = {
        "bools": numbers > 40,
        "zeros behind ones": (torch.arange(32) < torch.tensor([[20], [9]])).float(),
        "added to scores": torch.zeros(2, 32).masked_fill(numbers > 90, -torch.inf),
        "fractions": torch.linspace(0, 1, 32),
        "lengths": torch.randint(1, 9, (32,)),
        "sizes": torch.tensor([[3], [4]]),
        "one number": torch.tensor(7, dtype=torch.int16),
    }
    model = Samples().eval()
    quantized = quantize_dynamic(model, (*samples.values(), *kept.values()), dynamic=())
    saved = plain_record(quantized)
    inputs = dict(zip([*samples, *kept], rebuild(Samples(), saved).example, strict=True))
    for name, value in kept.items():
        assert torch.equal(inputs[name], value), name
    for name, value in samples.items():
        assert inputs[name].dtype == value.dtype, name
        assert not torch.equal(inputs[name].to(torch.complex128), value.to(torch.complex128)), name
    ids, greatest = samples["torch.int64"], samples["torch.int64"].max()
    # Indices: the greatest may be padding, as the least may, so that one between them stands for the others.
    assert torch.equal(inputs["torch.int64"], ids.where(ids == greatest, ids[ids < greatest].max()))
    assert (inputs["torch.int16"] == samples["torch.int16"].max()).all()
    assert (inputs["torch.float64"] == 0).all()
    assert max(len(one["values"]) for one in saved["example"]["args"]) <= 64


def test_a_model_of_rows_with_a_mask_is_rebuilt_to_the_bit(tmp_path) -> None:
    quantized = quantize_dynamic(Masked().eval(), (IDS, LONG), dynamic=(0, 1))
    ck.save(quantized, tmp_path)
    again = ck.load(Masked(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS, LONG), quantized(IDS, LONG))
    saved = plain_record(quantized)
    saved["example"]["args"][1] = {"shape": [2, 20], "dtype": "torch.bool"}  # as an earlier compresskit did
    with pytest.raises(ModelError, match=r"the values that the file keeps of the example.*Length of all samples"):
        rebuild(Masked(), saved)


SIZES = (300, 40, 5)  # of the tables of three columns
ROWS = torch.stack([torch.randint(0, size, (2,), generator=torch.Generator().manual_seed(i)) for i, size in enumerate(SIZES)], 1)


class Categories(nn.Module):
    """A table for each column, or row, of one tensor of indices."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim, self.head = dim, nn.Linear(24, 3)
        self.tables = nn.ModuleList([nn.Embedding(size, 8) for size in SIZES])

    def rows(self, x):
        return [x.select(self.dim, i) for i in range(3)]

    def forward(self, x):
        found = [table(ids) for table, ids in zip(self.tables, self.rows(x), strict=True)]
        return self.head(torch.cat(found, -1))


class Together(Categories):
    """The second index is the sum of two columns."""

    def rows(self, x):
        return [x[:, 0], x[:, 0] + x[:, 1], x[:, 2]]


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Categories(), ROWS),
        (Categories(1), ROWS[:, :, None].repeat(1, 1, 4)),
        (Together(), torch.tensor([[0, 39, 1], [39, 0, 2], [20, 19, 3]])),
    ],
    ids=["columns", "columns of rows in time", "columns that go together"],
)
def test_indices_in_tables_of_several_sizes_are_saved(model, x, tmp_path) -> None:
    quantized = quantize_dynamic(model.eval(), (x,), dynamic=())
    ck.save(quantized, tmp_path)
    again = ck.load(copy.deepcopy(model), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), quantized(x))
    if type(model) is Together:
        assert torch.equal(again.example[0], x[:1].repeat(3, 1))  # nothing less runs


def test_no_more_of_indices_is_saved_than_the_model_needs() -> None:
    x = torch.randint(0, 5, (2, 9), generator=torch.Generator().manual_seed(1))
    quantized = quantize_dynamic(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)).eval(), (x,))
    assert torch.equal(
        rebuild(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)), plain_record(quantized)).example[0], x.clamp(3)
    )
    many = torch.randint(0, 5, (200,), generator=torch.Generator().manual_seed(1))
    quantized = quantize_dynamic(nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 3)).eval(), (many,), dynamic=())
    plain_record(quantized)  # of one dimension, which has no columns


def test_offsets_and_flags_are_saved(tmp_path) -> None:
    x = {"ids": IDS.flatten(), "where": {"offsets": torch.tensor([0, 3, 7])}, "scale": None, "double": True}
    quantized = quantize_dynamic(Bag().eval(), x, dynamic=())
    ck.save(quantized, tmp_path)
    again = ck.load(Bag(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**x), quantized(**x))
    assert again.example["scale"] is None
    assert again.example["double"] is True
    quantized.example["scale"] = object()
    with pytest.raises(CheckpointError, match="an input of the model is of type object"):
        ck.save(quantized, tmp_path)


def test_records_of_earlier_versions_are_read() -> None:
    """They have the greatest value of integers, and none of others."""
    saved = plain_record(quantize_dynamic(Samples().eval(), (torch.randint(0, 9, (2, 32)), torch.randn(2, 32)), dynamic=()))
    sizes = {"shape": [2, 32]}
    saved["example"] = {"args": [sizes | {"dtype": "torch.int64", "value": 39}, sizes | {"dtype": "torch.float32"}]}
    whole, numbers = rebuild(Samples(), saved).example
    assert torch.equal(whole, torch.full((2, 32), 39))
    assert torch.equal(numbers, torch.zeros(2, 32))
