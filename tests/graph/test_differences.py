"""How far outputs of two models are apart, and what says nothing of it."""

from __future__ import annotations

import pytest
import torch

from compresskit.graph.differences import any_finite, filled_in, relative_difference, without_fills

INFINITY = float("inf")


def test_a_few_equal_numbers_far_from_all_others_are_fills() -> None:
    a = torch.tensor([0.5, -2.0, -1e9, -1e30, 3.0, float("nan"), INFINITY])
    assert filled_in(a, a).tolist() == [False, False, True, True, False, False, False]
    b = a.clone()
    b[2] = -1.1e9
    assert filled_in(a, b).tolist() == [False, False, False, True, False, False, False]  # not the same in both
    clean, noisy = without_fills(a[:5], torch.tensor([0.25, -2.0, -1e9, -1e30, 3.0]))
    assert clean.tolist() == [0.5, -2, 0, 0, 3]
    assert noisy.tolist() == [0.25, -2, 0, 0, 3]
    masked, other = torch.tensor([1.0, -INFINITY, INFINITY]), torch.tensor([2.0, -INFINITY, 3.0])
    assert [v.tolist() for v in without_fills(masked, other)] == [[1, 0, INFINITY], [2, 0, 3]]


@pytest.mark.parametrize(
    "values",
    [torch.full((4,), 5000.0), torch.tensor([1e6, 1e5, 1.0]), torch.tensor([500.0, 0.1]), 1e6 + torch.arange(20.0),
     torch.zeros(0), torch.tensor([1_000_000, 3]), torch.tensor([1e4] + [200.0] * 3)],
)  # fmt: skip
def test_numbers_of_a_model_are_no_fills(values) -> None:
    assert filled_in(values, values) is None
    assert without_fills(values, values)[0] is values


def test_levels_of_fills_are_found_behind_one_another() -> None:
    a = torch.tensor([[torch.finfo(torch.float32).min, 0.25], [-1e9, -1e4]])
    assert filled_in(a).tolist() == [[True, False], [True, True]]


def test_a_difference_is_a_fraction_of_what_differs() -> None:
    a = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    b = a + torch.tensor([0.0, 1e-3, 0.0])
    assert relative_difference(a, a) == 0
    assert relative_difference(a, b) == pytest.approx(1e-3)
    fills = torch.tensor([-1e9, torch.finfo(torch.float64).min, INFINITY, float("nan")], dtype=torch.float64)
    assert relative_difference(torch.cat([a, fills]), torch.cat([b, fills])) == pytest.approx(1e-3)
    added = torch.tensor([-1e9 + 0.3], dtype=torch.float64)  # rounds otherwise: a fill that is added, not written
    assert relative_difference(torch.cat([a, added]), torch.cat([b, added + 1e-6])) == pytest.approx(1e-6)
    assert not relative_difference(a, torch.tensor([0.5, -1.0, INFINITY])) <= 1
    assert not relative_difference(a, torch.tensor([0.5, -1.0, float("nan")])) <= 1


def test_rounding_of_outputs_that_cancel_is_no_difference() -> None:
    a = torch.tensor([100.0, 0.0, 1e-17], dtype=torch.float64)
    assert relative_difference(a, a + torch.tensor([0.0, 1e-14, -1e-17], dtype=torch.float64)) < 1e-11
    single = torch.tensor([1e-3], dtype=torch.float32)
    assert relative_difference(single, single + 1e-6) == pytest.approx(1e-6, rel=0.1)


def test_nothing_is_compared_where_nothing_is_finite() -> None:
    assert any_finite([torch.tensor([float("nan"), 1.0])])
    assert not any_finite([torch.tensor([float("nan"), INFINITY]), torch.zeros(0)])
