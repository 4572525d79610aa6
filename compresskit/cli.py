"""The command line: `verify|audit|bench|inspect FILE...` for ONNX files, `report FOLDER...` for runs, `compress`, `doctor`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import zlib
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from compresskit.base.errors import CompressError, DataError, Interrupted, SettingError
from compresskit.base.progress import make_writable_, output_may_end, say, stoppable
from compresskit.base.task import Inputs
from compresskit.base.version import __version__
from compresskit.export.check.audit import Audit, audit
from compresskit.export.check.benchmark import (
    agreed_sizes,
    ask_for_sizes,
    benchmark,
    check_sizes_of,
    open_session,
    shared_inputs,
)
from compresskit.export.check.contents import inspect_onnx
from compresskit.export.check.environment import environment, packages
from compresskit.export.check.levels import verify_levels
from compresskit.export.check.runtimes import OPENVINO_REMEDY, installed_openvino
from compresskit.export.files import read_metadata
from compresskit.mixed.formats.slow_bf16 import bf16_speed
from compresskit.recipe.folder import folder_of_run
from compresskit.recipe.page.records import read_run
from compresskit.recipe.page.render import write_csv, write_page
from compresskit.recipe.report import remarks, table
from compresskit.search import at_most, compress
from compresskit.search.ceilings import parse_ceiling
from compresskit.search.options import SearchSettings
from compresskit.search.script.user_file import defined_by

SAY_WHICH = "say which: --size N, or --inputs FILE.npz"
OPTION = "--{} {}"  # an option and its value, in messages
STOPPED = 130  # exit code, as shells have it for a process that SIGINT ended
#: Options of `compress` that are ceilings: (quantity of `at_most`, what is wanted).
CEILINGS = {
    "latency": ("latency", "5ms, or 0.4x of the uncompressed file's"),
    "size": ("bytes", "1MB, 300KiB, or 0.1x of the uncompressed file's"),
    "macs": ("macs", "10M, or 0.5x of the uncompressed model's"),
    "drop": ("drop", "0.5 or 0.5pt, in points (hundredths)"),
    "minutes": ("minutes", "30 (minutes), 30min or 2h"),
}
#: How the library names what an option of the command line sets -> the option.
WORDS = {
    r"name the dimensions that vary in dynamic=$": "give arrays of these sizes (--inputs), or say which (--batch, --size)",
    r"(?:at_most|compress)\((threads|batch|drop|trials|finalists|seconds)=\.\.\.\)": r"compress: --\1",
    r"\b(minutes|trials|finalists)=(?=[ ;,)]|$)": r"--\1",
    r"\bchoose another out=": "choose another {}",
}
OUTPUT_OF = {"report": "-o", "compress": "--out"}
#: Lines at the end of the help of a command.
EXAMPLES = {
    "verify": """  compresskit verify model.onnx int8.onnx --inputs samples.npz   real data: an array for each input
  compresskit verify model.onnx                                  the file at every optimization level

exit code: 0 agrees, 1 does not agree, 2 cannot be read, 3 no verdict: on random inputs, or no output is finite""",
    "audit": """  compresskit audit int8.onnx
  compresskit audit int8.onnx --profile --against fp32.onnx --threads 2   why it is not faster""",
    "bench": """  compresskit bench fp32.onnx int8.onnx --threads 2 --seconds 5
  compresskit bench fp32.onnx int8.onnx --batch 8 --size 224 --runtime onnxruntime""",
    "inspect": """  compresskit inspect int8.onnx
  compresskit inspect int8.onnx --json | jq '.[0].layers[] | select(.dtype != "int8") | .name'""",
    "report": """  compresskit report runs/digits
  compresskit report runs/digits runs/small -o page.html

exit code: 0 finished, 1 something is unfinished or damaged, 2 cannot be read""",
    "compress": """  compresskit compress mine.py --latency 5ms --size 1MB
  compresskit compress mine.py --latency 0.3x --drop 0.5 --minutes 2h --out runs/small

mine.py defines `model`, trained, and `task`, a compresskit.Task; and `train`, a compresskit.Train, if finalists are trained.
exit code: 0 a file meets the budget, 2 none does, 130 stopped by Ctrl-C; the same command goes on""",
    "doctor": """  compresskit doctor

