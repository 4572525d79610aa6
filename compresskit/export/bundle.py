"""Bundle an ONNX file with what is needed to run it elsewhere: labels, an example with its outputs, and a script of a page.

folder/model.onnx      the file, with its external data
folder/labels.json     names of the classes, where they are given
folder/example.npz     an array for each input, and "expected NAME" for each output, as ONNX Runtime computed it here
folder/infer.py        runs the file on an npz file; alone, on the example, whose outputs it compares. Needs numpy and onnxruntime
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from compresskit.base.errors import ExportError, SettingError
from compresskit.base.files import atomic
from compresskit.base.task import Inputs
from compresskit.export.check.benchmark import open_session
from compresskit.export.files import copy_model
from compresskit.measure import numpy_inputs, run_session

SCRIPT = '''"""Run {file} on an npz file with its inputs: python infer.py inputs.npz; alone, check it on the example."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

here = Path(__file__).parent
session = ort.InferenceSession(str(here / {file!r}), providers=["CPUExecutionProvider"])
labels = json.loads((here / "labels.json").read_text("utf-8")) if (here / "labels.json").exists() else None
inputs = dict(np.load(sys.argv[1] if len(sys.argv) > 1 else here / "example.npz"))
names = [entry.name for entry in session.get_outputs()]
for name, found in zip(names, session.run(None, {{entry.name: inputs[entry.name] for entry in session.get_inputs()}})):
    print(name, found.shape, [labels[i] for i in found.argmax(1)] if labels and name == names[0] else "")
    wanted = inputs.get(f"expected {{name}}", found)
    if np.abs(wanted.astype("f8") - found).max(initial=0) > 0.01 * np.abs(wanted.astype("f8")).max(initial=0):
        sys.exit(f"{{name}} is not what was expected; look at the version of onnxruntime, {{ort.__version__}} here")
'''


@runtime_checkable
class HasFile(Protocol):
    """The result of a run, or anything else with an ONNX file."""

    @property
    def onnx(self) -> Path | None:
        """The file; None where there is none."""


def bundle(
    source: HasFile | str | Path, folder: str | Path, *, example: Inputs | Tensor, labels: Sequence[str] | None = None
) -> Path:
    """Put an ONNX file into a folder with an example, labels and a script that runs it with numpy and onnxruntime alone.

    Args:
        source: the result of a run, or the path of an ONNX file.
        folder: is made where it is missing; files of an earlier bundle in it are replaced.
        example: inputs of the model, such as a few validation samples.
        labels: names of the classes, in the order of the model's first output (N, classes).

    Returns:
        The path of the script.

    Raises SettingError where the run wrote no file, or the number of labels is not that of the classes; ExportError where the
    file does not load or cannot run the example; DataError where it takes another number of inputs.
    """
    path = source.onnx if isinstance(source, HasFile) else Path(source)
    if path is None:
        raise SettingError("bundle(...): the result has no ONNX file; pass the path of one")
    session = open_session(path)
    feed = numpy_inputs(session, (example,) if isinstance(example, Tensor) else example)
    outputs = dict(zip((entry.name for entry in session.get_outputs()), run_session(session, feed, path), strict=True))
    first = next(iter(outputs.values()))
    if labels is not None and (isinstance(labels, str) or first.ndim != 2 or first.shape[1] != len(labels)):
        raise SettingError(f"bundle(labels=...): wanted a name for each class of the output {first.shape}, got {len(labels)}")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from error
    if (folder / path.name).resolve() != path.resolve():
        copy_model(path, folder / path.name)
    _write_arrays(folder / "example.npz", feed | {f"expected {name}": value for name, value in outputs.items()})
    if labels is None:
        (folder / "labels.json").unlink(missing_ok=True)
    else:
        _write_text(folder / "labels.json", json.dumps(list(map(str, labels)), ensure_ascii=False))
    _write_text(folder / "infer.py", SCRIPT.format(file=path.name))
    return folder / "infer.py"


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz file. `np.savez` takes names as arguments, and inputs may be called like its own."""
    with atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(value), allow_pickle=False)


def _write_text(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
