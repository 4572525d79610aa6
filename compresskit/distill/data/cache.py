"""A teacher's predictions on disk, so that it runs once: memory-mapped, all logits or the k largest.

    cache.json    digest of the teacher, shapes, dtype         keys.bin               (N, 2) 64-bit words, a digest of a sample
    values.bin    (N, C or k, ...) logits, the largest is 0    index.bin, rest.bin    of the top k: classes, logsumexp of others

Samples are found by a digest of the tensors that the model is fed. So the order of the samples does not matter, and an augmented
sample that was not cached raises an error instead of getting the predictions of another view.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CheckpointError, DataError, SettingError
from compresskit.base.files import FORMAT, absolute_path, check_is_path, read_json, write_json
from compresskit.base.settings import check_whole_number
from compresskit.base.task import Inputs, Task, batch_size, check_is_task
from compresskit.distill.class_dim import check_dim, class_dim, first_batch
from compresskit.distill.losses.common import check_positive
from compresskit.distill.losses.top_k import TopK, top_k
from compresskit.distill.models.teacher import Teacher, TeacherOutputs

log = logging.getLogger(__name__)

INFO = "cache.json"
STORED = {torch.float16: np.float16, torch.float32: np.float32}


def model_digest(model: nn.Module) -> str:
    """Return a digest of a model's class and of every tensor in its state, for `cache.json`."""
    digest = hashlib.blake2b(type(model).__qualname__.encode(), digest_size=16)
    for name, value in model.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(_row_bytes(value.reshape(1, -1)).tobytes())
    return digest.hexdigest()


