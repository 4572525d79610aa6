"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.base.fingerprint import describe
from compresskit.train.lr import Tail


def test_schedules_follow_their_formulas() -> None:
    assert ck.lr.Cosine()(0) == 1
    assert ck.lr.Cosine()(1) == pytest.approx(0)
    assert ck.lr.Cosine()(0.5) == pytest.approx(0.5)
    assert ck.lr.Cosine(end=0.1)(1) == pytest.approx(0.1)
    assert ck.lr.OneCycle()(0) == pytest.approx(0.04)
    assert ck.lr.OneCycle()(0.2) == pytest.approx(1)
    assert ck.lr.OneCycle()(1) == pytest.approx(0)
    assert ck.lr.OneCycle(warmup=0.5, start=0.2, end=0.3)(0.25) == pytest.approx(0.6)
    assert ck.lr.OneCycle(warmup=0.5, start=0.2, end=0.3)(1) == pytest.approx(0.3)
    assert ck.lr.Constant()(0.3) == 1
    assert ck.lr.Function(lambda done: 1 - done)(0.3) == 0.7


def test_the_tail_of_a_schedule_is_its_rest_stretched() -> None:
    tail = Tail(schedule=ck.lr.Cosine(), start=0.5)
    assert [tail(done) for done in (0, 0.5, 1)] == [ck.lr.Cosine()(done) for done in (0.5, 0.75, 1)]


def test_training_multiplies_every_rate_by_the_schedule() -> None:
    rates = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    batches = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))] * 5
    train = ck.Train(
        epochs=2,
        optimizer=lambda p: Watched([{"params": p[:1]}, {"params": p[1:], "lr": 1.0}], lr=0.1),
        schedule=ck.lr.OneCycle(),
    )
    train(nn.Linear(2, 2), ck.Task(train=batches, val=batches))
    factors = [ck.lr.OneCycle()(step / 10) for step in range(10)]
    assert rates == [[0.1 * factor, 1.0 * factor] for factor in factors]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ck.lr.Cosine(end=-0.1), r"lr.Cosine\(end=...\): wanted a factor >= 0, got -0.1"),
        (lambda: ck.lr.OneCycle(warmup=1.0), r"lr.OneCycle\(warmup=...\): wanted a number in \[0, 1\), got 1.0"),
        (lambda: ck.lr.OneCycle(start=-1.0), r"start=...\): wanted a factor"),
        (lambda: ck.lr.Function(0.5), r"wanted a function \(done\) -> factor, got float"),
    ],
)
def test_settings_out_of_range_are_refused(make, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


def test_schedules_read_and_compare_as_their_settings() -> None:
    assert repr(ck.lr.Cosine(end=0.1)) == "Cosine(end=0.1)"
    assert ck.lr.OneCycle() == ck.lr.OneCycle(warmup=0.2)
    assert describe(ck.lr.Cosine()) == {"kind": "Cosine", "end": 0.0}
