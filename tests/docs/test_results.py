"""The page of results and its picture are what the script makes of the committed benchmark files."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import checkout
import pytest

DOCS = checkout.ROOT / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_in_step_with_the_benchmarks(script) -> None:
    assert (DOCS / "results.md").read_text() == script.page(), "python docs/make_results.py writes the page anew"


def test_the_picture_is_in_step_with_the_benchmarks(script) -> None:
    text = (DOCS / "accuracy_latency.svg").read_text()
    assert text == script.picture(), "python docs/make_results.py draws the picture anew"
    marks = [e for e in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle") if len(e)]
    assert len(marks) == len(script.points())


def test_a_changed_figure_changes_the_page(script, monkeypatch) -> None:
    before = script.page()
    original = script.load

    def changed(name):
        found = original(name)
        if name == "distill_cifar":
            found["rows"][0]["accuracy"] += 0.1
        return found

    monkeypatch.setattr(script, "load", changed)
    assert script.page() != before


def test_every_benchmark_is_linked_from_the_page() -> None:
    linked = set(re.findall(r"benchmarks/(\w+)\.(?:md|py)", (DOCS / "results.md").read_text()))
    results = {path.stem for path in (checkout.ROOT / "benchmarks").glob("*.json")}
    assert results - linked == set()
