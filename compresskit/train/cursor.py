"""Batches of a loader, epoch after epoch, from a position that can be found again.

A loader draws random numbers for its order and its augmentations, a model for its dropout, from the same generator of torch's.
Here each has a stream of its own: to come back to batch 70 of an epoch, the loader's stream is put where the epoch began, and 70
batches are drawn and dropped, without the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compresskit.base import randomness
from compresskit.base.errors import CompressError, DataError
from compresskit.base.fingerprint import fingerprint

_END = object()


class Feed:
    """The epochs of a loader; its random numbers come from `stream`, a state of torch's generator."""

    def __init__(self, loader: Iterable[Any], stream: torch.Tensor, what: str = "the training loader") -> None:
        self.loader, self.stream, self.what = loader, stream, what
        self.number = 0  # of the epoch, from 1
        self.position = 0  # batches of it that were handed out
        self._begin: dict[str, Any] = {}
        self._last: Any = None
        self._wanted: dict[str, Any] | None = None

    def epoch(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of the one it was resumed in; DataError where the loader fails."""
        if self._wanted is None:
            self.number, self.position = self.number + 1, 0
        plain = randomness.captured()
        self._start(randomness.held_by(self.loader), plain)
        with self._own():
            batches = iter(self.loader)
        if self._wanted is not None:
            self._skip(batches)
            randomness.restore_plain_(plain)
        while (batch := self._next(batches)) is not _END:
            self.position += 1
            self._last = batch
            yield batch

    def _start(self, held: list[randomness.Generator], plain: dict[str, Any]) -> None:
        """Put every generator where the epoch begins, or note where that is."""
        for sampler in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            getattr(sampler, "set_epoch", lambda number: None)(self.number - 1)
        if getattr(self.loader, "persistent_workers", False):
            # Workers that live on from epoch to epoch have a state that nobody can save; they are started anew.
            self.loader._iterator = None  # type: ignore[attr-defined]
        if self._wanted is None:
            self._begin = plain | {"torch": self.stream, "held": [randomness.state_of(g) for g in held]}
            return
        self._begin = self._wanted["begin"]
        self.stream = self._begin["torch"]
        randomness.restore_plain_(self._begin)
        for generator, state in zip(held, self._begin["held"], strict=False):
            randomness.put_(generator, state)

    def _skip(self, batches: Iterator[Any]) -> None:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        batch = None
        for _ in range(self.position):
            batch = self._next(batches)
        if fingerprint(batch) != wanted["last"]:
            warnings.warn(
                f"{self.what} does not give again the batches that it gave before the interruption, so the result is not that"
                " of an uninterrupted run; let it draw from torch's, numpy's or random's generators, or one that it holds itself",
                stacklevel=2,
            )
        self._last = batch

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            with self._own():
                return next(batches, _END)
        except CompressError:
            raise
        except Exception as error:
            raise _no_batch(f"epoch {self.number}, batch {self.position + 1}", self.what, error) from error

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Let torch's global generator be the loader's inside the block."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.stream)
        try:
            yield
        finally:
            self.stream = torch.get_rng_state()
            torch.set_rng_state(outside)

    def resume_state(self) -> dict[str, Any]:
        """Where it stands: the beginning of the epoch, and how many batches were handed out."""
        return {
            "number": self.number,
            "position": self.position,
            "begin": self._begin,
            "last": fingerprint(self._last),
        }

    def resume_from_(self, state: dict[str, Any]) -> None:
        """Let the next `epoch` be the rest of the one that was left."""
        self.number, self.position, self._wanted = state["number"], state["position"], state


def refuse_dead_worker(error: BaseException, where: str) -> None:
    """Raise `DataError` for the death of a loader's worker, which torch tells wherever the program is just then."""
    if "DataLoader worker" in str(error):
        raise _no_batch(where, "the training loader", error) from error


def _no_batch(where: str, what: str, error: BaseException) -> DataError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(
        f"{where}: {what} gives no batch: {type(error).__name__}: {first};"
        " look at the data set, or try it with num_workers=0, then run the same command again"
    )
