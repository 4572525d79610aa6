"""Mixed precision: what half loses and masters keep, scaling, skipping, handing back."""

from __future__ import annotations

import copy
from dataclasses import replace

import oracles
import pytest
import torch
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, MASTER_FP16, LossScaler, Policy, prepare

POLICIES = [FP32, AMP_BF16, AMP_FP16, MASTER_BF16, MASTER_FP16]
pytestmark = pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")  # what it warns of is meant here


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
def test_every_policy_trains_and_hands_back_fp32(policy) -> None:
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


@pytest.mark.parametrize(("policy", "step"), [(replace(MASTER_FP16, loss_scale=512.0), 5), (MASTER_BF16, 40)])
def test_small_updates_are_kept_by_masters(policy, step) -> None:
    """1 + 1e-4 is 1 in fp16; with masters the half copy moves once the sum is half a step (N3 of the checklist)."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy)
    moved = 0
    for i in range(1, 60):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
        if not moved and model.weight.item() != 1.0:
            moved = i
    assert moved == step
    run.finish()
    assert model.weight.item() == pytest.approx(1 + 59e-4, rel=1e-4)


@pytest.mark.filterwarnings("ignore:pure has no masters:UserWarning")
def test_small_updates_are_lost_without_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    pure = Policy(name="pure", param_dtype=torch.float16)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), pure)
    for _ in range(59):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
    assert model.weight.item() == 1.0


def test_small_gradients_survive_with_a_scale() -> None:
    for scale, kept in ((None, False), (2.0**12, True)):
        policy = Policy(name="p", param_dtype=torch.float16, master=True, loss_scale=scale)
        model = nn.Linear(1, 1, bias=False)
        before = model.weight.item()
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**20), policy)
        run.backward((run(torch.ones(1, 1)) * 2.0**-26).sum())
        run.step()
        run.finish()
        assert (model.weight.item() != before) is kept


def test_overflow_skips_and_backs_off() -> None:
    model = nn.Linear(2, 2)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), MASTER_FP16)
    before = copy.deepcopy(run.masters())
    run.backward(run(torch.full((1, 2), 60000.0)).sum())
    run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.masters(), strict=True))
    assert not run.optimizer.state
    assert run.stats() == {"scale": 2.0**15, "skipped": 1}
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.stats()["skipped"] == 1
    assert not torch.equal(before[0], run.masters()[0])


def test_scale_never_leaves_its_bounds_and_grows_after_clean_steps() -> None:
    scaler = LossScaler(4.0, interval=3, ceiling=16.0)
    for _ in range(100):
        scaler.found_inf.fill_(1)
        scaler.update()
    assert scaler.scale == 1.0
    scaler.found_inf.zero_()
    seen = []
    for i in range(20):
        scaler.found_inf.fill_(i == 4)  # one overflow starts the count again
        scaler.update()
        seen.append(scaler.scale.item())
    assert seen[:9] == [1, 1, 2, 2, 1, 1, 1, 2, 2]
    assert max(seen) == 16.0
    again = LossScaler(4.0, interval=3, ceiling=16.0)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_unscaled_gradients_equal_float64() -> None:
    scaler = LossScaler(2.0**13)
    grads = [torch.randn(50) * 2.0**13 for _ in range(3)]
    wanted = [g.double() / 2.0**13 for g in grads]
    scaler.unscale_(grads)
    assert all(torch.equal(g.double(), w) for g, w in zip(grads, wanted, strict=True))
    grads[1][7] = float("nan")
    scaler.unscale_(grads)
    assert scaler.found_inf == 1


def test_masters_are_updated_as_adamw_says() -> None:
    model = nn.Linear(3, 1, bias=False)
    start = model.weight.detach().clone()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), MASTER_BF16)
    gradients = [torch.tensor([[1.0, -0.5, 0.25]]) * (i + 1) for i in range(5)]  # exact in bf16
    for g in gradients:
        run.backward((model.weight * g.bfloat16()).sum())
        run.step()
    run.finish()
    torch.testing.assert_close(model.weight.double(), oracles.adamw(start, gradients, lr=1e-2), atol=1e-6, rtol=1e-5)


def test_clipping_is_on_unscaled_gradients() -> None:
    for policy in (FP32, replace(MASTER_FP16, loss_scale=512.0)):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, clip=0.5)
        run.backward(run(torch.tensor([[3.0, 4.0, 0.0, 0.0]])).sum())
        run.step()
        assert run.stats()["grad_norm"] == pytest.approx(5.0)
        run.finish()
        assert model.weight.norm().item() == pytest.approx(0.5, rel=1e-5)


def test_groups_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    groups = [{"params": [model[0].bias], "lr": 0.0}, {"params": [model[1].weight, model[1].bias, model[2].bias]}]
    bias = model[0].bias.detach().clone()
    run = prepare(model, torch.optim.SGD(groups, lr=0.1), MASTER_BF16)
    for _ in range(3):
        run.backward(run(torch.randn(8, 4)).square().sum())
        run.step()
    run.finish()
    assert model[2].weight is model[1].weight
    assert torch.equal(model[0].weight, frozen)
    assert torch.equal(model[0].bias, bias)


def test_nested_inputs_and_outputs() -> None:
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, *, scale):
            assert batch["x"].dtype == torch.bfloat16
            assert batch["index"].dtype == torch.int64
            return {"y": self.layer(batch["x"]) * scale[0], "index": batch["index"]}

    model = Odd()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    out = run({"x": torch.randn(3, 2), "index": torch.arange(3)}, scale=[torch.ones(1)])
    assert out["y"].dtype == torch.float32
    assert out["index"].dtype == torch.int64


def test_bad_input() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="clip must be positive, got -1"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=-1)
    with pytest.raises(SettingError, match="not the model's"):
        prepare(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ModelError, match="weight is torch.bfloat16; give an fp32 model"):
        half = nn.Linear(2, 2).bfloat16()
        prepare(half, torch.optim.SGD(half.parameters(), lr=0.1))
    for settings, message in (
        ({"loss_scale": "auto"}, "'dynamic', got 'auto'"),
        ({"loss_scale": -1.0}, "must be positive, got -1.0"),
        ({"master": True}, "needs a half param_dtype"),
        ({"param_dtype": torch.float16, "autocast_dtype": torch.float16}, "exclude one another"),
    ):
        with pytest.raises(SettingError, match=message):
            Policy(name="P", **settings)
    for settings in ({"scale": 0.5}, {"growth": 1.0}, {"backoff": 1.5}, {"interval": 0}):
        with pytest.raises(SettingError, match="LossScaler: wanted"):
            LossScaler(**settings)


@pytest.mark.filterwarnings("default")
def test_fp16_on_a_cpu_warns() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="for numerics only"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_FP16)


def test_constant_buffers_come_back_whole() -> None:
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]))
            self.register_buffer("seen", torch.zeros(1))
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            self.seen += 1
            return self.layer(x - self.mean)

    model = Normalised()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    run.backward(run(torch.randn(4, 3)).sum())
    run.step()
    run.finish()
    assert torch.equal(model.mean, torch.tensor([0.485, 0.456, 0.406]))
    assert model.seen.item() == 1
