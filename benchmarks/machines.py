r"""One file on many machines: files x machines, how many integers and classes are those of exact sums.

    python benchmarks/machines.py --data CIFAR10 --checkpoints FOLDER --folder /tmp/machines \
        --emulator qemu-x86_64 --old OLD --web WEB --openvino OV/bin/python --aarch64 "qemu-aarch64 -L ROOT ROOT/usr/bin/python3"

Every machine is optional; what is missing is left out and said. `--networks` and `--machines` (parts of names) choose rows and
columns; cells that are not measured again are kept.

reference        this CPU with exact sums: int8 weights are moved to uint8, whose kernels widen before they add. VNNI computes the
                 same integers.
this CPU         as it is
--emulator       qemu's user mode: `NAME -cpu MODEL python` for each of `--cpus`. It has no AVX512: simulated only
simulated        `verify_onnx(machines="all")`
--web            a folder where `npm install onnxruntime-web` was run; node runs it, as WASM, on one thread
--old            one folder for each release, see `old_runtimes.py`
--aarch64        a command that runs Python with onnxruntime and numpy for aarch64
--openvino       a Python with openvino, in fp32 where it does not compute in integers. Its kernels are others: it is compared
                 with the file as written, run by ONNX Runtime without fusions

one by one       the file cut into its operators, each of which is given the integers of exact sums. Where an integer kernel
                 differs, it computes otherwise; where only rounded float values do, the machine's float arithmetic differs in the
                 last bits (the order of a sum, `exp`, `tanh`) and the value lies near the middle between two integers. Run as a
                 whole, each such step makes others differ: in a network without float operators there are none

*integers*: of all integer tensors of the file as ONNX Runtime fuses it, values that are equal (dynamic files: without the fusions
that hide them). *classes*: samples whose largest output is the same (minilm: of its 384 features). *outputs*: values within a
hundredth of a step, 1/255 of their range (OpenVINO: a step). CIFAR-10's networks are trained, the others have random weights and
BatchNorm statistics of random images. Writes `machines.json` and `machines.md` beside this file. `--latency`: only times, on this
CPU, of `X86` beside `X86` with weights that may overflow and fp32, in turn.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "recipes")]
from machine_files import UNGUARDED, Cut, File, files, sources  # noqa: E402

from compresskit.measure import latency  # noqa: E402
from compresskit.quant import X86  # noqa: E402

CPUS = ("Haswell-v4", "SandyBridge", "Nehalem")
WATCHED = 100  # samples of which integer tensors are kept
WATCHED_EMULATED = 16
CUT = 8  # samples, in one batch, of which operators are run one by one

PYTHON = """
import onnxruntime
def opened(job):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if job["plain"]:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(job["file"], options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda part, given: session.run(None, {name: part} | given)
"""
OPENVINO = """
import openvino
def opened(job):
    compiled = openvino.Core().compile_model(job["file"], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda part, given: list(compiled([part]).to_tuple())
"""
JOBS = """
import json, os, sys, numpy as np
for job in json.load(open(sys.argv[1])):
    os.makedirs(job["out"])
    try:
        run, x = opened(job), np.fromfile(job["inputs"], job["dtype"]).reshape(job["shape"])
        given = {t["name"]: np.fromfile(t["file"], t["dtype"]).reshape(t["shape"]) for t in job["given"]}
        for i in range(0, len(x), job["batch"]):
            found = run(x[i : i + job["batch"]], given)
            for k, values in enumerate(found):
                with open(job["out"] + "/" + str(k) + ".bin", "ab") as file:
                    file.write(np.ascontiguousarray(values).tobytes())
        done = [[str(v.dtype), v.shape] for v in found]
    except Exception as error:
        done = str(error).strip().splitlines()[-1][:200]
    json.dump(done, open(job["out"] + "/done.json", "w"))
"""
VERSION = "import {0}; print({0}.__version__)"
WEB = """
const fs = require("fs"), jobs = JSON.parse(fs.readFileSync(process.argv[2]));
const ort = require(jobs[0].web + "/node_modules/onnxruntime-web");
ort.env.wasm.numThreads = 1; ort.env.logLevel = "error";
async function run(job) {
  const session = await ort.InferenceSession.create(fs.readFileSync(job.file), {executionProviders: ["wasm"]});
  const arrays = {int64: BigInt64Array, float32: Float32Array, uint8: Uint8Array, int8: Int8Array, int32: Int32Array};
  const read = (file, dtype) => { const raw = fs.readFileSync(file);
    return new arrays[dtype](raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length)); };
  const all = read(job.inputs, job.dtype), shape = job.shape, given = {};
  job.given.forEach(t => { given[t.name] = new ort.Tensor(t.dtype, read(t.file, t.dtype), t.shape); });
  const size = shape.slice(1).reduce((a, b) => a * b, 1), names = session.outputNames;
  let types = [];
  for (let i = 0; i < shape[0]; i += job.batch) {
    const count = Math.min(job.batch, shape[0] - i), part = all.slice(i * size, (i + count) * size);
    const x = new ort.Tensor(job.dtype, part, [count, ...shape.slice(1)]);
    const found = await session.run({[session.inputNames[0]]: x, ...given});
    types = names.map(n => [found[n].type, found[n].dims]);
    names.forEach((n, k) => { const v = found[n].data;
      fs.appendFileSync(job.out + "/" + k + ".bin", Buffer.from(v.buffer, v.byteOffset, v.byteLength)); });
  }
  await session.release();
  return types;
}
(async () => {
  for (const job of jobs) {
    fs.mkdirSync(job.out);
    let done;
    try { done = await run(job); } catch (error) { done = String(error).slice(0, 200); }
    fs.writeFileSync(job.out + "/done.json", JSON.stringify(done));
  }
})();
"""


@dataclass(frozen=True)
class Job:
    """One file, run on inputs (samples, ...) in batches. plain: without fusions of ONNX Runtime. given: further inputs."""

    file: Path
    inputs: torch.Tensor
    batch: int
    plain: bool = False
    given: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """How to run files somewhere: a program with its arguments, then a script that reads jobs (JSON) and writes all outputs.

    slow: whether it is emulated, and gets only the first samples.
    """

    name: str
    command: tuple[str, ...]
    script: str = PYTHON + JOBS
    suffix: str = ".py"
    slow: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    web: str = ""

    def run(self, jobs: list[Job], folder: Path) -> list[list[np.ndarray] | str]:
        """For each job, in one process, all outputs over all its inputs, or why there are none; of one batch with shapes."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        told: list[dict[str, Any]] = []
        for k, job in enumerate(jobs):
            values = job.inputs.numpy()
            values.tofile(folder / f"{k}.bin")
            paths = {"file": str(job.file), "inputs": str(folder / f"{k}.bin"), "out": str(folder / f"out{k}"), "web": self.web}
            given = [_saved(folder / f"{k}.{i}.bin", name, tensor) for i, (name, tensor) in enumerate(job.given.items())]
            shape = {"dtype": str(values.dtype), "shape": values.shape, "batch": job.batch}
            told.append(paths | shape | {"plain": job.plain, "given": given})
        (folder / "jobs.json").write_text(json.dumps(told))
        script = folder / f"run{self.suffix}"
        script.write_text(self.script)
        done = subprocess.run(
            [*self.command, str(script), str(folder / "jobs.json")],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stderr.splitlines() if line.strip() and "warning" not in line]
        return [_written(job, f"exit {done.returncode}: {' '.join(lines[-1:])[:160]}") for job in told]


def _saved(path: Path, name: str, tensor: np.ndarray) -> dict[str, Any]:
    tensor.tofile(path)
    return {"name": name, "file": str(path), "dtype": str(tensor.dtype), "shape": tensor.shape}


def _written(job: dict[str, Any], otherwise: str) -> list[np.ndarray] | str:
    """What a job wrote."""
    out = Path(job["out"])
    if not (out / "done.json").exists():
        return otherwise
    done = json.loads((out / "done.json").read_text())
    if isinstance(done, str):
        return done
    whole = job["batch"] >= job["shape"][0]
    found = [np.fromfile(out / f"{k}.bin", kind) for k, (kind, _) in enumerate(done)]
    return [values.reshape(shape) if whole else values for values, (_, shape) in zip(found, done, strict=True)]


def machines(args: argparse.Namespace) -> tuple[list[Machine], list[str]]:
    """The machines that are at hand, and what is missing, with where to get it."""
    python = sys.executable
    found, missing = [Machine("this CPU", (python,))], []
    if args.emulator and shutil.which(args.emulator):
        found += [Machine(f"{cpu}, emulated", (args.emulator, "-cpu", cpu, python), slow=True) for cpu in args.cpus]
    else:
        missing.append("older CPUs: no --emulator (Debian: qemu-user)")
    if args.web and shutil.which("node") and (args.web / "node_modules" / "onnxruntime-web").is_dir():
        version = json.loads((args.web / "node_modules" / "onnxruntime-web" / "package.json").read_text())["version"]
        web = str(args.web.resolve())
        found.append(Machine(f"onnxruntime-web {version}, WASM", ("node",), WEB, ".cjs", web=web))
    else:
        missing.append("WASM: no --web (node, and npm: onnxruntime-web)")
    if args.old:
        releases = sorted(args.old.iterdir(), key=lambda path: [int(n) for n in path.name.split(".")])
        found += [Machine(f"onnxruntime {r.name}", (python,), environment={"PYTHONPATH": str(r.resolve())}) for r in releases]
    else:
        missing.append("older releases: no --old (pip: onnxruntime==1.17.3)")
    if args.openvino:
        version = answer((str(args.openvino), "-c", VERSION.format("openvino"))).split("-")[0]
        found.append(Machine(f"OpenVINO {version}", (str(args.openvino),), OPENVINO + JOBS))
    else:
        missing.append("OpenVINO: no --openvino (pip: openvino)")
    if args.aarch64:
        command = tuple(shlex.split(args.aarch64))
        version = answer((*command, "-c", VERSION.format("onnxruntime")))
        found.append(Machine(f"aarch64, emulated, onnxruntime {version}", command, slow=True))
    else:
        missing.append("aarch64: no --aarch64 (a Python for it, qemu-user of Debian's backports)")
    return [m for m in found if not args.machines or any(part in m.name for part in args.machines)], missing


def answer(command: tuple[str, ...]) -> str:
    """What a command prints last. Raises SystemExit where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: {' '.join(done.stderr.splitlines()[-1:])}")
    return done.stdout.split()[-1]


def compared(wanted: list[np.ndarray] | str, got: list[np.ndarray] | str, samples: int, steps: float) -> dict[str, Any]:
    """Share of equal classes, and of outputs within `steps`; or why there are none."""
    if isinstance(wanted, str) or isinstance(got, str):
        return {"failed": str(got)}
    a, b = (values[0].astype(np.float64).reshape(samples, -1) for values in (wanted, got))
    error = np.abs(a - b) / (np.ptp(a) / 255)
    return {
        "classes": float((a.argmax(1) == b.argmax(1)).mean()),
        "outputs": float((error <= steps).mean()),
        "db": float(10 * np.log10(np.square(a).sum() / max(np.square(a - b).sum(), 1e-15 * np.square(a).sum()))),
    }


def equal(wanted: list[np.ndarray] | str, got: list[np.ndarray] | str) -> float | None:
    """Share of equal integers over all tensors."""
    if isinstance(wanted, str) or isinstance(got, str):
        return None
    return float(sum(int((a == b).sum()) for a, b in zip(wanted, got, strict=True)) / sum(a.size for a in wanted))


def one_by_one(cut: Cut, wanted: list[np.ndarray], got: list[np.ndarray] | str) -> dict[str, Any]:
    """What operators compute from equal integers: how many integers there are and how many differ, of kernels and of roundings.

    tie: the largest distance, in steps, between a float value that was rounded otherwise and the middle of two integers.
    """
    if isinstance(got, str):
        return {"failed": got}
    tensors = dict(zip(cut.given, wanted, strict=False))
    floats = {name: wanted[len(cut.given) + 2 * k : len(cut.given) + 2 * k + 2] for k, name in enumerate(cut.rounded)}
    found: dict[str, Any] = {"kernels": [0, 0], "roundings": [0, 0], "tie": 0.0}
    for name, values in zip(cut.integers, got, strict=True):
        differ = tensors[name] != values
        kind = found["roundings" if name in floats else "kernels"]
        kind[0] += int(differ.sum())
        kind[1] += differ.size
        if name in floats and differ.any():
            steps = floats[name][0][differ].astype(np.float64) / float(floats[name][1].flat[0])
            found["tie"] = max(found["tie"], float(np.abs(steps - np.floor(steps) - 0.5).max()))
    return found


def operators(here: Machine, made: list[File], folder: Path) -> tuple[list[Job], list[list[np.ndarray]]]:
    """The jobs that run operators one at a time, and what `Cut.wanted` of each file computes."""
    cuts = [(file.cut, file.inputs[:CUT]) for file in made if file.cut]
    found = here.run([Job(cut.wanted, inputs, CUT) for cut, inputs in cuts], folder)
    values = [each for each in found if not isinstance(each, str)]
    assert len(values) == len(found), found
    jobs = []
    for (cut, inputs), each in zip(cuts, values, strict=True):
        given = {f"{name}.given": value for name, value in zip(cut.given, each, strict=False)}
        jobs.append(Job(cut.file, inputs, CUT, given=given))
    return jobs, values


def rows(made: list[File], others: list[Machine], args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Run the files of a network on every machine; enter the cells into `found`."""
    folder = args.folder / "run"

    def jobs(watched: int, path: Callable[[File], Path], *, plain: bool = False, slow: bool = False) -> list[Job]:
        """The files as they are, then those whose integers are compared."""
        whole = [Job(path(file), file.inputs[: args.emulated if slow else None], file.batch, plain) for file in made]
        count = WATCHED_EMULATED if slow else WATCHED
        few = [Job(file.watched[watched], file.inputs[:count], file.batch) for file in made if file.watched]
        return whole if plain else whole + few

    here = Machine("this CPU", (sys.executable,))
    wanted = here.run(jobs(1, lambda file: file.exact), folder / "exact")
    fewer = here.run(jobs(1, lambda file: file.exact, slow=True), folder / "fewer")
    written = here.run(jobs(0, lambda file: file.path, plain=True), folder / "written")
    steps, single = operators(here, made, folder / "single")
    assert not any(isinstance(each, str) for each in (*wanted, *written, *fewer)), (wanted, written, fewer)
    for machine in others:
        openvino = machine.name.startswith("OpenVINO")
        got = machine.run(jobs(0, lambda file: file.path, plain=openvino, slow=machine.slow), folder / "other")
        apart = [] if openvino else machine.run(steps, folder / "apart")
        reference, place = written if openvino else fewer if machine.slow else wanted, len(made)
        for k, file in enumerate(made):
            row = found.setdefault(f"{file.name}, {file.target}", {"cells": {}})
            row |= {"samples": len(file.inputs), "verified": file.verified, "simulated": file.machines}
            row |= {"opset": file.opset, "oldest": file.oldest}
            samples = min(len(file.inputs), args.emulated) if machine.slow else len(file.inputs)
            cell = compared(reference[k], got[k], samples, 1 if openvino else 0.01) | {"samples": samples}
            if file.cut and not openvino:
                row["integers"] = sum(np.size(values) for values in wanted[place])
                cell["integers"] = equal(reference[place], got[place])
                cell["one by one"] = one_by_one(file.cut, single[place - len(made)], apart[place - len(made)])
                place += 1
            if not (openvino and file.target == "ARM"):
                row["cells"][machine.name] = cell
            print(file.name, file.target, machine.name, cell, flush=True)


def percent(fraction: float | None) -> str:
    """As a percentage that is 100 only where all are equal."""
    if fraction is None:
        return "-"
    return "100" if fraction == 1 else f"{min(100 * fraction, 99.9999):.6g}" if fraction > 0.999 else f"{100 * fraction:.1f}"


def simulation(row: dict[str, Any]) -> str:
    """Which families of kernels differ in the simulation, and whether all are proved."""
    differ = {machine: text for machine, text in row["simulated"].items() if "overflow" in text}
    if differ:
        return ", ".join(differ) + " differ"
    proved = all("whatever the inputs" in text for text in row["simulated"].values())
    return "all equal, proved" if proved else "all equal on these samples"


def page(result: dict[str, Any]) -> str:
    """The Markdown page."""
    columns = list(dict.fromkeys(name for entry in result["rows"].values() for name in entry["cells"]))
    lines = [
        "Integers / classes in percent that are those of exact sums (OpenVINO: outputs within a step of the file as written, and",
        "classes); - where a file has no integer tensors, *not read* where a release does not read the file.",
        "",
        f"| file | samples | simulated | {' | '.join(columns)} |",
        f"|---|--:|---|{'--:|' * len(columns)}",
    ]
    for name, entry in result["rows"].items():
        cells = []
        for column in columns:
            cell = entry["cells"].get(column)
            if cell is None:
                cells.append("")
            elif "failed" in cell:
                cells.append("not read")
            else:
                first = cell["outputs"] if column.startswith("OpenVINO") else cell.get("integers")
                some = f" of {cell['samples']}" if cell["samples"] < entry["samples"] else ""
                cells.append(f"{percent(first)} / {percent(cell['classes'])}{some}")
        lines.append(f"| {name} | {entry['samples']} | {simulation(entry)} | {' | '.join(cells)} |")
    lines += ["", *(f"Left out: {text}." for text in result["missing"]), *single_operators(result["rows"], columns)]
    for name, times in result.get("latency", {}).items():
        ratio = times["X86"] / times[UNGUARDED.name]
        lines.append(
            f"{name} on this CPU, batch 1: {times['X86'] / times['fp32']:.3f} of fp32, {ratio:.3f} of weights that may overflow."
        )
    return "\n".join([*lines, "", f"{result['versions']}, {result['cpu']}", ""])


def single_operators(rows: dict[str, Any], columns: list[str]) -> list[str]:
    """The second table: what operators compute from equal integers."""
    measured = [c for c in columns if any("one by one" in entry["cells"].get(c, {}) for entry in rows.values())]
    if not measured:
        return []
    lines = [
        "One operator at a time, each given the integers of exact sums: how many integers differ that integer kernels compute /",
        "that are rounded from float values, and how far at most such a value lies from the middle of two integers, in steps.",
        "An LSTM is one operator, whose float arithmetic and roundings of the state alternate inside.",
        "",
        f"| file | of kernels / rounded | {' | '.join(measured)} |",
        f"|---|--:|{'--:|' * len(measured)}",
    ]
    for name, entry in rows.items():
        found = {
            column: entry["cells"][column]["one by one"] for column in measured if "one by one" in entry["cells"].get(column, {})
        }
        counts = [cell for cell in found.values() if cell and "failed" not in cell]
        if counts:
            cells = [difference(cell) for cell in found.values()]
            lines.append(f"| {name} | {counts[0]['kernels'][1]:,} / {counts[0]['roundings'][1]:,} | {' | '.join(cells)} |")
    return ["", *lines, ""]


def difference(cell: dict[str, Any] | None) -> str:
    """Integers that differ when each operator gets equal ones."""
    if cell is None or "failed" in cell:
        return "" if cell is None else "not read"
    tie = f", {cell['tie']:.0e}" if cell["roundings"][0] else ""
    return f"{cell['kernels'][0]} / {cell['roundings'][0]}{tie}"


def times(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the float file, X86, and X86 with weights that may overflow."""
    import compresskit as ck

    _, _, build = sources(args.data, args.checkpoints, 16)[name]
    model, calibration, inputs, _ = build()
    paths = {"fp32": ck.export_onnx(model, args.folder / "fp32.onnx", (inputs[:1],))}
    for target in (X86, UNGUARDED):
        quantized = ck.quant.quantize_static(model, [(calibration,)], target=target)
        paths[target.name] = ck.export_onnx(quantized, args.folder / f"time.{len(paths)}.onnx", (inputs[:1],))
    return dict(zip(paths, latency(list(paths.values()), (inputs[:1],), seconds=args.seconds), strict=True))


def cpu() -> str:
    """Which integer instructions this CPU has."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return (
        f"a CPU with {', '.join(name for name in ('avx2', 'avx512bw', 'avx_vnni', 'avx512_vnni', 'amx_int8') if name in flags)}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "checkpoints", "folder"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--emulator", default="")
    parser.add_argument("--cpus", nargs="*", default=CPUS)
    for name in ("web", "old", "openvino"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--aarch64", default="")
    parser.add_argument("--networks", nargs="*", default=())
    parser.add_argument("--machines", nargs="*", default=())
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--emulated", type=int, default=400, help="samples on emulated machines")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "machines.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.disable(logging.WARNING)
    args.folder.mkdir(parents=True, exist_ok=True)
    result = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}}
    others, missing = machines(args)
    for line in missing:
        print("left out:", line, flush=True)
    result |= {"cpu": cpu(), "versions": {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}}
    if not args.machines:
        result["missing"] = missing
    for name, source in sources(args.data, args.checkpoints, args.samples).items():
        if args.networks and name not in args.networks:
            continue
        if args.latency:
            if not source[1]:
                result.setdefault("latency", {})[name] = times(name, args)
        else:
            rows(files(source, name, args.folder), others, args, result["rows"])
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if "missing" in result:
        args.out.with_suffix(".md").write_text(page(result))


if __name__ == "__main__":
    main()
