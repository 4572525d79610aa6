"""What functions depend on: the code of a user's modules, however a function comes by them."""

from __future__ import annotations

import importlib
import sys

import pytest

from compresskit.base.fingerprint import describe

#: It has its package as an attribute, as the package has it.
LOSSES = "import mine\ndef focal(p, t):\n    return {factor} * (p - t)\n"
WAYS = {
    "module of a package": "import mine.losses\ndef loss(p, t): return mine.losses.focal(p, t)",
    "from the package, inside": "def loss(p, t):\n    from mine import losses\n    return losses.focal(p, t)",
    "from the module, inside": "def loss(p, t):\n    from mine.losses import focal\n    return focal(p, t)",
    "the module, inside": "def loss(p, t):\n    import mine.losses\n    return mine.losses.focal(p, t)",
    "the module by another name, inside": "def loss(p, t):\n    import mine.losses as l\n    return l.focal(p, t)",
    "relative, inside": "def loss(p, t):\n    from .losses import focal\n    return focal(p, t)",
    "relative module, inside": "def loss(p, t):\n    from . import losses\n    return losses.focal(p, t)",
    "enclosed": "def make():\n    from . import losses\n    return lambda p, t: losses.focal(p, t)\nloss = make()",
}


def description(folder, monkeypatch, way, factor, more=""):
    """The description of `loss` of a package that a new process would import."""
    (folder / "mine").mkdir(exist_ok=True)
    files = {"__init__": "", "losses": LOSSES.format(factor=factor) + more, "use": WAYS[way]}
    for name, text in files.items():
        (folder / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return describe(importlib.import_module("mine.use").loss)


@pytest.mark.parametrize("way", WAYS)
def test_a_function_of_a_module_of_the_user_counts_however_it_is_reached(way, tmp_path, monkeypatch) -> None:
    before = description(tmp_path, monkeypatch, way, 1)
    assert description(tmp_path, monkeypatch, way, 1) == before
    assert description(tmp_path, monkeypatch, way, 1, more="\nunused = 3") == before
    assert description(tmp_path, monkeypatch, way, 2) != before


def test_an_import_that_fails_or_is_of_a_library_changes_nothing() -> None:
    def lazy(x):
        import _not_installed_anywhere
        import numpy.polynomial

        return _not_installed_anywhere, numpy.polynomial, x

    before = describe(lazy)
    importlib.import_module("numpy.polynomial")
    assert describe(lazy) == before
