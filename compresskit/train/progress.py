"""Checkpoints inside a stage: every training of it goes on where it was, with the same bits.

progress/stage.json              which stage they are of
progress/1-12.safetensors        the first training of the stage, after 12 steps; the last two are kept
progress/1-end.safetensors       what it left, where it is over: the stage's next training is then not far

A stage that is started again does everything again but its trainings: those that are over hand back what they left, the one that
was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compresskit.base import distributed, randomness
from compresskit.base.errors import CheckpointError, Interrupted, SettingError
from compresskit.base.files import read_json, read_tensor_file, write_json, write_tensors
from compresskit.base.packing import Resumable, pack, unpack
from compresskit.base.settings import check_kinds

log = logging.getLogger(__name__)

KEPT = 2  # checkpoints of a training
NAME = re.compile(r"(\d+)-(\d+|end)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Every:
    """When a training is saved: after so many seconds, after so many steps, or both.

    seconds: since the last time; None for never. steps: of the optimizer.
    share: of the training's time that saving may take; what takes longer is done less often. Steps are not bound by it.
    """

    seconds: float | None = 60.0
    steps: int | None = None
    share: float = 0.01

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.seconds is not None and not self.seconds >= 0:
            raise SettingError(f"Every(seconds=...): wanted a number >= 0, or None, got {self.seconds}")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise SettingError(f"Every(steps=...): wanted a whole number >= 1, or None, got {self.steps}")
        if not 0 < self.share <= 1:
            raise SettingError(f"Every(share=...): wanted a share in (0, 1], got {self.share}")


@dataclass
class Stop:
    """Whether a signal asked the run to stop; `training` while a training can save itself first."""

    asked: str | None = None
    training: bool = False


@contextmanager
def stoppable(out: Path) -> Iterator[Stop]:
    """Inside the block SIGINT and SIGTERM end the run with `Interrupted`, after a training has saved itself.

    A second signal does not wait. Outside the main thread signals stay as they are.
    """
    stop, own = Stop(), os.getpid()

    def ask(number: int, frame: Any) -> None:
        if os.getpid() != own:  # a worker of a loader, forked with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        name = signal.Signals(number).name
        if stop.training and stop.asked is None:
            stop.asked = name
            return
        raise Interrupted(f"stopped by {name}; {out} has what was done. Run the same command again to go on")

    main = threading.current_thread() is threading.main_thread()
    taken = [s for s in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, ask) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(kw_only=True)
class Progress:
    """The checkpoints of one stage: a `Task(progress=Progress(folder=..., key=...))` saves its trainings there.

    folder: is emptied where it is of another stage. key: what tells the stage. writes: whether this process writes.
    """

    folder: Path
    key: str
    every: Every = field(default_factory=Every)
    stop: Stop = field(default_factory=Stop)
    writes: bool = field(default_factory=lambda: distributed.rank() == 0)
    trainings: int = 0
    seconds: float = 0.0  # of trainings in earlier processes
    decisions: int = 0

    def __post_init__(self) -> None:
        mark = self.folder / "stage.json"
        if mark.exists() and read_json(mark, "which stage its checkpoints are of").get("key") == self.key:
            return
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Progress:
        return self  # it counts the trainings of a stage, however often its task is copied

    def training(self, label: str) -> Training:
        """The next training of the stage; they come in the same order when the stage is started again."""
        self.trainings += 1
        return Training(progress=self, number=self.trainings, label=label)

    def decide(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, JSON-ready, or what it gave when the stage ran before: for what depends on a clock."""
        self.decisions += 1
        path, tensors = self.folder / f"decision-{self.decisions}.safetensors", dict[str, Tensor]()
        if distributed.first_of(path.exists):
            tensors, record = read_tensor_file(path)
            try:
                randomness.restore_(unpack(record["random"], tensors))
                return record["value"]
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{path}: no decision of a stage in it ({error!r}); delete it") from None
        value = distributed.first_of(make)
        if self.writes:
            self.prepare()
            random = pack(randomness.captured(), tensors)
            write_tensors(path, tensors, {"value": value, "random": random})
        return value

    def prepare(self) -> None:
        """Make the folder."""
        if not (self.folder / "stage.json").exists():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be made ({error.strerror})") from error
            write_json(self.folder / "stage.json", {"key": self.key})


