"""The position in the data of a training: which batch of which epoch comes next, and how to return to it after an interruption.

A loader draws random numbers for its order and its augmentations, and a model for its dropout, from the same global generator of
torch. `DataCursor` gives the loader a random stream of its own. To return to batch 70 of an epoch, it sets the stream to where
the epoch began, and draws 70 batches without running the model on them.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from compresskit.base import distributed, randomness
from compresskit.base.errors import CompressError, DataError, first_line
from compresskit.base.fingerprint import array_digest, fingerprint

log = logging.getLogger(__name__)

SplitBatch = Callable[[Any], tuple[Any, Any]]

_END = object()
COMPARED = 32  # rows of a batch that the processes compare
READ_AGAIN = 8  # times that a sample is read to see whether its label changes
LONGEST_SIGNAL = 2.0  # seconds from the end of a worker to the signal of it, on a busy machine


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler whose order depends on the epoch, such as torch's DistributedSampler."""

    def set_epoch(self, epoch: int, /) -> Any:
        """Set the epoch, from 0."""


class DataCursor:
    """A position in the epochs of a loader.

    Args:
        loader: can be iterated many times.
        stream: state of a torch generator, from which the loader draws its random numbers.
        name: of the loader in messages.

    Attributes:
        epoch: number of the current epoch, from 1; 0 before the first.
        batch: number of batches of the epoch that were yielded.
    """

    def __init__(self, loader: Iterable[Any], stream: torch.Tensor, name: str = "the training loader") -> None:
        self.loader, self.stream, self.name = loader, stream, name
        self.epoch, self.batch = 0, 0
        self._epoch_start: dict[str, Any] = {}  # random number generators at the beginning of the epoch
        self._last_batch: Any = None
        self._resume_state: dict[str, Any] | None = None

    def next_epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch, or the rest of the epoch that is resumed.

        Raises:
            DataError: the loader fails.
        """
        if self._resume_state is None:
            self.epoch, self.batch = self.epoch + 1, 0
        batches = self._open()
        while (batch := self._next(batches)) is not _END:
            self.batch += 1
            self._last_batch = batch
            yield batch

    def replay(self) -> None:
        """Draw again what was drawn before an interruption, where the training was over by then; nothing is yielded."""
        if self._resume_state is not None:
            self._open()

    def _open(self) -> Iterator[Any]:
        """An iterator at the position in the epoch."""
        host = randomness.rng_state()
        self._seek_epoch(randomness.generators_in(self.loader), host)
        with self._loader_stream():
            batches = iter(self.loader)
        if self._resume_state is not None:
            self._skip(batches)
            randomness.set_host_rng_state_(host)
        return batches

    def _seek_epoch(self, generators: list[randomness.Generator], host: dict[str, Any]) -> None:
        """Record the generators at the beginning of the epoch; when resuming, set them to those recorded."""
        for sampler in distributed.samplers_of(self.loader):
            if isinstance(sampler, EpochSampler):
                sampler.set_epoch(self.epoch - 1)
        if isinstance(self.loader, torch.utils.data.DataLoader) and self.loader.persistent_workers:
            self.loader._iterator = None  # starts new workers: those that persist have a state that cannot be saved
        if self._resume_state is None:
            states = [randomness.generator_state(generator) for generator in generators]
            self._epoch_start = host | {"torch": self.stream, "generators": states}
            return
        self._epoch_start = self._resume_state["epoch_start"]
        self.stream = self._epoch_start["torch"]
        randomness.set_host_rng_state_(self._epoch_start)
        for generator, state in zip(generators, self._epoch_start["generators"], strict=False):
            randomness.set_generator_state_(generator, state)

    def _skip(self, batches: Iterator[Any]) -> None:
        state, self._resume_state = self._resume_state, None
        assert state is not None
        batch = None
        for _ in range(self.batch):
            batch = self._next(batches)
        if fingerprint(batch) != state["last_batch"]:
            warnings.warn(
                f"{self.name} does not give again the batches that it gave before the interruption, so the result is not that"
                " of an uninterrupted run; let it draw from torch's, numpy's or random's generators, or one that it holds itself",
                stacklevel=2,
            )
        self._last_batch = batch

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            with self._loader_stream():
                return next(batches, _END)
        except CompressError:
            raise
        except Exception as error:
            if isinstance(error, ConnectionError | EOFError):
                _await_signal_of_death()
            raise _loader_error(f"epoch {self.epoch}, batch {self.batch + 1}", self.name, error) from error

    @contextmanager
    def _loader_stream(self) -> Iterator[None]:
        """Let torch's global generator continue the loader's stream inside the block."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.stream)
        try:
            yield
        finally:
            self.stream = torch.get_rng_state()
            torch.set_rng_state(outside)

    def resume_state(self) -> dict[str, Any]:
        """Return the position, the generators at the beginning of the epoch, and a fingerprint of the last batch."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "epoch_start": self._epoch_start,
            "last_batch": fingerprint(self._last_batch),
        }

    def resume_from_(self, state: dict[str, Any]) -> None:
        """Let the next call of `next_epoch` yield the rest of the epoch that `state` was taken in."""
        self.epoch, self.batch, self._resume_state = state["epoch"], state["batch"], state


def raise_other_length(loader: Any, length: int | None, gave: str) -> NoReturn:
    """Raise DataError: a training loader gave more or fewer batches than its length says, or none."""
    has = "no length" if length is None else f"length {length}"
    workers = "; the __len__ of an IterableDataset counts the samples of all workers, which share them evenly"
    more = workers if length and _streams(loader) else ""
    raise DataError(f"the training loader has {has} and gave {gave} batches; it must not change{more}")


def check_same_batches(batch: Any, loader: Any, split: SplitBatch, where: str, *, least: int) -> None:
    """Compare the first rows of a batch in all processes, which share out its rows; nothing where the loader shards samples.

    Where inputs and class labels differ, and the labels are those of the samples, the samples are others, and each process would
    drop rows that no other reads: an error. Where that is not known, as of augmentations, a stream, or a class around a loader,
    process 0 logs a warning.

    Args:
        batch: of this process.
        loader: gave it.
        split: inputs and target of a batch.
        where: begins the message.
        least: rows of a process, for fewer of which each takes its batch whole.

    Raises:
        DataError: the processes read other samples.
    """
    if distributed.world_size() == 1 or distributed.shards_samples(loader):
        return
    leaves = [v for v in pytree.tree_leaves(batch) if isinstance(v, torch.Tensor) and v.ndim]
    labels = [array_digest(v[:COMPARED]) for v in _class_labels(batch, split)]
    own = (len(leaves[0]) if leaves else 0, [array_digest(v[:COMPARED]) for v in leaves], labels)
    ranks = distributed.of_all_ranks(own)
    if all(rows // len(ranks) < least for rows, _, _ in ranks):
        return
    other = next((number for number, found in enumerate(ranks) if found != ranks[0]), None)
    if other is None:
        return
    (rows, values, classes), (other_rows, other_values, other_classes) = ranks[0], ranks[other]
    remedy = (
        "Give all the same data in the same order, of which each trains on its own rows (no part by rank, the same generator)"
    )
    if not _streams(loader):
        remedy += ", or a DistributedSampler as the `sampler` of the loader itself, with which each keeps its own samples"
    no_augmentation = classes != other_classes and not set(values) & set(other_values)
    if rows == other_rows and no_augmentation and all(distributed.of_all_ranks(_labels_are_of_samples(loader, split))):
        raise DataError(f"{where}: process {other} reads other samples than process 0. {remedy}")
    if distributed.rank() != 0:
        return
    if rows != other_rows:
        log.warning("%s: process %d has %d rows in its batch, process 0 has %d. %s", where, other, other_rows, rows, remedy)
        return
    log.warning(
        "%s: process %d reads another batch than process 0. That is well where augmentations alone differ, or samples are made at"
        " random; else rows are lost that no process reads. %s",
        where,
        other,
        remedy,
    )


def _class_labels(batch: Any, split: SplitBatch) -> list[torch.Tensor]:
    """The integers in the target of a batch: of rows, tokens or pixels; none where it has no target."""
    try:
        target = split(batch)[1]
    except DataError:
        return []
    leaves = [v for v in pytree.tree_leaves(target) if isinstance(v, torch.Tensor) and v.ndim]
    return [v for v in leaves if not v.is_floating_point() and not v.is_complex()]


def _streams(loader: Any) -> bool:
    """Whether a loader of torch reads a dataset that has no numbered samples, for which it takes no sampler."""
    data = torch.utils.data
    return isinstance(loader, data.DataLoader) and isinstance(loader.dataset, data.IterableDataset)


def _labels_are_of_samples(loader: Any, split: SplitBatch) -> bool:
    """Whether the class labels are known to belong to the samples: none is drawn at random with an augmentation.

    So it is where all labels are equal in a batch that has one sample several times. Generators are left as they were.
    """
    if isinstance(loader, Sequence):
        return True
    if not isinstance(loader, torch.utils.data.DataLoader) or _streams(loader) or loader.batch_sampler is None:
        return False
    generators = randomness.generators_in(loader)
    states = [randomness.generator_state(generator) for generator in generators]
    try:
        with randomness.generators_kept():
            labels = _class_labels(loader.collate_fn([loader.dataset[0] for _ in range(READ_AGAIN)]), split)
    except Exception as error:  # of the user's code, whose samples may have other keys than 0
        log.debug("sample 0 cannot be read again: %s", first_line(error))
        return False
    finally:
        for generator, state in zip(generators, states, strict=True):
            randomness.set_generator_state_(generator, state)
    return bool(labels) and all(len(v) == READ_AGAIN and torch.equal(v, v[:1].expand_as(v)) for v in labels)


@contextmanager
def naming_dead_workers(where: str) -> Iterator[None]:
    """Raise `DataError`, which begins with `where`, for the death of a loader's worker that the cleanup of a training notices."""
    try:
        yield
    except RuntimeError as error:
        raise_if_worker_died(error, where)
        raise


def raise_if_worker_died(error: BaseException, where: str) -> None:
    """Raise `DataError` if a worker process of a loader died; torch raises that error in whatever code runs at the time.

    That code may be what cleans up after the death was noticed at a batch: then the error that names the batch is raised.
    """
    if "DataLoader worker" not in str(error):
        return
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, DataError):
            raise before from error
        before = before.__context__
    raise _loader_error(where, "the training loader", error) from error


def _await_signal_of_death() -> None:
    """Wait for the signal that a worker died, where its pipe told so first.

    torch's handler of that signal raises once, in whatever line runs then: here, and not in the user's code after the training.
    """
    with suppress(RuntimeError):
        time.sleep(LONGEST_SIGNAL)


def _loader_error(where: str, name: str, error: BaseException) -> DataError:
    return DataError(
        f"{where}: {name} gives no batch: {type(error).__name__}: {first_line(error)};"
        " look at the data set, or try it with num_workers=0, then run the same command again"
    )
