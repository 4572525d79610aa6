"""Sparse models in files: size after compression, and ONNX's sparse encoding of weights."""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from compresskit.base.errors import ExportError
from compresskit.base.files import atomic, check_is_path
from compresskit.export.files import data_path
from compresskit.measure import session

OVERHEAD = 100  # bytes of a second name, type and shape in the file


def compressed_bytes(path: str | Path) -> dict[str, int | None]:
    """Size of a file after compression, with its external data: what a download or an app bundle weighs.

    Returns:
        Bytes: "zip" with deflate at level 9, "zstd" at level 19 (None where no zstd module is installed).
    """
    check_is_path(path, "compressed_bytes(path=...)")
    data = b"".join(p.read_bytes() for p in (Path(path), data_path(path)) if p.exists())
    zstd = _zstd()
    return {"zip": len(zlib.compress(data, 9)), "zstd": None if zstd is None else len(zstd.compress(data, 19))}


def _zstd() -> Any:
    for name in ("compression.zstd", "zstd", "backports.zstd"):  # the standard library has it from Python 3.14
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def store_sparse(path: str | Path, out: str | Path) -> Path:
    """Copy an ONNX file, with weights stored as `sparse_initializer` wherever that is smaller. Returns the path of the copy.

    The standard stores a sparse tensor as values and 8-byte positions, so that fp32 weights gain from two thirds of zeros on, and
    int8 weights from eight ninths. The copy computes the same: it is loaded in ONNX Runtime, which makes the weights dense again.
    Compressing the plain file saves more; this helps where files are stored as they are. Raises ExportError where the runtime
    does not load it, or for weights outside the file.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    if any(onnx.external_data_helper.uses_external_data(t) for t in model.graph.initializer):
        raise ExportError(f"{path}: its weights lie in another file, which sparse initializers cannot")
    dense = []
    for tensor in model.graph.initializer:
        sparse = _sparse(tensor)
        if sparse is None:
            dense.append(tensor)
        else:
            model.graph.sparse_initializer.append(sparse)
    del model.graph.initializer[:]
    model.graph.initializer.extend(dense)
    written = model.SerializeToString()
    try:
        session(written)
    except ExportError as error:
        raise ExportError(f"{out}: ONNX Runtime does not load sparse initializers here: {error}") from error
    with atomic(out) as temporary:
        temporary.write_bytes(written)
    return Path(out)


def _sparse(tensor: Any) -> Any:
    """The sparse form of a tensor, or None where it is not smaller."""
    from onnx import helper, numpy_helper

    values = numpy_helper.to_array(tensor)
    flat = values.reshape(-1)
    places = np.flatnonzero(flat).astype(np.int64)
    if len(places) * (values.itemsize + 8) + OVERHEAD >= values.nbytes or not len(places):
        return None
    kept = numpy_helper.from_array(flat[places], tensor.name)
    return helper.make_sparse_tensor(kept, numpy_helper.from_array(places, f"{tensor.name}_positions"), list(values.shape))
