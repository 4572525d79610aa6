"""What a search leaves for people: the recipe as a script, and the table."""

from __future__ import annotations

import ast
import copy
import enum
import functools
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compresskit as ck
from compresskit.cli import main
from compresskit.search.candidate import Candidate
from compresskit.search.options import SearchSettings
from compresskit.search.script.source import SCRIPT_TEXT, SourceWriter, as_script

QUICK = {"trials": 2, "finalists": 1, "seconds": 0.02}
pytestmark = pytest.mark.usefixtures("by_formula")


def test_the_written_recipe_says_how_it_is_called(model, task, tmp_path, monkeypatch) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    monkeypatch.setattr("sys.argv", [str(found.code)])
    with pytest.raises(SystemExit, match=r"python recipe.py FILE.py"):
        runpy.run_path(str(found.code), run_name="__main__")


def test_the_written_recipe_runs_a_file_that_imports_one_beside_it(model, task, tmp_path, monkeypatch, capsys) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    torch.save((model, task.train), tmp_path / "trained.pt")
    (tmp_path / "beside_it.py").write_text(
        "import torch, compresskit as ck\n"
        f"model, batches = torch.load({str(tmp_path / 'trained.pt')!r}, weights_only=False)\n"
        "task = ck.Task(train=batches, val=batches)\n"
    )
    (tmp_path / "mine.py").write_text("from beside_it import model, task\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "s").rename(tmp_path / "moved")
    code = tmp_path / "moved" / found.code.name
    monkeypatch.setattr("sys.argv", [str(code), str(tmp_path / "mine.py")])
    runpy.run_path(str(code), run_name="__main__")
    assert "0-start" in capsys.readouterr().out
    assert (tmp_path / "moved" / "again" / "model.onnx").exists()
    assert not (tmp_path / "s").exists()
    assert sys.modules.pop("beside_it").__file__ == str(tmp_path / "beside_it.py")


def test_what_was_given_in_eval_mode_stays_there_in_the_search_as_in_its_recipe(model, task, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: [Candidate(macs=0.5, bits="float")])
    frozen = copy.deepcopy(model).train()
    for module in frozen.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    settings = {"out": tmp_path / "s", **QUICK, "trials": 1, "train": ck.Train(steps=8)}
    found = ck.compress(frozen, task, ck.at_most(macs="0.9x"), **settings)
    again = found.recipe.run(frozen, task, tmp_path / "again")
    weights = [(run.out / "1-prune" / "model.safetensors").read_bytes() for run in (found.result, again)]
    assert weights[0] == weights[1]
    with pytest.raises(ck.CheckpointError, match="belongs to the search of another model"):
        ck.compress(frozen.eval(), task, ck.at_most(macs="0.9x"), **settings)


OPTIMIZER = "def adam(parameters, lr=0.001):\n    return torch.optim.Adam(parameters, lr=lr)\n"
MINE = """import torch
import compresskit as ck
{optimizer}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).eval()
batches = [(torch.randn(16, 12), torch.arange(16) % 4) for _ in range(2)]
task = ck.Task(train=batches, val=batches)
train = ck.Train(steps=4, optimizer=adam)
"""


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("optimizer", [OPTIMIZER, "from beside_them import adam"], ids=["of the file", "of one beside it"])
def test_the_written_recipe_runs_in_a_process_of_its_own(optimizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: [Candidate(macs=0.5)])
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_them.py").write_text(f"import torch\n{OPTIMIZER}")
    mine, out = tmp_path / "mine.py", tmp_path / "s"
    mine.write_text(MINE.format(optimizer=optimizer))
    quick = ["--trials", "1", "--finalists", "1", "--seconds", "0.02", "--out", str(out)]
    assert main(["compress", str(mine), "--size", "100KB", *quick]) == 0
    sys.modules.pop("beside_them", None)
    assert "adam" in (out / "recipe.py").read_text()
    runpy.run_path(str(out / "recipe.py"))  # as a worker of a loader imports it
    root = {"PYTHONPATH": str(Path(ck.__file__).parents[1])}
    subprocess.run([sys.executable, str(out / "recipe.py"), str(mine)], cwd="/", env=os.environ | root, check=True)
    (trained,) = (out / "trained").glob("*/model.onnx")
    assert (out / "again" / "model.onnx").read_bytes() == trained.read_bytes()


@pytest.mark.usefixtures("by_formula")
def test_a_recipe_that_somebody_changed_is_kept(model, task, tmp_path, caplog) -> None:
    def search(size: str) -> str:
        return ck.compress(model, task, ck.at_most(bytes=size), out=tmp_path, **QUICK).code.read_text()

    first, second = search("2x"), search("1.9x")
    assert "2x" in first.splitlines()[0] != second.splitlines()[0]
    search("1.9x")
    assert not (tmp_path / "recipe-1.py").exists()
    for number in (1, 2):
        (tmp_path / "recipe.py").write_text(f"{second}# {number}")
        assert search("1.9x") == second
        assert (tmp_path / f"recipe-{number}.py").read_text() == f"{second}# {number}"
        assert f"recipe.py is not as a search wrote it; it is kept as recipe-{number}.py" in caplog.text
    (tmp_path / "recipe.py").write_bytes(b"\xff")
    assert search("1.9x") == second
    assert (tmp_path / "recipe-3.py").read_bytes() == b"\xff"


def test_a_function_that_no_written_recipe_can_have_is_refused(model, task, tmp_path) -> None:
    def adam(parameters):
        return torch.optim.Adam(parameters)

    for module, name in (("__main__", "adam"), ("<string>", "adam"), (__name__, "test.<locals>.adam")):
        adam.__module__, adam.__qualname__ = module, name
        with pytest.raises(ck.SettingError, match=r"cannot be imported, so that no recipe can be written with it"):
            ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path, train=ck.Train(steps=1, optimizer=adam), **QUICK)


