"""Whole trainings under a policy: what is learned, and the fp32 model at the end."""

from __future__ import annotations

import copy

import pytest
import torch
from mixed_runs import FP16_ON_CPU
from torch import nn
from torch.nn import functional as F

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import (
    AMP_BF16,
    AMP_FP16,
    FP32,
    MASTER_BF16,
    MASTER_FP16,
    prepare,
)

pytestmark = FP16_ON_CPU
POLICIES = [FP32, AMP_BF16, AMP_FP16, MASTER_BF16, MASTER_FP16]


def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def train(model, run, steps=10):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
        loss = nn.functional.cross_entropy(run(x), y)
        run.backward(loss)
        run.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_every_policy_trains_and_returns_an_fp32_model(policy) -> None:
    torch.manual_seed(0)
    model = net()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = prepare(model, optimizer, policy)
    losses = train(model, run)
    if policy.param_dtype is not None:
        assert model[0].weight.dtype == policy.param_dtype
        assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32  # BatchNorm stays
    assert run.finish() is model
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {torch.float32}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    wanted = train(reference, prepare(reference, plain, FP32))
    assert losses == pytest.approx(wanted, abs=0.05)


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


def test_fp32_equals_the_loop_without_a_run_bit_for_bit() -> None:
    torch.manual_seed(0)
    ours, plain = small(), small()
    plain.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, plain)]
    run = prepare(ours, optimizers[0], FP32)
    for _ in range(5):
        x = torch.randn(8, 4)
        run.backward(run(x).square().mean())
        run.step()
        plain(x).square().mean().backward()
        optimizers[1].step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(run.finish().state_dict().values(), plain.state_dict().values(), strict=True))


def handwritten_digits():
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    return x, torch.tensor(data.target)


@pytest.mark.parametrize("policy", [MASTER_BF16, MASTER_FP16], ids=lambda p: p.name)
def test_adamw_and_one_cycle_reach_in_half_the_accuracy_of_fp32(policy) -> None:
    """On scikit-learn's digits; figures on a GPU are those of benchmarks/mixed_gpu.py."""
    x, y = handwritten_digits()
    found = []
    for chosen in (FP32, policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = prepare(model, optimizer, chosen)
        run.schedule(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=150), on="attempt")
        for i in range(150):
            batch = slice(i % 14 * 100, i % 14 * 100 + 100)
            run.backward(F.cross_entropy(run(x[batch]), y[batch]))
            run.step()
        found.append((run.finish()(x[1400:]).argmax(1) == y[1400:]).float().mean().item())
    assert found[0] > 0.85
    assert found[1] == pytest.approx(found[0], abs=0.03)


def test_a_compiled_model_runs_under_a_policy() -> None:
    """`torch.compile` wraps the model like DDP does: prepare first, then assign it back. No breaks: casts are around it."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), MASTER_BF16)
        if wrap:
            run.model = torch.compile(run.model, backend="aot_eager", fullgraph=True)
        for i in range(4):
            run.backward(run(torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).square().mean())
            run.step()
        results.append(run.masters())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_clip_must_be_positive_and_the_optimizer_of_the_models_parameters() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=r"^prepare\(clip=\.\.\.\): wanted a positive, finite norm, got -1"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=-1)
    with pytest.raises(SettingError, match="not the model's"):
        prepare(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_half_models_are_refused_where_they_would_have_no_masters() -> None:
    """Under policies without a half dtype: torch's fused optimizers take them without a warning, and there are no masters."""
    half = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ModelError, match="weight is torch.bfloat16; give an fp32 model"):
        prepare(half, torch.optim.SGD(half.parameters(), lr=0.1))
    half = nn.Linear(2, 2).half()
    with pytest.raises(ModelError, match="weight is torch.float16; give an fp32 model"):
        prepare(half, torch.optim.AdamW(half.parameters(), fused=True), AMP_FP16)
