"""Files that survive: safetensors and JSON, written atomically, read without executing anything."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compresskit.errors import CheckpointError
from compresskit.surgery import restructure_, structure
from compresskit.tensorfile import read_tensor_file, write_tensor_file

FORMAT = 1  # of JSON files; a reader refuses files of a later one
LARGEST = 2**26  # bytes of a JSON file that is read

MODEL, STRUCTURE = "model.safetensors", "structure.json"


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; what was written there takes its place at once, or not at all.

    The file is synced before it is renamed, so that after a power cut either the old or the new one is there, whole. Raises
    CheckpointError where the disk is full or cannot be written.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(unwritable(path, error)) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> str:
    """What to say where a file cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: the disk is full; make room and run the same command again, what was saved before is whole"
    return f"{path}: cannot be written ({error.strerror or error}); look at its rights, or choose another out="


def _digest(path: Path, record: Any) -> str:
    # With the name, so that one file does not pass for another.
    return hashlib.sha256(json.dumps([path.name, record], sort_keys=True).encode()).hexdigest()


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Write a record with its digest, atomically."""
    plain = json.loads(json.dumps(record, allow_nan=False))
    text = json.dumps(plain | {"sha256": _digest(Path(path), plain)}, indent=1) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text)


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON object; `CheckpointError` names the file where it is missing, damaged, changed or of a later format."""
    path = Path(path)
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there; {what} was expected") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, {what} was expected ({error}); delete it to start that stage again") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: wanted a JSON object with {what}, got {type(record).__name__}")
    if (version := record.get("format", FORMAT)) != FORMAT:
        raise CheckpointError(f"{path}: written in format {version}, this compresskit reads {FORMAT}; update compresskit")
    digest = record.pop("sha256", None)
    if digest != _digest(path, record):
        problem = "has no digest" if digest is None else "has changed since it was written"
        raise CheckpointError(f"{path}: {problem}; {what} was expected. Delete it to start that stage again")
    return record


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], record: Any = None) -> None:
    """Write tensors as safetensors, atomically; a tensor that shares memory with another is stored by itself."""
    with atomic(path) as temporary:
        write_tensor_file(temporary, tensors, record)


def read_tensors(path: str | Path, limit: int | None = None) -> dict[str, Tensor]:
    """Read a safetensors file; `CheckpointError` where it is missing, damaged, or larger than `limit` bytes."""
    return read_tensor_file(path, limit)[0]


def bytes_of(model: nn.Module) -> int:
    """Bytes of the values that a model stores."""
    return sum(value.numel() * value.element_size() for value in model.state_dict().values())


def load_values_(model: nn.Module, tensors: dict[str, Tensor], where: str | Path) -> None:
    """Load a state dict after names, shapes and dtypes have all been compared; nothing changes if any differs."""
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(tensors)):
        side = "the file lacks" if odd[0] in own else "the model has no"
        raise CheckpointError(f"{where}: {side} {odd[0]!r} ({len(odd)} names differ); it is of another model")
    for name, value in tensors.items():
        if own[name].shape != value.shape or own[name].dtype != value.dtype:
            raise CheckpointError(
                f"{where}: {name} is {tuple(value.shape)} {value.dtype}, the model wants"
                f" {tuple(own[name].shape)} {own[name].dtype}"
            )
    model.load_state_dict(tensors)


def save_model(model: nn.Module, folder: str | Path, **extra: Any) -> None:
    """Write `model.safetensors` and `structure.json` into a folder; `extra` goes into the JSON."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / MODEL, model.state_dict())
    write_json(folder / STRUCTURE, {"format": FORMAT, "structure": structure(model), **extra})


def load_model_(model: nn.Module, folder: str | Path) -> nn.Module:
    """Give a fresh model of the same class the saved structure (pruned shapes) and values; the model itself is returned.

    Raises CheckpointError for another model's files or damaged ones; a model that was refused keeps its values.
    """
    folder = Path(folder)
    record = read_json(folder / STRUCTURE, "a model's structure").get("structure")
    if not isinstance(record, dict) or not all(isinstance(record.get(k), dict) for k in ("tensors", "modules")):
        raise CheckpointError(f"{folder / STRUCTURE}: no structure of a float model in it; use compresskit.load")
    tensors = read_tensors(folder / MODEL, bytes_of(model))
    if wrong := [k for k, v in tensors.items() if list(v.shape) != record["tensors"].get(k)]:
        raise CheckpointError(f"{folder}: {MODEL} and {STRUCTURE} disagree about {wrong[0]}")
    try:
        restructure_(model, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / STRUCTURE}: not the structure of a model ({error!r}); delete the folder") from None
    load_values_(model, tensors, folder / MODEL)
    return model
