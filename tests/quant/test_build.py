"""Building a quantized model from a float one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.export import export_onnx, verify_onnx
from compresskit.quant import prepare_qat, quantize_dynamic, quantize_static, quantize_weights
from compresskit.quant.weight_only import Palette


class Mixed(nn.Module):
    """A layer norm, an operator that no rule knows, and layers that run in integers or do not."""

    def __init__(self, *layers: str) -> None:
        super().__init__()
        self.layers, self.conv, self.norm = layers, nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(8)
        self.gru, self.head, self.matrix = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 8), nn.Parameter(torch.eye(8))

    def forward(self, x):
        x = self.norm(self.conv(x)).cumsum(1).flatten(1, 2)
        for name in self.layers:
            x = x.bmm(x.transpose(1, 2)).bmm(x) if name == "attention" else x
            x = self.gru(x)[0] if name == "gru" else x
            x = F.linear(x, self.head.weight * x.abs().mean()) if name == "computed" else x
            x = torch.einsum("abc,cd->abd", x, self.matrix) if name == "einsum" else x
        return self.head(x)


def test_strict_takes_operators_without_weights() -> None:
    x = torch.randn(2, 4, 8, 8)
    placement = quantize_static(Mixed("attention").eval(), [x], strict=True).placement
    assert {"layer_norm", "cumsum", "bmm"} < set(placement.floating)
    assert [placement.costs[name].macs for name in placement.integer] == [4 * 4 * 9 * 64, 8 * 8 * 32]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("gru", "1 of 3 layers with weights would stay float: gru: X86 runs no recurrent in integers. Name them in skip="),
        ("computed", "1 of 3 layers with weights would stay float: linear: its weight is computed"),
    ],
)
def test_strict_names_layers_that_would_stay_float(layer, message) -> None:
    x = torch.randn(2, 4, 8, 8)
    for method in (quantize_static, prepare_qat):
        with pytest.raises(ModelError, match=f"strict=True: {message}"):
            method(Mixed(layer).eval(), [x], strict=True)
    quantized = quantize_static(Mixed(layer).eval(), [x])
    node = next(name for name in quantized.placement.floating if name in quantized.placement.costs)
    quantize_static(Mixed(layer).eval(), [x], strict=True, skip=(node,))


class Sums(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


class Pooled(nn.Module):
    def __init__(self, top):
        super().__init__()
        self.conv, self.head, self.top = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), top

    def forward(self, x):
        return self.top(self.head(self.conv(x).relu().mean((2, 3))))


def test_strict_about_all_operators_takes_a_model_in_integers_only() -> None:
    x = torch.randn(2, 3, 8, 8)
    for method in (quantize_static, prepare_qat):
        assert not method(Pooled(nn.ReLU()).eval(), [x], strict="all").placement.floating
        message = r'strict="all": 1 of \d+ operators would stay float: top: no rule for aten.cumsum.default. Put others'
        with pytest.raises(ModelError, match=message):
            method(Pooled(Sums()).eval(), [x], strict="all")
        with pytest.raises(ModelError, match='strict="all": 1 of .* head: '):
            method(Pooled(nn.Identity()).eval(), [x], strict="all", skip=("head",))
    quantize_static(Pooled(Sums()).eval(), [x], strict=True)


def test_strict_is_one_of_three() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(SettingError, match="strict=...\\): wanted False, True or \"all\", got 'every'"):
        quantize_static(Pooled(nn.ReLU()), [x], strict="every")
    with pytest.raises(SettingError, match='choose="measure" leaves float what is faster so'):
        quantize_static(Pooled(nn.ReLU()), [x], strict="all", choose="measure")


FORMS = {
    "static": quantize_static,
    "dynamic": quantize_dynamic,
    "qat": prepare_qat,
    "blocks": quantize_weights,
    "palette": partial(quantize_weights, scheme=Palette(bits=3)),
}


@pytest.mark.parametrize("form", FORMS)
def test_torchs_default_dtype_changes_nothing(form, monkeypatch, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(32, 32)
    wanted = FORMS[form](model, [x]).eval()
    torch.set_default_dtype(torch.float64)
    try:
        found = FORMS[form](model, [x]).eval()
        assert torch.equal(found(x), wanted(x))
        path = export_onnx(found, tmp_path / "f.onnx", (x,))
        assert verify_onnx(path, found, [x]).passed
        state = found.train().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name for name, value in state.items() if value.dtype is torch.float64} == set()
