"""Deep mutual learning."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError


def test_mutual_losses_are_the_formula() -> None:
    models, task = [build(kind).eval() for kind in (networks.Chain, networks.Residual, networks.Depthwise)], images_task(ck)
    goal = kd.mutual(*models[1:], weight=0.5, temperature=2.0).bind(models[0], task)
    x, y = task.train[0]
    losses = goal(models[0], (x, y))
    assert list(losses) == ["imitate:0", "task:0", "imitate:1", "task:1", "imitate:2", "task:2"]
    z = [m(x) for m in models]
    for i in range(3):
        others = [kd.losses.soft_targets(z[i], z[j], temperature=2.0) for j in range(3) if j != i]
        torch.testing.assert_close(losses[f"imitate:{i}"], 0.5 * sum(others) / 2)
        torch.testing.assert_close(losses[f"task:{i}"], nn.functional.cross_entropy(z[i], y))
    goal.close()


@pytest.mark.parametrize("precision", ["FP32", "MASTER_BF16"])
def test_mutual_learning_trains_all_and_keeps_one(precision) -> None:
    student, peer, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    names, before = set(student.state_dict()), copy.deepcopy(peer.state_dict())
    goal = kd.mutual(peer, task_weight=0.5).bind(student, task)
    assert not any(p is q for p in goal.peers for q in (peer, student))
    run = ck.mixed.prepare(student, torch.optim.SGD(student.parameters(), lr=0.05), getattr(ck.mixed, precision))
    student.train()
    for batch in task.train:
        run.backward(torch.stack(list(goal(run, batch).values())).sum())
        run.step()
    run.finish()
    goal.close()
    assert set(student.state_dict()) == names
    assert all(torch.equal(v, before[k]) for k, v in peer.state_dict().items())
    trained = dict(goal.peers[0].named_parameters())
    assert not any(torch.equal(p, before[name]) for name, p in trained.items() if name.endswith("weight"))
    assert all(p.dtype == torch.float32 for p in [*student.parameters(), *trained.values()])


def test_mutual_refuses_settings_and_models_that_do_not_fit() -> None:
    student, task = build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match=r"mutual\(\): wanted at least one peer"):
        kd.mutual()
    with pytest.raises(SettingError, match=r"mutual\(\): wanted models, got list"):
        kd.mutual([student])
    with pytest.raises(SettingError, match=r"mutual\(weight=\.\.\.\): wanted a positive number, got 0"):
        kd.mutual(student, weight=0)
    with pytest.raises(SettingError, match=r"mutual\(task_weight=\.\.\.\): wanted a number >= 0, got -1"):
        kd.mutual(student, task_weight=-1)
    with pytest.raises(SettingError, match=r"mutual\(temperature=\.\.\.\): wanted a positive number, got 0"):
        kd.mutual(student, temperature=0)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ModelError, match=r"mutual\(\): Chain gives predictions \(32, 7\), Chain \(32, 10\)"):
        kd.mutual(other).bind(student, task)
