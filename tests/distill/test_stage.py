"""The stage `Distill`: students, generations, assistants."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import SettingError


def test_student_learns_from_the_teacher_alone() -> None:
    task = images_task(ck, classes=4, samples=128)
    teacher = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(build(networks.Residual), task)
    assert ck.evaluate(teacher, task) > 0.9
    student = ck.Distill(
        student=networks.Chain, epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3), weight=1.0, task_weight=0.0
    )(teacher, task)
    assert isinstance(student, networks.Chain)
    assert ck.evaluate(student, task) > 0.8


def test_a_student_module_is_copied() -> None:
    task, mould = images_task(ck), build(networks.Chain)
    before = copy.deepcopy(mould.state_dict())
    ck.Distill(student=mould, epochs=1)(build(networks.Residual), task)
    assert all(torch.equal(v, before[k]) for k, v in mould.state_dict().items())


class Recorded(nn.Module):
    """A student that keeps the order in which students were made."""

    made: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.inner = networks.Chain()
        Recorded.made.append(self)

    def forward(self, x):
        return self.inner(x)


def test_every_generation_is_taught_by_the_one_before(monkeypatch) -> None:
    teachers = []
    plain = kd.Distill.imitation
    monkeypatch.setattr(kd.Distill, "imitation", lambda self, teacher: teachers.append(teacher) or plain(self, teacher))
    Recorded.made.clear()
    first, task = build(networks.Residual), images_task(ck)
    stage = kd.Distill(epochs=1, student=Recorded, generations=3)
    teachers.clear()
    last = stage(first, task)
    assert teachers == [first, *Recorded.made[:2]]
    assert last is Recorded.made[2]


def test_assistants_are_a_chain() -> None:
    task = images_task(ck, classes=4, samples=128)
    train = dict(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))
    teacher = ck.Train(**train)(build(networks.Residual), task)
    assistant = kd.Distill(student=networks.Depthwise, **train)(teacher, task)
    student = kd.Distill(student=networks.Chain, **train)(assistant, task)
    assert isinstance(student, networks.Chain)
    assert ck.evaluate(student, task) > 0.7


def test_generations_need_a_student() -> None:
    with pytest.raises(SettingError, match=r"Distill\(generations=\.\.\.\): wanted a whole number >= 1, got 0"):
        kd.Distill(epochs=1, generations=0)
    with pytest.raises(SettingError, match="each generation starts afresh; pass student="):
        kd.Distill(epochs=1, generations=2)


def test_distill_refuses_settings_and_students_that_do_not_fit() -> None:
    task, model = images_task(ck), build(networks.Chain)
    with pytest.raises(SettingError, match=r"temperature=\.\.\.\): wanted a positive number, got 0"):
        ck.Distill(epochs=1, temperature=0)
    with pytest.raises(SettingError, match="it is the teacher"):
        ck.Distill(epochs=1, objective=ck.imitate())
    with pytest.raises(SettingError, match="wanted a module or a function that makes one, got int"):
        ck.Distill(epochs=1, student=lambda: 3)(model, task)
