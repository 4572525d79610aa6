"""Distillation: the loss against its formula, the objective, the stage, and teachers that stay as they were."""

from __future__ import annotations

import copy
from functools import partial

import networks
import oracles
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.distill.losses import soft_targets


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0, 20.0])
def test_soft_targets_equal_the_formula(temperature) -> None:
    student, teacher = torch.randn(2, 6, 10) * 3
    got = soft_targets(student, teacher, temperature=temperature).item()
    assert got == pytest.approx(oracles.soft_targets(student, teacher, temperature), rel=1e-5)


def test_dense_predictions() -> None:
    student, teacher = torch.randn(2, 2, 5, 3, 3)
    flat = [v.movedim(1, -1).reshape(-1, 5) for v in (student, teacher)]
    torch.testing.assert_close(soft_targets(student, teacher), soft_targets(*flat))


def test_weights_mix_the_two_losses() -> None:
    model, task = build(networks.Chain), images_task(ck)
    batch = task.train[0]
    teacher = build(networks.Chain)
    both = ck.imitate(teacher, weight=0.7, task_weight=0.2).bind(model, task)(model, batch)
    only = ck.imitate(teacher, weight=1.0, task_weight=0).bind(model, task)(model, batch)
    assert set(both) == {"imitate", "task"}
    assert set(only) == {"imitate"}
    torch.testing.assert_close(both["imitate"], 0.7 * only["imitate"])
    plain = nn.functional.cross_entropy(model(batch[0]), batch[1])
    torch.testing.assert_close(both["task"], 0.2 * plain)


def test_the_teacher_stays_as_it_was() -> None:
    task = images_task(ck)
    teacher, student = build(networks.Residual).eval(), build(networks.Chain)
    before = copy.deepcopy(teacher.state_dict())
    ck.Distill(epochs=1, teacher=teacher)(student, task)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert not any("teacher" in name for name, _ in student.named_modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in student.modules())


def test_student_learns_from_the_teacher_alone() -> None:
    task = images_task(ck, classes=4, samples=128)
    teacher = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(build(networks.Residual), task)
    assert ck.evaluate(teacher, task) > 0.9
    student = ck.Distill(
        student=networks.Chain, epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3), weight=1.0, task_weight=0.0
    )(teacher, task)
    assert isinstance(student, networks.Chain)
    assert ck.evaluate(student, task) > 0.8


def test_student_module_is_copied() -> None:
    task, mould = images_task(ck), build(networks.Chain)
    before = copy.deepcopy(mould.state_dict())
    ck.Distill(student=mould, epochs=1)(build(networks.Residual), task)
    assert all(torch.equal(v, before[k]) for k, v in mould.state_dict().items())


def test_bad_input() -> None:
    task, model = images_task(ck), build(networks.Chain)
    with pytest.raises(SettingError, match="there is no teacher"):
        ck.imitate().bind(model, task)
    with pytest.raises(SettingError, match="one module"):
        ck.imitate(model).bind(model, task)
    with pytest.raises(SettingError, match="both weights are 0"):
        ck.imitate(model, weight=0, task_weight=0)
    with pytest.raises(SettingError, match=r"imitate\(weight=\.\.\.\): wanted a number >= 0, got -1"):
        ck.imitate(model, weight=-1)
    with pytest.raises(SettingError, match=r"temperature=\.\.\.\): wanted a positive number, got 0"):
        ck.Distill(epochs=1, temperature=0)
    with pytest.raises(SettingError, match="wanted a positive number"):
        soft_targets(torch.zeros(1, 2), torch.zeros(1, 2), temperature=-1)
    with pytest.raises(SettingError, match="it is the teacher"):
        ck.Distill(epochs=1, objective=ck.imitate())
    with pytest.raises(SettingError, match="wanted a module or a function that makes one, got int"):
        ck.Distill(epochs=1, student=lambda: 3)(model, task)
    other = networks.build(networks.Chain)
    other.head = nn.Linear(32, 7).eval()
    with pytest.raises(ModelError, match=r"gives predictions \(32, 7\), the student Chain \(32, 10\)"):
        ck.imitate(other).bind(model, task)
    with pytest.raises(ModelError, match="does not run on the student's inputs"):
        ck.imitate(nn.Linear(3, 10).eval()).bind(model, task)
