"""Flat masters equal separate ones bit for bit, or are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed import FP32, MASTER_BF16, MASTER_FP16, PURE_BF16, SPLIT_BF16, Lion, prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
OPTIMIZERS = [
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    functools.partial(torch.optim.Adam, lr=0.01),
    functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    functools.partial(torch.optim.Adagrad, lr=0.01),
    functools.partial(torch.optim.RMSprop, lr=0.01),
    functools.partial(Lion, lr=0.01, weight_decay=0.1),
]


def net(width=16):
    """All sizes multiples of 16: torch's fused CPU kernels round differently in their vector body and in the tail behind it."""
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, width, 3), nn.BatchNorm2d(width)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, width), nn.Linear(width, width))
    model[4].bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def groups(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": decayed, "lr": 0.02}, {"params": [p for p in model.parameters() if p.ndim < 2]}]


def trained(make, policy, *, flat, warm=0, width=16):
    model = net(width)
    optimizer = make(groups(model))
    if warm:  # steps before prepare: the optimizer brings its state along
        train(prepare(model, optimizer, FP32), range(warm))
    run = prepare(model, optimizer, policy, flat=flat, clip=2.0)
    train(run, range(10))
    if flat:
        assert [len(g["params"]) for g in optimizer.param_groups] == [1, 2]  # the frozen bias stays beside its buffer
    model = run.finish()
    train(prepare(model, optimizer, FP32), range(2))  # the optimizer goes on with its state afterwards
    return model.state_dict(), [p.stride() for p in model.parameters()]


def train(run, steps):
    for i in steps:
        x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(i))
        run.backward(run(x).square().mean())
        run.step()


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, MASTER_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda m: m.func.__name__ + str(m.keywords.get("fused", "")))
def test_flat_equals_separate_bit_for_bit(make, policy) -> None:
    """Mixed dtypes (batch norms kept in fp32), channels_last, two groups, a frozen parameter, overflows under MASTER_FP16."""
    (separate, strides), (flat, flat_strides) = (trained(make, policy, flat=flat) for flat in (False, True))
    assert strides == flat_strides
    assert all(torch.equal(separate[name], flat[name]) for name in separate)


def test_the_checks_of_fastais_lesson() -> None:
    """One flat fp32 master of all numbers, half weights in between, a scale above 512 after training, and fp32 at the end."""
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 2))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_FP16, flat=True)
    (flat,) = run.optimizer.param_groups[0]["params"]
    assert flat.shape == (10 * 30 + 30 + 30 * 2 + 2,)
    assert flat.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    for _ in range(20):
        x = torch.randn(64, 10)
        run.backward(nn.functional.cross_entropy(run(x), (x[:, 0] > 0).long()))
        run.step()
    assert run.stats()["scale"] > 512
    torch.testing.assert_close(flat.detach(), torch.cat([master.flatten() for master in run.masters()]))
    assert {p.dtype for p in run.finish().parameters()} == {torch.float32}


def test_an_optimizer_that_has_stepped_brings_its_state() -> None:
    for make in OPTIMIZERS[:1] + OPTIMIZERS[3:4]:
        (separate, _), (flat, _) = (trained(make, MASTER_BF16, flat=flat, warm=3) for flat in (False, True))
        assert all(torch.equal(separate[name], flat[name]) for name in separate)


def test_sizes_that_are_no_multiple_of_a_vector_are_bit_equal_too() -> None:
    for make in (make for make in OPTIMIZERS if not make.keywords.get("fused")):
        (separate, _), (flat, _) = (trained(make, MASTER_BF16, flat=flat, width=5) for flat in (False, True))
        assert all(torch.equal(separate[name], flat[name]) for name in separate)


def test_flat_masters_are_refused_where_they_would_differ() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(SettingError, match="Adafactor is not known to be elementwise"):
        prepare(model, torch.optim.Adafactor(model.parameters()), MASTER_BF16, flat=True)
    with pytest.raises(SettingError, match="Muon is not known to be elementwise"):
        prepare(model, torch.optim.Muon([model.weight]), MASTER_BF16, flat=True)
    for policy in (SPLIT_BF16, PURE_BF16):
        model = nn.Linear(4, 4)
        with pytest.raises(SettingError, match=f"{policy.name} has no masters to lay flat"):
            prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, flat=True)


def test_flat_masters_need_every_gradient() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16, flat=True)
    run.backward(model[0](torch.ones(1, 2).bfloat16()).sum())
    with pytest.raises(TrainingError, match="1.weight has no gradient in this step; freeze it"):
        run.step()


def test_flat_masters_of_an_optimizer_stepped_in_part_are_refused() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(SettingError, match="has stepped some parameters of a group and not others"):
        prepare(model, optimizer, MASTER_BF16, flat=True)
