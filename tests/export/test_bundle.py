"""A file with what is needed to run it elsewhere."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import networks
import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError


@dataclass
class Finished:
    onnx: Path | None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.randn(4, 3, 4)
    path = ck.export_onnx(model, tmp_path_factory.mktemp("bundle") / "net.onnx", (x,))
    return path, x, model(x).detach()


def python(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, cwd="/")


def test_the_script_runs_where_compresskit_is_not_known(exported, tmp_path) -> None:
    path, x, wanted = exported
    names = ["cat", 'do"g', "Kätzchen"]
    script = ck.export.bundle(Finished(path), tmp_path / "to", labels=names, example=(x,))
    text = script.read_text()
    assert len(text.splitlines()) <= 25
    imported = {a.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for a in node.names}
    assert imported == {"json", "sys", "numpy", "onnxruntime"}
    done = python("-I", script)
    assert done.returncode == 0, done.stderr
    assert repr([names[i] for i in wanted.argmax(1)]) in done.stdout
    stored = dict(np.load(tmp_path / "to" / "example.npz"))
    (output,) = (name for name in stored if name.startswith("expected "))
    np.testing.assert_allclose(stored[output], wanted.numpy(), atol=1e-5)
    np.savez(tmp_path / "wrong.npz", **stored | {output: stored[output] + 1})
    done = python("-I", script, tmp_path / "wrong.npz")
    assert done.returncode == 1
    assert "is not what was expected" in done.stderr


def test_a_bundle_is_replaced_by_the_next(exported, tmp_path) -> None:
    path, x, _ = exported
    ck.export.bundle(path, tmp_path, labels=["a", "b", "c"], example=x)
    assert json.loads((tmp_path / "labels.json").read_text()) == ["a", "b", "c"]
    ck.export.bundle(tmp_path / "net.onnx", tmp_path, example=x[:1])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *"example.bin example.json example.npz index.html infer.cpp infer.mjs infer.py net.onnx".split()
    ]
    assert (tmp_path / "net.onnx").read_bytes() == path.read_bytes()


def test_inputs_may_be_called_like_arguments_of_savez(tmp_path) -> None:
    class Named(nn.Module):
        def forward(self, file, allow_pickle):
            return file + allow_pickle

    x = torch.randn(2, 3)
    path = ck.export_onnx(Named().eval(), tmp_path / "named.onnx", {"file": x, "allow_pickle": 2 * x})
    ck.export.bundle(path, tmp_path / "to", example={"file": x, "allow_pickle": 2 * x})
    stored = dict(np.load(tmp_path / "to" / "example.npz"))
    assert {"file", "allow_pickle"} <= stored.keys()
    np.testing.assert_array_equal(stored["file"], x.numpy())


def test_what_cannot_be_bundled_is_refused(exported, tmp_path) -> None:
    path, x, _ = exported
    with pytest.raises(SettingError, match=r"wanted a name for each class of the output \(4, 3\), got 2"):
        ck.export.bundle(path, tmp_path / "no", labels=["a", "b"], example=x)
    with pytest.raises(SettingError, match="the result has no ONNX file; pass the path of one"):
        ck.export.bundle(Finished(None), tmp_path / "no", example=x)
    with pytest.raises(ck.ExportError, match="no such file: .*gone.onnx"):
        ck.export.bundle(tmp_path / "gone.onnx", tmp_path / "no", example=x)
    with pytest.raises(ck.DataError, match=r"the file wants inputs \['input'\], got 2 tensors"):
        ck.export.bundle(path, tmp_path / "no", example=(x, x))
    assert not (tmp_path / "no").exists()


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """An int8 file of a small classifier, pictures for it, and what it says of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    pixels = torch.randint(0, 256, (3, 12, 10, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = (pixels.permute(0, 3, 1, 2).float().div(255) - mean) / std
    quantized = ck.quant.quantize_static(model, x)
    path = ck.export_onnx(quantized, tmp_path_factory.mktemp("classifier") / "net.onnx", x)
    ck.export.annotate(path, stage={"lr": 0.1}, metric=0.5)
    (outputs,) = ort.InferenceSession(path).run(None, {"input": x.numpy()})
    return path, pixels, outputs


@pytest.mark.parametrize("in_graph", [False, True])
def test_pictures_are_preprocessed_by_the_script_or_by_the_file(classifier, tmp_path, in_graph) -> None:
    path, pixels, outputs = classifier
    script = ck.export.bundle(
        path, tmp_path, example=pixels, preprocess=ck.export.Preprocess(mean=MEAN, std=STD, in_graph=in_graph)
    )
    assert len(script.read_text().splitlines()) <= 25
    stored = dict(np.load(tmp_path / "example.npz"))
    (name,) = (name for name in stored if name.startswith("expected "))
    assert stored.keys() == {"pixels", name}
    assert stored["pixels"].dtype == np.uint8
    np.testing.assert_array_equal(stored[name], outputs)
    said = json.loads((tmp_path / "preprocess.json").read_text())
    assert (said["height"], said["width"], said["mean"], said["in_graph"]) == (12, 10, list(MEAN), in_graph)
    (entry,) = ort.InferenceSession(tmp_path / "net.onnx").get_inputs()
    assert (entry.name, entry.type) == (("pixels", "tensor(uint8)") if in_graph else ("input", "tensor(float)"))
    assert entry.shape[1:] == ([12, 10, 3] if in_graph else [3, 12, 10])
    done = python("-I", script)
    assert done.returncode == 0, done.stderr
    np.savez(tmp_path / "wrong.npz", **stored | {"pixels": 255 - stored["pixels"]})
    assert python("-I", script, tmp_path / "wrong.npz").returncode == 1
    ck.export.bundle(path, tmp_path / "again", example=pixels[:1].permute(0, 3, 1, 2).float())
    assert not (tmp_path / "again" / "preprocess.json").exists()


def test_what_the_training_wrote_into_the_file_can_be_left_out(classifier, tmp_path) -> None:
    path, pixels, _ = classifier
    x = pixels.permute(0, 3, 1, 2).float()
    ck.export.bundle(path, tmp_path / "with", example=x)
    ck.export.bundle(path, tmp_path / "without", example=x, metadata=False)
    assert ck.export.read_metadata(tmp_path / "with" / "net.onnx")["stage"] == {"lr": 0.1}
    assert ck.export.read_metadata(tmp_path / "without" / "net.onnx").keys() == {"producer", "opset"}
    assert [b'"lr"' in (tmp_path / name / "net.onnx").read_bytes() for name in ("with", "without")] == [True, False]


def test_the_page_and_the_cpp_lines_hold_the_example(classifier, tmp_path) -> None:
    path, pixels, outputs = classifier
    labels = ["</script>", 'do"g', "Kätzchen", "x"]
    settings = ck.export.Preprocess(mean=MEAN, std=STD)
    ck.export.bundle(path, tmp_path, example=pixels, labels=labels, preprocess=settings, web_runtime="ort/dist")
    example, raw = json.loads((tmp_path / "example.json").read_text()), (tmp_path / "example.bin").read_bytes()
    (shown,), (output,) = example["inputs"], example["outputs"]
    assert raw[shown["offset"] : shown["offset"] + shown["size"]] == pixels.numpy().tobytes()
    assert raw[output["offset"] : output["offset"] + output["size"]] == outputs.tobytes()
    assert output["offset"] % 64 == 0
    page = (tmp_path / "index.html").read_text()
    assert page.count("</script>") == 1
    assert '"runtime": "ort/dist/"' in page
    assert "http" not in page.replace("http.server", "")
    assert (
        "cdn.jsdelivr.net"
        in ck.export.bundle(path, tmp_path / "cdn", example=pixels, preprocess=settings).with_name("index.html").read_text()
    )
    lines = (tmp_path / "infer.cpp").read_text()
    assert "shape0 = {3, 3, 12, 10};" in lines
    assert f"bytes.data() + {output['offset']}" in lines
    assert len(lines.splitlines()) < 60


def test_types_that_browsers_lack_have_no_page(tmp_path) -> None:
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval(), torch.randn(2, 4)
    ck.export.bundle(ck.export_onnx(model, tmp_path / "a.onnx", x), tmp_path / "to", example=x)
    assert (tmp_path / "to" / "index.html").exists()
    ck.export.bundle(ck.export_onnx(model.half(), tmp_path / "a.onnx", x.half()), tmp_path / "to", example=x.half())
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == ["a.onnx", "example.npz", "infer.py"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mean": (), "std": (1.0,)},
            r"Preprocess\(mean=...\): wanted a number for each channel, such as \(0.5, 0.5, 0.5\), got \(\)",
        ),
        ({"mean": (0.5,), "std": ("1",)}, r"Preprocess\(std=...\): wanted a number for each channel"),
        ({"mean": (0.5,), "std": (1.0, 1.0)}, "wanted as many means as deviations, got 1 and 2"),
        ({"mean": (0.5,), "std": (0.0,)}, r"Preprocess\(std=...\): wanted numbers > 0, got \(0.0,\)"),
    ],
)
def test_bad_preprocessing_is_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        ck.export.Preprocess(**settings)


