"""Quantized models are rebuilt from files."""

from __future__ import annotations

import copy
import math
import operator

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.quant import Quantized, quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.accuracy_target.mixed_model import INT8, PRECISIONS, build_mixed
from compresskit.quant.dynamic.placement_dynamic import ALL_ZERO, DEFAULT_OPERATORS
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.numerics.targets import X86


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
