"""A user's file is run as a script is, and as a module that every process can import, whatever its name."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

import compresskit as ck
from compresskit.base.errors import Interrupted
from compresskit.base.fingerprint import describe
from compresskit.base.fingerprint.functions import USER_FILES
from compresskit.recipe.preflight import preflight_check
from compresskit.search.script.source import SCRIPT_TEXT, SourceWriter
from compresskit.search.script.user_file import defined_by

FILE = """import argparse
import logging
import sys
import torch
from dataclasses import dataclass
from torch.utils.data import DataLoader, Dataset
import compresskit as ck
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
arguments, here = parser.parse_args(), (sys.argv, sys.path[0])
print("it trains", arguments.epochs)
class Rows(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        return torch.full((12,), float(i)), i % 4
def adam(parameters, lr=0.001):
    logging.getLogger(__name__).debug(__file__)
    return torch.optim.Adam(parameters, lr=lr)
class Net(torch.nn.Linear):
    pass
torch.manual_seed(0)
model = Net(12, 4)
loader = DataLoader(Rows(), 8, num_workers=1, multiprocessing_context="spawn")
task = ck.Task(train=loader, val=loader)
train = ck.Train(steps=4, optimizer=adam)
if __name__ == "__main__":
    raise RuntimeError("it is run as a module")
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Iterator[Path]:
    """A file by the name of a module that is loaded; modules of files are forgotten after the test."""
    monkeypatch.setattr("sys.path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "of user").mkdir()
    path = tmp_path / "of user" / "torch.py"
    path.write_text(FILE)
    yield path
    for name in set(sys.modules) - before:
        if name.startswith(f"{USER_FILES}."):
            del sys.modules[name]


def test_a_file_is_run_as_a_script_without_arguments(mine, monkeypatch) -> None:
    given = ["compresskit", "compress", "--size", "1MB"]
    monkeypatch.setattr("sys.argv", given)
    defined = defined_by(str(mine), "here")
    assert defined["here"] == ([str(mine)], str(mine.parent))
    assert defined["__file__"] == str(mine)
    assert sys.argv is given
    assert sys.modules["torch"] is torch


def test_another_process_finds_what_the_file_defines(mine, capsys) -> None:
    defined = defined_by(str(mine), "here")
    capsys.readouterr()
    stored = bytes(ForkingPickler.dumps([defined["Rows"](), defined["adam"]]))
    del sys.modules[defined["Rows"].__module__]  # another process does not have it yet
    mine.write_text(FILE.replace("i % 4", "i % 2"))
    rows, adam = ForkingPickler.loads(stored)
    assert rows[7][1] == 1
    assert adam.__module__ == type(rows).__module__
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "it trains 3\n")  # standard output may be JSON


def test_a_worker_that_is_no_fork_reads_the_data_of_the_file(mine) -> None:
    """In the written recipe, which the command line runs alike. Its folder and the working directory are others."""
    file = mine.rename(mine.with_name("my-model.v2.py"))
    code = mine.parents[1] / "recipe.py"
    first = "type('First', (), {'run': lambda self, model, task, out: next(iter(task.val))[1].tolist()})()"
    code.write_text(SCRIPT_TEXT.format(title="", name="recipe.py", defines="", imports="", recipe=first, out="again"))
    process = subprocess.run(
        [sys.executable, str(code), os.path.relpath(file, "/")],
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(Path(ck.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == "it trains 3\n[0, 1, 2, 3, 0, 1, 2, 3]\n", process.stderr


def test_what_a_run_recognizes_a_file_by_is_that_of_runpy(mine, monkeypatch) -> None:
    """By which earlier versions ran it: their runs go on, wherever the file is."""
    monkeypatch.setattr("sys.argv", [str(mine)])
    before, defined = runpy.run_path(str(mine)), defined_by(str(mine), "here")
    for name in ("Rows", "adam", "model", "loader", "train"):
        assert describe(defined[name]) == describe(before[name])
    writer = SourceWriter()
    writer.source(defined["train"], "here")
    assert writer.defined == ["adam"]


OF_USER = """
class Factored(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["row"] = p.grad.reshape(len(p), -1).square().mean(1)
        return super().step(closure)
@dataclass(frozen=True)
class Mine(ck.Stage):
    keeps = frozenset()
    dynamic: tuple = ()
    def __call__(self, model, task):
        return model.float()
optimizer = Factored(model.parameters(), lr=0.1)
"""


def test_an_optimizer_of_the_file_is_none_of_the_library(mine) -> None:
    """Whose states have the shapes of their parameters, or are numbers; this one keeps a number for each row."""
    mine.write_text(FILE + OF_USER)
    defined = defined_by(str(mine), "here")
    run = ck.mixed.prepare(defined["model"], defined["optimizer"], ck.mixed.FP32)
    run.backward(run(torch.ones(2, 12)).square().mean())
    run.step()
    kept = run.state_dict()["optimizer"]
    run.load_state_dict(run.state_dict())
    assert torch.equal(run.state_dict()["optimizer"]["state"]["weight"]["row"], kept["state"]["weight"]["row"])


def test_a_stage_of_the_file_is_none_of_the_library(mine) -> None:
    """Of the library's stages it is known that they keep the dtype; one of a user may cast a model that cannot be written yet."""
    mine.write_text(FILE + OF_USER)
    defined = defined_by(str(mine), "here")
    model = torch.nn.Conv2d(12, 4, 1).double()
    rows = [(torch.ones(n, 12, 1, 1, dtype=torch.float64), torch.zeros(n, 1, 1, dtype=torch.int64)) for n in (2, 1)]
    preflight_check(model, ck.Task(val=rows), [defined["Mine"]()])  # whose `dynamic` may mean anything
    with pytest.raises(ck.ExportError, match="ONNX Runtime has no Conv in DOUBLE"):
        preflight_check(model, ck.Task(val=rows))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sys.exit('no data\\nhere')", "SystemExit: no data here"),
        ("parser.error('no data')", "SystemExit: 2"),
    ],
)
def test_a_file_that_ends_the_process_is_refused(line, said, mine, monkeypatch) -> None:
    given = [*sys.argv]
    text = FILE.replace("class Rows", f"{line}\nclass Rows")
    mine.write_text(text)
    at = text.splitlines().index(line.splitlines()[0]) + 1
    with pytest.raises(ck.SettingError) as caught:
        defined_by(str(mine), "here")
    assert str(caught.value).startswith(f"here: {mine}, line {at}")
    end = f": it ends the process ({said}), and is run without arguments; give its options defaults, and let it run to its end"
    assert str(caught.value).endswith(end)
    assert sys.argv == given
    assert not [name for name in sys.modules if name.startswith("compresskit.search.script.user_file.")]


def test_a_signal_that_ends_a_run_in_the_file_is_no_error_of_it(mine) -> None:
    mine.write_text("from compresskit.base.errors import Interrupted\nraise Interrupted('stopped by SIGTERM')\n")
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        defined_by(str(mine), "here")
