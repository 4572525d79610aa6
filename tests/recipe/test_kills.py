"""A run that is killed, at any write or at any other moment, ends with the bits of one that was not."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import chains
import checkout
import pytest
import torch

import compresskit as ck
from compresskit.base.errors import CheckpointError, Interrupted
from compresskit.base.progress import Progress, stoppable
from compresskit.recipe.folder import locked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")


def case(name, chain, folder):
    checkout.python(checkout.SUPPORT / "kills.py", name, folder, chain)


def test_a_short_run_that_is_stopped_ends_with_the_same_bits(tmp_path) -> None:
    case("signals", "short", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["short", "long", "sparse", "taught"])
@pytest.mark.parametrize("name", ["every_write", "moments", "writes"])
def test_a_killed_run_ends_with_the_same_bits(name, chain, tmp_path) -> None:
    case(name, chain, tmp_path)


def test_a_signal_outside_of_training_ends_at_once(tmp_path) -> None:
    with (
        pytest.raises(Interrupted, match="stopped by SIGTERM; .* Run the same command again"),
        stoppable(tmp_path),
    ):
        os.kill(os.getpid(), signal.SIGTERM)


class Watched:
    pass


def signalled_in_a_callback() -> None:
    """A signal while Python runs the callback of a weak reference, which drops exceptions; torch.export has many."""
    watched = Watched()
    reference = weakref.ref(watched, lambda _: [signal.raise_signal(signal.SIGTERM), None])
    del watched
    assert reference() is None


def test_a_signal_whose_exception_python_drops_is_sent_again(tmp_path) -> None:
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="stopped by SIGTERM"), stoppable(tmp_path):
        signalled_in_a_callback()
        while time.monotonic() < begin + 20:
            time.sleep(0.01)
    assert time.monotonic() < begin + 10


def test_a_signal_that_is_dropped_at_the_end_of_a_run_ends_what_is_around_it(tmp_path) -> None:
    with pytest.raises(Interrupted, match="stopped by SIGTERM"), stoppable(tmp_path):
        with stoppable(tmp_path / "inner"):
            signalled_in_a_callback()
        pytest.fail("the outer run goes on")


def test_an_error_that_a_signal_causes_is_no_error(tmp_path) -> None:
    """As an import raises another one than the exception that interrupted it."""
    with pytest.raises(Interrupted, match="stopped by SIGTERM") as found, stoppable(tmp_path):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except Interrupted:
            raise ImportError("initialization failed") from None
    assert isinstance(found.value.__cause__, ImportError)


def test_exceptions_that_python_drops_for_other_reasons_are_told_as_before(tmp_path, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_value))
    before = sys.unraisablehook
    with stoppable(tmp_path):
        watched = Watched()
        reference = weakref.ref(watched, lambda _: 1 / 0)
        del watched
        assert reference() is None
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert sys.unraisablehook is before


def test_a_folder_is_locked_until_its_process_ends(tmp_path) -> None:
    ready, go = os.pipe(), os.pipe()

    def hold():
        with locked(tmp_path):
            worker = os.fork()  # a loader's worker outlives its parent for a while
            if worker == 0:
                os.read(go[0], 1)
                os._exit(0)
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)

    child = os.fork()
    if child == 0:
        hold()
    os.read(ready[0], 1)
    with (
        pytest.raises(CheckpointError, match=f"in use by another process \\({child}\\); wait for it"),
        locked(tmp_path),
    ):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with locked(tmp_path):
        pass
    os.write(go[1], b"x")


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker")  # on a machine of one core
@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_a_stopped_training_with_loader_workers_resumes_with_the_same_bits(settings, tmp_path) -> None:
    def run(folder, stop_at=None):
        torch.manual_seed(0)
        real, steps = ck.mixed.Run.step, [0]

        def step(self, closure=None):
            steps[0] += 1
            if steps[0] == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, closure)

        loader = torch.utils.data.DataLoader(chains.Augmented(), 16, shuffle=True, **settings)
        task = ck.Task(train=loader, val=loader, progress=Progress(folder=folder, key="workers"))
        model = chains.Net()
        with pytest.MonkeyPatch.context() as patch, stoppable(folder) as task.progress.stop:
            patch.setattr(ck.mixed.Run, "step", step)
            return ck.Train(epochs=3, optimizer=chains.sgd)(model, task)

    wanted = run(tmp_path / "whole").state_dict()
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", stop_at=9)
    got = run(tmp_path / "stopped").state_dict()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_a_loader_that_gives_other_batches_on_resuming_gives_a_warning(tmp_path) -> None:
    class Own:
        """Draws from a generator that nobody can find."""

        def __init__(self):
            hidden = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
            self.draw = lambda: torch.randn(8, 1, 8, 8, generator=hidden)

        def __len__(self):
            return 4

        def __iter__(self):
            return ((self.draw(), torch.arange(8) % 4) for _ in range(4))

    def run(stop_at=None):
        def stop(step, steps):
            if step == stop_at:
                raise KeyboardInterrupt

        loader = Own()
        progress = Progress(folder=tmp_path / "p", key="own", every=ck.Every(seconds=None, steps=2))
        task = ck.Task(train=loader, val=loader, progress=progress)
        ck.fit_(chains.Net(), task, ck.Train(epochs=1), after_step=[stop])

    with pytest.raises(KeyboardInterrupt):
        run(stop_at=3)
    with pytest.warns(UserWarning, match="the training loader does not give again the batches that it gave before"):
        run()
