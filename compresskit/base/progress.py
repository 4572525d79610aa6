"""Checkpoints of the trainings of a stage, from which an interrupted stage is resumed with the same bits.

progress/stage.json              key of the stage
progress/1-12.safetensors        the stage's first training after 12 steps; the last two checkpoints are kept
progress/1-end.safetensors       the state after the first training, once it has finished

A stage that is started again repeats everything but its trainings: the result of a finished one is read from its file, the
interrupted one continues from its last checkpoint.

What shows progress is here, too: bars, announcements, the signals that stop a long run, and what a command writes where its
output is full, closed, or read by nobody.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch import Tensor
from tqdm import tqdm

from compresskit.base import distributed, randomness
from compresskit.base.errors import CheckpointError, Interrupted, SettingError
from compresskit.base.files import read_json, read_tensors, write_json, write_tensors
from compresskit.base.packing import pack, unpack
from compresskit.base.settings import check_field_types

log = logging.getLogger(__name__)

SEND_AGAIN = 0.05  # seconds after which a signal is sent again whose exception Python dropped
CHECKPOINTS_KEPT = 2  # of a training
UNREAD = 141  # exit code, as shells have it for a process that SIGPIPE ended
CHECKPOINT_NAME = re.compile(r"(\d+)-(\d+|end)\.safetensors")


def is_silenced() -> bool:
    """Whether the user asked for silence: the logger "compresskit" has a level above INFO."""
    return logging.getLogger("compresskit").level > logging.INFO


def announce(logger: logging.Logger, text: str, *values: Any) -> None:
    """Log a line about the progress of a run, from process 0, at level INFO.

    Where nobody has set up `logging`, which would then drop it, it is written to standard error, unless `is_silenced`.
    """
    if distributed.rank() != 0:
        return
    if logger.hasHandlers() or is_silenced() or sys.stderr is None:
        logger.info(text, *values)
        return
    with suppress(OSError, ValueError):  # a pipe whose reader has gone, a file that is closed
        sys.stderr.write(text % values + "\n")


def progress_bar(steps: Iterable[Any] | None = None, **settings: Any) -> tqdm[Any]:
    """Return tqdm's progress bar; silent on request, and where standard error is no terminal or is not there at all."""
    silent = is_silenced() or sys.stderr is None or sys.stderr.closed or None  # None: tqdm looks whether it is a terminal
    return tqdm(steps, disable=silent, leave=False, **settings)


class _HeldText(io.StringIO):
    """What is written to a stream while it is held."""

    def take_out(self, text: str) -> None:
        """Leave a text out of what will be written."""
        kept = self.getvalue().replace(text, "")
        self.seek(0)
        self.truncate()
        self.write(kept if kept.strip() else "")


@contextmanager
def stderr_held() -> Iterator[_HeldText]:
    """Hold what the block writes to standard error until it ends; what is taken out by then is not written."""
    held = _HeldText()
    try:
        with redirect_stderr(held):
            yield held
    finally:
        if sys.stderr is not None and held.getvalue():
            sys.stderr.write(held.getvalue())


def make_writable_() -> None:
    """Let what is printed be lost where the process began without an output, and escape what its encoding has no form of."""
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115  to the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Write to standard error, with what is left there from before; where nothing can be written to it, all that is lost."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, a pipe whose reader has gone, a file that is closed
        _discard_(sys.stderr)


@contextmanager
def output_may_end() -> Iterator[None]:
    """End quietly where the reader of what is printed has gone, as in `compresskit inspect f.onnx | head`; else say why."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        _discard_(sys.stdout)
        unread = isinstance(error, BrokenPipeError)
        say("" if unread else f"compresskit: the output cannot be written ({error.strerror})\n")
        raise SystemExit(UNREAD if unread else 2) from None


def _discard_(stream: TextIO) -> None:
    """Lose what a stream still holds; else the interpreter flushes it once more at its end, complains, and exits with 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@dataclass(frozen=True, kw_only=True)
class Every:
    """How often a training writes a checkpoint.

    Args:
        seconds: write one when this many seconds have passed since the last; None for never.
        steps: write one after every so many optimizer steps; None for never.
        overhead: largest fraction of the training time that checkpoints by `seconds` may take, in (0, 1]; they are written less
            often where writing takes longer. `steps` is not limited by it.
    """

    seconds: float | None = 60.0
    steps: int | None = None
    overhead: float = 0.01

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.seconds is not None and not self.seconds >= 0:
            raise SettingError(f"Every(seconds=...): wanted a number >= 0, or None, got {self.seconds}")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise SettingError(f"Every(steps=...): wanted a whole number >= 1, or None, got {self.steps}")
        if not 0 < self.overhead <= 1:
            raise SettingError(f"Every(overhead=...): wanted a fraction in (0, 1], got {self.overhead}")


