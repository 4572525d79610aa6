"""Self-distillation: heads on earlier layers."""

from __future__ import annotations

from functools import partial

import oracles
import pytest
import torch
from networks import ThreeDepths, build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError
from compresskit.distill.objectives.terms import ADAPTERS


def test_the_deepest_layer_teaches_the_others() -> None:
    student, task = build(partial(ThreeDepths, 8)), images_task(ck)
    names = set(student.state_dict())
    goal = kd.self_distill("one", "t*", temperature=2.0, weight=0.4).bind(student, task)
    x, y = batch = task.train[0]
    losses = goal(student.eval(), batch)
    z, feature = student(x), student.one(x)
    torch.testing.assert_close(losses["task"], nn.functional.cross_entropy(z, y))
    own = feature.mean((2, 3)) @ goal.heads["one"].linear.weight.T + goal.heads["one"].linear.bias
    torch.testing.assert_close(losses["task:one"], 0.6 * nn.functional.cross_entropy(own, y))
    assert losses["imitate:one"].item() == pytest.approx(0.4 * oracles.soft_targets(own.detach(), z.detach(), 2.0), rel=1e-4)
    assert list(goal.heads) == ["one", "two", "three"]
    student.zero_grad()
    losses["imitate:one"].backward()
    assert student.head.weight.grad is None  # the teacher's side takes no gradient
    assert student.one[0].weight.grad.any()
    ck.Train(epochs=1, objective=kd.self_distill("one"), precision=ck.mixed.MASTER_BF16)(student, task)
    assert set(student.state_dict()) == names


def test_self_distill_refuses_settings_and_heads_that_do_not_fit() -> None:
    student, task = build(partial(ThreeDepths, 8)), images_task(ck)
    with pytest.raises(SettingError, match=r"self_distill\(\): wanted the names of at least one module"):
        kd.self_distill()
    with pytest.raises(SettingError, match=r"self_distill\(weight=\.\.\.\): wanted a number in \(0, 1\], got 0"):
        kd.self_distill("one", weight=0)
    with pytest.raises(SettingError, match=r"self_distill\(temperature=\.\.\.\): wanted a positive number, got 0"):
        kd.self_distill("one", temperature=0)
    with pytest.raises(SettingError, match=r"self_distill\(head=\.\.\.\): wanted a function, got int"):
        kd.self_distill("one", head=3)
    with pytest.raises(ModelError, match=r"self_distill: the head of one gives \(32, 8, 16, 16\), the model \(32, 10\)"):
        kd.self_distill("one", head=lambda f, z: nn.Identity()).bind(student, task)
    with pytest.raises(ModelError, match="tap 'for': ThreeDepths has no such module"):
        kd.self_distill("for").bind(student, task)
    with pytest.raises(ModelError, match=r"no pooled head turns features \(4, 2\) into predictions \(4, 2, 3\)"):
        kd.pooled_head(torch.zeros(4, 2), torch.zeros(4, 2, 3))
    assert not hasattr(student, ADAPTERS)
