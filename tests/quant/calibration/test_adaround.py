"""Adaptive rounding: every weight on one of its two neighbours, layer outputs closer than rounded to nearest."""

from __future__ import annotations

from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.quant import X86, adaround_, diagnose, quantize_static
from compresskit.quant.numerics.quantizers import WeightQuantizer


def bits(count: int):
    return replace(X86, name=f"W{count}", weights=replace(X86.weights, bits=count))


def test_weights_lie_on_a_neighbouring_grid_point_and_outputs_are_closer() -> None:
    """Every weight is one of its two neighbours on the grid, and the layers' outputs are closer than rounded to nearest."""
    model, batches = build(networks.Residual), [image(64)]
    target = bits(3)
    nearest, quantized = (quantize_static(model, batches, target=target) for _ in range(2))
    before = {n: p.detach().clone() for n, p in quantized.body.named_parameters()}
    assert adaround_(quantized, batches, steps=300) == 5
    moved = 0
    for name, quantizer in quantized.body.quantizers.named_children():
        if isinstance(quantizer, WeightQuantizer):
            leaf = name.removeprefix("weight_").replace("_weight", "").replace("_0", ".0") + ".weight"
            weight, old = quantized.body.get_parameter(leaf), before[leaf]
            scale = quantizer.qparams(weight)[0].view(-1, *[1] * (weight.ndim - 1))
            assert torch.equal(quantizer(weight), weight)  # it lies on the grid
            inside = old.abs() < scale * 3
            assert ((weight - old).abs()[inside] <= (scale * 1.0001).expand_as(old)[inside]).all()
            moved += int(((weight - old).abs() > 0.5001 * scale)[inside].sum())
    assert moved > 20  # some were rounded to the farther neighbour
    x = image(64)
    with torch.no_grad():
        wanted = model(*x)
        assert oracles.sqnr(wanted, quantized(*x)) > oracles.sqnr(wanted, nearest(*x)) + 2
    assert diagnose(quantized, [x], model=model).sqnr > diagnose(nearest, [x], model=model).sqnr


def test_adaptive_rounding_survives_export_and_load(tmp_path) -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)], target=bits(4))
    adaround_(quantized, [image(16)], steps=20)
    x = image(16)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)), quantized, [x]).passed
    ck.save(quantized, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(networks.Chain(), tmp_path)(*x), quantized(*x))


def test_no_batch_and_bad_settings_are_refused() -> None:
    quantized = quantize_static(build(networks.Chain), [image(4)])
    with pytest.raises(DataError, match="adaround_: no calibration batch"):
        adaround_(quantized, [])
    for settings in ({"steps": 0}, {"batch_size": 0}, {"rate": 0.0}):
        with pytest.raises(SettingError, match=next(iter(settings))):
            adaround_(quantized, [image(4)], **settings)
