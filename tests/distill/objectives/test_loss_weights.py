"""Weights of losses that follow the training."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, images_task

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import SettingError
from compresskit.distill import Term


def test_linear_warmup_rises_and_stays() -> None:
    assert [kd.linear_warmup(d, over=0.2, to=3.0) for d in (0.0, 0.1, 0.2, 1.0)] == [0.0, 1.5, 3.0, 3.0]
    assert kd.linear_warmup(0.0, over=0.0) == 1.0


def test_a_weight_follows_the_training() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    terms = [Term(kd.losses.dkd, weight=partial(kd.linear_warmup, over=0.5, to=2.0)), Term(kd.losses.dist)]
    goal = ck.imitate(teacher, terms=terms, weight=lambda done: 1 - done).bind(student, task)
    batch = task.train[0]
    full = goal(student.eval(), batch)  # nobody said how far it is
    assert full["imitate"].item() == 0
    for done, share in ((0.0, 0.0), (0.25, 0.5), (1.0, 1.0)):
        goal.advance(done)
        now = goal(student, batch)
        torch.testing.assert_close(now["dkd"], share * full["dkd"])
        torch.testing.assert_close(now["dist"], full["dist"])
        assert (now["imitate"] > 0) == (done < 1)
    seen = []
    weight = lambda done: seen.append(done) or 1.0  # noqa: E731
    goal = ck.imitate(teacher, terms=[Term(kd.losses.dkd, weight=weight)])
    seen.clear()
    ck.Train(epochs=2, objective=goal, accumulate=2)(student, task)
    assert seen == [0.0, 0.0, 0.25, 0.5, 0.5, 0.75]  # 3 batches an epoch, 2 steps: what is done before each batch


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(SettingError, match=r"Term\(weight=\.\.\.\): wanted a number >= 0, got -0.5 from its function"):
        Term(kd.losses.hint, weight=lambda done: -done)
    with pytest.raises(SettingError, match=r"imitate\(weight=\.\.\.\): wanted a number >= 0, got x from its function"):
        ck.imitate(weight=lambda done: "x")