@pytest.mark.parametrize(
    ("budget", "train", "named"),
    [
        (ck.at_most(bytes="2x", minutes="2s"), None, r"at_most\(minutes=...\)"),
        (ck.at_most(bytes="2x"), ck.Train(steps=1), "train="),
    ],
)
def test_a_training_without_data_to_train_on_is_refused(budget, train, named, model, task, tmp_path) -> None:
    unlabelled = ck.Task(calibration=[x for x, _ in task.train], val=task.val)
    with pytest.raises(ck.SettingError, match=named + r".* trains finalists, which needs Task\(train=...\)"):
        ck.compress(model, unlabelled, budget, out=tmp_path / "s", train=train, **QUICK)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("train", "shown"), [(None, {""}), (ck.Train(epochs=1), {"0", "1"})], ids=["not trained", "trained"])
def test_the_table_says_what_was_trained_of_a_training_alone(train, shown, model, task, tmp_path) -> None:
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", train=train, **QUICK)
    head, _, *rows = str(found).splitlines()[1:]
    end = head.index("trained") + len("trained")
    (chosen,) = (row for row in rows if row.startswith(">"))
    assert chosen[end - len("trained") : end].strip() in shown


def names_of_the_script() -> list[str]:
    """What the script reads or defines besides what a recipe needs."""
    blank = dict.fromkeys(("title", "name", "defines", "imports", "out"), "")
    tree = ast.parse(SCRIPT_TEXT.format(recipe="None", **blank))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {(a.asname or a.name) for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    return sorted(name for name in names if not name.startswith("__"))


class Kind(enum.StrEnum):
    FEW = "few"


class Level(enum.IntEnum):
    HIGH = 3


class Steps(int):
    pass


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (np.geomspace(1e-3, 1e-1, 3)[1], 0.01),
        ((np.float64(0.5), 0.25, np.int64(3), np.bool_(True), np.str_("text")), (0.5, 0.25, 3, True, "text")),
        ([math.inf, -math.inf, np.float32(np.inf)], [math.inf, -math.inf, math.inf]),
        ({np.int64(1): Kind.FEW, Level.HIGH: None}, {1: Kind.FEW, 3: None}),
        ([Steps(5), torch.__version__], [5, str(torch.__version__)]),
    ],
    ids=["numpy", "tuple", "infinity", "enum", "subclasses"],
)
def test_values_are_written_as_python_that_makes_them(given, plain) -> None:
    train = ck.Train(steps=4, clip=np.float64(2.0), optimizer=functools.partial(torch.optim.SGD, lr=given))
    text = as_script(ck.Recipe(train), title="", name="recipe.py", out="again")
    read = {"__name__": "worker", "__file__": "recipe.py"}
    exec(text, read)
    (stage,) = read["recipe"].stages
    assert stage.optimizer.keywords == {"lr": plain}
    assert stage.clip == 2.0


def test_nan_is_written() -> None:
    writer = SourceWriter()
    assert (writer.source(math.nan, "here"), writer.imports()) == ("nan", "\nfrom math import nan\n")


@pytest.mark.parametrize("value", [torch.tensor(0.1), np.ones(1), np.complex128(1j)], ids=["tensor", "array", "complex"])
def test_what_python_does_not_write_is_refused(value) -> None:
    with pytest.raises(ck.SettingError, match="here: .* cannot be written as Python"):
        SourceWriter().source(functools.partial(torch.optim.SGD, lr=value), "here")


@pytest.mark.parametrize("name", names_of_the_script())
def test_a_function_by_a_name_of_the_script_itself_is_refused(name) -> None:
    def optimizer(parameters):
        return torch.optim.Adam(parameters)

    for module in ("<run_path>", "mine"):
        optimizer.__module__, optimizer.__qualname__ = module, name
        with pytest.raises(ck.SettingError, match=rf"here, optimizer: {name} of {module} and of .* are both used; rename one"):
            SourceWriter().source(ck.Train(steps=1, optimizer=optimizer), "here")


def test_a_function_named_partial_is_refused_beside_that_of_functools() -> None:
    def own(parameters):
        return torch.optim.Adam(parameters)

    own.__module__, own.__qualname__ = "mine", "partial"
    for given in ((own, functools.partial(torch.optim.SGD)), (functools.partial(own),)):
        with pytest.raises(ck.SettingError, match="partial of .* are both used; rename one of them"):
            SourceWriter().source(given, "here")


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ((np.int64(0), np.int64(1)), (0, 1)),
        (range(2), (0, 1)),
        (np.arange(2), (0, 1)),
        ({0, 1}, (0, 1)),
        ({"input": {np.int64(0): "batch", np.int64(1): "length"}}, {"input": {0: "batch", 1: "length"}}),
    ],
    ids=["numpy", "range", "array", "set", "names"],
)
def test_dimensions_of_other_types_are_recorded_as_numbers(given, plain, tmp_path) -> None:
    """JSON, and a written recipe, have no others."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    settings, recipe = SearchSettings(dynamic=given), ck.Recipe(ck.StaticQuant(), dynamic=given)
    assert settings.dynamic == recipe.dynamic == plain
    written = as_script(recipe, title="", name="recipe.py", out="again")
    assert f"dynamic={plain!r}" in written
    quantized = ck.quant.quantize_static(net, [torch.randn(2, 5, 4) for _ in range(2)], dynamic=given)
    ck.save(quantized, tmp_path)
    assert ck.load(net, tmp_path).dynamic == plain
