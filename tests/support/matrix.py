"""Matrices of costly cases, of which the gate runs a part, and `-m slow` the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest


def some(values: Iterable[Any], every: int = 2) -> list[Any]:
    """The values of one parameter; all but the first of each `every` are slow."""
    return [value if number % every == 0 else pytest.param(value, marks=pytest.mark.slow) for number, value in enumerate(values)]


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Of each test with the mark `matrix`, leave in the gate so many cases that each value of each parameter is in one.

    Of these one of each `every`, where the mark says so: of tests of one parameter whose values go the same way, and take long.
    """
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        settings = found[0].get_closest_marker("matrix").kwargs
        assert not settings or len([*found[0].iter_markers("parametrize")]) == 1, (
            f"{found[0].nodeid}: every= is for one parameter"
        )
        kept = in_the_gate([item.callspec.params for item in found], **settings)
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def in_the_gate(cases: Sequence[Mapping[str, Any]], every: int = 1) -> set[int]:
    """The numbers of the cases of one test that are not slow."""
    return set([*cover(cases)][::every])


def cover(cases: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """The numbers of so many cases that each value of each parameter is in one; a case is the values of its parameters."""
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set[tuple[str, str]]().union(*values)
    while missing:
        best = max(range(len(cases)), key=lambda number: len(values[number] & missing))
        missing -= values[best]
        yield best
