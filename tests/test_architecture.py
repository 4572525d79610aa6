"""The shape of the house: import order, ceilings, the public surface."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import compresskit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "compresskit"
FILES = sorted(PACKAGE.rglob("*.py"))

#: A file imports only from layers above its own (and, inside a package, from its neighbours).
LAYERS = [
    {"errors", "version"},
    {"settings", "distributed", "records"},
    {"task", "randomness", "packing", "tensorfile"},
    {"inputs", "samples", "surgery", "normalize", "recurrent", "feed"},
    {"graph", "masks", "snapshots"},
    {"mixed", "measure", "checkpoint"},
    {"progress"},
    {"loop"},
    {"train"},
    {"export"},
    {"distill", "prune", "quant"},
    {"store", "report", "folder", "rehearse"},
    {"recipe"},
    {"__init__", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("compresskit"):
            rest = node.module.removeprefix("compresskit").strip(".")
            yield from ([rest.split(".")[0]] if rest else [alias.name for alias in node.names])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    here = part(path)
    for other in imports(path):
        if other == here:
            continue
        assert LEVEL[other] < LEVEL[here], f"{path.name} ({here}) imports {other}"


def test_mixed_is_a_leaf() -> None:
    for path in (PACKAGE / "mixed").glob("*.py"):
        assert set(imports(path)) <= {"mixed", "errors"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_ceilings(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
        assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)), "star import"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_names_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) is not None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize(
    "module", [compresskit, *(getattr(compresskit, n) for n in ("distill", "export", "mixed", "prune", "quant"))]
)
def test_public_surface_is_sorted_and_complete(module) -> None:
    # ruff sorts __all__ its own way (constants, classes, functions); each kind is sorted and every name exists.
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def lines_with(pattern: str) -> list[str]:
    banned = re.compile(pattern)
    return [
        f"{p.name}: {line}" for p in FILES for line in p.read_text().splitlines() if banned.search(line.replace(".eval(", ""))
    ]


def test_nothing_that_executes_a_file() -> None:
    assert not lines_with(r"\bpickle\b|\btorch\.load\b|\beval\(|\bexec\(|os\.system|subprocess")


def test_nothing_unfinished_and_nothing_of_torch_ao() -> None:
    assert not lines_with(r"torch\.ao\b|NotImplementedError|\bTODO\b")


def test_no_prints_from_the_library() -> None:
    for path in FILES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_import_is_light() -> None:
    code = (
        "import sys, time; import torch; begin = time.process_time(); import compresskit;"  # what has run so far is torch
        "heavy = ('onnx', 'onnxruntime', 'onnxscript', 'onnx_ir', 'matplotlib', 'torchvision');"
        "print((time.process_time() - begin) / begin, [m for m in heavy if m in sys.modules])"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(5)]
    assert all(run.split(maxsplit=1)[1].strip() == "[]" for run in runs)
    assert min(float(run.split()[0]) for run in runs) < 0.28  # of the time that torch takes, whatever the machine


def test_oracles_share_no_code() -> None:
    assert "compresskit" not in [n.split(".")[0] for n in _imported(ROOT / "tests" / "oracles.py")]


def _imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
