"""Files of a run: safetensors and JSON with a digest, written atomically; reading them checks the digest and executes no code.

A safetensors file is written in one pass, without a second copy of the tensors in memory:

8 bytes         length of the header, little endian
header          JSON: {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {"format", "record", "sha256"}}
data            the tensors

Complex tensors are stored as pairs of real numbers; "complex" of the metadata has their names, where there are any.
The digest is that of the whole file with 64 zeros in place of the digest itself. `sealed` gives plain data one, too, such as a
plan that a user keeps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compresskit.base.errors import CheckpointError, SettingError

FORMAT = 1  # of JSON and tensor files; a reader refuses files of a later one
MAX_JSON = 2**26  # bytes of a JSON file; a larger one is not read
MAX_HEADER = 2**26  # bytes of the header of a tensor file; a longer one is not read
BLOCK = 2**22  # bytes that are read at once
NO_DIGEST = "0" * 64
RUN_AGAIN = "delete it to start that stage again"  # what to do where a file of a run is damaged

SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def check_is_path(value: Any, where: str, advice: str = "") -> None:
    """Raise SettingError, which begins with `where`, for what is no path. advice: what to write then."""
    if not isinstance(value, str | os.PathLike):
        raise SettingError(f"{where}: wanted a path, got {type(value).__name__}{advice}")


def absolute_path(value: str | Path) -> Path:
    """A path that stays the same wherever data or a forward pass move the working directory.

    Raises CheckpointError where the working directory was deleted.
    """
    try:
        return Path(os.getcwd(), value)
    except FileNotFoundError:
        if Path(value).is_absolute():
            return Path(value)
        raise CheckpointError(f"{value}: the working directory was deleted; change to another by os.chdir(...)") from None


def can_be_stored(dtype: torch.dtype) -> bool:
    """Whether `write_tensors` stores tensors of a dtype: those of safetensors, and complex ones, as pairs of real numbers."""
    return dtype.is_complex or dtype in SAFETENSORS_DTYPES


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], record: Any = None) -> None:
    """Write tensors and a JSON-ready record as safetensors, atomically.

    Tensors that share memory are stored separately. At most one tensor at a time is copied.

    Raises:
        CheckpointError: a tensor is of a dtype that `can_be_stored` denies, or the file cannot be written.
    """
    with atomic(path) as temporary:
        _write(temporary, tensors, record)


def _write(path: Path, tensors: Mapping[str, Tensor], record: Any) -> None:
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # alignment, as safetensors itself sorts
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        value = tensors[name]
        if not can_be_stored(value.dtype):
            raise CheckpointError(f"{name}: tensors of {value.dtype} cannot be stored")
        begin, end = end, end + value.numel() * value.element_size()
        shape = [*value.shape, 2] if value.is_complex() else list(value.shape)
        entries[name] = {"dtype": SAFETENSORS_DTYPES[value.dtype.to_real()], "shape": shape, "data_offsets": [begin, end]}
    metadata = {"format": str(FORMAT), "record": json.dumps(record, allow_nan=False), "sha256": NO_DIGEST}
    if complex_names := [name for name in names if tensors[name].is_complex()]:
        metadata["complex"] = json.dumps(complex_names)
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    at = 8 + header.index(NO_DIGEST.encode())
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(header).to_bytes(8, "little"), header, *map(_raw_bytes, map(tensors.__getitem__, names))):
            digest.update(part)
            file.write(part)
        file.seek(at)
        file.write(digest.hexdigest().encode())


def _raw_bytes(value: Tensor) -> Any:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    plain = plain.as_strided((plain.numel(),), (1,))  # a single value may have another stride, and be contiguous
    return memoryview(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


def read_tensors(path: str | Path, limit: int | None = None, advice: str = RUN_AGAIN) -> tuple[dict[str, Tensor], Any]:
    """Read a file that `write_tensors` wrote, after comparing its digest.

    Args:
        path: the file.
        limit: most bytes that the tensors may take together, as many as those of the model; None for any number.
        advice: what to do where the file is damaged, or of another save than the files beside it.

    Returns:
        The tensors by name, and the record.

    Raises:
        CheckpointError: the file is missing, damaged, larger than the limit, of a later format, or not of this library.
    """
    path = Path(path)
    try:
        metadata = _checked_metadata(path, limit, advice)
        tensors = load_file(path)
        for name in json.loads(metadata.get("complex", "[]")):
            tensors[name] = torch.view_as_complex(tensors[name].clone())  # in memory that is aligned for both parts
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there") from None
    except OSError as error:  # it may be whole
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); look at its rights and its disk") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file of this library ({error}); {advice}") from None
    return tensors, json.loads(metadata["record"])


def _checked_metadata(path: Path, limit: int | None, advice: str) -> dict[str, str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        if limit is not None and size - 8 - length > limit:
            raise CheckpointError(
                f"{path}: it holds {size - 8 - length} bytes, at most {limit} fit the model given: saved from another model, or"
                f" in another dtype; make the model as the saved one was, or, where the files are of two saves, {advice}"
            )
        raw = file.read(length)
        header = json.loads(raw)
        metadata = header["__metadata__"]
        if (version := metadata["format"]) != str(FORMAT):
            raise CheckpointError(f"{path}: written in format {version}, this compresskit reads {FORMAT}; update compresskit")
        if (
            not isinstance(metadata["record"], str)
            or raw.count(metadata["sha256"].encode()) != 1
            or len(metadata["sha256"]) != 64
        ):
            raise ValueError("no digest in it")
        digest = hashlib.sha256(length.to_bytes(8, "little") + raw.replace(metadata["sha256"].encode(), NO_DIGEST.encode()))
        if _digest_of_rest(file, digest) != metadata["sha256"]:
            raise ValueError("its digest is another: some of it has changed since it was written")
    return metadata  # type: ignore[no-any-return]


def _digest_of_rest(file: BinaryIO, digest: Any) -> str:
    while block := file.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()  # type: ignore[no-any-return]


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` at the end of the block, unless the block raises.

    The file is synced before it is renamed, so that after a power cut the old or the new one is there, complete.

    Raises:
        CheckpointError: the disk is full or the file cannot be written.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        part = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
        part.open("xb").close()  # not by tempfile, whose files are their owner's alone, whatever the umask says
        temporary = part
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        take_rights_(temporary, path)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(unwritable(path, error)) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def take_rights_(new: Path, old: Path) -> None:
    """Give a new file the rights of the one that it is to replace; where there is none, it has those that the umask left it."""
    with suppress(FileNotFoundError):
        new.chmod(stat.S_IMODE(old.stat().st_mode))


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its entries survive a power cut; nothing on Windows, which opens no folders."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, error: OSError) -> str:
    """Return the message for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{path}: the disk is full; make room and run the same command again, what was saved before is whole"
    if error.errno == errno.EFBIG:
        return f"{path}: larger than a file may be here ({error.strerror}); raise the limit (ulimit -f), or choose another out="
    if error.errno == errno.EEXIST and path.is_symlink():
        return f"{path}: cannot be written, a link to {os.readlink(path)}, which is not there; make that, or choose another out="
    rights = "" if error.errno in (errno.EROFS, errno.ENAMETOOLONG) else "look at its rights, or "
    return f"{path}: cannot be written ({error.strerror or error}); {rights}choose another out="


