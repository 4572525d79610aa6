"""Inputs of a model in the forms that callers use."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build

import compresskit as ck
from compresskit.base.errors import DataError
from compresskit.graph.capture import capture
from compresskit.measure import latency


def test_one_tensor_stands_for_the_inputs(tmp_path) -> None:
    model, x = build(networks.Chain).eval(), torch.randn(8, 3, 16, 16)
    assert ck.count_macs(model, x) == ck.count_macs(model, (x,))
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.5), round_to=4)
    assert ck.prune.prove(model, plan, x) is None
    quantized = ck.quant.quantize_static(model, [x, [x]])
    assert ck.quant.equalize_(model, x) >= 0
    assert ck.quant.quantize_dynamic(model, x)(x).shape == (8, 10)
    assert ck.quant.quantize_weights(model, [x], rounding=ck.quant.weight_only.gptq)(x).shape == (8, 10)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert len(latency([path], x, seconds=0.01)) == 1
    torch.testing.assert_close(capture(model, x).module(x), model(x))
    ck.quant.correct_bias_(quantized, [x])
    ck.quant.diagnose(quantized, [x])
    ck.quant.prepare_qat(model, [x])
    ck.prune.reestimate_batchnorm_(model, [x])
    with pytest.raises(DataError, match="quantize_static: wanted batches of inputs, such as .*, or one batch, got int"):
        ck.quant.quantize_static(model, 3)
    with pytest.raises(DataError, match=r"the example: wanted inputs as a tensor, a tuple or a dict of them, got int"):
        capture(model, 3)
