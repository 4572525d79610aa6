"""QAT as a stage: accuracy that it recovers, precisions that it trains in."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.quant import X86, Bits, Target, prepare_qat


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


def conv_norm(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]


def test_a_rate_that_batchnorm_allows_is_allowed_with_frozen_statistics() -> None:
    """With the plain gradient the loss was above 5 after some steps; with that of normalized batches alone it drifted away."""
    torch.manual_seed(0)
    means, model = torch.randn(4, 3, 8, 8), nn.Sequential(*(layer for i in range(9) for layer in conv_norm(3 if i == 0 else 16)))
    model.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten()).append(nn.Linear(16, 4))

    def loss_of_a_step(model, optimizer) -> float:
        target = torch.randint(4, (64,))
        loss = F.cross_entropy(model(means[target] + 1.5 * torch.randn(64, 3, 8, 8)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
    for _ in range(60):
        loss_of_a_step(model, optimizer)
    alive = prepare_qat(model.eval(), [torch.randn(64, 3, 8, 8)], bits=Bits(weights=4))
    optimizer = torch.optim.SGD(alive.parameters(), lr=0.02, momentum=0.9)
    before = [loss_of_a_step(alive, optimizer) for _ in range(30)]
    alive.freeze_statistics_()
    after = [loss_of_a_step(alive, optimizer) for _ in range(60)]
    assert max(before[10:]) < 0.3
    assert max(after) < 0.3


@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16], ids=lambda p: p.name)
def test_qat_trains_under_every_precision(policy, tmp_path) -> None:
    task = images_task(ck)
    model = build(networks.Residual)
    quantized = ck.QAT(epochs=1, precision=policy)(model, task)
    assert {v.dtype for v in quantized.state_dict().values()} == {torch.float32, torch.int32, torch.int8}
    ck.export_onnx(quantized, tmp_path / "q.onnx", task.example())
    assert ck.verify_onnx(tmp_path / "q.onnx", quantized, [image(32)]).passed
