"""Teachers: frozen, cast once, ensembles, and a moving average of the student."""

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
from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError
from compresskit.distill import EMA, Teacher, Term
from compresskit.distill.models import teacher as teacher_module
from compresskit.graph.surgery import frozen_copy


def test_a_teacher_is_frozen_and_stays_in_eval_mode() -> None:
    model = build(networks.Residual).eval()
    before = copy.deepcopy(model.state_dict())
    teacher = Teacher(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    outer = nn.Sequential(teacher, nn.Dropout())
    outer.train()
    assert outer.training
    assert outer[1].training
    assert not any(m.training for m in teacher.modules())
    assert teacher.eval() is teacher
    ck.Distill(epochs=1, teacher=teacher)(build(networks.Chain), images_task(ck))
    assert all(torch.equal(v, before[k.removeprefix("members.0.")]) for k, v in teacher.state_dict().items())
    torch.testing.assert_close(teacher(torch.ones(2, 3, 16, 16)), model.eval()(torch.ones(2, 3, 16, 16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_model_is_a_teacher_as_it_is(dtype: torch.dtype) -> None:
    task = images_task(ck)
    half, other = build(networks.Residual).to(dtype).eval(), build(networks.Chain).eval()
    with torch.no_grad():
        wanted = half(task.val[0][0].to(dtype)).float()
    torch.testing.assert_close(Teacher(half).predictions((task.val[0][0],), task), wanted, rtol=0, atol=0)
    both = Teacher(half, other).predictions((task.val[0][0],), task).exp()  # each gets its own dtype
    with torch.no_grad():
        mean = (wanted.softmax(1) + other(task.val[0][0]).softmax(1)) / 2
    torch.testing.assert_close(both, mean)
    student = build(networks.Chain)
    losses = ck.imitate(half).bind(student, task)(student, task.val[0])
    torch.testing.assert_close(losses["imitate"], 0.9 * kd.losses.soft_targets(student(task.val[0][0]), wanted, temperature=4.0))


def test_a_teacher_without_a_dimension_of_its_own_has_the_classes_in_dimension_1() -> None:
    teacher, task = Teacher(build(networks.Residual), build(networks.Chain)), images_task(ck)
    inputs, _ = task.split(task.val[0])
    wanted = teacher.predictions(inputs, task)
    vars(teacher).pop("class_dim", None)  # as in one that was pickled before it had one
    torch.testing.assert_close(copy.deepcopy(teacher).predictions(inputs, task), wanted)


def test_an_ensemble_is_averaged_in_probability() -> None:
    models, task = [build(kind) for kind in (networks.Residual, networks.Chain, networks.Depthwise)], images_task(ck)
    inputs, _ = task.split(task.val[0])
    got = Teacher(*models).predictions(inputs, task)
    mean = torch.stack([m(*inputs).double().softmax(1) for m in models]).mean(0)
    torch.testing.assert_close(got.exp(), mean.float())
    sure = Teacher(*(nn.Sequential(nn.Flatten(), Sure(c)).eval() for c in (1, 2))).predictions(inputs, task)
    assert torch.isfinite(sure).all()
    torch.testing.assert_close(sure[:, 1:3].exp(), torch.full((len(sure), 2), 0.5))
    dicts = ck.Task(val=task.val, train=task.train, predict=lambda output: output["scores"])
    wrapped = Teacher(*(Scores(m).eval() for m in models)).predictions(inputs, dicts)
    torch.testing.assert_close(wrapped, got)
    student = build(networks.Chain)
    goal = ck.imitate(Teacher(*models), weight=1, task_weight=0).bind(student, task)
    torch.testing.assert_close(goal(student, task.val[0])["imitate"], kd.losses.soft_targets(student(*inputs), got))


def test_an_ensemble_of_one_channel_is_averaged_in_its_outputs() -> None:
    a, b, student = (nn.Linear(8, 1) for _ in range(3))
    x = torch.randn(16, 8)
    mean, task = ((a(x) + b(x)) / 2).detach(), ck.Task(train=[(x, torch.randn(16, 1))], loss=nn.functional.mse_loss)
    teacher = Teacher(a.eval(), b.eval())
    torch.testing.assert_close(teacher.predictions((x,), task), mean)
    goal = ck.imitate(teacher, loss=nn.functional.mse_loss, weight=1, task_weight=0).bind(student, task)
    torch.testing.assert_close(goal(student, task.train[0])["imitate"], nn.functional.mse_loss(student(x), mean))
    flat = Teacher(*(nn.Sequential(m, nn.Flatten(0)).eval() for m in (a, b)))
    torch.testing.assert_close(flat.predictions((x,), task), mean[:, 0])
    with pytest.raises(ModelError, match="give one channel, of which a softmax says nothing; leave average out"):
        Teacher(a, b, average="probabilities").predictions((x,), task)


def test_the_mean_of_an_ensemble_is_chosen_by_its_setting() -> None:
    models, task = [build(kind) for kind in (networks.Residual, networks.Chain)], images_task(ck)
    inputs, _ = task.split(task.val[0])
    outputs = torch.stack([m(*inputs) for m in models]).mean(0).detach()
    torch.testing.assert_close(Teacher(*models, average="outputs").predictions(inputs, task), outputs)
    teacher = Teacher(*models)
    other = teacher.averaging("outputs")
    torch.testing.assert_close(other.predictions(inputs, task), outputs)
    assert not torch.allclose(teacher.predictions(inputs, task), outputs)
    assert teacher.average is None
    assert other.members[0] is teacher.members[0]
    with pytest.raises(SettingError, match=r"Teacher\(average=...\): wanted 'probabilities', 'outputs' or None, got 'logits'"):
        Teacher(*models, average="logits")


class Sure(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        return torch.nn.functional.one_hot(torch.full((len(x),), self.own), 10) * 1e4


class Scores(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return {"scores": self.model(x)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_teacher_is_cast_once(dtype) -> None:
    model, task = build(networks.Residual), images_task(ck)
    teacher = Teacher(model, dtype=dtype)
    kinds = {type(m): {p.dtype for p in m.parameters(recurse=False)} for m in teacher.modules()}
    assert kinds[nn.Conv2d] == kinds[nn.Linear] == {dtype}
    assert kinds[nn.BatchNorm2d] == {torch.float32}
    inputs, _ = task.split(task.val[0])
    got = teacher.predictions(inputs, task)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, model(*inputs).detach(), rtol=0.1, atol=0.1)
    assert not torch.equal(got, model(*inputs))
    student = build(networks.Chain)
    terms = [Term(kd.losses.hint, "head:in", adapt=kd.project), Term(kd.losses.similarity_preserving, "a", "inner")]
    ck.Distill(epochs=1, teacher=teacher, terms=terms)(student, task)
    assert next(model.parameters()).dtype == torch.float32


def test_ema_follows_the_student() -> None:
    student, task = build(networks.Chain), images_task(ck)
    goal = ck.imitate(EMA(decay=0.5), terms=[Term(kd.losses.hint, "b")]).bind(student, task)
    start, batch = copy.deepcopy(student.state_dict()), task.train[0]
    assert goal(student.eval(), batch)["imitate"].item() == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(1.0)
    goal(student, batch)
    average = goal.source.members[0].state_dict()
    keep = min(0.5, 2 / 11)  # the second batch
    for name, p in student.named_parameters():
        torch.testing.assert_close(average[name], keep * start[name] + (1 - keep) * p.detach())
    assert all(p.grad is None and not p.requires_grad for p in goal.source.parameters())
    assert not any("student" in name for name, _ in goal.source.named_modules())


def test_ema_copies_the_student_once(monkeypatch) -> None:
    copied = []
    monkeypatch.setattr(teacher_module, "frozen_copy", lambda model: copied.append(model) or frozen_copy(model))
    student = build(networks.Chain).train()
    source = teacher_module.teacher_source(EMA(), student, "here")
    assert copied == [student]
    assert not source.training
    assert source.label == "Chain"


@pytest.mark.parametrize("precision", ["FP32", "MASTER_BF16"])
def test_ema_trains_from_masters(precision) -> None:
    student, task = build(networks.Chain), images_task(ck)
    goal = ck.imitate(EMA(decay=0.9), terms=[Term(kd.losses.hint, "b", adapt=kd.project)]).bind(student, task)
    run = ck.mixed.prepare(student, torch.optim.SGD(student.parameters(), lr=1e-4), getattr(ck.mixed, precision))
    for batch in task.train:
        run.backward(torch.stack(list(goal(run, batch).values())).sum())
        run.step()
    goal.source.batches = 10**9
    goal.source.decay = 0.0
    masters = [m.clone() for m in run.masters()]
    goal(run, task.train[0])
    own = dict(goal.source.members[0].named_parameters())
    for (name, _), master in zip(student.named_parameters(), masters, strict=True):
        if name in own:
            assert torch.equal(own[name], master)
    run.finish()
    goal.close()


def test_a_teacher_may_have_inputs_of_its_own() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    x, _ = batch = task.train[0]
    larger = kd.Teacher(teacher, inputs=lambda inputs: (nn.functional.interpolate(inputs[0], scale_factor=2),))
    goal = ck.imitate(larger, weight=1, task_weight=0).bind(student.eval(), task)
    wanted = kd.losses.soft_targets(student(x), teacher(x.repeat_interleave(2, 2).repeat_interleave(2, 3)))
    torch.testing.assert_close(goal(student, batch)["imitate"], wanted)


@pytest.mark.slow
@pytest.mark.skipif(not ck.mixed.step.compiled.has_compiler(torch.device("cpu")), reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own machinery warns of torch's other parts
def test_a_compiled_teacher_gives_the_same_predictions() -> None:
    model, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    teacher = kd.Teacher(model, compiled=True)
    inputs, _ = task.split(task.train[0])
    torch.testing.assert_close(teacher.predictions(inputs, task), model(*inputs).detach(), rtol=1e-4, atol=1e-4)
    assert set(teacher.state_dict()) == {f"members.0.{name}" for name in model.state_dict()}
    ck.Distill(epochs=1, teacher=teacher)(student, task)


def test_a_compiled_teacher_has_no_taps() -> None:
    model, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match="this teacher has no modules to tap, only predictions"):
        ck.imitate(kd.Teacher(model, compiled=True), terms=[Term(kd.losses.hint, "b")]).bind(student, task)


def test_teachers_that_do_not_fit_are_refused() -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match=r"Teacher\(\): wanted at least one model"):
        Teacher()
    for make in (Teacher, partial(ck.imitate, terms=[Term(kd.losses.dkd)])):
        with pytest.raises(ModelError, match="the teacher Chain is in train mode, .*; put it in eval mode if it is"):
            goal = make(build(networks.Chain).train())
            goal.bind(student, task)
    with pytest.raises(SettingError, match=r"Teacher\(inputs=\.\.\.\): wanted a function, got int"):
        Teacher(teacher, inputs=3)
    with pytest.raises(SettingError, match=r"Teacher\(\): wanted models, got list; an ensemble is Teacher\(a, b\)"):
        Teacher([teacher, student])
    with pytest.raises(SettingError, match=r"Teacher\(dtype=\.\.\.\): wanted a floating-point type, got torch.int8"):
        Teacher(teacher, dtype=torch.int8)
    with pytest.raises(SettingError, match=r"EMA\(decay=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        EMA(decay=1)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7).eval()
    with pytest.raises(ModelError, match=r"the teachers Residual \+ Chain give predictions of shapes \[\(32, 10\), \(32, 7\)\]"):
        ck.imitate(Teacher(teacher, other)).bind(student, task)
    with pytest.raises(SettingError, match=r"Term\(hint, 'b'\): this teacher has no modules to tap, only predictions"):
        ck.imitate(Teacher(teacher, teacher), terms=[Term(kd.losses.hint, "b")]).bind(student, task)


class Seen(nn.Module):
    """A linear layer that notes the dtype of what it computes."""

    def __init__(self):
        super().__init__()
        self.layer, self.dtypes = nn.Linear(4, 3), []

    def forward(self, x):
        y = self.layer(x)
        self.dtypes.append(y.dtype)
        return y


@pytest.mark.parametrize(
    ("policy", "dtype", "wanted"),
    [
        ("FP32", None, torch.float32),
        ("AMP_BF16", None, torch.bfloat16),
        ("MASTER_BF16", None, torch.bfloat16),
        ("AMP_BF16", torch.float32, torch.float32),
        ("FP32", torch.bfloat16, torch.bfloat16),
        ("AMP_FP16", None, torch.float32),  # fp16 is slower than fp32 on a CPU
    ],
)
@pytest.mark.filterwarnings("ignore:fp16 on a CPU")
def test_a_teacher_computes_in_the_precision_of_the_training(policy, dtype, wanted) -> None:
    torch.manual_seed(0)
    student, model = nn.Linear(4, 3), Seen().eval()
    teacher = Teacher(model, dtype=dtype)
    run = mixed.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1), getattr(mixed, policy))
    x = torch.randn(5, 4)
    task = ck.Task(val=[(x, torch.zeros(5, dtype=torch.long))])
    predictions, features = teacher.outputs(run, None, (x,), task, ["layer"])
    assert teacher.members[0].dtypes == [wanted]
    assert predictions.dtype == torch.float32
    if dtype is None:
        assert features["layer"].dtype == torch.float32  # a loss of the user's own computes in fp32
    torch.testing.assert_close(predictions, model(x), atol=0.02, rtol=0.02)
    assert (torch.equal(predictions, model(x))) == (wanted is torch.float32)
    teacher.predictions((x,), task)  # for a cache, or without a training
    assert teacher.members[0].dtypes[1] == (dtype or torch.float32)


def test_integer_buffers_of_an_average_are_the_students() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    teacher = teacher_module.EMATeacher(model, 0.5)
    model.train()(torch.randn(4, 3))
    teacher.update_(model)
    assert int(teacher.members[0][1].num_batches_tracked) == 1


def test_a_restored_average_goes_on_with_the_same_decay() -> None:
    model = nn.Linear(3, 3)
    first, again = (teacher_module.EMATeacher(model, 0.9) for _ in range(2))
    for _ in range(3):
        first.update_(model)
    again.resume_from_(first.resume_state())
    with torch.no_grad():
        model.weight.add_(1)
    for each in (first, again):
        each.update_(model)
    assert torch.equal(first.members[0].weight, again.members[0].weight)
