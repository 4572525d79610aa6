"""Shared fixtures. Nothing here needs a network or data that is not part of the project."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matrix import mark_slow
from quick import make_quick

make_quick()

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: one thread each, and for what they start
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


#: Files with tests of 20 s and more: the last of them must not keep one worker busy while the others have nothing left to do.
LONG = ("test_recipes.py", "test_kills.py", "test_pages.py", "test_workers.py")


@pytest.hookimpl(tryfirst=True)  # before those are left out that are slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first."""
    mark_slow(items)
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: the collector need not look at it again. It takes a seventh of the time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`run_script(CODE)` runs a script in a folder of its own, as `python script.py` does, without importing everything again."""

    def run(code: str) -> None:
        script = tmp_path / "script.py"
        script.write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script)])
        before = dict(sys.modules)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                runpy.run_path(str(script), run_name="__main__")
        finally:  # a page may put a stand-in where a module of that name would be found
            for name in sys.modules.keys() - before.keys():
                if getattr(sys.modules[name], "__spec__", None) is None:
                    del sys.modules[name]
            sys.modules.update(before)

    return run
