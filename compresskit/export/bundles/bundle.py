"""Bundle an ONNX file with what is needed to run it elsewhere: labels, an example with its outputs, and code for each place.

folder/model.onnx        the file, with its external data
folder/labels.json       names of the classes, where they are given
folder/preprocess.json   how pictures become its input, where it is given
folder/example.npz       an array for each input, and "expected NAME" for each output, as computed here
folder/infer.py          runs the file on an npz file; alone, on the example, and compares. Needs numpy and onnxruntime
folder/index.html        the same in a browser, by infer.mjs and onnxruntime-web
folder/infer.cpp         the same in C++
folder/example.json      where the arrays of the example lie in example.bin, for the two
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.files import atomic, check_is_path
from compresskit.base.task import Inputs
from compresskit.export.bundles.preprocess import PIXELS, Preprocess
from compresskit.export.check.benchmark import open_session
from compresskit.export.files import copy_onnx, external_files, read_metadata
from compresskit.measure import numpy_inputs, run_session

#: Where a page loads onnxruntime-web from, unless `web_runtime` names another place. The release that the tests run.
WEB_RUNTIME = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/"
#: Types that the page and the C++ lines know -> the name of ONNX Runtime's C API.
SHARED_TYPES = {"float32": "FLOAT", "float64": "DOUBLE", "int64": "INT64", "int32": "INT32", "uint8": "UINT8", "int8": "INT8"} | {
    "bool": "BOOL"
}
ALIGNMENT = 64  # bytes, of the arrays in example.bin


@runtime_checkable
class HasFile(Protocol):
    """The result of a run, or anything else with an ONNX file."""

    @property
    def onnx(self) -> Path | None:
        """The file; None where there is none."""


def bundle(
    source: HasFile | str | Path,
    folder: str | Path,
    *,
    example: Inputs | Tensor,
    labels: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    metadata: bool = True,
    web_runtime: str = WEB_RUNTIME,
) -> Path:
    """Put an ONNX file into a folder with an example, labels, and code that runs it in Python, in a browser and in C++.

    Args:
        source: the result of a run, or the path of an ONNX file.
        folder: is made where it is missing; files of an earlier bundle in it are replaced.
        example: inputs of the model, such as a few validation samples; with `preprocess`, pictures: uint8 (N, height, width,
            channels).
        labels: names of the classes, in the order of the model's first output (N, classes).
        preprocess: how pictures become the input of the model; the code in the folder applies it, or the file does by itself.
        metadata: False leaves out of the copy what a run wrote into it: settings, metric, verification.
        web_runtime: URL of the folder `dist` of onnxruntime-web, also relative to the page; the page loads it when it is opened.

    Returns:
        The path of the Python script. A type of array that browsers lack, such as fp16, and weights in a second file have no
        page and no C++ lines.

    Raises SettingError where the run wrote no file, the number of labels is not that of the classes, or the copy would replace
    its source; ExportError where the file does not load or cannot run the example, or preprocessing does not fit it; DataError
    where it takes another number of inputs, or the example is no pictures.
    """
    if not isinstance(source, HasFile):
        check_is_path(source, "bundle(source=...)", "; give that of an ONNX file, or the result of a run")
    check_is_path(folder, "bundle(folder=...)")
    path = source.onnx if isinstance(source, HasFile) else Path(source)
    if path is None:
        raise SettingError("bundle(...): the result has no ONNX file; pass the path of one")
    folder = Path(folder)
    run = _run_example(path, example, preprocess)
    first = next(iter(run.outputs.values()))
    if labels is not None and (isinstance(labels, str) or first.ndim != 2 or first.shape[1] != len(labels)):
        raise SettingError(f"bundle(labels=...): wanted a name for each class of the output {first.shape}, got {len(labels)}")
    names = None if labels is None else list(map(str, labels))
    _copy(path, folder, changed=not metadata or run.in_graph, without=() if metadata else tuple(read_metadata(path)))
    if preprocess is not None and run.in_graph:
        run = _with_graph(run, preprocess, folder / path.name)
    _write_arrays(folder / "example.npz", run.shown | {f"expected {name}": value for name, value in run.outputs.items()})
    _write_json(folder / "labels.json", names)
    _write_json(folder / "preprocess.json", run.settings)
    _write_text(folder / "infer.py", _filled("infer.py.jinja", file=path.name, prepared=run.prepared))
    _write_shared(folder, path.name, run, {"file": path.name, "runtime": web_runtime.rstrip("/") + "/", "labels": names})
    return folder / "infer.py"


@dataclass(frozen=True, kw_only=True)
class _Example:
    """The example as a file ran it.

    feed: inputs of the file. shown: what the folder's code starts from: pictures, or the inputs themselves.
    outputs: of the file. settings: what preprocess.json says. prepared: the input that the folder's code makes of the pictures.
    """

    feed: dict[str, np.ndarray]
    shown: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    settings: dict[str, Any] | None = None

    @property
    def in_graph(self) -> bool:
        return self.settings is not None and bool(self.settings["in_graph"])

    @property
    def prepared(self) -> str | None:
        return None if self.settings is None or self.in_graph else str(self.settings["input"])


def _run_example(path: Path, example: Inputs | Tensor, preprocess: Preprocess | None) -> _Example:
    """Run the file as it is on the example, after preprocessing."""
    session = open_session(path)
    if preprocess is None:
        feed = numpy_inputs(session, (example,) if isinstance(example, Tensor) else example, path)
        return _Example(feed=feed, shown=feed, outputs=_named_outputs(session, feed, path))
    pixels = preprocess.pixels(example)
    names = [entry.name for entry in session.get_inputs()]
    if len(names) != 1:
        raise ExportError(f"{path}: preprocessing is for files with one input, this one has {', '.join(names)}")
    _, height, width, _ = pixels.shape
    feed = {names[0]: preprocess(pixels)}
    settings = {"pixels": "uint8 (N, height, width, channels)", "height": height, "width": width}
    settings |= {"mean": preprocess.mean, "std": preprocess.std, "input": names[0], "in_graph": preprocess.in_graph}
    return _Example(feed=feed, shown={PIXELS: pixels}, outputs=_named_outputs(session, feed, path), settings=settings)


def _named_outputs(session: Any, feed: Mapping[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    return dict(zip((entry.name for entry in session.get_outputs()), run_session(session, feed, path), strict=True))


def _copy(path: Path, folder: Path, *, changed: bool, without: Sequence[str]) -> None:
    """Copy the file into the folder; where it is to be changed there, it must not be the source itself."""
    same = (folder / path.name).resolve() == path.resolve()
    if same and changed:
        raise SettingError(f"bundle(...): {path} lies in the folder itself and would be changed; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error
    if not same:
        copy_onnx(path, folder / path.name, without=without)


def _with_graph(run: _Example, preprocess: Preprocess, path: Path) -> _Example:
    """Put preprocessing into the file and run it on the pictures; ExportError where that does not give what it gave before."""
    preprocess.write_into(path, path)
    found = _named_outputs(open_session(path), run.shown, path)
    for name, value in run.outputs.items():
        error, largest = (np.abs(array).max(initial=0) for array in (found[name].astype("f8") - value, value.astype("f8")))
        if not error <= 0.01 * largest:
            raise ExportError(f"{path}: with its preprocessing in the graph, {name} differs by {error:.3g} of {largest:.3g}")
    return replace(run, feed=run.shown, outputs=found)


def _write_shared(folder: Path, file: str, run: _Example, web: Mapping[str, Any]) -> None:
    """Write the page and the C++ lines, with the example as they read it; where they cannot run the file, remove old ones."""
    parts = [run.feed, run.shown if run.prepared else {}, run.outputs]
    if any(str(v.dtype) not in SHARED_TYPES for part in parts for v in part.values()) or external_files(folder / file):
        for name in ("index.html", "infer.mjs", "infer.cpp", "example.json", "example.bin"):
            (folder / name).unlink(missing_ok=True)
        return
    inputs, pictures, outputs = (_laid_out(part, parts[:place]) for place, part in enumerate(parts))
    with atomic(folder / "example.bin") as temporary:
        temporary.write_bytes(b"".join(_aligned_bytes(value) for part in parts for value in part.values()))
    _write_json(folder / "example.json", {"inputs": pictures or inputs, "outputs": outputs, "preprocess": run.settings})
    _write_text(folder / "index.html", _filled("index.html.jinja", file=file, settings=web))
    _write_text(folder / "infer.mjs", (Path(__file__).parent / "infer.mjs").read_text("utf-8"))
    lines = {"prepared": run.prepared, "inputs": inputs, "outputs": outputs, "types": SHARED_TYPES}
    _write_text(folder / "infer.cpp", _filled("infer.cpp.jinja", file=file, **lines))


def _aligned_bytes(value: np.ndarray) -> bytes:
    raw = np.ascontiguousarray(value).tobytes()
    return raw + bytes(-len(raw) % ALIGNMENT)


def _laid_out(arrays: Mapping[str, np.ndarray], before: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Where arrays lie in example.bin, after those of `before`."""
    offset = sum(len(_aligned_bytes(value)) for part in before for value in part.values())
    entries = []
    for name, value in arrays.items():
        entries.append(
            {"name": name, "type": str(value.dtype), "dims": list(value.shape), "offset": offset, "size": value.nbytes}
        )
        offset += len(_aligned_bytes(value))
    return entries


@cache
def _environment() -> Any:
    import jinja2  # here, since few need it and importing the library stays quick

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    html = jinja2.select_autoescape(["html.jinja"], default=False)
    environment = jinja2.Environment(loader=loader, autoescape=html, keep_trailing_newline=True, **options)
    environment.filters |= {"repr": repr, "cpp": json.dumps}
    return environment


def _filled(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)  # type: ignore[no-any-return]


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz file. `np.savez` takes names as arguments, and inputs may be called like its own."""
    with atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(value), allow_pickle=False)


def _write_json(path: Path, value: Any) -> None:
    """Write JSON; None removes the file of an earlier bundle."""
    if value is None:
        path.unlink(missing_ok=True)
    else:
        _write_text(path, json.dumps(value, ensure_ascii=False))


def _write_text(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
