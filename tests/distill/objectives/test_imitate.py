"""`imitate`: weights, teachers, classes, mixup, and what stays on the models."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import DEPTHS, ThreeDepths, build, image, images_task, indexed_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.distill import Term


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


def test_both_networks_see_one_mixture() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    goal = ck.imitate(teacher, weight=1, task_weight=0, mixup=1.0).bind(student.eval(), task)
    x, _ = batch = task.train[0]
    torch.manual_seed(5)
    got = goal(student, batch)["imitate"]
    torch.manual_seed(5)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    order = torch.randperm(len(x))
    mixed = share * x + (1 - share) * x[order]
    assert 0.01 < share < 0.99
    torch.testing.assert_close(got, kd.losses.soft_targets(student(mixed), teacher(mixed)))
    inputs = kd.mixup({"x": x, "ids": torch.arange(32), "scale": torch.ones(3)})
    assert torch.equal(inputs["ids"], torch.arange(32))
    assert torch.equal(inputs["scale"], torch.ones(3))
    assert not torch.equal(inputs["x"], x)
    ck.Distill(epochs=1, teacher=teacher, weight=1, task_weight=0)(student, task)
    with pytest.raises(DataError, match="mixup: no floating-point inputs, got .'torch.int64'.; ids cannot mix"):
        kd.mixup((torch.arange(4),))


class Padded(nn.Module):
    """A model whose vocabulary is padded."""

    def __init__(self, extra):
        super().__init__()
        self.inner, self.extra = build(networks.Chain), extra

    def forward(self, x):
        return nn.functional.pad(self.inner(x), (0, self.extra), value=3.0)


def test_padded_vocabularies_are_cut_on_request(tmp_path) -> None:
    student, teacher, task = Padded(2).eval(), Padded(6).eval(), images_task(ck)
    x, y = batch = task.train[0]
    goal = ck.imitate(teacher, classes=10, weight=1, terms=[Term(kd.losses.dkd)]).bind(student, task)
    losses = goal(student, batch)
    s, t = student(x)[:, :10], teacher(x)[:, :10]
    torch.testing.assert_close(losses["imitate"], kd.losses.soft_targets(s, t))
    torch.testing.assert_close(losses["dkd"], kd.losses.dkd(s, t, y))
    torch.testing.assert_close(losses["task"], 0.1 * nn.functional.cross_entropy(student(x), y))
    with pytest.raises(ModelError, match=r"teacher Padded gives predictions \(32, 16\), the student Padded \(32, 12\).*classes="):
        ck.imitate(teacher).bind(student, task)
    with pytest.raises(ModelError, match=r"classes=13\): Padded predicts 12 classes and the teacher Padded 16; .*at most 12"):
        ck.imitate(teacher, classes=13).bind(student, task)
    cached = kd.cache(teacher, task, tmp_path / "c", dtype=torch.float32)
    again = ck.imitate(cached, classes=10, weight=1).bind(student, task)(student, batch)["imitate"]
    torch.testing.assert_close(again, losses["imitate"])


def test_nothing_of_a_teacher_is_in_a_student(tmp_path) -> None:
    task, _, _ = indexed_task(ck)
    student, teacher = build(partial(ThreeDepths, 8)), build(partial(ThreeDepths, 12))
    names, before = set(student.state_dict()), copy.deepcopy(teacher.state_dict())
    terms = [
        Term(kd.losses.hint, "two", adapt=kd.project),
        Term(kd.losses.reviewkd, DEPTHS, adapt=kd.losses.abf, weight=kd.linear_warmup),
        Term(kd.losses.CRDLoss(samples=96, negatives=8), "three", adapt=kd.losses.projection_heads),
        Term(kd.losses.rkd_angle, "head:in"),
    ]
    ck.Train(epochs=2, objective=ck.imitate(teacher, terms=terms), precision=ck.mixed.MASTER_BF16)(student, task)
    assert set(student.state_dict()) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [*student.modules(), *teacher.modules()])
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(torch.isfinite(p).all() for p in student.parameters())


def test_imitate_refuses_settings_out_of_range() -> None:
    with pytest.raises(SettingError, match=r"imitate\(classes=\.\.\.\): wanted a whole number >= 2, got 1"):
        ck.imitate(classes=1)
    for teacher, got in ((3, "int"), ([], "list"), (nn.Linear, "the class Linear")):
        with pytest.raises(SettingError, match=rf"imitate\(\): wanted a model, a Teacher, an EMA or a cache, got {got}"):
            ck.imitate(teacher)
    for temperature in ("4", float("inf")):
        with pytest.raises(SettingError, match=r"imitate\(temperature=...\): wanted a positive number"):
            ck.imitate(temperature=temperature)
    with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): wanted a number >= 0, got -1"):
        ck.imitate(mixup=-1)
    for settings in (dict(), dict(task_weight=0, loss=kd.losses.dkd), dict(task_weight=0, terms=[Term(kd.losses.dkd)])):
        with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): mixed inputs have no label; set task_weight=0"):
            ck.imitate(mixup=1.0, **settings)


def test_imitate_refuses_teachers_and_weights_that_do_not_fit() -> None:
    task, model = images_task(ck), build(networks.Chain)
    with pytest.raises(SettingError, match="there is no teacher"):
        ck.imitate().bind(model, task)
    with pytest.raises(SettingError, match="one module"):
        ck.imitate(model).bind(model, task)
    with pytest.raises(SettingError, match="both weights are 0"):
        ck.imitate(model, weight=0, task_weight=0)
    with pytest.raises(SettingError, match=r"imitate\(weight=\.\.\.\): wanted a number >= 0, got -1"):
        ck.imitate(model, weight=-1)
    other = networks.build(networks.Chain)
    other.head = nn.Linear(32, 7).eval()
    with pytest.raises(ModelError, match=r"gives predictions \(32, 7\), the student Chain \(32, 10\)"):
        ck.imitate(other).bind(model, task)
    with pytest.raises(ModelError, match="does not run on the student's inputs"):
        ck.imitate(nn.Linear(3, 10).eval()).bind(model, task)


def test_one_channel_has_no_soft_targets() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 1))
    x = image(8)[0]
    task = ck.Task(train=[(x, torch.rand(8, 1))], val=[(x, torch.rand(8, 1))], loss=F.mse_loss, metric=F.mse_loss)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(768, 1)).eval()
    with pytest.raises(ModelError, match="gives one channel, of which a softmax says nothing"):
        ck.Distill(epochs=1, teacher=teacher)(model, task)
    ck.Train(epochs=1, objective=ck.imitate(teacher, loss=F.mse_loss))(model, task)


@pytest.mark.parametrize("form", [lambda x: {"input": x}, lambda x: (x,), lambda x: x])
def test_no_label_is_asked_for_where_none_is_used(form) -> None:
    torch.manual_seed(0)
    x, student = torch.randn(16, 8), nn.Linear(8, 4)
    goal = ck.imitate(nn.Linear(8, 4).eval(), weight=1.0, task_weight=0.0)
    val = [{"input": x, "labels": torch.arange(16) % 4}]
    before = student.weight.detach().clone()
    trained = ck.fit_(student, ck.Task(train=[form(x)], val=val, calibration=[form(x)]), ck.Train(epochs=1, objective=goal))
    assert not torch.equal(before, trained.weight)
    with pytest.raises(DataError, match="no entry 'labels' for the target"):
        task = ck.Task(train=[{"input": x}], val=val)
        ck.fit_(student, task, ck.Train(epochs=1, objective=ck.imitate(nn.Linear(8, 4).eval())))


@pytest.mark.parametrize("policy", [ck.mixed.MASTER_BF16, ck.mixed.SPLIT_BF16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("teacher", [None, kd.EMA(decay=0.999)], ids=["model", "average"])
def test_a_half_student_is_trained_as_its_fp32_weights_are(policy, teacher) -> None:
    """Half policies take half models; the objective runs the model, or averages it, before its masters are there."""
    task = images_task(ck)
    half = build(networks.Chain).bfloat16()
    wide = copy.deepcopy(half).float()
    objective = ck.imitate(build(networks.Residual).eval() if teacher is None else teacher)
    for model in (half, wide):
        torch.manual_seed(0)
        ck.fit_(model, task, ck.Train(epochs=1, precision=policy, objective=objective))
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), wide.parameters(), strict=True))
    with pytest.raises(ModelError, match=r"prepare: .* is torch.bfloat16; give an fp32 model"):
        ck.fit_(build(networks.Chain).bfloat16(), task, ck.Train(epochs=1, objective=objective))