exit code: 0 all that is needed is there, 1 something is missing or too old""",
    "completion": """  eval "$(compresskit completion)"   for example in ~/.bashrc or ~/.zshrc""",
}
COMPLETION = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X compinit bashcompinit && compinit -u && bashcompinit; fi
_compresskit() {{
  local words=''
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -le 1 ]; then words='{first}'; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _compresskit compresskit
"""
LONGEST_ENTRY = 80  # characters of an entry of the metadata that `audit` prints


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; None reads `sys.argv`.

    Returns:
        The exit code: 0 for success, 1 if a file does not agree with its reference, a run is not finished or a package is
        missing, 2 if a file cannot be read or the output not be written, 3 if random inputs or outputs that are not finite allow
        no verdict, 130 if it was stopped by a signal.

    Raises SystemExit where the command line is wrong or asks for help, and where the output cannot be written or nobody reads it.
    """
    make_writable_()
    parser = make_parser()
    with output_may_end():
        options = parser.parse_args(arguments)
        if options.command == "completion":
            sys.stdout.write(_completion_script(parser))
            return 0
    try:
        return COMMANDS[options.command](options)
    except CompressError as error:
        say(f"compresskit: {_in_own_words(options.command, str(error))}\n")
        return 2
    except Interrupted as error:
        say(f"compresskit: {error}\n")
    except KeyboardInterrupt:
        say("compresskit: stopped by SIGINT\n")
    finally:
        say("")  # what the library wrote, such as warnings
    return STOPPED


class _Parser(argparse.ArgumentParser):
    """One that does not swallow it where its help cannot be written, and that takes `-5ms` for a value, which it is not to be."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is sys.stderr:
            say(message)
        else:
            file.write(message)


def _in_own_words(command: str, text: str) -> str:
    """A message of the library with the names of options in it."""
    for library, own in WORDS.items():
        text = re.sub(library, own.format(OUTPUT_OF.get(command, "file")), text)
    return text


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="compresskit",
        description="Verify, audit, benchmark and inspect ONNX files of any tool; report on runs.",
        epilog="compresskit COMMAND --help shows the options of a command, with examples and exit codes.",
    )
    parser.add_argument("--version", action="version", version=f"compresskit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "run a file at every optimization level and compare the outputs; of two files, the first is the reference"),
        ("audit", "which operators ONNX Runtime runs in integers, and the metadata of the file"),
        ("bench", "median latency of each file, measured in turn, and its ratio to the first"),
        ("inspect", "inputs, outputs, and what each layer stores, in which type, with which scales"),
    ):
        command = _add_command(commands, name, text)
        command.add_argument("files", nargs="+", metavar="FILE", help="ONNX file")
        command.add_argument("--json", action="store_true", help="print JSON")
        if name != "inspect":
            _add_input_options(command, name)
    says = "onnxruntime or openvino, may be given twice (default: both where openvino is installed)"
    commands.choices["bench"].add_argument("--runtime", action="append", metavar="NAME", help=says)
    audited = commands.choices["audit"]
    audited.add_argument("--profile", action="store_true", help="also time each layer")
    audited.add_argument("--against", metavar="FILE", help="with --profile: a file to compare with, usually of the float model")
    report = _add_command(commands, "report", "the table of a run, or a page or a CSV file of one or several")
    report.add_argument("files", nargs="+", metavar="FOLDER", help="folder of a run, finished or not")
    report.add_argument("-o", "--output", metavar="FILE", help="write a page (.html) or a table (.csv) of all runs")
    report.add_argument("--json", action="store_true", help="print JSON")
    _add_compress(commands)
    doctor = _add_command(commands, "doctor", "versions, what is missing, and what this processor can do for int8")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    _add_command(commands, "completion", "a script that lets bash and zsh complete commands and options")
    return parser


