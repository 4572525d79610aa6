"""Several processes at one search: which of them live, and whose turn it is to time files."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from compresskit.recipe.locks import exclusive, is_locked, lock_open_file

LOCKS = "lock"  # folder of a search in which its processes meet
TIMING = "compresskit-timing.lock"  # in the folder of the machine's temporary files
PAUSE = 0.2  # seconds between two looks at what others do


class Worker:
    """One process among those that work on a search: this one.

    Each holds the lock on a file of its own, which the system releases when the process ends; others see by it who lives. The
    folder may be on a file system that several machines share, if that has locks (local ones do, and NFS since version 3).

    Args:
        out: folder of the search.
    """

    def __init__(self, out: Path) -> None:
        self.locks = out / LOCKS
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Be seen by other processes while the block runs."""
        mine = self._lease(self.name)
        with exclusive(mine):
            try:
                yield
            finally:
                mine.unlink(missing_ok=True)

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Wait until no other process of the search does the same, and keep them from it."""
        with exclusive(self.locks / what):
            yield

    def lives(self, name: str | None) -> bool:
        """Whether the process with this name is still at work."""
        return name is not None and is_locked(self._lease(name))

    def others(self) -> int:
        """How many other processes are at work."""
        names = [path.name for path in self.locks.glob("workers/*") if path.name != self.name]
        return sum(self.lives(name) for name in names)

    def _lease(self, name: str) -> Path:
        return self.locks / "workers" / name


@contextmanager
def timing_alone() -> Iterator[None]:
    """Wait until no other search on this machine times files, and keep them from it."""
    path = Path(tempfile.gettempdir()) / TIMING
    file: Any = nullcontext()
    for mode in ("a+", "r"):  # another user's can only be read
        with suppress(OSError):
            file = path.open(mode)
            break
    with file as opened, nullcontext() if opened is None else lock_open_file(opened, wait=True):
        yield
