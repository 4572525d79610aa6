"""The command line: tables, JSON and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import networks
import numpy as np
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.cli import COMMANDS, main, make_parser
from compresskit.export.check.environment import Package


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    model = build(networks.Residual)
    plain = ck.export_onnx(model, folder / "f.onnx", image(2))
    small = ck.export_onnx(ck.quant.quantize_static(model, [image(16)]), folder / "q.onnx", image(2))
    return str(plain), str(small)


def test_audit_prints_operators_and_metadata(files, capsys) -> None:
    assert main(["audit", *files]) == 0
    text = capsys.readouterr().out
    assert "0.0% of the MACs in integers" in text
    assert "100.0% of the MACs in integers" in text
    assert "layers in float: " in text
    assert ck.__version__ in text
    assert main(["audit", "--json", files[1]]) == 0
    record = json.loads(capsys.readouterr().out)[files[1]]
    assert record["operators"]["Conv"] == [4, 4]
    assert record["about"]["target"] == "X86"
    assert record["about"]["model"] == "Residual"


def test_audit_profiles_layers_beside_another_file(files, capsys) -> None:
    assert main(["audit", files[1], "--profile", "--against", files[0], "--seconds", "0.05"]) == 0
    text = capsys.readouterr().out
    assert "layer" in text
    assert "outside of kernels" in text
    assert main(["audit", files[1], "--profile", "--seconds", "0.05", "--threads", "2", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)[files[1]]["profile"]
    assert profile["threads"] == 2
    total = sum(layer["this"]["milliseconds"] for layer in profile["layers"]) + profile["outside"]
    assert total == pytest.approx(profile["milliseconds"])
    assert main(["audit", files[1], "--against", files[0]]) == 2
    assert capsys.readouterr().err == "compresskit: audit: --against is for --profile; write that, too\n"


def test_bench_prints_latencies_and_ratios(files, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["bench", *files, "--batch", "4", "--json"]) == 0
    timings = json.loads(capsys.readouterr().out)
    assert [t["path"] for t in timings] == list(files)
    assert [t["batch"] for t in timings] == [4, 4]
    assert all(t["milliseconds"] > 0 and t["bytes"] > 1000 for t in timings)
    assert timings[0]["ratio"] == 1
    assert main(["bench", files[0], "--seconds", "0.1"]) == 0
    head, row, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "runtime", "batch", "KiB", "median", "ms", "ratio"]
    assert row.split()[:3] == [files[0], "onnxruntime", "1"]
    assert row.split()[-1] == "1.000"
    assert note == "openvino is not installed, no file was timed in it: pip install openvino"
    assert main(["bench", files[0], "--seconds", "0.1", "--runtime", "onnxruntime"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["bench", files[0], "--runtime", "openvino"]) == 2
    assert capsys.readouterr().err == "compresskit: bench: openvino is not installed; pip install openvino\n"


def test_verify_compares_optimization_levels_and_files(files, capsys, tmp_path) -> None:
    assert main(["verify", files[0]]) == 0
    text = capsys.readouterr().out
    assert "agrees with the file as it is written" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["basic", "extended", "all"]
    assert main(["verify", files[1], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["quantized"]
    assert record["levels"]["all"]["within_two"] >= 0.97
    np.savez(tmp_path / "x.npz", x=image(64)[0].numpy())
    assert main(["verify", *files, "--inputs", str(tmp_path / "x.npz"), "--json"]) in (0, 1)
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert list(levels) == ["none", "basic", "extended", "all"]
    assert all(level["agreement"] > 0.8 for level in levels.values())
    other = ck.export_onnx(build(networks.Chain), tmp_path / "other.onnx", image(2))
    assert main(["verify", files[0], str(other)]) == 1


def test_report_prints_the_table_of_a_run(tmp_path, capsys) -> None:
    ck.Recipe(ck.StaticQuant()).run(build(networks.Chain), images_task(ck, samples=64), tmp_path / "run")
    run = str(tmp_path / "run")
    assert main(["report", run]) == 0
    assert "1-staticquant" in capsys.readouterr().out
    assert main(["report", run, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["stage"] for row in record["rows"]] == ["0-start", "1-staticquant"]
    assert record["stages"][0]["kind"] == "StaticQuant"
    assert record["environment"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert main(["report", run, run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [record, record]
    assert main(["report", run, "-o", str(tmp_path / "none" / "page.html")]) == 2
    assert capsys.readouterr().err.endswith("(No such file or directory); look at its rights, or choose another -o\n")
    page, lines = tmp_path / "page.html", tmp_path / "page.csv"
    assert main(["report", run, run, "-o", str(page)]) == main(["report", run, "-o", str(lines)]) == 0
    assert page.read_text().count(" (2)</h2>") == 1  # the same run twice
    assert lines.read_text() == (tmp_path / "run" / "report.csv").read_text()
    assert capsys.readouterr().out == ""
    assert main(["report", run, "-o", str(tmp_path / "page.pdf")]) == 2
    assert "report -o: wanted a name that ends with .html or .csv, got '" in capsys.readouterr().err
    (tmp_path / "run" / "report.json").unlink()
    (tmp_path / "run" / "1-staticquant" / "row.json").unlink()
    assert main(["report", run, "-o", str(page)]) == 1
    assert "compresskit: 1-staticquant: not finished\n" in capsys.readouterr().err
    assert "<li>1-staticquant: not finished</li>" in page.read_text()


def test_unreadable_files_end_with_exit_code_2(files, capsys, tmp_path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no")
    np.savez(tmp_path / "x.npz", wrong=np.zeros(3))
    np.savez(tmp_path / "shape.npz", x=np.zeros((2, 5, 8, 8), np.float32))
    for arguments, message in (
        (["audit", str(tmp_path / "bad.onnx")], "cannot load it"),
        (["bench", str(tmp_path / "bad.onnx")], "cannot load it"),
        (["verify", files[0], "--inputs", str(tmp_path / "bad.onnx")], "not an npz file"),
        (["verify", files[0], "--inputs", str(tmp_path / "x.npz")], "no array 'x'; the file wants ['x']"),
        (["verify", files[0], files[0], files[0]], "wanted one file, or a reference and a file, got 3"),
        (["report", str(tmp_path)], "report.json: not there"),
        (["report", files[0]], "f.onnx: a file; wanted the folder of a run"),
        (["audit", str(tmp_path / "nothere.onnx")], f"compresskit: no such file: {tmp_path / 'nothere.onnx'}\n"),
        (["verify", str(tmp_path / "nothere.onnx")], f"compresskit: no such file: {tmp_path / 'nothere.onnx'}\n"),
        (["bench", str(tmp_path / "nothere.onnx")], f"compresskit: no such file: {tmp_path / 'nothere.onnx'}\n"),
        (["inspect", str(tmp_path / "nothere.onnx")], f"compresskit: no such file: {tmp_path / 'nothere.onnx'}\n"),
        (["bench", files[0], "--inputs", "nothere.npz"], "compresskit: no such file: nothere.npz\n"),
        (["report", str(tmp_path / "nothere")], f"no such file: {tmp_path / 'nothere'}; wanted the folder of a run"),
        (["audit", str(tmp_path)], "a folder; wanted an ONNX file"),
        (["bench", files[0], "--threads", "-1"], "wanted threads >= 1 and seconds > 0, got -1"),
        (["bench", files[0], "--threads", "0"], "wanted threads >= 1 and seconds > 0, got 0"),
        (["bench", files[0], "--runtime", "tflite"], "bench: wanted runtimes among ('onnxruntime', 'openvino'), got ['tflite']"),
        (["audit", files[0], "--profile", "--threads", "0"], "wanted threads >= 1 and seconds > 0, got 0"),
        (["audit", str(tmp_path / "bad.onnx"), "--profile"], "cannot load it"),
        (["verify", files[0], "--inputs", str(tmp_path / "shape.npz")], "index: 1 Got: 5 Expected: 3"),
        (["bench", files[0], "--inputs", str(tmp_path / "shape.npz")], "f.onnx: ONNX Runtime cannot run it: Got invalid dimens"),
        (
            ["verify", files[0], "--inputs", str(tmp_path / "shape.npz")],
            "; give arrays of these sizes (--inputs), or say which (",
        ),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_version_is_printed(capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"compresskit {ck.__version__}\n"


def test_every_command_teaches_by_example(capsys) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        text = capsys.readouterr().out
        assert f"examples:\n  compresskit {name} " in text or name == "doctor"
        lines = [line.split("   ")[0].split(" | ")[0] for line in text.splitlines() if line.startswith("  compresskit ")]
        for line in lines:
            assert make_parser().parse_args(line.split()[1:]).command == name


def test_shells_complete_commands_and_options(capsys) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    for words, expected in (
        (["", "ver"], ["verify"]),
        (["", "--v"], ["--version"]),
        (["", "bench", "--r"], ["--runtime"]),
        (["", "report", "--o"], ["--output"]),
        (["", "verify", "model"], []),
    ):
        typed = f"COMP_WORDS=({' '.join(word or 'compresskit' for word in words)}); COMP_CWORD={len(words) - 1}"
        code = f'{script}\n{typed}\n_compresskit\necho "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert (done.stdout.split(), done.stderr) == (expected, "")


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """Files of one model: of any size, of any batch, of a batch of 2, of a batch of 4; and npz files of 0 and 2 rows."""
    folder, example = tmp_path_factory.mktemp("sized"), torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    made = {}
    for name, dynamic, rows in (("free", (0, 2, 3), 2), ("any", (0,), 2), ("two", (), 2), ("four", (), 4)):
        x = example.repeat(rows // 2, 1, 1, 1)
        made[name] = str(ck.export_onnx(model, folder / f"{name}.onnx", (x,), dynamic=dynamic))
    for rows in (0, 2):
        np.savez(folder / f"{rows}.npz", input=np.zeros((rows, 3, 8, 8), np.float32))
        made[str(rows)] = str(folder / f"{rows}.npz")
    return made


def test_files_are_timed_at_a_batch_that_all_take(sized, capsys) -> None:
    quick = ["--seconds", "0.02", "--runtime", "onnxruntime", "--json"]
    for names, options, batch in (
        (["any"], [], 1),
        (["two"], [], 2),
        (["any", "two"], [], 2),
        (["two", "any"], [], 2),
        (["free", "two"], [], 2),  # at its size, too
        (["any"], ["--batch", "3"], 3),
        (["two"], ["--batch", "2", "--size", "8"], 2),
        (["any"], ["--inputs", sized["2"]], 2),
        (["any"], ["--inputs", sized["2"], "--batch", "2"], 2),
    ):
        assert main(["bench", *(sized[name] for name in names), *options, *quick]) == 0
        assert {t["batch"] for t in json.loads(capsys.readouterr().out)} == {batch}
    assert main(["verify", sized["any"], sized["two"]]) == main(["verify", sized["free"], sized["two"]]) == 0
    assert main(["audit", sized["any"], "--profile", "--against", sized["two"], "--seconds", "0.02"]) == 0


def test_a_batch_or_a_size_that_a_file_does_not_take_is_refused(sized, capsys) -> None:
    two, four, takes = sized["two"], sized["four"], f"{sized['two']} takes input (2, 3, 8, 8) and no other"
    for arguments, message in (
        (["bench", two, "--batch", "4"], f"bench: {takes} batch, got --batch 4; say --batch 2, or leave it out"),
        (["bench", sized["any"], two, "--batch", "4"], f"{takes} batch, got --batch 4; say --batch 2, or leave it out"),
        (["bench", two, "--size", "224"], f"{takes} size, got --size 224; leave it out"),
        (["verify", two, "--batch", "4"], f"verify: {takes} batch, got --batch 4; say --batch 2, or leave it out"),
        (["audit", two, "--profile", "--batch", "4"], f"audit --profile: {takes} batch, got --batch 4; say --batch 2"),
        (["bench", two, four], f"got {two} with 2 in a dimension where {four} has 4; export one with dimensions that vary"),
        (
            ["bench", sized["any"], "--inputs", sized["2"], "--batch", "4"],
            "wanted inputs for --batch 4, got input (2, 3, 8, 8); leave",
        ),
        (
            ["bench", two, "--inputs", sized["2"], "--size", "9"],
            "wanted inputs for --size 9, got input (2, 3, 8, 8); leave out one",
        ),
        (
            ["bench", sized["any"], "--inputs", sized["0"]],
            "0.npz: the inputs have no rows, got input (0, 3, 8, 8); give at least one",
        ),
        (
            ["verify", sized["any"], "--inputs", sized["0"]],
            "0.npz: the inputs have no rows, got input (0, 3, 8, 8); give at least one",
        ),
        (["bench", four, "--inputs", sized["2"]], "Got: 2 Expected: 4; give arrays of these sizes (--inputs), or say which"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "dynamic=" not in error
        assert error.count("\n") == 1


def test_verify_says_that_outputs_are_not_finite(capsys, tmp_path) -> None:
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)

    path = str(ck.export_onnx(Log(), tmp_path / "f.onnx", (torch.ones(2, 8),)))
    assert main(["verify", path]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{path}: agrees with the file as it is written"
    assert re.fullmatch(r"  not finite: [\d.]+% of the values are NaN or infinite, at the same places in both; random .*", last)
    np.savez(tmp_path / "x.npz", x=np.full((2, 8), -1, np.float32))
    assert main(["verify", path, "--inputs", str(tmp_path / "x.npz")]) == 3
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{path}: no verdict: no output is finite, so nothing was compared"
    assert not _
    assert last == "  not finite: all values are NaN or infinite, at the same places in both"
    assert main(["verify", path, "--inputs", str(tmp_path / "x.npz"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["passed"] is None
    found = ck.export.verify_levels(path, (torch.full((2, 8), -1.0),))
    assert (found.passed, found.drawn) == (None, False)
    assert str(found).startswith("no verdict: no output is finite")


def test_verify_compares_truth_values(capsys, tmp_path) -> None:
    class Positive(nn.Module):
        def forward(self, x):
            return x > 0

    class Negative(nn.Module):
        def forward(self, x):
            return x < 0

    one, other = (str(ck.export_onnx(m(), tmp_path / f"{m.__name__}.onnx", (torch.ones(2, 8),))) for m in (Positive, Negative))
    assert main(["verify", one]) == 0
    assert main(["verify", one, other]) == 1
    assert "DISAGREES" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["inspect"], ["--help"], ["completion"]])
def test_output_that_nobody_reads_ends_a_command_quietly(arguments, files, capsys, monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with pytest.raises(SystemExit, match="141"):
            main([*arguments, *(files[:1] if arguments == ["inspect"] else [])])
        unread.flush()  # as the interpreter does at its end
    assert capsys.readouterr().err == ""


def test_the_file_of_compress_defines_model_and_task(files, capsys, tmp_path) -> None:
    mine = tmp_path / "mine.py"
    (tmp_path / "broken_helper.py").write_text("\nx = (\n")
    for text, message in (
        ("model = 1\ntask = 2\n", f"compress: {mine}: model: wanted a torch.nn.Module, got int; write model = one"),
        (
            "from torch import nn\nmodel = nn.Linear(1, 1)\ntask = {'a': 1}\n",
            f"compress: {mine}: task: wanted a compresskit.Task, got dict; write task = one",
        ),
        (
            "x = 1\ny = (\n",
            f"compress: {mine}, line 2: SyntaxError: '(' was never closed; python {mine} shows the whole traceback",
        ),
        ("\nimport nowhere\n", f"compress: {mine}, line 2: ModuleNotFoundError: No module named 'nowhere'; python"),
        ("import broken_helper\n", f"compress: {mine}, line 1 ({tmp_path}/broken_helper.py, line 2): SyntaxError: '('"),
        ("import json\njson.loads('[')\n", f"compress: {mine}, line 2 ({json.decoder.__file__}, line "),
        ("raise ValueError('one\\ntwo')\n", f"compress: {mine}, line 1: ValueError: one two; python"),
    ):
        mine.write_text(text)
        assert main(["compress", str(mine), "--size", "1MB"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"compresskit: {message}")
        assert error.count("\n") == 1
    for given, what in ((files[0], "not a Python file"), (str(tmp_path), "a folder")):
        assert main(["compress", given, "--size", "1MB"]) == 2
        assert capsys.readouterr().err == f"compresskit: {given}: {what}; wanted a Python file that defines model and task\n"


COMPRESSED = (
    "import compresskit as ck, torch\nmodel = torch.nn.Linear(2, 2)\ntask = ck.Task(val=[(torch.ones(2, 2), torch.ones(2))])\n"
)


@pytest.fixture
def budgets(monkeypatch, tmp_path):
    """The budgets that a command asks `compress` for, which does nothing; and the name of a file to compress."""
    (tmp_path / "mine.py").write_text(COMPRESSED)
    found: list = []

    def compress(model, task, budget, **options):
        found.append(budget)
        raise ck.CompressError("compress: none; raise trials=, choose another out=")

    monkeypatch.setattr("compresskit.cli.compress", compress)
    return found, str(tmp_path / "mine.py")


def test_the_budget_of_compress_is_in_the_words_of_the_command_line(budgets, capsys) -> None:
    found, mine = budgets
    for text in ("2h", "120", "120min", "7200s"):
        assert main(["compress", mine, "--drop", "0.5", "--minutes", text]) == 2
        assert capsys.readouterr().err == "compresskit: compress: none; raise --trials, choose another --out\n"
    assert set(found) == {ck.at_most(drop="0.5pt", minutes="2h")}
    for arguments, message in (
        (["--drop", "-1"], "compress --drop: wanted 0.5 or 0.5pt, in points (hundredths), got '-1'"),
        (["--drop", "nan"], "compress --drop: wanted 0.5 or 0.5pt, in points (hundredths), got 'nan'"),
        (["--drop", "1", "--minutes", "2d"], "compress --minutes: wanted 30 (minutes), 30min or 2h, got '2d'"),
        (["--size", "1 parsec"], "compress --size: wanted 1MB, 300KiB, or 0.1x of the uncompressed file's, got '1 parsec'"),
        (["--drop", "1", "--threads", "0"], "compress: --threads: wanted a whole number >= 1, got 0"),
        (["--drop", "1", "--trials", "0"], "compress: --trials: wanted a whole number >= 1, got 0"),
        (["--drop", "1", "--seconds", "0"], "compress: --seconds: wanted a positive number, got 0.0"),
        (["--drop", "1", "--out", mine], f"compress --out: wanted a folder, got a file: {mine}"),
        ([], "compress: wanted at least one of --latency, --size, --macs and --drop, got none; such as --latency 5ms"),
        (["--latency", "-5ms"], "compress --latency: wanted 5ms, or 0.4x of the uncompressed file's, got '-5ms'"),
    ):
        for file in (mine, "nothere.py"):  # whatever it would take to run it
            assert main(["compress", file, *arguments]) == 2
            assert capsys.readouterr().err == f"compresskit: {message}\n"
    assert len(found) == 4


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def _as_in_a_terminal() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; workers of pytest ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_as_in_a_terminal")
def test_a_search_that_is_stopped_says_how_it_goes_on(budgets, capsys, monkeypatch) -> None:
    monkeypatch.setattr("compresskit.cli.compress", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    assert main(["compress", budgets[1], "--size", "1MB", "--out", "runs/s"]) == 130
    said = "compresskit: stopped by SIGINT; runs/s has what was done. Run the same command again to go on\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr("compresskit.cli.inspect_onnx", interrupted)
    assert main(["inspect", "f.onnx"]) == 130
    assert capsys.readouterr().err == "compresskit: stopped by SIGINT\n"


def test_audit_shortens_long_metadata(capsys, tmp_path) -> None:
    path = str(ck.export_onnx(nn.Linear(8, 4).eval(), tmp_path / "f.onnx", (torch.randn(2, 8),)))
    ck.export.annotate(path, stage={"settings": {"objective": "x" * 3000}}, notes="two\nlines")
    assert main(["audit", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 200
    assert any(line.split() == ["notes", "two", "lines"] for line in lines)
    assert any("xxx ... (--json prints all of it)" in line for line in lines)
    assert main(["audit", path, "--json"]) == 0
    assert "x" * 3000 in capsys.readouterr().out


def test_random_inputs_give_no_verdict_on_a_calibrated_file(capsys, tmp_path) -> None:
    x, model = torch.rand(32, 8) * 0.1, nn.Linear(8, 4).eval()
    target = ck.quant.targets.X86_NO_VNNI
    plain = str(ck.export_onnx(model, tmp_path / "f.onnx", (x,)))
    small = str(ck.export_onnx(ck.quant.quantize_static(model, [(x,)], target=target), tmp_path / "q.onnx", (x,)))
    assert main(["verify", plain, small]) == 3
    assert f"{small}: no verdict: on random inputs, which may lie outside the ranges it was" in capsys.readouterr().out
    assert main(["verify", plain, small, "--json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert record["passed"] is None
    assert record["undecided"]
    np.savez(tmp_path / "x.npz", input=x.numpy())
    assert main(["verify", plain, small, "--inputs", str(tmp_path / "x.npz")]) == 0
    assert f"{small}: agrees with {plain}" in capsys.readouterr().out
    np.savez(tmp_path / "x.npz", input=100 * x.numpy())
    assert main(["verify", plain, small, "--inputs", str(tmp_path / "x.npz")]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_a_dynamically_quantized_file_is_a_quantized_one(tmp_path) -> None:
    x, model = (torch.randn(32, 8),), nn.Linear(8, 4).eval()
    target = ck.quant.targets.X86_NO_VNNI
    plain = ck.export_onnx(model, tmp_path / "f.onnx", x)
    small = ck.export_onnx(ck.quant.quantize_dynamic(model, [x], target=target), tmp_path / "q.onnx", x)
    found = ck.export.verify_levels(small, reference=plain)
    assert found.quantized
    assert not found.undecided


def test_bench_asks_for_the_sizes_that_vary(capsys, tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)).eval()
    path = str(ck.export_onnx(model, tmp_path / "f.onnx", (torch.randn(2, 3, 8, 8),), dynamic=(0, 2, 3)))
    assert main(["bench", path]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"compresskit: bench: {path} takes any size of input (")
    assert error.endswith("; say which: --size N, or --inputs FILE.npz\n")
    assert error.count("\n") == 1
    assert main(["audit", path, "--profile"]) == 2
    assert capsys.readouterr().err.endswith("; say which: --size N, or --inputs FILE.npz\n")
    assert main(["bench", path, "--size", "8", "--seconds", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["milliseconds"] > 0
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 3, 8, 8), np.float32))
    assert main(["bench", path, "--inputs", str(tmp_path / "x.npz"), "--seconds", "0.1"]) == 0


def test_inspect_prints_layers(files, capsys) -> None:
    assert main(["inspect", *files]) == 0
    text = capsys.readouterr().out
    assert f"{files[0]}: " in text
    assert "input scale" in text
    assert main(["inspect", "--json", files[1]]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert {layer["dtype"] for layer in record["layers"]} == {"int8"}
    assert record["path"] == files[1]


def test_doctor_says_what_is_missing(capsys, monkeypatch) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith(f"compresskit {ck.__version__}, Python 3.")
    assert f"  torch          {torch.__version__.partition(chr(43))[0]}\n" in text
    assert re.search(r"^  (no )?bf16: a convolution takes [\d.]+ times as long as in fp32", text, re.MULTILINE)
    assert text.endswith("all that is needed is there\n")
    found = [Package(name="onnx", version="1.2", wanted="1.18"), Package(name="transformers", version=None, purpose="models")]
    monkeypatch.setattr("compresskit.cli.packages", lambda: found)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "  onnx           1.2  wanted 1.18 or newer: pip install 'onnx>=1.18'\n" in text
    assert "  transformers   missing  only for models: pip install transformers\n" in text
    assert text.endswith("something that is needed is missing or too old\n")
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [package["fits"] for package in record["packages"]] == [False, True]
    assert record["fits"] is False
    assert "bf16" in record["bf16"]
