"""Pseudo-labels for unlabelled data."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn
from torch.utils.data import DataLoader

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.distill.objectives.pseudo_label import RepeatedLoader

ADAM = partial(torch.optim.Adam, lr=3e-3)


def test_labelled_and_unlabelled_batches_go_together() -> None:
    student, teacher, task = build(networks.Chain).eval(), build(networks.Residual), images_task(ck)
    more = [torch.randn(8, 3, 16, 16), (torch.randn(6, 3, 16, 16),)]
    threshold = teacher(torch.cat([more[0], more[1][0]])).softmax(1).amax(1).median().item()
    goal = kd.pseudo_label(teacher, more, threshold=threshold, weight=0.5, task_weight=2.0).bind(student, task)
    x, y = batch = task.train[0]
    for inputs in (more[0], more[1][0], more[0]):  # it starts again
        losses = goal(student, batch)
        torch.testing.assert_close(losses["task"], 2 * nn.functional.cross_entropy(student(x), y))
        p = teacher(inputs).softmax(1).amax(1)
        sure = p >= threshold
        assert sure.sum() > 0
        labels = teacher(inputs).argmax(1)[sure]
        torch.testing.assert_close(losses["pseudo"], 0.5 * nn.functional.cross_entropy(student(inputs)[sure], labels))


def test_a_student_learns_from_unlabelled_data() -> None:
    task = images_task(ck, classes=4, samples=128)
    teacher = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(build(networks.Residual), task)
    unlabelled = ck.Task(train=[(x, torch.full_like(y, -100)) for x, y in task.train], val=task.val)
    student, loss = build(networks.Chain), partial(kd.losses.hard_targets, threshold=0.6)
    before = ck.evaluate(student, task)
    how = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))
    ck.fit_(student, unlabelled, how, objective=ck.imitate(teacher, loss=loss, weight=1.0, task_weight=0.0))
    assert ck.evaluate(student, task) > before + 0.3


@pytest.mark.slow
def test_unlabelled_data_helps() -> None:
    task = images_task(ck, classes=4, samples=256)
    teacher = ck.Train(epochs=12, optimizer=ADAM)(build(networks.Residual), task)
    x = [x for x, _ in task.train]
    labelled = [(x, y // 2 * 2) for x, y in task.train]  # labels that say only half
    few = ck.Task(train=labelled, val=task.val)
    scores = []
    settings = dict(weight=2.0, task_weight=0.5)
    for goal in (
        None,
        *(kd.pseudo_label(teacher, x, **more, **settings) for more in (dict(threshold=0.6), dict(loss=kd.losses.soft_targets))),
    ):
        torch.manual_seed(0)
        student = ck.Train(epochs=12, optimizer=ADAM, objective=goal)(networks.Chain(), few)
        scores.append(ck.evaluate(student, task))
    assert min(scores[1:]) > scores[0] + 0.2


def test_pseudo_label_refuses_settings_and_data_that_do_not_fit() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    with pytest.raises(SettingError, match="pseudo_label\\(\\): there is no teacher"):
        kd.pseudo_label(None, [torch.zeros(1)]).bind(student, task)
    for bad in (iter([1]), torch.zeros(2), 3):
        with pytest.raises(SettingError, match=r"unlabelled=\.\.\.\): wanted a loader of batches that can be read many times"):
            kd.pseudo_label(teacher, bad)
    with pytest.raises(SettingError, match=r"pseudo_label\(threshold=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        kd.pseudo_label(teacher, [1], threshold=1)
    with pytest.raises(SettingError, match=r"pseudo_label\(weight=\.\.\.\): wanted a positive number, got 0"):
        kd.pseudo_label(teacher, [1], weight=0)
    with pytest.raises(SettingError, match=r"pseudo_label\(task_weight=\.\.\.\): wanted a number >= 0, got -1"):
        kd.pseudo_label(teacher, [1], task_weight=-1)
    with pytest.raises(DataError, match=r"pseudo_label\(unlabelled=\.\.\.\): the loader is empty"):
        kd.pseudo_label(teacher, []).bind(student, task)
    with pytest.raises(DataError, match=r"wanted batches of inputs, a tensor, a tuple or a dict, got str"):
        kd.pseudo_label(teacher, ["text"]).bind(student, task)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ModelError, match=r"the teacher Residual gives predictions \(2, 10\), the student Chain \(2, 7\)"):
        kd.pseudo_label(teacher, [torch.zeros(2, 3, 16, 16)]).bind(other, task)


def test_a_restored_objective_goes_on_with_the_average_and_the_data() -> None:
    task, more = images_task(ck, samples=32), [torch.randn(4, 3, 16, 16) for _ in range(3)]
    goal = kd.pseudo_label(kd.EMA(decay=0.5), more, threshold=0.0)
    student, fresh = build(networks.Residual).eval(), networks.Residual().eval()
    first, again = goal.bind(student, task), goal.bind(fresh, task)
    for _ in range(4):
        first(student, task.train[0])
        with torch.no_grad():
            next(student.parameters()).add_(0.1)
    again.resume_from_(copy.deepcopy(first.resume_state()))
    assert again.source.batches == 4
    wanted = first.source.members[0].state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.source.members[0].state_dict().items())
    fresh.load_state_dict(student.state_dict())
    assert again(fresh, task.train[0])["pseudo"] == first(student, task.train[0])["pseudo"]


@pytest.mark.parametrize("teacher", [networks.Residual().eval(), kd.EMA(decay=0.5)], ids=["fixed", "average"])
def test_states_that_are_the_position_alone_are_restored(teacher) -> None:
    """Checkpoints of before the teacher had a state."""
    task, more = images_task(ck, samples=32), [torch.randn(4, 3, 16, 16) for _ in range(3)]
    student, goal = build(networks.Chain), kd.pseudo_label(teacher, more)
    first, again = goal.bind(student, task), goal.bind(student, task)
    next(first.batches)
    again.resume_from_(first.resume_state()["batches"])
    assert next(again.batches) is more[1]


def test_a_restored_position_in_the_unlabelled_data_goes_on() -> None:
    def loader():
        torch.manual_seed(0)
        return RepeatedLoader(DataLoader(torch.arange(6), batch_size=2, shuffle=True))

    whole, first = loader(), loader()
    wanted = [next(whole) for _ in range(7)]
    for _ in range(4):
        next(first)
    again = loader()
    again.resume_from_(first.resume_state())
    assert all(torch.equal(next(again), batch) for batch in wanted[4:])
