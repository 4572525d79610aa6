"""Read and write ONNX files: atomically, with weights past 2 GB in a second file, and with metadata as JSON.

model.onnx          the graph; metadata_props["compresskit"] is a JSON object (versions, model, stage, metric, verification)
model.onnx.data     the weights, where they do not fit into the file; named in it without any folder
"""

from __future__ import annotations

import filecmp
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from compresskit.base.errors import CheckpointError, ExportError
from compresskit.base.files import atomic, check_is_path, sync_folder, take_rights_, unwritable

LIMIT = 2**31 - 2**24  # bytes a protobuf file can hold, less room for the graph
KEY = "compresskit"  # of the JSON object among a file's key-value pairs


class DiskError(ExportError, CheckpointError):
    """An ONNX file cannot be written or read: of the disk or the folder, not of the model."""


def data_path(path: str | Path) -> Path:
    """Where this library writes external data: the weights that do not fit into the file."""
    path = Path(path)
    return path.with_name(f"{path.name}.data")


def external_files(path: str | Path) -> list[Path]:
    """The files beside an ONNX file in which weights of it lie, whatever tool wrote them; raises ExportError as `read_proto`."""
    places = {PurePosixPath(place) for _, place in _external_locations(read_proto(path))}
    return [Path(path).parent / place for place in sorted(places)]


def file_bytes(path: str | Path) -> int:
    """Bytes of an ONNX file, with those of its external data; raises ExportError as `read_proto`."""
    return sum(p.stat().st_size for p in (Path(path), *external_files(path)))


def write_model(model: Any, path: Path) -> None:
    """Write an onnx-ir model. An existing file is replaced only once the new one is complete.

    Two files cannot be replaced at once. Where the weights are in a second one, an existing file is removed before its weights
    are replaced: a process that is killed in between leaves no file, and never the old graph with the new weights.

    Raises DiskError where the disk is full or the file cannot be written.
    """
    import onnx_ir as ir  # heavy, and only exporting needs it

    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    external = data_path(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            new = Path(folder) / path.name
            ir.save(model, new, external_data=external.name if size > LIMIT else None)
            written = [data_path(new)] if size > LIMIT else []
            for file in [*written, new]:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
                take_rights_(file, path.with_name(file.name))
            if written:
                _replace_weights(written[0], external, path)
            new.replace(path)
            sync_folder(path.parent)
        if not written:
            external.unlink(missing_ok=True)  # of a larger model that was here before
    except OSError as error:
        raise DiskError(unwritable(path, error)) from error


def _replace_weights(new: Path, weights: Path, graph: Path) -> None:
    """Move a file of weights to its place. The graph that reads what is there goes first: with other weights it would load, and
    compute nonsense.
    """
    if weights.exists():
        graph.unlink(missing_ok=True)
        sync_folder(graph.parent)
    new.replace(weights)


def copy_onnx(source: Path, to: Path, *, without: Collection[str] = ()) -> None:
    """Copy an ONNX file, with its external data, to another folder under the same name. What is there is not written again.

    without: entries of its metadata that the copy lacks, of those that `annotate` wrote.
    """
    pairs = [(file, to.parent / file.relative_to(source.parent)) for file in external_files(source)]
    for old, new in pairs if without else [*pairs, (source, to)]:
        if not (new.exists() and filecmp.cmp(old, new, shallow=False)):
            if old != source:  # weights: the graph that reads those which are there goes first, as in `write_model`
                to.unlink(missing_ok=True)
            new.parent.mkdir(parents=True, exist_ok=True)
            with atomic(new) as temporary, old.open("rb") as reader, temporary.open("wb") as writer:
                while block := reader.read(2**24):
                    writer.write(block)
    if without:
        proto = read_proto(source)
        content = _with_record(proto, {name: value for name, value in _metadata_record(proto).items() if name not in without})
        if not to.exists() or to.read_bytes() != content:
            with atomic(to) as temporary:
                temporary.write_bytes(content)


def read_proto(path: str | Path) -> Any:
    """Read a file as a protobuf, without its external data.

    Raises SettingError for what is no path, ExportError where it is not an ONNX file, or where its external data is missing or
    lies outside its folder.
    """
    check_is_path(path, "an ONNX file")
    import onnx  # heavy, and only exporting needs it
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        proto = onnx.load(path, load_external_data=False)
    except FileNotFoundError:
        raise ExportError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ExportError(f"{path}: a folder; wanted an ONNX file") from None
    except OSError as error:
        raise DiskError(f"{path}: cannot be read ({error.strerror or error}); look at its rights and its disk") from error
    except DecodeError as error:
        raise ExportError(f"{path}: ONNX Runtime cannot load it: not an ONNX file ({error})") from error
    for name, place in _external_locations(proto):
        outside = PurePosixPath(place).is_absolute() or PureWindowsPath(place).is_absolute() or PureWindowsPath(place).drive
        if outside or ".." in PureWindowsPath(place).parts:
            raise ExportError(f"{path}: the weight {name!r} lies at {place!r}, outside the folder of the file; it is not read")
        here = Path(path).parent
        if not (here / place).resolve().is_relative_to(here.resolve()):
            raise ExportError(f"{path}: the weight {name!r} lies at {place!r}, a link out of the folder of the file")
        if not (here / place).exists():
            raise ExportError(f"{path}: {place}, in which its weights lie, is not there; keep the two files together")
    return proto


def _external_locations(proto: Any) -> Iterator[tuple[str, str]]:
    for tensor in _stored_tensors(proto.graph):
        yield from ((tensor.name, entry.value) for entry in tensor.external_data if entry.key == "location")


def _stored_tensors(graph: Any) -> Iterator[Any]:
    """Every stored tensor of a graph and of the graphs inside its operators."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.initializer:
                    yield from _stored_tensors(inner)


def annotate(path: str | Path, **entries: Any) -> None:
    """Add JSON-ready entries to the metadata of a file; an entry of an existing name replaces it.

    Raises ExportError where the file is not an ONNX file.
    """
    proto = read_proto(path)
    content = _with_record(proto, _metadata_record(proto) | entries)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def _with_record(proto: Any, record: dict[str, Any]) -> bytes:
    """A file with this JSON object in the place of the one that it has."""
    import onnx

    kept = {p.key: p.value for p in proto.metadata_props} | {KEY: json.dumps(record, allow_nan=False)}
    del proto.metadata_props[:]
    proto.metadata_props.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in kept.items())
    return proto.SerializeToString()  # type: ignore[no-any-return]


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Read the metadata of a file.

    Returns:
        `producer`, `opset`; the entries that this library wrote: `versions` of the libraries, `model` (class), `target` of a
        quantized model, and for a file of a recipe `stage`, `metric` and `verification`; other entries as text.

    Raises ExportError where the file is not an ONNX file.
    """
    proto = read_proto(path)
    others = {p.key: p.value for p in proto.metadata_props if p.key != KEY}
    opset = next((i.version for i in proto.opset_import if i.domain in ("", "ai.onnx")), None)
    return {"producer": proto.producer_name, "opset": opset, **_metadata_record(proto), **others}


def _metadata_record(proto: Any) -> dict[str, Any]:
    text = next((p.value for p in proto.metadata_props if p.key == KEY), "{}")
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
