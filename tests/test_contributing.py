"""What CONTRIBUTING asks for an addition is complete: leaving a step out fails here, with a message that names the file.

A kind of addition is a row of `KINDS`. What exists is read from the source files, so that a new function is seen before it is
entered anywhere.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import checkout
import oracles
import pytest
from matrix import cover, in_the_gate

import compresskit as ck
from compresskit.distill.losses import LOSSES, TARGET_LOSSES
from compresskit.prune.criteria import CRITERIA, WEIGHT_CRITERIA
from compresskit.quant.numerics import observers
from compresskit.quant.numerics.targets import TARGETS

PACKAGE, TESTS = checkout.ROOT / "compresskit", checkout.ROOT / "tests"
CONTRIBUTING = (checkout.ROOT / "CONTRIBUTING.md").read_text()


def parse(path: str) -> ast.Module:
    return ast.parse((checkout.ROOT / path).read_text())


def public(path: str, wanted: Callable[[ast.stmt], bool]) -> set[str]:
    """Names of the public functions and classes of a file, or of the files of a folder, for which `wanted` is true."""
    place = checkout.ROOT / path
    files = sorted(place.glob("*.py")) if place.is_dir() else [place]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name for node in named if not node.name.startswith("_") and wanted(node)}


def takes(*names: str) -> Callable[[ast.stmt], bool]:
    """Whether a function's positional arguments begin so, and it needs no keyword."""

    def wanted(node: ast.stmt) -> bool:
        if not isinstance(node, ast.FunctionDef):
            return False
        if node.returns is None or ast.unparse(node.returns) in ("ABFStack", "ProjectionHeads"):  # they make adapters
            return False
        required = [a for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None]
        return [a.arg for a in node.args.args[: len(names)]] == list(names) and not required

    return wanted


def subclasses(*bases: str) -> Callable[[ast.stmt], bool]:
    def wanted(node: ast.stmt) -> bool:
        return isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id in bases for b in node.bases)

    return wanted


def is_observer(kind: object) -> bool:
    return isinstance(kind, type) and kind is not observers.Observer and issubclass(kind, observers.Observer)


