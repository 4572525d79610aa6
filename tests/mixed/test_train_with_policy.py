"""`Train` hands its precision settings to `mixed.prepare` and trains as a loop by hand does."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from mixed_runs import USER_WARNINGS
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.mixed import (
    KAHAN_BF16,
    MASTER_BF16,
    MASTER_FP16,
    SPLIT_BF16,
    SR_BF16,
    prepare,
)

pytestmark = USER_WARNINGS
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batches():
    torch.manual_seed(0)
    labels = torch.arange(96) % 4
    images = torch.randn(96, 3, 6, 6) + labels.view(-1, 1, 1, 1)
    return list(zip(images.split(16), labels.split(16), strict=True))


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def trained(**settings):
    task = ck.Task(train=batches(), val=batches())
    how = ck.Train(epochs=2, optimizer=SGD, **settings)
    return dict(how(net(), task).named_parameters())


def by_hand(policy, accumulate):
    model = net()
    optimizer = SGD(model.parameters())
    run = prepare(model, optimizer, policy, clip=1.0)
    steps = 2 * 6 // accumulate
    data = batches() * 2
    for step, start in enumerate(range(0, 12, accumulate)):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / steps))
        with run.accumulate(accumulate):
            for x, y in data[start : start + accumulate]:
                run.backward(nn.functional.cross_entropy(run(x), y))
        run.step()
    return dict(run.finish().named_parameters())


@pytest.mark.parametrize("policy", [MASTER_BF16, MASTER_FP16, SPLIT_BF16, KAHAN_BF16, SR_BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_train_equals_the_loop_by_hand(policy, accumulate) -> None:
    got, wanted = trained(precision=policy, clip=1.0, accumulate=accumulate), by_hand(policy, accumulate)
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-5)


def test_train_passes_layout_and_backend_on(monkeypatch) -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained().values(), trained(flat=True).values(), strict=True))
    seen = []
    true = ck.mixed.prepare

    def recorded(*args, **kwargs):
        seen.append(kwargs)
        return true(*args, **kwargs | {"backend": "foreach"})  # compiling takes seconds, and is tested elsewhere

    monkeypatch.setattr(ck.mixed, "prepare", recorded)
    trained(flat=True)
    trained(precision=MASTER_BF16, backend="compiled")
    assert [(kwargs["flat"], kwargs["backend"]) for kwargs in seen] == [(True, None), (False, "compiled")]
    with pytest.raises(SettingError, match=r"Train\(backend=...\): wanted None, 'foreach' or 'compiled', got 'fast'"):
        ck.Train(epochs=1, backend="fast")


def test_accumulated_losses_of_a_float64_model_keep_their_precision() -> None:
    data = [(x.double(), y) for x, y in batches()[:3]]
    model = net().double().eval()  # the same statistics in all batches
    for x, y in data:
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    again = net().double().eval()
    run = prepare(again, torch.optim.SGD(again.parameters(), lr=0.1))
    with run.accumulate(3):
        for x, y in data:
            run.backward(nn.functional.cross_entropy(run(x), y))
    assert all(torch.equal(grad, wanted[name]) for name, grad in run.unscaled().items())


def test_a_training_of_a_float64_model_keeps_the_precision_of_its_losses() -> None:
    data = [(x.flatten(1).double(), y) for x, y in batches()[:3]]
    model, snapshots = nn.Linear(108, 4).double(), {0.0: {}}
    before = model.weight.detach().clone()
    for x, y in data:
        (nn.functional.cross_entropy(model(x), y) / 3).backward()
    wanted = before - model.weight.grad
    how = ck.Train(epochs=1, accumulate=3, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    ck.fit_(model, ck.Task(train=data, snapshots=snapshots), how)
    assert torch.equal(snapshots[0.0]["weight"], before)
    torch.testing.assert_close(model.weight.detach(), wanted, atol=1e-14, rtol=1e-13)
