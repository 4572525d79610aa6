"""Predictions on disk."""

from __future__ import annotations

import copy
import json
import os
import shutil
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
from compresskit.distill import Cached, Teacher, Term, cache


def shuffled(task):
    """The same samples in another order and in other batches."""
    x, y = (torch.cat(parts) for parts in zip(*task.train, strict=True))
    order = torch.randperm(len(x))
    batches = [(x[i], y[i]) for i in order.split(20)]
    return ck.Task(train=batches, val=task.val)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cache_gives_the_teachers_predictions(tmp_path, dtype) -> None:
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


def test_a_cache_is_used_again_and_the_teacher_answers_one_batch(tmp_path, monkeypatch) -> None:
    teacher, task = build(networks.Residual), images_task(ck)
    cache(teacher, task, tmp_path / "c")
    written = (tmp_path / "c" / "values.bin").stat().st_mtime_ns
    asked = []
    answer = Teacher.predictions
    monkeypatch.setattr(Teacher, "predictions", lambda *args: asked.append(args) or answer(*args))
    cache(teacher, task, tmp_path / "c")
    assert len(asked) == 1 < len(task.train)
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


def test_a_cache_is_refused_for_mixup_and_unlabelled_data(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    cached = kd.cache(teacher, task, tmp_path / "c")
    with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): a cache has no predictions of mixed inputs"):
        ck.imitate(cached, mixup=1.0, task_weight=0).bind(student, task)
    with pytest.raises(SettingError, match=r"pseudo_label\(\): a cache has no predictions of the unlabelled data"):
        kd.pseudo_label(cached, [torch.zeros(1)]).bind(student, task)


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


def test_caches_and_settings_that_do_not_fit_are_refused(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    cached = cache(teacher, task, tmp_path / "c")
    with pytest.raises(SettingError, match=r"imitate\(\): wanted a model, a Teacher, an EMA or a cache, got int"):
        ck.imitate(3).bind(student, task)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7).eval()
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


def test_a_cache_that_does_not_fit_the_disk_leaves_the_teacher(tmp_path, monkeypatch, caplog) -> None:
    task, teacher = images_task(ck), build(networks.Residual)
    whole = cache(teacher, task, tmp_path / "whole", dtype=torch.float32)
    size = sum(path.stat().st_size for path in (tmp_path / "whole").glob("*.bin"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size - 1))
    source = cache(teacher, task, tmp_path / "c", dtype=torch.float32)
    assert "GB are needed on the disk" in caplog.text
    assert "the teacher computes its predictions in every step instead" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["whole"], "nothing half-written stays"
    student = build(networks.Residual)
    losses = [ck.imitate(made).bind(student, task)(student, next(iter(task.train))) for made in (whole, source)]
    torch.testing.assert_close(losses[0], losses[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=size))
    assert isinstance(cache(teacher, task, tmp_path / "c", dtype=torch.float32), Cached)


def test_missing_and_damaged_caches_are_refused(tmp_path) -> None:
    cache(build(networks.Residual), images_task(ck), tmp_path / "c")
    with pytest.raises(CheckpointError, match="not there; a cache of predictions was expected"):
        Cached(tmp_path / "nowhere")
    values = tmp_path / "c" / "values.bin"
    values.write_bytes(values.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="a damaged cache of predictions"):
        Cached(tmp_path / "c")
    info = tmp_path / "c" / "cache.json"
    info.write_text(json.dumps({"format": 1}))
    with pytest.raises(CheckpointError, match="has no digest; a cache of predictions was expected"):
        Cached(tmp_path / "c")
    write_json(info, {"format": 1})
    with pytest.raises(CheckpointError, match="a damaged cache of predictions"):
        Cached(tmp_path / "c")


class Bent(nn.Linear):
    """A linear layer whose forward can be another with the same weights."""

    bend = staticmethod(torch.tanh)

    def forward(self, x):
        return self.bend(super().forward(x))


@pytest.mark.parametrize("top", [None, 2])
def test_a_cache_of_other_answers_is_refused_though_the_weights_are_the_same(tmp_path, monkeypatch, top) -> None:
    torch.manual_seed(0)
    teacher, x = Bent(8, 4).eval(), torch.randn(16, 8)
    batches = [(x, torch.arange(16) % 4)]
    task = ck.Task(train=batches, val=batches)
    cache(Teacher(teacher), task, tmp_path / "c", top=top)
    assert len(cache(Teacher(teacher), task, tmp_path / "c", top=top)) == 16
    flipped = Teacher(teacher, inputs=lambda inputs: (-inputs[0],))
    negated = ck.Task(train=batches, val=batches, predict=lambda output: -output)
    for other, its in ((flipped, task), (Teacher(teacher), negated)):
        with pytest.raises(CheckpointError, match="the teacher answers otherwise than when it was made, with the same weights"):
            cache(other, its, tmp_path / "c", top=top)
    monkeypatch.setattr(Bent, "bend", staticmethod(torch.relu))
    with pytest.raises(CheckpointError, match="answers otherwise"):
        cache(Teacher(teacher), task, tmp_path / "c", top=top)


def test_a_cache_lies_where_it_was_asked_for_though_the_data_change_the_working_directory(tmp_path, monkeypatch) -> None:
    class Moves(list):
        def __iter__(self):
            os.chdir(elsewhere)
            return super().__iter__()

    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    task = images_task(ck)
    cached = cache(build(networks.Chain), ck.Task(train=Moves(task.train)), "c")
    assert len(cached) == len(Cached(tmp_path / "c"))
    assert str(cached.folder) == "c"  # a run knows its stages by what was written
    assert not list(elsewhere.iterdir())


def test_arguments_of_a_cache_that_are_of_another_kind_are_refused(tmp_path) -> None:
    task = images_task(ck)
    for settings, message in (
        ({"views": "2"}, r"cache\(views=...\): wanted a whole number >= 1, got '2'"),
        ({"top": -1}, r"cache\(top=...\): wanted a whole number >= 1, got -1"),
        ({"temperature": "4"}, r"cache\(temperature=...\): wanted a positive number, got '4'"),
        ({"task": task.train}, "cache: wanted a Task, got list"),
        ({"folder": task}, r"cache\(folder=...\): wanted a path, got Task"),
    ):
        with pytest.raises(SettingError, match=message):
            cache(**{"teacher": build(networks.Chain), "task": task, "folder": tmp_path / "c", **settings})
