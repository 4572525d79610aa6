"""Teachers: frozen, cast once, several together, the student's own average, and what one said before."""

from __future__ import annotations

import copy
import json
from functools import partial

import networks
import oracles
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import CheckpointError, DataError, ModelError, SettingError
from compresskit.base.files import write_json
from compresskit.distill import EMA, Cached, Teacher, Term, cache


def test_a_teacher_is_frozen_and_stays_in_eval_mode() -> None:
    model = build(networks.Residual).eval()
    before = copy.deepcopy(model.state_dict())
    teacher = Teacher(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    with pytest.raises(ModelError, match=r"Teacher.train\(\): a teacher stays in eval mode"):
        teacher.train()
    assert teacher.eval() is teacher
    ck.Distill(epochs=1, teacher=teacher)(build(networks.Chain), images_task(ck))
    assert all(torch.equal(v, before[k.removeprefix("members.0.")]) for k, v in teacher.state_dict().items())
    torch.testing.assert_close(teacher(torch.ones(2, 3, 16, 16)), model.eval()(torch.ones(2, 3, 16, 16)))


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


def shuffled(task):
    """The same samples in another order and in other batches."""
    x, y = (torch.cat(parts) for parts in zip(*task.train, strict=True))
    order = torch.randperm(len(x))
    batches = [(x[i], y[i]) for i in order.split(20)]
    return ck.Task(train=batches, val=task.val)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cache_says_what_the_teacher_said(tmp_path, dtype) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    cached = cache(teacher, task, tmp_path / "c", dtype=dtype)
    assert len(cached) == 96
    assert not list(tmp_path.glob(".*"))
    other = shuffled(task)
    for source in (cached, Cached(tmp_path / "c")):
        live = ck.imitate(teacher, terms=[Term(kd.losses.dkd), Term(kd.losses.dist)]).bind(student, other)
        stored = ck.imitate(source, terms=[Term(kd.losses.dkd), Term(kd.losses.dist)]).bind(student, other)
        for batch in other.train:
            for name, value in live(student, batch).items():
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(stored(student, batch)[name], value, rtol=tolerance, atol=1e-4)
    ck.Distill(epochs=1, teacher=cached)(student, other)


def test_a_cache_of_the_top_k(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    for k in (1, 3, 9):
        cached = cache(teacher, task, tmp_path / str(k), top=k, temperature=2.0, dtype=torch.float32)
        goal = ck.imitate(cached, temperature=2.0, weight=1, task_weight=0).bind(student.eval(), task)
        x, _ = task.train[1]
        got, s, t = goal(student, task.train[1])["imitate"].item(), student(x), teacher(x)
        assert got == pytest.approx(oracles.bucketed(s, t, k, 2.0), rel=1e-4)
        direct = kd.losses.top_k_soft_targets(s, kd.losses.top_k.top_k(t, k, temperature=2.0)).item()
        assert direct == pytest.approx(oracles.bucketed(s, t, k, 2.0), rel=1e-4)
        full = kd.losses.soft_targets(s, t, temperature=2.0).item()
        assert got <= full * (1 + 1e-5)
    assert got == pytest.approx(full, rel=1e-4)  # nine and a bucket of one are all ten
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "3").glob("*.bin")}
    assert sizes == {"keys.bin": 96 * 16, "values.bin": 96 * 12, "index.bin": 96 * 12, "rest.bin": 96 * 4}
    student.train()
    ck.Distill(epochs=1, teacher=cached, temperature=2.0)(student, task)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_soft_targets_are_finite_and_zero_for_oneself(dtype) -> None:
    logits = torch.randn(6, 10).to(dtype)
    assert kd.losses.top_k_soft_targets(logits, kd.losses.top_k.top_k(logits, 3)).item() == pytest.approx(0, abs=1e-6)
    for size in (30.0, 150.0, 1e4):
        sure = torch.zeros(4, 10, dtype=dtype)
        sure[:, 0] = size
        wrong = sure.roll(1, 1).requires_grad_()
        value = kd.losses.top_k_soft_targets(wrong, kd.losses.top_k.top_k(sure, 2, temperature=1.0))
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(wrong.grad).all()


def test_a_cache_is_used_again_without_the_teacher_running(tmp_path) -> None:
    teacher, task = build(networks.Residual), images_task(ck)
    cache(teacher, task, tmp_path / "c")
    written = (tmp_path / "c" / "values.bin").stat().st_mtime_ns
    teacher.forward = None  # it would fail
    cache(teacher, task, tmp_path / "c")
    assert (tmp_path / "c" / "values.bin").stat().st_mtime_ns == written


def test_views_and_repeated_samples(tmp_path) -> None:
    class Augmented(list):
        passes = 0

        def __iter__(self):
            Augmented.passes += 1
            shift = float(Augmented.passes % 2)
            return iter([(x + shift, y) for x, y in list.__iter__(self)])

    task = images_task(ck)
    twice = ck.Task(val=task.val, train=Augmented([*task.train, task.train[0]]))
    cached = cache(build(networks.Chain), twice, tmp_path / "c", views=2)
    assert len(cached) == 2 * 96
    for _ in range(4):
        for x, _ in twice.train:
            cached.lookup((x,))