@dataclass
class Stop:
    """A request to stop the run.

    Attributes:
        signal: name of the signal that asked for it, or None.
        training: whether a training is running, which writes a checkpoint before it stops.
        raised: number of a signal that ended the run at once, or None.
    """

    signal: str | None = None
    training: bool = False
    raised: int | None = None


@contextmanager
def stoppable(out: Path) -> Iterator[Stop]:
    """Let SIGINT and SIGTERM end the run with `Interrupted` inside the block, after a running training has written a checkpoint.

    A second signal ends the run at once. Outside the main thread the handlers are not changed.

    A signal may come while Python runs what must not raise, such as the callback of a weak reference: it drops the exception
    there, so that the signal is sent again. Code that was interrupted may also raise an error of its own, as an import does.

    Args:
        out: folder of the run, for the message.
    """
    stop, process = Stop(), os.getpid()
    again: list[threading.Timer] = []

    def handle(number: int, frame: Any) -> None:
        if os.getpid() != process:  # a worker of a loader, forked with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first, stop.signal = stop.signal is None, signal.Signals(number).name
        if not (stop.training and first):
            stop.raised = number
            end()

    def end(cause: Exception | None = None) -> NoReturn:
        raise Interrupted(f"stopped by {stop.signal}; {out} has what was done. Run the same command again to go on") from cause

    def dropped(what: Any) -> None:
        if not isinstance(what.exc_value, Interrupted) or stop.raised is None:
            hook(what)
            return
        again.append(threading.Timer(SEND_AGAIN, os.kill, (process, stop.raised)))
        again[-1].daemon = True
        again[-1].start()

    main = threading.current_thread() is threading.main_thread()
    handled = [s for s in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handle) for number in handled}
    hook, sys.unraisablehook = sys.unraisablehook, dropped if handled else sys.unraisablehook
    try:
        yield stop
    except Exception as error:
        if stop.raised is not None:
            end(error)
        raise
    else:
        if stop.raised is not None:
            end()
    finally:
        sys.unraisablehook = hook
        for timer in again:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(kw_only=True)
class Progress:
    """The checkpoints of one stage; trainings of a task with `Task(progress=Progress(folder=..., key=...))` write and read them.

    Args:
        folder: of the checkpoints; it is emptied where it belongs to a stage with another key.
        key: identifies the stage and its settings.
        every: how often a training writes a checkpoint.
        stop: a request to stop the run.
        writes: whether this process writes files; rank 0 by default.
        on_step, on_epoch: functions that every training of the stage calls, besides its own; see `Train`.

    Attributes:
        trainings: how many trainings of the stage have begun.
        seconds: time of trainings in earlier processes.
        decisions: how many times `decide` was called.
        histories: what the trainings recorded of themselves, in their order; see `Training.history`.
    """

    folder: Path
    key: str
    every: Every = field(default_factory=Every)
    stop: Stop = field(default_factory=Stop)
    writes: bool = field(default_factory=lambda: distributed.rank() == 0)
    on_step: Sequence[Callable[[Any], Any]] = ()
    on_epoch: Sequence[Callable[[Any], Any]] = ()
    trainings: int = 0
    seconds: float = 0.0
    decisions: int = 0
    histories: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stage(self) -> str:
        """Name of the stage's folder, such as "2-prune"."""
        return self.folder.resolve().parent.name

    def __post_init__(self) -> None:
        mark = self.folder / "stage.json"
        if mark.exists() and read_json(mark, "which stage its checkpoints are of").get("key") == self.key:
            return
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Progress:
        return self  # copies of the task share the count of trainings

    def training(self, label: str) -> Training:
        """Return the checkpoints of the stage's next training; a restarted stage has its trainings in the same order."""
        self.trainings += 1
        training = Training(progress=self, number=self.trainings, label=label)
        self.histories.append(training.history)
        return training

    def decide(self, make: Callable[[], Any]) -> Any:
        """Call `make` and store its result, or return the result that an earlier run of the stage stored.

        For decisions that depend on measured times. The random number generators are restored with it.

        Args:
            make: returns JSON-ready data.
        """
        self.decisions += 1
        path, tensors = self.folder / f"decision-{self.decisions}.safetensors", dict[str, Tensor]()
        if distributed.on_rank_zero(path.exists):
            tensors, record = read_tensors(path)
            try:
                randomness.set_rng_state_(unpack(record["random"], tensors))
                return record["value"]
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path}: no decision of a stage in it ({error!r}); delete it") from None
        value = distributed.on_rank_zero(make)
        if self.writes:
            self.prepare()
            random = pack(randomness.rng_state(), tensors)
            write_tensors(path, tensors, {"value": value, "random": random})
        return value

    def prepare(self) -> None:
        """Create the folder, if it does not exist. Raises CheckpointError where it cannot be created."""
        if not (self.folder / "stage.json").exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be made ({error.strerror})") from error
            write_json(self.folder / "stage.json", {"key": self.key})