def test_preprocessing_that_does_not_fit_is_refused(exported, classifier, tmp_path) -> None:
    path, pixels, _ = classifier
    three = ck.export.Preprocess(mean=MEAN, std=STD, in_graph=True)
    with pytest.raises(ck.DataError, match=r"wanted pictures as example, uint8 \(N, height, width, 3\), got float32 \(4, 3, 4\)"):
        ck.export.bundle(path, tmp_path / "no", example=exported[1], preprocess=three)
    with pytest.raises(ck.DataError, match="wanted pictures as example.*got list"):
        ck.export.bundle(path, tmp_path / "no", example=([1, 2],), preprocess=three)
    with pytest.raises(SettingError, match="lies in the folder itself and would be changed; choose another folder"):
        ck.export.bundle(path, path.parent, example=pixels, preprocess=three)
    with pytest.raises(ck.ExportError, match="cannot run|cannot be run|Invalid|rank"):
        ck.export.bundle(exported[0], tmp_path / "no", example=pixels, preprocess=three)
    two = ck.export_onnx(networks.TwoInputs().eval(), tmp_path / "two.onnx", (torch.randn(2, 3, 16, 16), torch.randn(2, 8)))
    with pytest.raises(ck.ExportError, match="preprocessing is for files with one input, this one has "):
        ck.export.bundle(two, tmp_path / "no", example=pixels, preprocess=three)
    for file, got in ((two, "the file has image, numbers$"), (exported[0], r"the file has input \('?\w+'?, 3, 4\)")):
        with pytest.raises(ck.ExportError, match=rf"preprocessing wants one float input \(N, 3, height, width\), {got}"):
            three.write_into(file, tmp_path / "never.onnx")


