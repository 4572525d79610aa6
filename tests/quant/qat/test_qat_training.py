"""QAT as a stage: accuracy that it recovers, precisions that it trains in."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task

import compresskit as ck
from compresskit.quant import X86, Target


def test_qat_recovers_accuracy_that_rounding_lost() -> None:
    """At 2 bits static quantization loses much; training with the rounding in place gets most of it back."""
    model, task = build(networks.Residual), images_task(ck, samples=192, classes=4)
    ck.Train(epochs=20, optimizer=partial(torch.optim.Adam, lr=3e-3))(model, task)
    assert ck.evaluate(model, task) > 0.95
    coarse = Target(
        name="COARSE", operators=X86.operators, weights=ck.quant.Scheme(bits=2, signed=True, symmetric=True, per_channel=True)
    )
    static = ck.StaticQuant(target=coarse)(model, task)
    trained = ck.QAT(epochs=12, target=coarse, optimizer=torch.optim.Adam, objective=ck.imitate())(model, task)
    assert ck.evaluate(trained, task) > max(0.8, ck.evaluate(static, task) + 0.1)


@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16], ids=lambda p: p.name)
def test_qat_trains_under_every_precision(policy, tmp_path) -> None:
    task = images_task(ck)
    model = build(networks.Residual)
    quantized = ck.QAT(epochs=1, precision=policy)(model, task)
    assert {v.dtype for v in quantized.state_dict().values()} == {torch.float32, torch.int32, torch.int8}
    ck.export_onnx(quantized, tmp_path / "q.onnx", task.example())
    assert ck.verify_onnx(tmp_path / "q.onnx", quantized, [image(32)]).passed
