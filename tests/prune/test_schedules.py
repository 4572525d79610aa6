"""Ratio schedules: their formulas, and what no schedule can do: remove more than the final ratio, or end elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.prune.schedules import Constant, Cubic, Cyclic, Exponential, Function, Linear, RatioSchedule


def test_schedules_are_their_formulas() -> None:
    assert [round(Cubic()(d, end=0.8), 6) for d in (0, 0.5, 1)] == [0.0, 0.7, 0.8]
    assert [Linear(start=0.2)(d, end=0.8) for d in (0, 0.5, 1)] == pytest.approx([0.2, 0.5, 0.8])
    assert [Exponential()(d, end=0.99) for d in (0, 0.5, 1)] == pytest.approx([0.0, 0.9, 0.99])
    assert Exponential(start=0.36)(0.5, end=0.84) == pytest.approx(1 - 0.64 * 0.5)
    assert {Constant()(d, end=0.7) for d in (0, 0.3, 1)} == {0.7}
    assert [Cyclic(cycles=2)(d, end=0.8) for d in (0, 0.5, 1)] == [0.0, 0.0, 0.8]
    assert Cyclic(cycles=2)(0.25, end=0.8) == pytest.approx(0.7)


@given(done=st.floats(0, 1), end=st.floats(0, 0.999), start=st.floats(0, 0.999))
def test_schedules_stay_between_start_and_end(done, end, start) -> None:
    for kind in (Cubic, Linear, Exponential, Cyclic):
        value = kind(start=start)(done, end=end)
        assert min(start, end) - 1e-9 <= value <= end
        assert kind(start=start)(1.0, end=end) == end


@dataclass(frozen=True)
class Late(RatioSchedule):
    """A schedule of a user."""

    after: float = 0.5

    def ratio(self, done: float, *, end: float) -> float:
        return end if done > self.after else 0.0


def test_a_schedule_of_the_user() -> None:
    assert [Late()(d, end=0.6) for d in (0.5, 0.6, 1.0)] == [0.0, 0.6, 0.6]
    assert ck.Prune(budget=ck.keep(macs=0.5), schedule=Late()).schedule == Late()


@given(done=st.floats(0, 1), end=st.floats(0, 0.999), value=st.floats(-10, 10))
def test_no_function_removes_more_than_the_end(done, end, value) -> None:
    schedule = Function(lambda done, *, end: value)
    assert 0 <= schedule(done, end=end) <= end
    assert schedule(1.0, end=end) == end


@pytest.mark.parametrize("schedule", [lambda done, *, end: end, Cubic, "cubic", 0.5, ck.Train(epochs=1).schedule])
def test_other_things_are_no_ratio_schedule(schedule) -> None:
    for make in (
        lambda: ck.Prune(budget=ck.keep(macs=0.5), schedule=schedule),
        lambda: ck.Sparsify(budget=ck.remove(weights=0.5), schedule=schedule, finetune=ck.Train(epochs=1)),
    ):
        with pytest.raises(SettingError, match=r"wanted a ratio schedule such as prune.schedules.Cubic\(\), got") as caught:
            make()
        assert "learning-rate schedules belong to Train(schedule=...)" in str(caught.value)
        assert "prune.schedules.Function(...)" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(start=1.0), r"Linear\(start=...\): wanted a ratio in \[0, 1\), got 1.0"),
        (lambda: Cubic(start="0"), r"Cubic\(start=...\): wanted a ratio in \[0, 1\), got '0'"),
        (lambda: Cyclic(cycles=0), r"Cyclic\(cycles=...\): wanted a whole number >= 1, got 0"),
        (lambda: Function(Cubic), r"Function\(...\): wanted a function"),
    ],
)
def test_settings_out_of_range(make, message) -> None:
    with pytest.raises(SettingError, match=message):
        make()
