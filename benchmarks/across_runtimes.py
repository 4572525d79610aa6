"""One file in four runtimes: the classes of 1,000 images in onnxruntime, `infer.py`, OpenVINO, and onnxruntime-web in a browser.

    pip install openvino; npm install --prefix WEB onnxruntime-web
    python benchmarks/across_runtimes.py --run runs/digits --web WEB/node_modules/onnxruntime-web/dist
    python benchmarks/across_runtimes.py --data CIFAR10 --checkpoints FOLDER --web WEB/node_modules/onnxruntime-web/dist

--run         the folder of `recipes/digits.py` with its usual seed: its 540 test images and 460 that it was trained on; files of
              its first and its last stage.
--checkpoints ResNet-20, float and in int8 (`quantize_static`, for onnxruntime and for OpenVINO), on the first 100 test images of
              each class of CIFAR-10.

Each file is put into a bundle (`ck.export.bundle`) with the images as its example. `infer.py` runs as a script of its own. The
browser is Chromium, without a window; it runs the `infer.mjs` of the bundle. "Other classes" counts the images to which a runtime
gives another class than onnxruntime on this machine does; "margin" is, of these, the largest distance between the outputs of both
classes, as a fraction of the largest output: 0 is a tie.

Writes `across_runtimes.json` and `.md`, beside this file unless `--out` says where; networks that are not run again are kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import compresskit as ck
from compresskit.quant.numerics.targets import OPENVINO, X86

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "recipes"))
IMAGES = 1000
PAGE = """<!doctype html><title>classes</title><link rel="icon" href="data:,"><pre id="found"></pre><script type="module">
import { classes, readArrays, run } from "./infer.mjs";
const ort = await import("./dist/ort.wasm.min.mjs");
ort.env.wasm.wasmPaths = new URL("dist/", document.baseURI).href;
ort.env.wasm.numThreads = 1;
const read = async name => (await fetch(name)).arrayBuffer();
const example = JSON.parse(new TextDecoder().decode(await read("example.json")));
const session = await ort.InferenceSession.create(new Uint8Array(await read("model.onnx")), { executionProviders: ["wasm"] });
const found = await run(ort, session, readArrays(example.inputs, await read("example.bin")), example.preprocess);
const answer = { version: ort.env.versions.web, classes: classes(found[example.outputs[0].name]) };
document.getElementById("found").textContent = JSON.stringify(answer);
</script>"""


class Silent(SimpleHTTPRequestHandler):
    """Serves a folder."""

    def log_message(self, *args: Any) -> None:
        """Requests are not reported."""


def in_onnxruntime(folder: Path) -> tuple[str, np.ndarray]:
    """Its version, and the outputs (N, classes)."""
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return onnxruntime.__version__, session.run(None, inputs(folder))[0]


def in_script(folder: Path) -> list[int]:
    """The classes that the bundle's `infer.py` prints; it ends with an error where the outputs are not what was expected."""
    done = subprocess.run([sys.executable, "infer.py"], cwd=folder, check=True, capture_output=True, text=True)
    return [int(label) for label in re.findall(r"'(\d+)'", done.stdout)]