def _row_bytes(values: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of each row, uint8 (N, bytes)."""
    return values.detach().cpu().contiguous().view(torch.uint8).reshape(len(values), -1).numpy()


def _keys(inputs: Inputs) -> np.ndarray[Any, Any]:
    """A digest of each sample over all input tensors that have a row for it, uint64 (N, 2)."""
    count = batch_size(inputs)
    tensors = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.ndim and len(v) == count]
    digests = [hashlib.blake2b(digest_size=16) for _ in range(count)]
    for tensor in tensors:
        head = f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode()
        for digest, row in zip(digests, _row_bytes(tensor), strict=True):
            digest.update(head)
            digest.update(row)
    return np.frombuffer(b"".join(d.digest() for d in digests), np.uint64).reshape(-1, 2)


class Cached:
    """A cache on disk as a teacher: `imitate(Cached(folder))`.

    Args:
        folder: what `cache` wrote.

    Raises: CheckpointError for a folder that is missing or damaged.
    """

    tappable = None

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder = Path(folder)
        info = read_json(folder / INFO, "a cache of predictions")
        try:
            self.teacher, self.label = str(info["teacher"]), str(info["label"])
            self.dim = int(info.get("dim", 1))
            self.shape, self.top, self.temperature = tuple(info["shape"]), info["top"], float(info["temperature"])
            count, kind = int(info["samples"]), np.dtype(info["dtype"])
            kept = (self.top or self.shape[0], *self.shape[1:])
            self._keys = np.memmap(folder / "keys.bin", np.uint64, "r", shape=(count, 2))
            self._values = np.memmap(folder / "values.bin", kind, "r", shape=(count, *kept))
            if self.top:
                self._index = np.memmap(folder / "index.bin", np.int32, "r", shape=(count, *kept))
                self._rest = np.memmap(folder / "rest.bin", np.float32, "r", shape=(count, 1, *kept[1:]))
        except (KeyError, TypeError, ValueError, IndexError, OSError) as error:
            raise CheckpointError(f"{folder}: a damaged cache of predictions ({error}); delete it and make it again") from None
        self._order = np.argsort(self._keys[:, 0], kind="stable")
        self._sorted = self._keys[self._order, 0]

    def __len__(self) -> int:
        return len(self._keys)

    def lookup(self, inputs: Inputs) -> Tensor | TopK:
        """Return the teacher's predictions for these inputs, on the CPU; `DataError` for samples that are not in the cache."""
        keys = _keys(inputs)
        at = self._order[np.searchsorted(self._sorted, keys[:, 0]).clip(max=len(self) - 1)]
        if missing := int((self._keys[at] != keys).any(1).sum()):
            raise DataError(
                f"cache {self.folder}: {missing} of {len(keys)} samples are not in it; it was made of other data, or the loader"
                " augments at random: cache what it really gives, or imitate the teacher itself"
            )
        values = torch.from_numpy(self._values[at]).float()
        if not self.top:
            return values.movedim(1, self.dim)
        index, rest = torch.from_numpy(self._index[at]).long(), torch.from_numpy(self._rest[at])
        shape = self._zeros(len(keys)).shape
        return TopK(values=values, index=index, rest=rest, shape=shape, temperature=self.temperature, dim=self.dim)

    def _zeros(self, rows: int) -> Tensor:
        """Zeros of the shape of so many predictions."""
        return torch.zeros(()).expand(rows, *self.shape).movedim(1, self.dim)

    def example_outputs(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return zeros of the predictions' shape, for the task's example need not be in the cache."""
        return self._zeros(batch_size(inputs)), {}

    def outputs(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return the predictions for one batch, which is looked up by its inputs on the CPU."""
        stored = self.lookup(replace(task, device="cpu").inputs(batch))
        if isinstance(stored, TopK):
            values, index, rest = (v.to(task.device) for v in (stored.values, stored.index, stored.rest))
            return replace(stored, values=values, index=index, rest=rest), {}
        return stored.to(task.device), {}


def cache(
    teacher: nn.Module,
    task: Task,
    folder: str | Path,
    *,
    top: int | None = None,
    temperature: float = 4.0,
    dtype: torch.dtype = torch.float16,
    views: int = 1,
    dim: int | None = None,
) -> Cached | Teacher:
    """Run a teacher once over the training data and keep its predictions in a folder: `imitate(cache(teacher, task, folder))`.

    An existing cache of the same teacher and settings is used again, after a look at whether it answers the first batch alike.
    Where the predictions do not fit the disk, a line of the log says so and the teacher itself is returned, which computes them
    in every step: the same training, slower.

    Args:
        teacher: a trained model in eval mode, or a `Teacher`.
        task: its training data is cached.
        folder: where the cache is, or is written.
        top: keep only the k largest logits of each row and the sum of the others' probabilities at `temperature`, which is
            enough for `soft_targets` of that temperature and for no other loss; None keeps all logits.
        temperature: see `top`.
        dtype: dtype of the logits on disk, torch.float16 or torch.float32. The largest of each row is subtracted first.
        views: number of passes over the data, for a loader whose augmentations repeat after that many epochs.
        dim: the dimension of the predictions that holds the classes, as in `imitate`.

    Raises:
        CheckpointError: the folder holds a damaged cache, or one of another teacher or other settings.
        DataError: the cache lacks samples of the first batch, or predictions are not (N, C, ...).
        SettingError: a setting is out of range, or nothing says which dimension of the predictions holds the classes.
    """
    check_is_task(task, "cache")
    _check_cached(top, temperature, dtype, views, dim)
    check_is_path(folder, "cache(folder=...)")
    given, folder = folder, absolute_path(folder)  # reading data may change the working directory
    source = (teacher if isinstance(teacher, Teacher) else Teacher(teacher)).to(task.device)
    rows = _dim_of_rows(folder, source, task, dim)
    source = source.averaging(source.average, rows) if source.takes_mean else source
    record = {
        "format": FORMAT,
        "teacher": model_digest(source),
        "label": source.label,
        "top": top,
        "temperature": temperature,
        "dtype": np.dtype(STORED[dtype]).name,
        "views": views,
        "dim": rows,
    }
    if (folder / INFO).exists():
        _check_same(folder, record)
    elif not _write_whole(folder, source, task, record, views):
        return source
    cached = Cached(folder)
    cached.folder = Path(given)  # as it was written: a run knows its stages by that
    _check_answers(cached, source, task)
    return cached


def _check_cached(top: int | None, temperature: float, dtype: torch.dtype, views: int, dim: int | None) -> None:
    check_dim(dim, "cache")
    check_positive("cache", "temperature", temperature)
    if dtype not in STORED:
        raise SettingError(f"cache(dtype=...): wanted torch.float16 or torch.float32, got {dtype}")
    check_whole_number(views, "cache(views=...)")
    if top:
        check_whole_number(top, "cache(top=...)")


def _dim_of_rows(folder: Path, teacher: Teacher, task: Task, given: int | None) -> int:
    """The dimension of the teacher's predictions that holds the classes, which are kept relative to the largest of their row.

    Of a cache that exists it is the one that is written there.
    """
    if given is None and (folder / INFO).exists():
        return int(read_json(folder / INFO, "a cache of predictions").get("dim", 1))
    batch = first_batch(task, "train")
    if batch is None:
        return 1
    predictions = teacher.predictions(task.inputs(batch), task)
    found = class_dim(task, teacher, predictions, reads_loss=False, given=given, where="cache")
    if found.dim is None and not found.known:
        raise SettingError(
            f"cache(): the teacher {teacher.label} gives predictions {tuple(predictions.shape)}, and neither the task's loss nor"
            " its labels say which dimension holds the classes; pass cache(dim=-1) for (N, T, C), cache(dim=1) for (N, C, T)"
        )
    return 1 if found.dim is None else found.dim % predictions.ndim


def _check_answers(cached: Cached, teacher: Teacher, task: Task) -> None:
    """Raise DataError where the data are others, CheckpointError where the teacher says something else of the first batch.

    The digest of a teacher knows its class and weights, not its forward, `Teacher(inputs=...)` or `Task(predict=...)`.
    """
    batch = next(iter(task.batches("train")))
    inputs = task.inputs(batch)
    stored = cached.lookup(replace(task, device="cpu").inputs(batch))
    logits = teacher.predictions(inputs, task).cpu()
    if isinstance(stored, TopK):
        rows = logits.movedim(cached.dim, 1)
        values, wanted = stored.values, top_k(rows, stored.values.shape[1], temperature=cached.temperature).values
    else:
        values, wanted = stored, logits - logits.amax(cached.dim, keepdim=True)
    # As probabilities: what is stored of them may be rounded to half precision, and cut off far below the largest.
    if values.shape != wanted.shape or not bool(torch.isclose(values.exp(), wanted.exp(), rtol=0.02, atol=0.02).all()):
        raise CheckpointError(
            f"cache {cached.folder}: the teacher answers otherwise than when it was made, with the same weights: another forward,"
            " Teacher(inputs=...) or Task(predict=...); delete it, or name another folder"
        )


def _check_same(folder: Path, record: dict[str, Any]) -> None:
    old = {"dim": 1, **read_json(folder / INFO, "a cache of predictions")}
    for name, value in record.items():
        if old.get(name) != value:
            what = "is of another teacher" if name == "teacher" else f"was made with {name}={old.get(name)}, wanted {value}"
            raise CheckpointError(f"cache {folder}: it {what}; delete it, or name another folder")


def _write_whole(folder: Path, source: Teacher, task: Task, record: dict[str, Any], views: int) -> bool:
    """Write a whole cache, or none; False where the disk has no room for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _fill(part, source, task, record, np.dtype(record["dtype"]), views)
        part.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"{folder}: the cache cannot be put there ({error}); name a folder that is empty") from None
        log.warning(
            "cache %s: %s; the teacher computes its predictions in every step instead. Keep fewer (top=...), or name a folder on"
            " another disk.",
            folder,
            error.strerror,
        )
        return False
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"about {needed / 1e9:.2g} GB are needed on the disk, {free / 1e9:.2g} GB are free")


def _fill(folder: Path, teacher: Teacher, task: Task, record: dict[str, Any], kind: Any, views: int) -> None:
    seen: set[bytes] = set()
    shape: tuple[int, ...] | None = None
    names = ("keys", "values", *(("index", "rest") if record["top"] else ()))
    files = {name: (folder / f"{name}.bin").open("wb") for name in names}
    batches, room_checked = task.known_length("train", about=True) or 1, False
    try:
        for batch in (batch for _ in range(views) for batch in task.batches("train")):
            inputs = task.inputs(batch)
            keys, logits = _keys(replace(task, device="cpu").inputs(batch)), teacher.predictions(inputs, task).cpu()
            shape = tuple(logits.shape[1:]) if shape is None else shape
            if tuple(logits.shape[1:]) != shape or not shape:
                raise DataError(f"cache: wanted predictions (N, C, ...) of one size, got {shape} and {tuple(logits.shape[1:])}")
            first = {key.tobytes(): i for i, key in reversed(list(enumerate(keys)))}
            fresh = sorted(i for key, i in first.items() if key not in seen)
            seen |= first.keys()
            logits = logits[fresh].movedim(record["dim"], 1)
            values = logits - logits.amax(1, keepdim=True)
            if record["top"]:
                kept = top_k(logits, record["top"], temperature=record["temperature"])
                values = kept.values
                files["index"].write(kept.index.numpy().astype(np.int32).tobytes())
                files["rest"].write(kept.rest.numpy().astype(np.float32).tobytes())
            files["keys"].write(keys[fresh].tobytes())
            files["values"].write(values.clamp(min=float(np.finfo(kind).min)).numpy().astype(kind).tobytes())
            if not room_checked:
                _check_room(folder, sum(file.tell() for file in files.values()) * batches * views)
                room_checked = True
    finally:
        for file in files.values():
            file.close()
    if shape is None:
        raise DataError("cache: the training loader is empty")
    stored = torch.empty(1, *shape, device="meta").movedim(record["dim"], 1).shape[1:]
    write_json(folder / INFO, {**record, "shape": list(stored), "samples": len(seen)})