def keys_of(path: str, variable: str) -> set[str]:
    """Keys of a dict literal that is assigned to a variable, anywhere in a file: texts, or the names of functions."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == variable:
            found |= {k.value if isinstance(k, ast.Constant) else ast.unparse(k) for k in node.value.keys if k is not None}
    assert found, f"{path}: no dict {variable}"
    return found


def names_in_tests(path: str) -> set[str]:
    """Names that the asserting test functions of a file use."""
    tests = [list(ast.walk(node)) for node in parse(path).body if isinstance(node, ast.FunctionDef)]
    asserting = [nodes for nodes in tests if any(isinstance(node, ast.Assert) for node in nodes)]
    return {node.id for nodes in asserting for node in nodes if isinstance(node, ast.Name)}


def words_of_test(test: str) -> str:
    """The source of a test function, wherever it stands."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body if test in path.read_text() else []:
            if isinstance(node, ast.FunctionDef) and node.name == test:
                return "\n".join(map(ast.unparse, node.decorator_list)) + ast.unparse(node)
    raise AssertionError(f"there is no test {test}, which tests/test_contributing.py names")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of addition.

    row: its first cell in CONTRIBUTING's table, which must name `files`.
    exist: names that the source defines.
    listed: names in the list (at `where`) over which the contract tests run.
    values: names whose expected values a test file has; `add` says how to enter more.
    own: for names without an entry there, the test that holds their expected values.
    page: the page of docs that names each.
    """

    row: str
    files: tuple[str, ...]
    exist: set[str]
    listed: set[str]
    where: str
    add: str
    values: set[str]
    own: dict[str, str]
    page: str


LOSS_TESTS, CRITERION_TESTS = "tests/distill/losses/test_losses.py", "tests/prune/test_criteria.py"
OBSERVER_TESTS = "tests/quant/numerics/test_observers.py"
ELSEWHERE = "or name the test that has its values in `own` of tests/test_contributing.py"

KINDS = [
    Kind(
        row="a distillation loss",
        files=("compresskit/distill/losses/__init__.py", "tests/support/oracles.py", LOSS_TESTS, "docs/distillation.md"),
        exist=public("compresskit/distill/losses", takes("student", "teacher")),
        listed={f.__name__ for f in (*LOSSES, *TARGET_LOSSES)} | {"reviewkd", "top_k_soft_targets", "match_predictions"},
        where="LOGIT_LOSSES, FEATURE_LOSSES, RELATION_LOSSES or TARGET_LOSSES in compresskit/distill/losses/__init__.py",
        add=f"add its settings to FORMULAS in {LOSS_TESTS} and its formula to tests/support/oracles.py, {ELSEWHERE}",
        values=keys_of(LOSS_TESTS, "FORMULAS"),
        own={
            "attention_scores": "test_masked_attention_scores_count_as_zero",
            "chunked_soft_targets": "test_chunked_is_the_same_loss_and_gradient",
            "dkd": "test_dkd_equals_its_formula_and_decomposes_kd",
            "hard_targets": "test_sums_with_labels_equal_their_formulas",
            "kl_plus_ce": "test_sums_with_labels_equal_their_formulas",
            "match_predictions": "test_match_predictions_is_soft_targets_for_classes_and_a_relative_error_otherwise",
            "reviewkd": "test_reviewkd_is_the_sum_of_its_depths",
            "top_k_soft_targets": "test_a_cache_of_the_top_k",
        },
        page="docs/distillation.md",
    ),
    Kind(
        row="a criterion",
        files=("compresskit/prune/criteria.py", CRITERION_TESTS, "docs/pruning.md"),
        exist=public("compresskit/prune/criteria.py", takes("slices")),
        listed={f.__name__ for f in (*CRITERIA, *WEIGHT_CRITERIA)},
        where="CRITERIA (channels) or WEIGHT_CRITERIA (single weights) in compresskit/prune/criteria.py",
        add=f"add its formula to the table `wanted` in {CRITERION_TESTS}, {ELSEWHERE}",
        values=keys_of(CRITERION_TESTS, "wanted"),
        own={
            **dict.fromkeys(("snip", "movement", "grasp", "wanda"), "test_criteria_are_their_formulas"),
            "optimal_brain_surgeon": "test_optimal_brain_surgeon_is_what_least_squares_cannot_make_up",
            "random_scores": "test_random_is_uniform_and_seeded",
            "shapley": "test_shapley_of_every_order",
        },
        page="docs/pruning.md",
    ),
    Kind(
        row="an observer",
        files=("compresskit/quant/numerics/observers.py", OBSERVER_TESTS, "docs/quantization.md"),
        # A range that is known beforehand is none of the values, as the contract wants it.
        exist={name for name, kind in vars(observers).items() if is_observer(kind) and not name.startswith("_")} - {"KnownRange"},
        listed={o.__name__ for o in observers.OBSERVERS},
        where="OBSERVERS in compresskit/quant/numerics/observers.py",
        add=f"add a test of the range it finds to {OBSERVER_TESTS}",
        values=names_in_tests(OBSERVER_TESTS),
        own={},
        page="docs/quantization.md",
    ),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.row)


@every_kind
def test_each_is_entered_in_the_list_of_the_contract_tests(kind: Kind) -> None:
    missing = sorted(kind.exist - kind.listed)
    assert not missing, f"{kind.row}: enter {missing} in {kind.where}; the contract tests run over that list"


@every_kind
def test_each_has_expected_values(kind: Kind) -> None:
    missing = sorted(kind.listed - kind.values - kind.own.keys())
    assert not missing, f"{kind.row}: no expected values for {missing}; {kind.add}"
    stale = sorted(kind.own.keys() - kind.listed)
    assert not stale, f"{kind.row}: {stale} in `own` of tests/test_contributing.py no longer exist"
    for name, test in kind.own.items():
        assert "assert" in words_of_test(test), f"{kind.row}: {test}, which has the values of {name}, asserts nothing"


@every_kind
def test_each_is_on_the_page_of_its_kind(kind: Kind) -> None:
    page = (checkout.ROOT / kind.page).read_text()
    missing = sorted(name for name in kind.listed if not re.search(rf"\b{name}\b", page))
    assert not missing, f"{kind.row}: {kind.page} does not name {missing}"


def test_each_formula_of_a_loss_has_an_oracle() -> None:
    missing = sorted(name for name in keys_of(LOSS_TESTS, "FORMULAS") if not hasattr(oracles, name))
    assert not missing, f"a distillation loss: add the formula of {missing} to tests/support/oracles.py"


#: Kinds whose members need no table of formulas, but a test that names each: row, names, where the test belongs.
MENTIONED = [
    ("a ranking of groups", public("compresskit/prune/rankings.py", takes("step")), "tests/prune/test_rankings.py"),
    ("a normalizer", public("compresskit/prune/normalizers.py", takes("scores")), CRITERION_TESTS),
    ("an allocation", public("compresskit/prune/allocations.py", takes("weights", "ratio")),
     "tests/prune/test_allocations.py"),
    ("a pattern of zeros", public("compresskit/prune/patterns.py", subclasses("Pattern")), "tests/prune/test_patterns.py"),
    ("a ratio schedule", public("compresskit/prune/schedules.py", subclasses("RatioSchedule", "_Rising")),
     "tests/prune/test_schedules.py"),
    ("a learning-rate schedule", public("compresskit/train/lr.py", subclasses("LRSchedule")), "tests/train/test_lr.py"),
    ("a target", {target.name for target in TARGETS}, "tests/quant/numerics/test_targets.py"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "names", "file"), MENTIONED, ids=[row for row, *_ in MENTIONED])
def test_each_is_named_by_its_tests(row: str, names: set[str], file: str) -> None:
    assert names
    text = (checkout.ROOT / file).read_text()
    missing = sorted(name for name in names if not re.search(rf"\b{name}\b", text))
    assert not missing, f"{row}: no test of {missing} in {file}"


def test_each_target_is_in_the_list() -> None:
    assigned = {
        node.targets[0].id
        for node in parse("compresskit/quant/numerics/targets.py").body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("Target", "replace")
    }
    missing = sorted(assigned - {target.name for target in TARGETS})
    assert not missing, f"a target: enter {missing} in TARGETS in compresskit/quant/numerics/targets.py"


def test_each_stage_is_in_a_test_of_chains() -> None:
    kinds = [
        kind
        for place in (ck, ck.prune.depth, ck.prune.low_rank, ck.quant, ck.quant.qat)
        for name in place.__all__
        if isinstance(kind := getattr(place, name), type) and issubclass(kind, ck.Stage)
    ]
    stages = {kind.__name__ for kind in kinds} - {"Stage"}
    exist = {c.__name__ for c in all_subclasses(ck.Stage) if c.__module__.startswith("compresskit")}
    assert exist == stages, f"a stage: export {sorted(exist ^ stages)} in compresskit/__init__.py"
    tests = [text for path in TESTS.rglob("*.py") if "Recipe(" in (text := path.read_text())]
    missing = sorted(name for name in stages if not any(re.search(rf"\b{name}\(", text) for text in tests))
    assert not missing, f"a stage: no test runs {missing} in a Recipe; tests/recipe/test_recipe.py has chains"


def all_subclasses(base: type) -> set[type]:
    return {c for sub in base.__subclasses__() for c in (sub, *all_subclasses(sub))}


ROWS = {
    cells[0]: line for line in CONTRIBUTING.splitlines() if len(cells := [c.strip() for c in line.strip("| ").split("|")]) > 1
}


@pytest.mark.parametrize(
    ("row", "files"),
    [*((kind.row, kind.files) for kind in KINDS), *((row, (file,)) for row, _, file in MENTIONED)],
    ids=[kind.row for kind in KINDS] + [row for row, *_ in MENTIONED],
)
def test_contributing_names_every_file(row: str, files: tuple[str, ...]) -> None:
    assert row in ROWS, f"CONTRIBUTING.md has no row {row!r}"
    missing = [file for file in files if file.removeprefix("compresskit/") not in ROWS[row]]
    assert not missing, f"CONTRIBUTING.md, row {row!r}, does not name {missing}"


def test_files_that_contributing_names_are_there() -> None:
    named = set(re.findall(r"`((?:tests/|docs/|benchmarks/|[a-z_]+/)[\w/]+\.(?:py|md))`", CONTRIBUTING))
    assert len(named) > 15
    missing = [name for name in sorted(named) if not (checkout.ROOT / name).exists() and not (PACKAGE / name).exists()]
    assert not missing, f"CONTRIBUTING.md names files that are not there: {missing}"


def test_the_gate_has_each_value_of_a_matrix() -> None:
    """And no more cases than the parameter with most values has, where all go with all."""
    cases = [{"one": one, "two": two, "with it": -two} for one, two in itertools.product("abc", (1, 2))]
    chosen = [cases[number] for number in cover(cases)]
    assert len(chosen) == 3
    assert {value for case in chosen for value in case.values()} == {*"abc", 1, 2, -1, -2}
    assert list(cover(cases[2:3])) == [0]  # a case that is asked for alone runs
    assert in_the_gate([{"one": n} for n in range(5)], every=2) == {0, 2, 4}  # of tests that say so, one of two
