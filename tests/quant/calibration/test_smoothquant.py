"""Moving what is hard to round: the float model computes what it did, and rounding loses less."""

from __future__ import annotations

import copy

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.quant import quantize_static, smooth_


class Block(nn.Module):
    """Tokens (N, T, 32) to (N, 7): layer norms, attention by hand or by torch, a gated layer behind an RMS norm."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.enter, self.one, self.qkv, self.out = nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.two, self.gate, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.last, self.head = nn.LayerNorm(32), nn.Linear(32, 7)

    def forward(self, x):
        x = self.enter(x)
        q, k, v = self.qkv(self.one(x)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        by_hand = (q @ k.transpose(2, 3) / 8**0.5).softmax(3) @ v
        y = F.scaled_dot_product_attention(q, k, v) if self.fused else by_hand
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.two(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.last(x).mean(1))


def block(fused: bool = True) -> nn.Module:
    model = Block(fused).eval()
    with torch.no_grad():
        for norm in (model.one, model.two):
            norm.weight[::8] = 25.0  # outliers, as trained transformers have them
        model.one.bias[3] += 40.0
        model.qkv.bias[64:] += torch.randn(32) * 3  # v
    return model


def tokens(n: int = 8):
    return (torch.randn(n, 10, 48),)


@pytest.mark.parametrize("fused", [True, False])
def test_smoothing_keeps_the_function(fused) -> None:
    model = block(fused).double()
    before, old = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    data = [(x.double(),) for (x,) in (tokens(), tokens(4))]
    x = tokens(16)[0].double()
    assert smooth_(model, data) >= 3
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-12, rtol=1e-12)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, old[name])}
    assert {"one.weight", "one.bias", "qkv.weight", "qkv.bias", "out.bias", "two.weight", "gate.weight", "up.weight"} <= changed
    assert not changed & {"enter.weight", "last.weight"}  # the residual stream is read by others; the mean is not a product
    places = (model.qkv.bias - before.qkv.bias).abs()
    assert places[64:].max() > 0.1


def test_without_shift_only_factors_are_applied() -> None:
    model = block()
    before = copy.deepcopy(model)
    assert smooth_(model, [tokens()], shift=False) >= 2
    assert torch.equal(model.out.bias, before.out.bias)
    factor = before.one.weight / model.one.weight
    torch.testing.assert_close(before.one.bias[3] / model.one.bias[3], factor[3])
    assert factor.max() / factor.min() > 2
    nothing = block()
    assert smooth_(nothing, [tokens()], shift=False, strengths=(0.0,)) == 0


def noise(model, quantized, x) -> float:
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    return float(oracles.sqnr(wanted, got))


def test_static_integers_keep_their_accuracy(tmp_path) -> None:
    model, x = block(), tokens(128)
    plain, smoothed = (quantize_static(model, [tokens(64)], smooth=on) for on in (False, True))
    assert noise(model, smoothed, x) > noise(model, plain, x) + 3
    path = ck.export_onnx(smoothed, tmp_path / "q.onnx", tokens())
    assert ck.verify_onnx(path, smoothed, [x]).passed
    ck.save(smoothed, tmp_path / "kept")
    again = ck.load(Block(), tmp_path / "kept")
    with torch.no_grad():
        torch.testing.assert_close(again(*x), smoothed.eval()(*x), atol=0, rtol=0)


def test_first_and_last_layer_stay_float_where_they_are_small() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.head = nn.Linear(4, 64), nn.Linear(64, 4)
            self.blocks = nn.Sequential(
                *[nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
            )

        def forward(self, x):
            return self.head(self.blocks(self.enter(x)).mean(1))

    model, x = Deep().eval(), (torch.randn(16, 9, 4),)
    floating = quantize_static(model, [x]).placement
    reasons = {floating.layers[name]: reason for name, reason in floating.floating.items() if "layer and" in reason}
    assert set(reasons) == {"enter", "head"}
    assert "it is the first layer and 0.3% of the MACs" in reasons["enter"]
    assert noise(model, quantize_static(model, [x]), x) > noise(model, quantize_static(model, [x], smooth=False), x)


def test_no_batch_nan_and_bad_settings_are_refused() -> None:
    with pytest.raises(DataError, match="no calibration batch"):
        smooth_(block(), [])
    with pytest.raises(SettingError, match="strengths"):
        smooth_(block(), [tokens()], strengths=(1.5,))
    with pytest.raises(DataError, match="one: what it hands on is nan or infinite"):
        smooth_(block(), [(torch.full((2, 10, 48), torch.nan),)])
    with pytest.raises(ModelError, match="quantized already"):
        smooth_(quantize_static(block(), [tokens()]), [tokens()])