def _add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command whose help ends with its examples."""
    layout = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=text, description=text, epilog=f"examples:\n{EXAMPLES[name]}", formatter_class=layout)


def _add_compress(commands: Any) -> None:
    """The budget of a search; what is not given is minimised."""
    command = _add_command(
        commands, "compress", "search for the recipe that meets a budget, run it, and hand over its verified file"
    )
    command.add_argument("file", metavar="FILE.py", help="defines model and task")
    for name, of in (
        ("latency", "of one call of the file"),
        ("size", "of the file"),
        ("macs", "multiply-accumulates of one sample"),
        ("drop", "how much worse the metric may be"),
        ("minutes", "how long may be trained in all (default: no training)"),
    ):
        command.add_argument(f"--{name}", help=f"{of}: {CEILINGS[name][1]}")
    command.add_argument("--threads", type=int, default=1, help="threads of the runtime (default 1)")
    command.add_argument("--batch", type=int, default=1, help="samples of a call (default 1)")
    command.add_argument("--trials", type=int, default=24, help="candidates that are measured without training (default 24)")
    command.add_argument("--finalists", type=int, default=3, help="candidates that are run as recipes at most (default 3)")
    command.add_argument("--seconds", type=float, default=1.0, help="time to measure each latency (default 1)")
    command.add_argument("--out", default="runs/compress", help="folder of the search, which it resumes (default runs/compress)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _completion_script(parser: argparse.ArgumentParser) -> str:
    """What a shell evaluates to complete the words of the parser; other words are completed as files."""
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands = action.choices
    first = " ".join([*commands, *parser._option_string_actions])
    cases = [f"    {name}) words='{' '.join(command._option_string_actions)}' ;;" for name, command in commands.items()]
    return COMPLETION.format(cases="\n".join(cases), first=first)


def _add_input_options(command: argparse.ArgumentParser, name: str) -> None:
    """What a file is run on, and for how long. Those of `audit` are only for --profile, and None tells that none was given."""
    command.add_argument("--inputs", help="npz file with an array for each input; random numbers where not given")
    rows = 8 if name == "verify" else 1
    command.add_argument("--batch", type=int, help=f"rows of random inputs (default {rows}, where a file takes any)")
    says = "other dimensions that vary" + (" (default 64)" if name == "verify" else "")
    command.add_argument("--size", type=int, help=says)
    if name != "verify":
        once = 1 if name == "bench" else None
        command.add_argument("--threads", type=int, default=once, help="threads of the runtime (default 1)")
        command.add_argument("--seconds", type=float, default=once, help="time for each file (default 1)")


def _print(options: argparse.Namespace, record: Any, text: str) -> None:
    with output_may_end():
        sys.stdout.write((json.dumps(record, indent=1) if options.json else text) + "\n")


def _inputs(path: str, options: argparse.Namespace, *others: str) -> Inputs | None:
    """Inputs of a file from the npz file, such that other files run on them, too; None where none is given."""
    if not options.inputs:
        return None
    names = [entry.name for entry in open_session(path).get_inputs()]
    given = _stored_arrays(options.inputs, names)
    check_sizes_of(given, options.batch, options.size, f"{options.command} --inputs {options.inputs}", OPTION)
    return shared_inputs(given, others)


def _stored_arrays(path: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """The arrays of these names in an npz file. Raises DataError where it is none, or an array is missing or holds no numbers."""
    try:
        with open(path, "rb") as file:  # numpy leaves one open that is no whole zip file
            stored = np.load(file, allow_pickle=False)
            given = {} if isinstance(stored, np.ndarray) else dict(stored)
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: of how it is zipped
        raise DataError(f"{path}: not an npz file of arrays ({error})") from None
    if isinstance(stored, np.ndarray):
        write = f'np.savez("inputs.npz", **{{"{(*names, "input")[0]}": array}})'
        raise DataError(f"{path}: one array without a name, wanted an npz file with an array for each input; {write} writes one")
    if missing := sorted(set(names) - set(given)):
        raise DataError(f"{path}: no array {missing[0]!r}; the file wants {sorted(names)}")
    try:
        return {name: torch.from_numpy(given[name]) for name in names}
    except (TypeError, ValueError) as error:  # such as texts, or numbers in the order of bytes of another machine
        raise DataError(f"{path}: holds what no input can be ({error}); write arrays of numbers") from None


def _agree_on_sizes_(options: argparse.Namespace, *paths: str) -> None:
    """Set the options for random inputs that nobody gave to what all files take, where some take only one."""
    options.batch, options.size = agreed_sizes(paths, options.batch, options.size, options.command, OPTION)


def _verify_command(options: argparse.Namespace) -> int:
    if len(options.files) > 2:
        raise SettingError(f"verify: wanted one file, or a reference and a file, got {len(options.files)}")
    reference = options.files[0] if len(options.files) == 2 else None
    if (inputs := _inputs(options.files[0], options, *options.files[1:])) is None:
        _agree_on_sizes_(options, *options.files)
    batch, size = (usual if given is None else given for given, usual in ((options.batch, 8), (options.size, 64)))
    result = verify_levels(options.files[-1], inputs, reference=reference, batch=batch, size=size)
    _print(options, {"file": options.files[-1]} | result.to_json(), f"{options.files[-1]}: {result}")
    return {True: 0, False: 1, None: 3}[result.passed]


def _audit_command(options: argparse.Namespace) -> int:
    records, texts = {}, []
    for path in options.files:
        result, metadata = _audit_of(path, options), read_metadata(path)
        records[path] = asdict(result) | {"share": result.integer_fraction, "about": metadata}
        entries = [f"  {key:<24} {_shortened(value)}" for key, value in metadata.items() if value]
        texts.append("\n".join([f"{path}: {result}", *entries]))
    _print(options, records, "\n".join(texts))
    return 0


def _audit_of(path: str, options: argparse.Namespace) -> Audit:
    names = ("against", "inputs", "batch", "threads", "seconds")
    given = {name: value for name in names if (value := vars(options)[name]) is not None}
    if not options.profile:
        if given:
            raise SettingError(f"audit: --{next(iter(given))} is for --profile; write that, too")
        return audit(path, size=options.size)
    others = [options.against] if options.against else []
    if (inputs := _inputs(path, options, *others)) is not None:
        return audit(path, profile=True, size=options.size, **{**given, "inputs": inputs})
    batch, size = agreed_sizes([path, *others], options.batch, options.size, "audit --profile", OPTION)
    ask_for_sizes(path, size, "audit --profile", SAY_WHICH)
    return audit(path, profile=True, size=size, **{**given, "batch": 1 if batch is None else batch})


def _shortened(value: Any) -> str:
    """An entry of the metadata in one line that a terminal holds."""
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= LONGEST_ENTRY else f"{text[:LONGEST_ENTRY]} ... (--json prints all of it)"


def _bench_command(options: argparse.Namespace) -> int:
    inputs = _inputs(options.files[0], options, *options.files[1:])
    if inputs is None:
        _agree_on_sizes_(options, *options.files)
        ask_for_sizes(options.files[0], options.size, "bench", SAY_WHICH)
    timings = benchmark(
        options.files,
        inputs,
        batch=options.batch,
        size=options.size,
        threads=options.threads,
        seconds=options.seconds,
        runtimes=options.runtime,
    )
    width = max(map(len, options.files))
    lines = [f"{'file':<{width}}  {'runtime':<11}  {'batch':>5}  {'KiB':>10}  {'median ms':>10}  {'ratio':>6}"]
    for t in timings:
        rows = "-" if t.batch is None else t.batch
        cells = f"{t.runtime:<11}  {rows:>5}  {t.bytes / 1024:>10.1f}  {t.milliseconds:>10.3f}  {t.ratio:>6.3f}"
        lines.append(f"{t.path:<{width}}  {cells}")
    if options.runtime is None and installed_openvino() is None:
        lines.append(f"openvino is not installed, no file was timed in it: {OPENVINO_REMEDY}")
    _print(options, [asdict(t) for t in timings], "\n".join(lines))
    return 0


def _report_command(options: argparse.Namespace) -> int:
    runs = [read_run(folder) for folder in options.files]
    missing = [sentence for run in runs for sentence in run.missing]
    if options.output is None:
        lines = []
        for run in runs:
            lines += [table(run.rows), *remarks(run.rows)] if run.rows else [f"{run.folder}: no stage is finished"]
        records = [run.to_json() for run in runs]
        _print(options, records if len(records) > 1 else records[0], "\n".join(lines))
    else:
        writers = {".html": write_page, ".csv": write_csv}
        if (write := writers.get(Path(options.output).suffix)) is None:
            raise SettingError(f"report -o: wanted a name that ends with .html or .csv, got {options.output!r}")
        write(options.output, runs)
    say("".join(f"compresskit: {sentence}\n" for sentence in missing))
    return 1 if missing else 0


def _inspect_command(options: argparse.Namespace) -> int:
    found = [inspect_onnx(path) for path in options.files]
    _print(options, [asdict(contents) for contents in found], "\n".join(map(str, found)))
    return 0


def _with_points(drop: str | None) -> str | None:
    """A drop whose unit is points where none is written."""
    try:
        return None if drop is None else f"{float(drop)}pt"
    except ValueError:
        return drop


def _ceilings(options: argparse.Namespace) -> dict[str, str | None]:
    """What `at_most` takes, by quantity. Raises SettingError, in the words of the command line, for what it does not take."""
    given: dict[str, str | None] = {}
    for name, (quantity, wanted) in CEILINGS.items():
        text = vars(options)[name]
        given[quantity] = _with_points(text) if name == "drop" else text
        try:
            if text is not None:
                parse_ceiling(quantity, given[quantity])
        except SettingError:
            raise SettingError(f"compress --{name}: wanted {wanted}, got {text!r}") from None
    if not any(given[CEILINGS[name][0]] for name in CEILINGS if name != "minutes"):
        got = "none" if options.minutes is None else "--minutes alone, which is how long may be trained"
        raise SettingError(
            f"compress: wanted at least one of --latency, --size, --macs and --drop, got {got}; such as --latency 5ms"
        )
    return given


def _compress_command(options: argparse.Namespace) -> int:
    budget = at_most(**_ceilings(options), threads=options.threads, batch=options.batch)
    # The file may train for hours: what is wrong in the command line is said before.
    SearchSettings(trials=options.trials, finalists=options.finalists, seconds=options.seconds)
    out = folder_of_run(options.out)  # of the working directory before the file changes it
    if out.exists() and not out.is_dir():
        raise SettingError(f"compress --out: wanted a folder, got a file: {options.out}")
    # What the file and its functions print is no part of the JSON.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        defined = defined_by(options.file, "compress")
        with stoppable(Path(options.out)):
            found = compress(
                defined["model"],
                defined["task"],
                budget,
                out=out,
                train=defined.get("train"),
                trials=options.trials,
                finalists=options.finalists,
                seconds=options.seconds,
            )
    _print(options, found.to_json(), str(found))
    return 0


def _doctor_command(options: argparse.Namespace) -> int:
    here, found = environment(), packages()
    words = {True: "yes", False: "no", None: "not known"}
    lines = [f"compresskit {here['compresskit']}, Python {here['python']}, {here['system']}"]
    lines.append(f"processor: {here['processor']}, {here['cores']} cores, {here['threads']} threads of torch")
    lines.append("  " + ", ".join(f"{name} {words[value]}" for name, value in here["features"].items()))
    here["bf16"] = bf16_speed()
    lines += [f"  {here['int8']}", f"  {here['bf16']}"]
    lines += [f"GPU: {name}" for name in here["gpus"]] or ["GPU: none that torch can use"]
    for package in found:
        advice = f"  {package.advice}" if package.advice else ""
        lines.append(f"  {package.name:<14} {package.version or 'missing'}{advice}")
    fits = all(package.fits for package in found)
    lines.append("all that is needed is there" if fits else "something that is needed is missing or too old")
    _print(options, here | {"packages": [asdict(p) | {"fits": p.fits} for p in found], "fits": fits}, "\n".join(lines))
    return 0 if fits else 1


COMMANDS = {
    "verify": _verify_command,
    "audit": _audit_command,
    "bench": _bench_command,
    "inspect": _inspect_command,
    "report": _report_command,
    "compress": _compress_command,
    "doctor": _doctor_command,
}

if __name__ == "__main__":
    sys.exit(main())
