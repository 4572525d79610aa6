"""Names of quantizers and stored weights never collide with names of the user's model."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.calibration.equalize import equalize_
from compresskit.quant.qat.qat import prepare_qat

WAYS = {
    "static": lambda model, x: quantize_static(model, [(x,)]),
    "dynamic": lambda model, x: quantize_dynamic(model, (x,)),
    "weights": lambda model, x: quantize_weights(model, (x,)),
}


def agrees(quantized, x, folder):
    return ck.verify_onnx(ck.export_onnx(quantized, folder / "m.onnx", (x,)), quantized, [(x,)]).passed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [8, 16])
def test_weights_whose_names_differ_by_a_dot_are_two_weights(way, width, tmp_path):
    x = torch.randn(64, 8)
    parts = OrderedDict(a=nn.Sequential(nn.Linear(8, width)), relu=nn.ReLU(), a_0=nn.Linear(width, 8))
    assert agrees(WAYS[way](nn.Sequential(parts).eval(), x), x, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["quantizers", "graph", "code", "meta"])
def test_a_module_may_have_any_name(way, name, tmp_path):
    x = torch.randn(16, 8)
    model = nn.Sequential(OrderedDict([(name, nn.Sequential(nn.Linear(8, 16), nn.ReLU())), ("head", nn.Linear(16, 4))])).eval()
    assert agrees(WAYS[way](model, x), x, tmp_path)
    assert {key.split(".")[0] for key in model.state_dict()} == {name, "head"}


class Cast(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_cast_may_be_rounded(way, tmp_path):
    x = torch.randn(16, 8)  # its node is called "to", as a method of every module
    assert agrees(WAYS[way](nn.Sequential(Cast(), nn.Linear(8, 4)).eval(), x), x, tmp_path)


class Functional(nn.Module):
    """A linear layer whose tensors have the names that the lowered graph would give its own."""

    def __init__(self):
        super().__init__()
        self.linear_weight, self.linear_bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return nn.functional.linear(x, self.linear_weight, self.linear_bias)


def test_a_bias_may_be_called_as_the_lowered_graph_calls_its_own(tmp_path):
    x = torch.randn(4, 5, 8)
    assert agrees(WAYS["static"](Functional().eval(), x), x, tmp_path)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.b(self.a(x)[0])[0]


def test_two_lstms_have_their_own_weights(tmp_path):
    x = torch.randn(4, 5, 8)
    assert agrees(quantize_dynamic(Recurrent().eval(), (x,)), x, tmp_path)


def test_a_batchnorm_called_like_the_holder_of_quantizers_trains_and_folds():
    x = torch.randn(8, 3, 8, 8)
    parts = OrderedDict(conv=nn.Conv2d(3, 4, 3), quantizers=nn.BatchNorm2d(4), relu=nn.ReLU(), head=nn.Conv2d(4, 2, 3))
    model = nn.Sequential(parts).eval()
    quantized = prepare_qat(model, [(x,)])
    count = len(quantized.quantizers())
    assert count == len(quantize_static(model, [(x,)]).quantizers())
    quantized(x).sum().backward()
    quantized.convert_()
    assert len(quantized.quantizers()) == count
    torch.testing.assert_close(quantized.eval()(x), model(x), atol=0.2, rtol=0)


def test_a_reserved_name_keeps_its_mask_and_its_place_in_equalization():
    x = torch.randn(16, 8)
    model = nn.Sequential(OrderedDict(graph=nn.Linear(8, 16), relu=nn.ReLU(), head=nn.Linear(16, 4))).eval()
    with torch.no_grad():
        model.graph.weight[0] *= 100
        before, weight = model(x), model.graph.weight.clone()
        assert equalize_(model, [(x,)]) == 1
        assert not torch.equal(model.graph.weight, weight)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["static", "dynamic"])
def test_a_model_with_reserved_names_is_loaded_as_it_was_saved(way, tmp_path):
    x = torch.randn(16, 8)

    def fresh():
        return nn.Sequential(OrderedDict(code=nn.Linear(8, 16), relu=nn.ReLU(), quantizers=nn.Linear(16, 4))).eval()

    quantized = WAYS[way](fresh(), x)
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(fresh(), tmp_path / "saved")(x), quantized(x))