@dataclass(kw_only=True)
class Training:
    """The checkpoints of one training.

    Attributes:
        progress: of the stage.
        number: of the training in its stage, from 1.
        label: names the training in messages.
        begun, saved: when this process began the training, and last wrote a checkpoint of it, in seconds of `perf_counter`.
        save_time: seconds that the last checkpoint took.
        earlier_seconds: time of the training in earlier processes.
        history: what the training recorded of itself, JSON-ready, for the report; a checkpoint holds it.
    """

    progress: Progress
    number: int
    label: str
    begun: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)
    save_time: float = 0.0
    earlier_seconds: float = 0.0
    history: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.history = {"label": self.label}

    def _path(self, at: int | str) -> Path:
        return self.progress.folder / f"{self.number}-{at}.safetensors"

    def _files(self) -> list[Path]:
        """Checkpoints of the unfinished training, newest first."""
        checkpoints = []
        for path in self.progress.folder.glob(f"{self.number}-*.safetensors"):
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match is not None and match[2] != "end":
                checkpoints.append((int(match[2]), path))
        return [path for _, path in sorted(checkpoints, reverse=True)]

    def finished(self) -> dict[str, Any] | None:
        """Return the state after the training, if it has finished."""
        path = self._path("end")
        if not distributed.on_rank_zero(path.exists):
            return None
        state = self._read(path)
        self.progress.seconds += state["seconds"]
        self.history.update(state.get("history", {}))
        return state

    def latest(self) -> dict[str, Any] | None:
        """Return the state of the last checkpoint, or None.

        A damaged checkpoint is logged, and the one before it is used.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        path = distributed.on_rank_zero(self._newest_readable)
        if path is None:
            return None
        state = self._read(path)
        log.info("%s resumes from %s", self.label, path)
        self.earlier_seconds = state["seconds"]
        self.history.update(state.get("history", {}))
        self.progress.seconds += self.earlier_seconds
        return state

    def _newest_readable(self) -> Path | None:
        first_error: CheckpointError | None = None
        for path in self._files():
            try:
                self._read(path)
                return path
            except CheckpointError as error:
                log.warning("%s", error)
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        tensors, record = read_tensors(path)
        try:
            state = unpack(record["state"], tensors)
            identity = (record["key"], record["label"], record["number"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: no checkpoint of a training in it ({error!r}); delete it") from None
        if identity != (self.progress.key, self.label, self.number) or not isinstance(state, dict) or "seconds" not in state:
            raise CheckpointError(f"{path}: a checkpoint of another training; delete the folder to start that stage again")
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match is not None and match[2] != "end" and state.get("step") != int(match[2]):
            raise CheckpointError(f"{path}: a checkpoint of another step; delete it to go on from the one before")
        return state

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` optimizer steps."""
        every = self.progress.every
        if not self.progress.writes:
            return False
        if every.steps is not None and step % every.steps == 0:
            return True
        waited = time.perf_counter() - self.saved
        return every.seconds is not None and waited >= max(every.seconds, self.save_time / every.overhead)

    def save(self, state: Mapping[str, Any], at: int | str) -> None:
        """Write a checkpoint and delete older ones.

        Args:
            state: of the training, as `pack` takes it.
            at: the number of optimizer steps, or "end".
        """
        if not self.progress.writes:
            return
        begin = time.perf_counter()
        self.progress.prepare()
        path, tensors = self._path(at), dict[str, Tensor]()
        seconds = self.earlier_seconds + begin - self.begun
        packed = pack({**state, "seconds": seconds, "history": self.history}, tensors)
        write_tensors(path, tensors, {"key": self.progress.key, "label": self.label, "number": self.number, "state": packed})
        for old in self._files()[0 if at == "end" else CHECKPOINTS_KEPT :]:
            old.unlink(missing_ok=True)
        self.saved = time.perf_counter()
        self.save_time = self.saved - begin
        log.info("%s: saved %s, %.1f MB in %.0f ms", self.label, path.name, path.stat().st_size / 1e6, self.save_time * 1e3)

    def raise_if_stopped(self, at: str) -> None:
        """Raise `Interrupted` where a signal asked for it; call it after `save`."""
        if (name := self.progress.stop.signal) is not None:
            raise Interrupted(
                f"stopped by {name}; saved {self.progress.stage}, {self.label}, {at}. Run the same command again to go on"
            )