def test_bad_input(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    cached = cache(teacher, task, tmp_path / "c")
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
    with pytest.raises(SettingError, match=r"imitate\(\): wanted a model, a Teacher, an EMA or a cache, got int"):
        ck.imitate(3).bind(student, task)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7).eval()
    with pytest.raises(ModelError, match=r"the teachers Residual \+ Chain give predictions of shapes \[\(32, 10\), \(32, 7\)\]"):
        ck.imitate(Teacher(teacher, other)).bind(student, task)
    with pytest.raises(SettingError, match=r"Term\(hint, 'b'\): this teacher has no modules to tap, only predictions"):
        ck.imitate(Teacher(teacher, teacher), terms=[Term(kd.losses.hint, "b")]).bind(student, task)
    with pytest.raises(SettingError, match="has no modules to tap"):
        ck.imitate(cached, terms=[Term(kd.losses.hint, "b")]).bind(student, task)
    with pytest.raises(ModelError, match=r"the teacher Residual gives predictions \(32, 10\), the student Chain \(32, 7\)"):
        ck.imitate(cached).bind(other, task)
    with pytest.raises(DataError, match=r"cache .*: 32 of 32 samples are not in it; it was made of other data, or the loader"):
        ck.imitate(cached).bind(student, task)(student, (torch.randn(32, 3, 16, 16), torch.zeros(32, dtype=torch.long)))
    with pytest.raises(DataError, match="32 of 32 samples are not in it"):
        cache(teacher, images_task(ck), tmp_path / "c")
    with pytest.raises(CheckpointError, match="cache .*: it is of another teacher; delete it, or name another folder"):
        cache(build(networks.Residual), task, tmp_path / "c")
    with pytest.raises(CheckpointError, match="it was made with top=None, wanted 3"):
        cache(teacher, task, tmp_path / "c", top=3)
    with pytest.raises(SettingError, match=r"cache\(dtype=\.\.\.\): wanted torch.float16 or torch.float32, got torch.bfloat16"):
        cache(teacher, task, tmp_path / "d", dtype=torch.bfloat16)
    with pytest.raises(SettingError, match=r"cache\(views=\.\.\.\): wanted a whole number >= 1, got 0"):
        cache(teacher, task, tmp_path / "d", views=0)
    with pytest.raises(SettingError, match=r"top_k\(k=\.\.\.\): wanted 1\.\.9 of 10 classes, got 10"):
        cache(teacher, task, tmp_path / "d", top=10)
    with pytest.raises(DataError, match=r"cache: wanted predictions \(N, C, \.\.\.\) of one size, got \(\) and \(\)"):
        cache(teacher, ck.Task(val=task.val, train=task.train, predict=lambda z: z[:, 0]), tmp_path / "d")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="the cache cannot be put there .*; name a folder that is empty"):
        cache(teacher, task, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "full"]
    top = cache(teacher, task, tmp_path / "top", top=3)
    for settings in (dict(temperature=2.0), dict(loss=kd.losses.jsd), dict(terms=[Term(kd.losses.dkd)])):
        with pytest.raises(SettingError, match="a cache of the top 3 serves soft targets at temperature 4.0 alone"):
            ck.imitate(top, **settings).bind(student, task)
    with pytest.raises(DataError, match=r"top_k_soft_targets: student has shape \(2, 5\), the teacher \(2, 6\)"):
        kd.losses.top_k_soft_targets(torch.zeros(2, 5), kd.losses.top_k.top_k(torch.zeros(2, 6), 2))
    with pytest.raises(CheckpointError, match="not there; a cache of predictions was expected"):
        Cached(tmp_path / "nowhere")
    values = tmp_path / "c" / "values.bin"
    values.write_bytes(values.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="a damaged cache of predictions"):
        Cached(tmp_path / "c")
    info = tmp_path / "top" / "cache.json"
    info.write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match="has no digest; a cache of predictions was expected"):
        Cached(tmp_path / "top")
    write_json(info, {"format": 1})
    with pytest.raises(CheckpointError, match="a damaged cache of predictions"):
        Cached(tmp_path / "top")


def test_a_cached_ensemble_trains_the_same_student_as_a_live_one(tmp_path) -> None:
    task, start = images_task(ck, classes=4, samples=128), build(networks.Chain)
    teacher = Teacher(*(ck.Train(epochs=3)(build(networks.Residual), task) for _ in range(2)))
    students = []
    for source in (teacher, cache(teacher, task, tmp_path / "c", dtype=torch.float32)):
        student = copy.deepcopy(start)
        stage = ck.Distill(teacher=source, epochs=3, optimizer=partial(torch.optim.SGD, lr=0.05), weight=1.0, task_weight=0.0)
        students.append(stage(student, task))
    for live, stored, before in zip(*(m.parameters() for m in (*students, start)), strict=True):
        torch.testing.assert_close(live, stored, rtol=1e-3, atol=1e-4)
        assert not torch.equal(live, before)
