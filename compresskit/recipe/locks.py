"""Locks on files that end with the process that holds them, however it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compresskit.base.errors import CheckpointError
from compresskit.base.files import unwritable

try:
    import fcntl
except ImportError:  # there is none on Windows, and so no lock
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None
_LOCK_FILES: set[Any] = set()  # that this process has open


@contextmanager
def lock_open_file(file: Any, *, wait: bool) -> Iterator[bool]:
    """Lock an open file for this process, and say whether that worked; without `wait` it does not where another has it.

    Raises CheckpointError where the file system has no locks, as some network folders: two processes would write the same files.
    """
    taken = True
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken = False
        except OSError as error:
            raise CheckpointError(
                f"{file.name}: the file system there has no locks that keep two processes apart ({error.strerror}); choose"
                " another out=, on a disk of this machine"
            ) from error
    if taken:
        _LOCK_FILES.add(file)
    try:
        yield taken
    finally:
        _LOCK_FILES.discard(file)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for the lock on a file, made where there is none, and hold it.

    Raises CheckpointError where it cannot be made or locked.
    """
    with open_lock_file(path) as file, lock_open_file(file, wait=True):
        yield


def is_locked(path: Path) -> bool:
    """Whether a living process has the lock on a file."""
    if not path.exists():
        return False
    with open_lock_file(path) as file, lock_open_file(file, wait=False) as taken:
        return not taken


def open_lock_file(path: Path) -> Any:
    """A file to lock, opened, and made with its folders. Raises CheckpointError where it cannot be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        raise CheckpointError(unwritable(path, error)) from error


def _release_in_child() -> None:
    # A worker of a loader inherits the open file, and with it the lock, and would keep it when its parent is dead.
    for file in _LOCK_FILES:
        file.close()
    _LOCK_FILES.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_release_in_child)
