"""The page of the articles: its commands name scripts and options that exist, its expressions public names, its tests tests."""

from __future__ import annotations

import functools
import re

import checkout
import pytest

import compresskit as ck
from compresskit import distill as kd

TEXT = (checkout.ROOT / "docs" / "sources.md").read_text()
COMMANDS = sorted(set(re.findall(r"`python ([^`]+)`", TEXT)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", TEXT)))
NAMES = sorted(set(re.findall(r"\b((?:ck|kd)(?:\.\w+)+)", TEXT)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_a_script_and_its_options(command) -> None:
    file, *rest = command.split()
    script = checkout.ROOT / file
    assert script.exists()
    shared = [script.parent / f"{name}.py" for name in re.findall(r"^from (\w+) import", script.read_text(), re.M)]
    sources = [path.read_text() for path in (script, *shared) if path.exists()]
    for option in (word for word in rest if word.startswith("--")):
        assert any(f'"{option}"' in source for source in sources), option


@pytest.mark.parametrize("test", TESTS)
def test_a_test_exists(test) -> None:
    file, name = test.split("::")
    assert re.search(rf"^def {name}\(", (checkout.ROOT / file).read_text(), re.M)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists(name) -> None:
    root, *path = name.split(".")
    functools.reduce(getattr, path, {"ck": ck, "kd": kd}[root])


def test_the_page_covers_the_recipes() -> None:
    assert len(COMMANDS) > 15
    assert len(NAMES) > 10
    assert len(TESTS) > 50
    for line in TEXT.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            assert line.count("|") == 4, line
