"""Views of the inputs that a teacher sees: its predictions are their mean, its features those of the inputs as they are."""

from __future__ import annotations

import copy
import math
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.distill import Teacher, Term

ALONE = {"weight": 1, "task_weight": 0}
SEEN: list[int] = []


def counted(inputs):
    SEEN.append(len(inputs[0]))
    return kd.mirror(inputs)


def log_mean(*logits: torch.Tensor) -> torch.Tensor:
    return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))


def test_the_mean_over_views_is_imitated() -> None:
    student, teacher, task = build(networks.Chain).eval(), build(networks.Residual).eval(), images_task(ck)
    x, _ = batch = task.train[0]
    plain, mirrored = teacher(x), teacher(x.flip(-1))
    assert not torch.allclose(plain, mirrored)
    soft = ck.imitate(teacher, teacher_views=[kd.mirror], **ALONE).bind(student, task)
    torch.testing.assert_close(soft(student, batch)["imitate"], kd.losses.soft_targets(student(x), log_mean(plain, mirrored)))
    squares = ck.imitate(teacher, teacher_views=[kd.mirror], loss=F.mse_loss, **ALONE).bind(student, task)
    torch.testing.assert_close(squares(student, batch)["imitate"], F.mse_loss(student(x), (plain + mirrored) / 2))
    other = build(networks.Chain).eval()
    both = ck.imitate(Teacher(teacher, other), teacher_views=[kd.mirror], **ALONE).bind(student, task)
    wanted = log_mean(plain, mirrored, other(x), other(x.flip(-1)))
    torch.testing.assert_close(both(student, batch)["imitate"], kd.losses.soft_targets(student(x), wanted))


def test_features_are_those_of_the_inputs_as_they_are() -> None:
    student, task = build(partial(networks.ThreeDepths, 8)).eval(), images_task(ck)
    teacher = copy.deepcopy(student)
    goal = ck.imitate(teacher, teacher_views=[kd.mirror], terms=[Term(kd.losses.hint, "two")], **ALONE).bind(student, task)
    losses = goal(student, task.train[0])
    assert losses.pop("imitate") > 0
    assert [loss.item() for loss in losses.values()] == [0]


def test_a_view_is_made_before_the_inputs_become_the_teachers() -> None:
    student, teacher, task = build(networks.Chain).eval(), build(networks.Residual).eval(), images_task(ck)
    x, _ = batch = task.train[0]
    darker = Teacher(teacher, inputs=lambda inputs: (inputs[0] / 2,))
    goal = ck.imitate(darker, teacher_views=[lambda inputs: (inputs[0] + 1,)], **ALONE).bind(student, task)
    wanted = log_mean(teacher(x / 2), teacher((x + 1) / 2))
    torch.testing.assert_close(goal(student, batch)["imitate"], kd.losses.soft_targets(student(x), wanted))


def test_a_moving_average_is_updated_once_a_batch() -> None:
    student, task = build(networks.Chain), images_task(ck)
    goal = ck.imitate(kd.EMA(), teacher_views=[kd.mirror]).bind(student, task)
    for batch in task.train[:2]:
        goal(student, batch)
    assert goal.source.batches == 2


def test_the_model_of_a_recipe_is_imitated_with_views(tmp_path) -> None:
    model, task = build(networks.Chain), images_task(ck)
    for name, stage in (
        ("distill", ck.Distill(epochs=1, teacher_views=[counted], optimizer=torch.optim.SGD)),
        ("qat", ck.QAT(epochs=1, objective=ck.imitate(teacher_views=[counted]))),
    ):
        SEEN.clear()
        ck.Recipe(ck.Prune(budget=ck.keep(macs=0.7)), stage).run(model, task, out=tmp_path / name)
        assert sum(SEEN) >= 96  # each image of the one epoch


def test_images_are_mirrored_and_nothing_else() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    inputs = kd.mirror({"x": x, "ids": torch.arange(4).reshape(1, 1, 2, 2), "scale": torch.arange(3.0)})
    assert torch.equal(inputs["x"], x.flip(-1))
    assert torch.equal(inputs["ids"], torch.arange(4).reshape(1, 1, 2, 2))
    assert torch.equal(inputs["scale"], torch.arange(3.0))
    with pytest.raises(DataError, match=r"mirror: no images; wanted floating-point inputs \(N, C, H, W\), got .'torch.int64 "):
        kd.mirror((torch.arange(4),))


def test_views_that_cannot_be_averaged_are_refused(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match=r"imitate\(teacher_views=...\): wanted a list of functions, such as \[mirror\], got"):
        ck.imitate(teacher, teacher_views=kd.mirror)
    cached = kd.cache(teacher, task, tmp_path / "c")
    with pytest.raises(SettingError, match=r"imitate\(teacher_views=...\): .* is not a model in memory, and has no predictions"):
        ck.imitate(cached, teacher_views=[kd.mirror]).bind(student, task)
    dense = nn.Conv2d(3, 4, 1).eval()
    maps = ck.Task(train=[(torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long))])
    with pytest.raises(ModelError, match=r"the teacher Conv2d gives predictions \(2, 4, 8, 8\), one for each place"):
        ck.imitate(dense, teacher_views=[kd.mirror]).bind(copy.deepcopy(dense), maps)
