"""The command line where outputs cannot be written or inputs not be read: no traceback, and the exit codes of its help."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import zipfile
from types import SimpleNamespace

import checkout
import numpy as np
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.cli import main


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(ck.export_onnx(nn.Linear(4, 2), tmp_path_factory.mktemp("cli") / "ü.onnx", (torch.ones(2, 4),)))


@pytest.mark.parametrize("command", ["inspect", "completion"])
def test_an_output_that_is_full_is_said(command, file, capsys, monkeypatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="2"):
            main([command, *([file] if command == "inspect" else [])])
        full.flush()  # as the interpreter does at its end
    assert capsys.readouterr().err == "compresskit: the output cannot be written (No space left on device)\n"


def test_a_command_without_outputs_ends_as_others_do(file, monkeypatch) -> None:
    """A closed output is None, as of a daemon."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["inspect", file]) == 0
    assert main(["inspect", f"{file}.gone"]) == 2
    sys.stdout.close()
    sys.stderr.close()


def test_what_an_output_has_no_letters_for_is_escaped(file, monkeypatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["inspect", file]) == 0
    assert rb"\xfc.onnx: " in written.getvalue()


def test_what_is_no_npz_file_of_numbers_ends_with_exit_code_2(file, tmp_path, capsys) -> None:
    rows = np.zeros((2, 4), np.float32)
    np.savez(tmp_path / "whole.npz", input=rows)
    whole = (tmp_path / "whole.npz").read_bytes()
    np.savez_compressed(tmp_path / "packed.npz", input=rows)
    packed = bytearray((tmp_path / "packed.npz").read_bytes())
    begin = 30 + int.from_bytes(packed[26:28], "little") + int.from_bytes(packed[28:30], "little")
    packed[begin : begin + 8] = b"\xff" * 8  # of the data after the header of the entry
    np.save(tmp_path / "one.npy", rows)
    np.savez(tmp_path / "text.npz", input=np.array(["a"]))
    with zipfile.ZipFile(tmp_path / "file.zip", "w") as archive:
        archive.writestr("input", "rows")
    for name, content in (("cut.npz", whole[:200]), ("empty.npz", b""), ("packed.npz", packed)):
        (tmp_path / name).write_bytes(content)
    for name, message in (
        ("one.npy", 'one array without a name, .*; np.savez\\("inputs.npz", \\*\\*{"input": array}\\) writes one'),
        ("cut.npz", "not an npz file of arrays"),
        ("empty.npz", "not an npz file of arrays"),
        ("packed.npz", "not an npz file of arrays"),
        ("text.npz", "holds what no input can be"),
        ("file.zip", "holds what no input can be"),
    ):
        for command in (["verify", file], ["bench", file], ["audit", file, "--profile"]):
            assert main([*command, "--inputs", str(tmp_path / name)]) == 2
            error = capsys.readouterr().err
            assert re.match(f"compresskit: {re.escape(str(tmp_path / name))}: {message}", error), error
            assert error.count("\n") == 1
    assert main(["verify", file, "--inputs", str(tmp_path / "whole.npz")]) == 0


def full_stream(buffered: bool) -> io.TextIOWrapper:
    """A stream of a full disk; not buffered as with PYTHONUNBUFFERED=1, or by lines, as standard error is."""
    if buffered:
        return open("/dev/full", "w", buffering=1)
    return io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "command", ["inspect", "inspect nothing", "completion", "--version", "--help", "inspect --help", "nonsense"]
)
def test_a_full_disk_for_both_outputs_is_told_by_the_exit_code(command, buffered, file, monkeypatch) -> None:
    """As of `> log 2>&1`; a traceback would end with 1, and what the interpreter cannot flush at its end with 120."""
    with full_stream(buffered) as out, full_stream(buffered) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        arguments = [file if command == "inspect" else "nothing.onnx"] if command.startswith("inspect") else []
        try:
            code = main([*command.removesuffix(" nothing").split(), *arguments])
        except SystemExit as ended:
            code = ended.code
        out.flush()
        err.flush()
    assert code == 2


def test_warnings_to_a_full_disk_leave_the_exit_code(file, monkeypatch, capsys) -> None:
    with full_stream(buffered=True) as err:
        monkeypatch.setattr(sys, "stderr", err)
        with contextlib.suppress(OSError):
            err.write("of the library\n")  # which swallows the error
        assert main(["inspect", file]) == 0
        err.flush()
    assert "ü.onnx" in capsys.readouterr().out


def test_what_the_file_of_compress_does_leaves_the_output_and_its_folder(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").write_text(
        "import os, torch, compresskit as ck\n"
        f"os.chdir({str(tmp_path / 'elsewhere')!r})\n"
        "print('epoch 1')\n"
        "model, task = torch.nn.Linear(2, 2), ck.Task(val=[(torch.ones(2, 2), torch.ones(2))])\n"
    )

    def search(model, task, budget, *, out, **options):
        print("epoch 2")
        return SimpleNamespace(to_json=lambda: {"out": str(out)})

    monkeypatch.setattr("compresskit.cli.compress", search)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert main(["compress", "mine.py", "--size", "1MB", "--out", "runs/s", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"out": str(tmp_path / "runs" / "s")}
    assert said.err == "epoch 1\nepoch 2\n"


def test_minutes_alone_are_no_budget(capsys) -> None:
    assert main(["compress", "mine.py", "--minutes", "2h"]) == 2
    assert "got --minutes alone, which is how long may be trained; such as --latency 5ms" in capsys.readouterr().err


def test_the_package_runs_as_the_command() -> None:
    assert ck.__version__ in checkout.python("-m", "compresskit", "--version").stdout
    done = checkout.python("-m", "compresskit", "audit", "missing.onnx", check=False)
    assert (done.returncode, done.stderr) == (2, "compresskit: no such file: missing.onnx\n")
