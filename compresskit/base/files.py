"""Files that survive: safetensors and JSON, written atomically, read without executing anything and only if they are whole.

A safetensors file is written in one pass, without a second copy in memory:

8 bytes         length of the header, little endian
header          JSON: {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {"format", "record", "sha256"}}
data            the tensors

The digest is that of the whole file, read with 64 zeros in the place of the digest itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compresskit.base.errors import CheckpointError

FORMAT = 1  # of JSON and tensor files; a reader refuses files of a later one
LARGEST = 2**26  # bytes of a JSON file that is read
HEADER = 2**26  # bytes of a header; a longer one is not read
BLOCK = 2**22
NOTHING = "0" * 64

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], record: Any = None) -> None:
    """Write tensors, each by itself, and a JSON-ready record; not atomic. One tensor at a time is copied, where it has to be.

    Raises CheckpointError for a dtype that safetensors does not have, OSError where the disk is full.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # alignment, as safetensors itself sorts
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        value = tensors[name]
        if value.dtype not in DTYPES:
            raise CheckpointError(f"{name}: tensors of {value.dtype} cannot be stored")
        begin, end = end, end + value.numel() * value.element_size()
        entries[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    told = {"format": str(FORMAT), "record": json.dumps(record, allow_nan=False), "sha256": NOTHING}
    header = json.dumps({"__metadata__": told, **entries}).encode()
    header += b" " * (-len(header) % 8)
    at = 8 + header.index(NOTHING.encode())
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header, *map(_bytes, map(tensors.__getitem__, names))):
            digest.update(part)
            file.write(part)
        file.seek(at)
        file.write(digest.hexdigest().encode())


def _bytes(value: Tensor) -> Any:
    plain = value.detach().cpu().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


def read_tensor_file(path: str | Path, limit: int | None = None) -> tuple[dict[str, Tensor], Any]:
    """(tensors, record) of a file that `write_tensor_file` wrote, after its digest was compared.

    limit: bytes that the tensors may take together, where the reader knows. CheckpointError where the file is missing, cut off,
    changed, larger, of a later format or somebody else's.
    """
    path = Path(path)
    try:
        told = _checked(path, limit)
        tensors = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file of this library ({error}); delete it to start that stage again"
        ) from None
    return tensors, json.loads(told["record"])


def _checked(path: Path, limit: int | None) -> dict[str, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        if limit is not None and size - 8 - length > limit:
            raise ValueError(f"it holds {size - 8 - length} bytes, at most {limit} fit the model")
        raw = file.read(length)
        header = json.loads(raw)
        told = header["__metadata__"]
        if (version := told["format"]) != str(FORMAT):
            raise ValueError(f"written in format {version}, this compresskit reads {FORMAT}; update compresskit")
        if not isinstance(told["record"], str) or raw.count(told["sha256"].encode()) != 1 or len(told["sha256"]) != 64:
            raise ValueError("no digest in it")
        digest = hashlib.sha256(length.to_bytes(8, "little") + raw.replace(told["sha256"].encode(), NOTHING.encode()))
        if _rest(file, digest) != told["sha256"]:
            raise ValueError("its digest is another: some of it has changed since it was written")
    return told  # type: ignore[no-any-return]


def _rest(file: BinaryIO, digest: Any) -> str:
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()  # type: ignore[no-any-return]


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