@dataclass(kw_only=True)
class Training:
    """The checkpoints of one training."""

    progress: Progress
    number: int
    label: str
    begun: float = field(default_factory=time.perf_counter)
    saved: float = field(default_factory=time.perf_counter)
    took: float = 0.0  # the last time that it was saved
    before: float = 0.0  # seconds in earlier processes

    def _path(self, at: int | str) -> Path:
        return self.progress.folder / f"{self.number}-{at}.safetensors"

    def _files(self) -> list[Path]:
        """Checkpoints on the way, the newest first."""
        found = []
        for path in self.progress.folder.glob(f"{self.number}-*.safetensors"):
            match = NAME.fullmatch(path.name)
            if match is not None and match[2] != "end":
                found.append((int(match[2]), path))
        return [path for _, path in sorted(found, reverse=True)]

    def finished(self) -> dict[str, Any] | None:
        """What the training left, where it was over."""
        path = self._path("end")
        if not distributed.first_of(path.exists):
            return None
        state = self._read(path)
        self.progress.seconds += state["seconds"]
        return state

    def latest(self) -> dict[str, Any] | None:
        """The last checkpoint; the one before where that is damaged, as the log says. CheckpointError where both are."""
        path = distributed.first_of(self._newest_whole)
        if path is None:
            return None
        state = self._read(path)
        log.info("%s goes on from %s", self.label, path)
        self.before = state["seconds"]
        self.progress.seconds += self.before
        return state

    def _newest_whole(self) -> Path | None:
        problem: CheckpointError | None = None
        for path in self._files():
            try:
                self._read(path)
                return path
            except CheckpointError as error:
                log.warning("%s", error)
                problem = problem or error
        if problem is not None:
            raise problem
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        tensors, record = read_tensor_file(path)
        try:
            state = unpack(record["state"], tensors)
            known = (record["key"], record["label"], record["number"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: no checkpoint of a training in it ({error!r}); delete it") from None
        if known != (self.progress.key, self.label, self.number) or not isinstance(state, dict) or "seconds" not in state:
            raise CheckpointError(f"{path}: a checkpoint of another training; delete the folder to start that stage again")
        named = NAME.fullmatch(path.name)
        if named is not None and named[2] != "end" and state.get("step") != int(named[2]):
            raise CheckpointError(f"{path}: a checkpoint of another step; delete it to go on from the one before")
        return state

    def due(self, step: int) -> bool:
        """Whether it is time to save."""
        every = self.progress.every
        if not self.progress.writes:
            return False
        if every.steps is not None and step % every.steps == 0:
            return True
        waited = time.perf_counter() - self.saved
        return every.seconds is not None and waited >= max(every.seconds, self.took / every.share)

    def save(self, state: Mapping[str, Any], at: int | str) -> None:
        """Write a checkpoint and drop those that are older than the last two; after the end, all but that."""
        if not self.progress.writes:
            return
        begin = time.perf_counter()
        self.progress.prepare()
        path, tensors = self._path(at), dict[str, Tensor]()
        told = pack({**state, "seconds": self.before + begin - self.begun}, tensors)
        write_tensors(path, tensors, {"key": self.progress.key, "label": self.label, "number": self.number, "state": told})
        for old in self._files()[0 if at == "end" else KEPT :]:
            old.unlink(missing_ok=True)
        self.saved = time.perf_counter()
        self.took = self.saved - begin
        log.info("%s: saved %s, %.1f MB in %.0f ms", self.label, path.name, path.stat().st_size / 1e6, self.took * 1e3)

    def stopped(self, at: str) -> None:
        """Raise `Interrupted` where a signal asked for it; the training was saved."""
        if (name := self.progress.stop.asked) is not None:
            stage = self.progress.folder.parent.name
            raise Interrupted(f"stopped by {name}; saved {stage}, {self.label}, {at}. Run the same command again to go on")


def module_states(model: nn.Module) -> dict[str, Any]:
    """What modules must remember besides their tensors: those that have `resume_state`, by name."""
    return {name: part.resume_state() for name, part in model.named_modules() if isinstance(part, Resumable)}


def restore_modules_(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules what `module_states` found."""
    for name, state in states.items():
        model.get_submodule(name).resume_from_(state)  # type: ignore[operator]