WEB = os.environ.get("COMPRESSKIT_WEB")  # a folder where `npm install onnxruntime-web` was run

NODE = """
import { readFile } from "node:fs/promises";
import * as ort from "%s";
import { check, classes } from "./infer.mjs";

ort.env.wasm.numThreads = 1;
const [example, bytes, model] = await Promise.all(["example.json", "example.bin", "net.onnx"].map(file => readFile(file)));
const session = await ort.InferenceSession.create(model);
const raw = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const found = await check(ort, session, JSON.parse(example), raw);
console.log(JSON.stringify(found.map(found => ({ ...found, data: undefined, classes: classes(found) }))));
"""


@pytest.mark.skipif(
    WEB is None or shutil.which("node") is None, reason="node, and COMPRESSKIT_WEB with onnxruntime-web, are not here"
)
@pytest.mark.parametrize("in_graph", [None, False, True])
def test_the_page_gives_the_same_classes_in_wasm(classifier, tmp_path, in_graph) -> None:
    path, pixels, outputs = classifier
    settings = None if in_graph is None else ck.export.Preprocess(mean=MEAN, std=STD, in_graph=in_graph)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    x = (pixels.permute(0, 3, 1, 2).float().div(255) - mean) / std
    ck.export.bundle(path, tmp_path, example=x if settings is None else pixels, preprocess=settings)
    (tmp_path / "run.mjs").write_text(NODE % (Path(WEB) / "node_modules" / "onnxruntime-web" / "dist" / "ort.wasm.min.mjs"))
    done = subprocess.run(["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(done.stdout)
    assert found["agrees"]
    assert found["classes"] == outputs.argmax(1).tolist()
    example = json.loads((tmp_path / "example.json").read_text())
    raw = bytearray((tmp_path / "example.bin").read_bytes())
    raw[example["outputs"][0]["offset"] + 3] ^= 0x80  # the sign of a value
    (tmp_path / "example.bin").write_bytes(raw)
    assert (
        '"agrees":false' in subprocess.run(["node", "run.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    )


@pytest.mark.slow
@pytest.mark.skipif(
    WEB is None or shutil.which("chromium") is None, reason="chromium, and COMPRESSKIT_WEB with onnxruntime-web, are not here"
)
def test_the_page_runs_in_a_browser(classifier, tmp_path) -> None:
    path, pixels, _ = classifier
    ck.export.bundle(
        path,
        tmp_path,
        example=pixels,
        labels=list("abcd"),
        preprocess=ck.export.Preprocess(mean=MEAN, std=STD),
        web_runtime="dist",
    )
    (tmp_path / "dist").symlink_to(Path(WEB).resolve() / "node_modules" / "onnxruntime-web" / "dist")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/index.html"
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=20000",
            "--dump-dom",
            address,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        server.shutdown()
    assert "The outputs on the example are what was expected." in done.stdout


@pytest.mark.skipif(
    "ONNXRUNTIME_ROOT" not in os.environ, reason="ONNXRUNTIME_ROOT, a release of onnxruntime for C++, is not here"
)
def test_the_cpp_lines_compile_and_agree(classifier, tmp_path) -> None:
    path, pixels, _ = classifier
    root = os.environ["ONNXRUNTIME_ROOT"]
    ck.export.bundle(path, tmp_path, example=pixels, preprocess=ck.export.Preprocess(mean=MEAN, std=STD))
    flags = ["-std=c++17", "-I", f"{root}/include", "-L", f"{root}/lib", "-lonnxruntime", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", "infer.cpp", *flags, "-o", "infer"], cwd=tmp_path, check=True)
    assert "largest error" in subprocess.run(["./infer"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
