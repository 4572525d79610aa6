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

*integers*: of all integer tensors of the file as ONNX Runtime fuses it, values that are equal (dynamic files: without the fusions
that hide them). *classes*: samples whose largest output is the same. *outputs*: values within a hundredth of a step, 1/255 of
their range (OpenVINO: a step). CIFAR-10's networks are trained, the others have random weights and BatchNorm statistics of
random images. Writes `machines.json` and `machines.md` beside this file. `--latency`: only times, on this CPU, of `X86` beside
`X86` with weights that may overflow and fp32, in turn.
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
from machine_files import UNGUARDED, File, files, sources  # noqa: E402

from compresskit.measure import latency  # noqa: E402
from compresskit.quant import X86  # noqa: E402

CPUS = ("Haswell-v4", "SandyBridge", "Nehalem")
WATCHED = 100  # samples of which integer tensors are kept
WATCHED_EMULATED = 16

PYTHON = """
import onnxruntime
def opened(job):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if job["plain"]:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(job["file"], options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda part: session.run(None, {name: part})
"""
OPENVINO = """
import openvino
def opened(job):
    compiled = openvino.Core().compile_model(job["file"], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda part: list(compiled([part]).to_tuple())
"""
JOBS = """
import json, os, sys, numpy as np
for job in json.load(open(sys.argv[1])):
    os.makedirs(job["out"])
    try:
        run, x = opened(job), np.fromfile(job["inputs"], job["dtype"]).reshape(job["shape"])
        for i in range(0, len(x), job["batch"]):
            found = run(x[i : i + job["batch"]])
            for k, values in enumerate(found):
                with open(job["out"] + "/" + str(k) + ".bin", "ab") as file:
                    file.write(np.ascontiguousarray(values).tobytes())
        done = [str(v.dtype) for v in found]
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
  const raw = fs.readFileSync(job.inputs), wide = job.dtype === "int64", shape = job.shape;
  const all = new (wide ? BigInt64Array : Float32Array)(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
  const size = shape.slice(1).reduce((a, b) => a * b, 1), names = session.outputNames;
  let types = [];
  for (let i = 0; i < shape[0]; i += job.batch) {
    const count = Math.min(job.batch, shape[0] - i), part = all.slice(i * size, (i + count) * size);
    const x = new ort.Tensor(wide ? "int64" : "float32", part, [count, ...shape.slice(1)]);
    const found = await session.run({[session.inputNames[0]]: x});
    types = names.map(n => found[n].type);
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
    """One file, run on inputs (samples, ...) in batches. plain: without fusions of ONNX Runtime."""

    file: Path
    inputs: torch.Tensor
    batch: int
    plain: bool = False


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
        """For each job, in one process, all outputs over all its inputs as flat arrays, or why there are none."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        told: list[dict[str, Any]] = []
        for k, job in enumerate(jobs):
            values = job.inputs.numpy()
            values.tofile(folder / f"{k}.bin")
            paths = {"file": str(job.file), "inputs": str(folder / f"{k}.bin"), "out": str(folder / f"out{k}"), "web": self.web}
            told.append(paths | {"dtype": str(values.dtype), "shape": values.shape, "batch": job.batch, "plain": job.plain})
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
        return [_written(Path(job["out"]), f"exit {done.returncode}: {' '.join(lines[-1:])[:160]}") for job in told]


def _written(out: Path, otherwise: str) -> list[np.ndarray] | str:
    """What a job wrote."""
    if not (out / "done.json").exists():
        return otherwise
    done = json.loads((out / "done.json").read_text())
    return done if isinstance(done, str) else [np.memmap(out / f"{k}.bin", kind, "r") for k, kind in enumerate(done)]


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
    assert not any(isinstance(each, str) for each in (*wanted, *written, *fewer)), (wanted, written, fewer)
    for machine in others:
        openvino = machine.name.startswith("OpenVINO")
        got = machine.run(jobs(0, lambda file: file.path, plain=openvino, slow=machine.slow), folder / "other")
        reference, place = written if openvino else fewer if machine.slow else wanted, len(made)
        for k, file in enumerate(made):
            row = found.setdefault(f"{file.name}, {file.target}", {"cells": {}})
            row |= {"samples": len(file.inputs), "verified": file.verified, "simulated": file.machines}
            row |= {"opset": file.opset, "oldest": file.oldest}
            samples = min(len(file.inputs), args.emulated) if machine.slow else len(file.inputs)
            cell = compared(reference[k], got[k], samples, 1 if openvino else 0.01) | {"samples": samples}
            if file.watched and not openvino:
                row["integers"] = sum(np.size(values) for values in wanted[place])
                cell["integers"] = equal(reference[place], got[place])
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
    lines += ["", *(f"Left out: {text}." for text in result["missing"])]
    for name, times in result.get("latency", {}).items():
        ratio = times["X86"] / times[UNGUARDED.name]
        lines.append(
            f"{name} on this CPU, batch 1: {times['X86'] / times['fp32']:.3f} of fp32, {ratio:.3f} of weights that may overflow."
        )
    return "\n".join([*lines, "", f"{result['versions']}, {result['cpu']}", ""])


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