def in_openvino(folder: Path) -> tuple[str, np.ndarray]:
    """Its version, and the outputs (N, classes)."""
    import openvino

    compiled = openvino.Core().compile_model(str(folder / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return openvino.__version__.split("-")[0], compiled(inputs(folder))[0]


def in_browser(folder: Path, web: Path) -> tuple[str, list[int]]:
    """The version of onnxruntime-web, and the classes."""
    (folder / "classes.html").write_text(PAGE)
    (folder / "dist").symlink_to(web.resolve())
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/classes.html"
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=60000",
            "--dump-dom",
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        server.shutdown()
    found = re.search(r'<pre id="found">(\{.*?\})</pre>', done.stdout)
    if found is None:
        raise SystemExit(f"{folder}: the page did not run\n{done.stderr[-2000:]}")
    answer = json.loads(found[1])
    return answer["version"], answer["classes"]


def inputs(folder: Path) -> dict[str, np.ndarray]:
    """The example of a bundle, without its outputs."""
    example = np.load(folder / "example.npz")
    return {name: example[name] for name in example.files if not name.startswith("expected ")}


def compare(name: str, path: Path, example: torch.Tensor, right: torch.Tensor, web: Path | None) -> dict[str, Any]:
    """A row: in which runtime how many classes differ from those of onnxruntime."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "bundle"
        ck.export.bundle(path, folder, example=(example,), labels=[str(i) for i in range(10)])
        version, outputs = in_onnxruntime(folder)
        wanted = outputs.argmax(1)
        version_openvino, openvino = in_openvino(folder)
        found = {f"onnxruntime {version}": wanted, "infer.py": np.array(in_script(folder))}
        found[f"OpenVINO {version_openvino}"] = openvino.argmax(1)
        if web is not None:
            version, classes = in_browser(folder, web)
            found[f"onnxruntime-web {version}"] = np.array(classes)
    runtimes = {}
    for runtime, classes in found.items():
        assert classes.shape == wanted.shape, runtime
        other = np.flatnonzero(classes != wanted)
        margin = max((float(outputs[i, wanted[i]] - outputs[i, classes[i]]) for i in other), default=0.0)
        right_here = float((classes == right.numpy()).mean())
        runtimes[runtime] = {"differ": len(other), "margin": margin / float(np.abs(outputs).max()), "accuracy": right_here}
    print(name, runtimes, flush=True)
    return {"file": name, "images": len(wanted), "runtimes": runtimes}


def digits(run: Path) -> Iterator[tuple[str, Path, torch.Tensor, torch.Tensor]]:
    from digits import data

    task = data(0, 64)
    train: Any = task.train
    val: Any = task.val
    parts = [train.dataset.tensors, val.dataset.tensors]
    x, y = (torch.cat([parts[1][i], parts[0][i][: IMAGES - len(parts[1][i])]]) for i in (0, 1))
    stages = sorted(path for path in run.iterdir() if (path / "model.onnx").exists())
    if not stages:
        raise SystemExit(f"{run}: no finished stage there; python recipes/digits.py writes it")
    for stage in (stages[0], stages[-1]):
        yield f"digits, {stage.name}", stage / "model.onnx", x, y


def resnet(data: str, checkpoints: Path, folder: Path) -> Iterator[tuple[str, Path, torch.Tensor, torch.Tensor]]:
    from quantize_cifar import MEAN, STD, draw, trained
    from vision import cifar10

    (train, _), (test, labels) = (cifar10(data, None)[part] for part in ("train", "test"))
    chosen = torch.cat([(labels == label).nonzero()[: IMAGES // 10, 0] for label in range(10)])
    x = (test[chosen].float() / 255 - MEAN.view(-1, 1, 1)) / STD.view(-1, 1, 1)
    model = trained("resnet20", checkpoints)
    batches = [(b,) for b in draw(train, 0)]
    int8 = {"int8": X86, "int8 for OpenVINO": OPENVINO}
    made = {name: ck.quant.quantize_static(model, batches, target=target) for name, target in int8.items()}
    for name, network in ({"fp32": model} | made).items():
        (folder / name).mkdir()
        yield f"ResNet-20, {name}", ck.export_onnx(network, folder / name / "model.onnx", (x[:2],)), x, labels[chosen]


def table(found: dict[str, Any]) -> str:
    lines = ["| file | runtime | top-1 % | other classes than onnxruntime, of 1,000 | margin |", "|---|---|--:|--:|--:|"]
    for row in found["rows"]:
        for runtime, entry in row["runtimes"].items():
            margin = f"{entry['margin']:.1e}" if entry["differ"] else ""
            lines.append(f"| {row['file']} | {runtime} | {100 * entry['accuracy']:.1f} | {entry['differ']} | {margin} |")
    about = ", ".join(f"{key} {value}" for key, value in found["about"].items())
    return "\n".join([*lines, "", f"Machine: {about}."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of recipes/digits.py")
    parser.add_argument("--data", help="CIFAR-10: train/<class>/* and test/<class>/*")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--web", type=Path, help="folder `dist` of the npm package onnxruntime-web; needs chromium")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the JSON and Markdown files")
    args = parser.parse_args()
    if args.run is None and None in (args.data, args.checkpoints):
        parser.error("wanted --run, or --data and --checkpoints")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = list(digits(args.run)) if args.run else []
        if args.data and args.checkpoints:
            cases += resnet(args.data, args.checkpoints, Path(folder))
        rows = [compare(*case, args.web) for case in cases]
    path = args.out / "across_runtimes.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    again = {row["file"] for row in rows}
    cpu = "with VNNI" if "avx512_vnni" in Path("/proc/cpuinfo").read_text() else "without VNNI"
    about = {"torch": torch.__version__, "python": platform.python_version(), "processor": f"{platform.machine()} {cpu}"}
    found = {"about": about, "rows": [*(row for row in kept if row["file"] not in again), *rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
