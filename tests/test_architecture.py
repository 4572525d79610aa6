"""The shape of the package: import order, ceilings, words, the public surface."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import checkout
import pytest
from checkout import ROOT, SUPPORT

import compresskit

PACKAGE = ROOT / "compresskit"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})

#: A package imports only from those on the lines above its own. `mixed` is a leaf: of the library it knows only the errors.
LAYERS = [
    {"base"},
    {"graph"},
    {"mixed", "measure", "metrics"},
    {"train"},
    {"export"},
    {"distill"},
    {"prune", "quant"},
    {"recipe"},
    {"search"},
    {"__init__", "cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: The same inside quant, whose parts stand on one another.
QUANT_LAYERS = [
    {"numerics"},
    {"passes"},
    {"model"},
    {"calibration"},
    {"build"},
    {"calibrated"},
    {"measured_placement"},
    {"effort"},
    {"static", "dynamic", "weight_only"},
    {"accuracy_target"},
    {"qat", "serialize"},
    {"__init__"},
]
QUANT_LEVEL = {name: level for level, names in enumerate(QUANT_LAYERS) for name in names}

LARGEST_FOLDER, LONGEST_FILE, LONGEST_FUNCTION = 15, 500, 60
MOST_LOOK_UPS = 25  # getattr and hasattr with a literal name
MOST_SHARED_NAMES = 10  # top-level names that are defined in more than one file


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """The syntax tree of each file; parsed by a process that runs one of these tests, not by one that only collects them."""
    return {path: ast.parse(path.read_text()) for path in FILES}


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_file(dotted: str) -> Path | None:
    """The file of `compresskit.a.b`, where there is one."""
    base = ROOT.joinpath(*dotted.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path in trees():
            return path
    return None


def imported_files(path: Path) -> Iterator[Path]:
    """The files of the package that a file imports, wherever in it: functions and TYPE_CHECKING blocks count."""
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "compresskit":
            for alias in node.names:
                found = module_file(f"{node.module}.{alias.name}") or module_file(str(node.module))
                assert found is not None, f"{short(path)}: {node.module}.{alias.name}"
                yield found
        elif isinstance(node, ast.Import):
            yield from (found for alias in node.names if (found := module_file(alias.name)) is not None)


@pytest.mark.parametrize("path", FILES, ids=short)
def test_imports_run_one_way(path: Path) -> None:
    here = part(path)
    for other in imported_files(path):
        if part(other) != here:
            assert LEVEL[part(other)] < LEVEL[here], f"{short(path)} ({here}) imports {short(other)}"
        elif here == "quant" and path.parent != other.parent:
            inner, outer = (p.relative_to(PACKAGE / "quant").parts[0].removesuffix(".py") for p in (path, other))
            assert QUANT_LEVEL[outer] < QUANT_LEVEL[inner], f"{short(path)} imports {short(other)}"


def test_mixed_is_a_leaf() -> None:
    for path in (PACKAGE / "mixed").rglob("*.py"):
        assert {short(other) for other in imported_files(path) if part(other) != "mixed"} <= {"base/errors.py"}


def test_no_import_cycles() -> None:
    graph = {path: {other for other in imported_files(path) if other != path} for path in FILES}
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " -> ".join(map(short, (*trail[trail.index(path) :], path)))
        if path not in done:
            for other in sorted(graph[path]):
                visit(other, (*trail, path))
            done.add(path)

    for path in FILES:
        visit(path, ())


@pytest.mark.parametrize("folder", FOLDERS, ids=short)
def test_folders_can_be_read_at_a_glance(folder: Path) -> None:
    inside = [path for path in folder.iterdir() if path.suffix == ".py" or path in FOLDERS]
    assert len(inside) <= LARGEST_FOLDER, f"{short(folder)} holds {len(inside)} modules and packages; give it a sub-package"


@pytest.mark.parametrize("path", FILES, ids=short)
def test_ceilings(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{node.name} is too long"
        assert not (isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)), "star import"


def test_no_file_name_twice_in_a_package() -> None:
    where = defaultdict(list)
    for path in FILES:
        if path.stem != "__init__":
            where[part(path), path.stem].append(short(path))
    assert [paths for paths in where.values() if len(paths) > 1] == []


def top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_a_name_is_defined_in_one_file() -> None:
    """Private helpers count: a reader who greps for a name should land in one place."""
    where = defaultdict(set)
    for path, tree in trees().items():
        for name in top_level_names(tree):
            if name not in ("__all__", "log"):
                where[name].add(short(path))
    shared = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    assert len(shared) <= MOST_SHARED_NAMES, shared


def test_string_look_ups_are_few() -> None:
    """`getattr(x, "name")` is a contract that no type checker sees."""
    found = [
        f"{short(path)}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ]
    assert len(found) <= MOST_LOOK_UPS, found


OF_TORCH = {"_parameters", "_buffers", "_modules", "_pytree"}  # private by name, but torch's own documentation uses them


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in OF_TORCH


def defined_names(tree: ast.Module) -> set[str]:
    """Names and attributes that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def test_no_module_reads_private_names_of_another() -> None:
    defined = {path: defined_names(tree) for path, tree in trees().items()}
    everywhere = set().union(*defined.values())
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("compresskit"):
                found += [f"{short(path)} imports {a.name}" for a in node.names if is_private(a.name)]
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined[path]:
                found += [f"{short(path)}:{node.lineno} reads {node.attr}"] if node.attr in everywhere else []
    assert found == []


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=short)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = trees()[path]
    assert ast.get_docstring(tree) is not None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and not is_overload(node):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize(
    ("module", "most"),
    [(compresskit, 47), *((getattr(compresskit, n), 30) for n in ("distill", "export", "mixed", "prune", "quant"))],
)
def test_public_surface_is_small_and_complete(module, most: int) -> None:
    # ruff sorts __all__ its own way (constants, classes, functions); each kind is sorted and every name exists.
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(module.__all__) <= most