def _digest(path: Path, record: Any) -> str:
    # The file name is part of the digest, so that a file cannot stand in for another.
    return hashlib.sha256(json.dumps([path.name, record], sort_keys=True).encode()).hexdigest()


def write_json(path: str | Path, record: dict[str, Any]) -> None:
    """Write a JSON object and its digest, atomically. Raises CheckpointError where it cannot be written."""
    plain = json.loads(json.dumps(record, allow_nan=False))
    text = json.dumps(plain | {"sha256": _digest(Path(path), plain)}, indent=1) + "\n"
    with atomic(path) as temporary:
        temporary.write_text(text)


def sealed(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Plain data with its format and a digest of the entries `names`, for users who keep it in a file of their own."""
    return {"format": FORMAT, **record, "sha256": _seal(record, names)}


def unsealed(record: Mapping[str, Any], names: Sequence[str], what: str, advice: str) -> dict[str, Any]:
    """The plain data of a record that `sealed` made; one of before there were digests passes without.

    Args:
        record: from `sealed`, perhaps by way of JSON.
        names: the entries whose digest it has.
        what: what the record holds, without an article, for messages.
        advice: what to do in place of an edit.

    Raises:
        CheckpointError: it is of a later format, one of the entries is missing, or was changed since.
    """
    if not isinstance(record, Mapping) or (missing := [name for name in names if name not in record]):
        lacks = f"it lacks {missing[0]!r}" if isinstance(record, Mapping) else f"got {type(record).__name__}"
        raise CheckpointError(f"not a {what}: {lacks}")
    if (version := record.get("format", FORMAT)) != FORMAT:
        raise CheckpointError(f"a {what} written in format {version}, this compresskit reads {FORMAT}; update compresskit")
    if record.get("sha256", seal := _seal(record, names)) != seal:
        raise CheckpointError(f"the {what} was changed after it was made, so nothing proves it; {advice}")
    return {name: value for name, value in record.items() if name not in ("format", "sha256")}


def _seal(record: Mapping[str, Any], names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps({name: record[name] for name in names}, sort_keys=True).encode()).hexdigest()


def read_json(path: str | Path, what: str, advice: str = RUN_AGAIN) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote, after comparing its digest.

    Args:
        path: the file.
        what: what the file holds, for messages.
        advice: what to do where it is damaged.

    Raises:
        CheckpointError: the file is missing, damaged, changed or of a later format.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"it has more than {MAX_JSON} bytes")
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not there; {what} was expected") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent}: a file, wanted a folder with {what}") from None
    except OSError as error:  # it may be whole
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}), {what} was expected; look at its rights and its disk"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged, {what} was expected ({error}); {advice}") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: wanted a JSON object with {what}, got {type(record).__name__}")
    if (version := record.get("format", FORMAT)) != FORMAT:
        raise CheckpointError(f"{path}: written in format {version}, this compresskit reads {FORMAT}; update compresskit")
    digest = record.pop("sha256", None)
    if digest != _digest(path, record):
        problem = "has no digest" if digest is None else "has changed since it was written"
        raise CheckpointError(f"{path}: {problem}; {what} was expected; {advice}")
    return record
