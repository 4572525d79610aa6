"""The page of the recipes and its pictures are what the script makes of the runs that are committed."""

from __future__ import annotations

import importlib.util
import json
import re
from xml.etree import ElementTree

import checkout
import pytest

RECIPES = checkout.ROOT / "recipes"
NAMES = {path.name for path in RECIPES.glob("*.py")} - {"vision.py", "text.py"}


def loaded(folder, name):
    spec = importlib.util.spec_from_file_location(name, checkout.ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return loaded("docs", "make_gallery")


def test_the_page_and_its_pictures_are_in_step_with_the_runs(script) -> None:
    assert (RECIPES / "README.md").read_text() == script.page(), "python docs/make_gallery.py writes the page anew"
    drawn = script.pictures()
    assert {path.name for path in (RECIPES / "pictures").iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (RECIPES / "pictures" / name).read_text() == text, "python docs/make_gallery.py draws the pictures anew"
        title = ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title")
        assert title.text.startswith(name.removesuffix(".svg"))


def test_every_recipe_was_run_with_the_settings_of_the_script(script) -> None:
    cases, runs = loaded("benchmarks", "gallery").CASES, script.runs()
    assert set(cases) == set(script.SHOWS) == set(runs) == NAMES
    for name, run in runs.items():
        assert run["arguments"] == cases[name], f"python benchmarks/gallery.py --only {name}"
        assert run["seconds"] > 1
        assert all(row["verified"] for row in run["rows"])
        options = re.findall(r'"(--[a-z-]+)"', (RECIPES / name).read_text() + (RECIPES / "text.py").read_text())
        assert set(re.findall(r"(?<!\S)--[a-z-]+", run["arguments"])) <= set(options)
    assert "/tmp" not in json.dumps(runs)


def test_a_changed_figure_changes_the_page(script, monkeypatch) -> None:
    page, pictures, found = script.page(), script.pictures(), script.runs()
    found["digits.py"]["rows"][-1]["metric"] -= 0.01
    monkeypatch.setattr(script, "runs", lambda: found)
    assert script.page() != page
    assert script.pictures()["digits.svg"] != pictures["digits.svg"]