def lines_with(pattern: str) -> list[str]:
    banned = re.compile(pattern)
    return [
        f"{p.name}: {line}" for p in FILES for line in p.read_text().splitlines() if banned.search(line.replace(".eval(", ""))
    ]


def test_nothing_that_executes_a_file() -> None:
    found = lines_with(r"\bpickle\b|\btorch\.load\b|\beval\(|\bexec\(|os\.system|subprocess\.|\bctypes\.CDLL")
    # The machine's own compiler builds the package's own source, in a folder that nobody else can write to.
    own = [line for line in found if line.startswith("native.py: ")]
    assert found == own
    calls = re.findall(r"(?:subprocess|ctypes)\.\w+(?=\()", " ".join(own))
    assert calls == ["subprocess.run", "ctypes.CDLL"]


def test_nothing_unfinished_and_nothing_of_torch_ao() -> None:
    assert not lines_with(r"torch\.ao\b|NotImplementedError|\bTODO\b")


def test_no_prints_from_the_library() -> None:
    for path, tree in trees().items():
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_import_is_light() -> None:
    code = (
        "import sys, time; import torch; begin = time.process_time(); import compresskit;"  # what has run so far is torch
        "heavy = ('onnx', 'onnxruntime', 'onnxscript', 'onnx_ir', 'matplotlib', 'torchvision', 'compresskit.search');"
        "print((time.process_time() - begin) / begin, [m for m in heavy if m in sys.modules])"
    )
    checkout.python(
        "-m", "compileall", "-q", PACKAGE
    )  # torch is compiled when it is installed; a user's second import finds both so
    shares = []
    while len(shares) < 3 and not (shares and min(shares) < 0.28):  # of the time that torch takes, whatever the machine
        share, heavy = checkout.python("-c", code).stdout.split(maxsplit=1)
        assert heavy.strip() == "[]"
        shares.append(float(share))
    assert min(shares) < 0.28


def test_what_is_imported_late_is_kept_as_a_user_sets_it() -> None:
    """A stand-in for `ck.compress` stays; what `mock.patch` takes away comes back."""
    code = (
        "import compresskit as ck; ck.compress = len; ck.at_most(bytes=1); assert ck.compress is len;"
        "del ck.compress; assert ck.compress.__module__ == 'compresskit.search.compress'; search = ck.search;"
        "del ck.search; assert ck.search is search; assert {'search', 'compress', 'at_most'} <= {*dir(ck)};"
        "from compresskit import *; assert compress is ck.compress; print(hasattr(ck, 'nothing'))"
    )
    assert checkout.python("-c", code).stdout.strip() == "False"


def test_oracles_share_no_code() -> None:
    assert "compresskit" not in [n.split(".")[0] for n in _imported(SUPPORT / "oracles.py")]


def _imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
