"""A run that failed says why, and ends with the same bits once the cause is gone."""

from __future__ import annotations

import errno
import os
from functools import partial

import networks
import pytest
import torch
from networks import images_task

import compresskit as ck
from compresskit import mixed
from compresskit.base.errors import (
    CompressError,
    DataError,
    TrainingError,
)


def task(**settings):
    return images_task(ck, samples=32, batch=16, **settings)


SAVE = ck.Every(seconds=None, steps=1)


def run(out, given=None, epochs=2):
    torch.manual_seed(0)
    recipe = ck.Recipe(ck.Train(epochs=epochs, optimizer=partial(torch.optim.SGD, lr=0.01)), save=SAVE, export="last")
    return recipe.run(networks.Chain(), task() if given is None else given, out)


def goes_on(out, wanted):
    """A run that failed is started again and ends with the weights of one that never did."""
    got = run(out).model.state_dict()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run").model.state_dict()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "the disk is full; make room and run the same command again"), (errno.EROFS, "cannot be written"),
     (errno.EACCES, "look at its rights, or choose another out=")],
)  # fmt: skip
@pytest.mark.parametrize("at", [6, 9, 12, 15])
def test_a_run_resumes_after_a_full_or_read_only_disk(number, said, at, whole, tmp_path, monkeypatch) -> None:
    real, seen = os.fsync, [0]

    def fsync(handle):
        seen[0] += 1
        if seen[0] == at:
            raise OSError(number, os.strerror(number))
        return real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CompressError, match=said):
        run(tmp_path / "run")
    monkeypatch.undo()
    assert not list(tmp_path.rglob("*.part"))
    goes_on(tmp_path / "run", whole)


@pytest.mark.matrix
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 GB")])
@pytest.mark.parametrize("where", ["__call__", "backward", "step"])
def test_a_run_resumes_after_running_out_of_memory(error, where, whole, tmp_path, monkeypatch) -> None:
    real, seen = getattr(mixed.Run, where), [0]

    def fails(self, *args, **kwargs):
        seen[0] += self.model.training  # not where the metric is measured
        if seen[0] == 3 and self.model.training:
            raise error
        return real(self, *args, **kwargs)

    monkeypatch.setattr(mixed.Run, where, fails)
    with pytest.raises(TrainingError, match=r"memory.*; lower the batch size \(accumulate= keeps the step what it was\)"):
        run(tmp_path / "run")
    monkeypatch.undo()
    goes_on(tmp_path / "run", whole)


def test_a_run_resumes_after_a_metric_of_nan(whole, tmp_path) -> None:
    broken = task()
    broken = ck.Task(train=broken.train, val=broken.val, metric=lambda p, t: float("nan"))
    with pytest.raises(DataError, match="the metric is nan"):
        run(tmp_path / "run", broken)
    goes_on(tmp_path / "run", whole)
