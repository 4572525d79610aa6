"""A run that is killed, at any write or at any other moment, ends with the bits of one that was not."""

from __future__ import annotations

import os
import signal

import chains
import kills
import pytest
import torch

import compresskit as ck
from compresskit.errors import CheckpointError, Interrupted

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),  # threads of ONNX Runtime are idle
]


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    torch.set_num_threads(1)
    kills.warm(tmp_path_factory.mktemp("warm"))


def whole_run(name, folder, **settings):
    events, seconds = kills.count_events(name, folder, **settings)
    return kills.bits(folder), events, seconds


def test_kills_while_a_run_writes(tmp_path) -> None:
    wanted, events, _ = whole_run("short", tmp_path / "whole")
    assert events > 50
    assert kills.killed_again_and_again("short", tmp_path / "killed", seed=1) > 2
    assert kills.bits(tmp_path / "killed") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long", "sparse", "taught"])
def test_kills_at_every_third_write(name, tmp_path) -> None:
    wanted, events, _ = whole_run(name, tmp_path / "whole")
    for number in range(1, events, max(1, events // 16)):
        folder = tmp_path / str(number)
        assert kills.killed_once(name, folder, lambda number=number: kills.at_event(number))
        assert kills.bits(folder) == wanted, f"killed at write {number} of {events}"
    assert kills.killed_again_and_again(name, tmp_path / "often", seed=2, most=25) > 4
    assert kills.bits(tmp_path / "often") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long", "sparse", "taught"])
def test_kills_at_random_moments(name, tmp_path) -> None:
    wanted, _, seconds = whole_run(name, tmp_path / "whole")
    for i in range(6):
        folder = tmp_path / str(i)
        kills.killed_once(name, folder, lambda i=i: kills.after(seconds * (i + 0.5) / 6))
        assert kills.bits(folder) == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_say_how_to_go_on(number, tmp_path) -> None:
    wanted, _, _ = whole_run("short", tmp_path / "whole", save=ck.Every(seconds=None, steps=10**6))

    def stopped():
        real, steps = ck.mixed.Run.step, [0]

        def step(self, closure=None):
            steps[0] += 1
            if steps[0] == 4:
                os.kill(os.getpid(), number)
            return real(self, closure)

        ck.mixed.Run.step = step
        chains.run("short", tmp_path / "run", save=ck.Every(seconds=None, steps=10**6))

    assert kills.forked(stopped, stderr=tmp_path / "said") == 1
    said = (tmp_path / "said").read_text()
    assert said.startswith(f"stopped by {number.name}; saved 1-train, train, epoch 1, batch ")
    assert "Run the same command again to go on" in said
    assert list((tmp_path / "run" / "1-train" / "progress").glob("1-4.safetensors"))
    assert kills.forked(lambda: chains.run("short", tmp_path / "run", save=ck.Every(seconds=None, steps=10**6))) == 0
    assert kills.bits(tmp_path / "run") == wanted


def test_a_signal_outside_of_training_ends_at_once(tmp_path) -> None:
    with pytest.raises(Interrupted, match="stopped by SIGTERM; .* Run the same command again"), ck.progress.stoppable(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)


def test_one_process_for_a_folder(tmp_path) -> None:
    ready, go = os.pipe(), os.pipe()

    def hold():
        with ck.folder.locked(tmp_path):
            worker = os.fork()  # a loader's worker outlives its parent for a while
            if worker == 0:
                os.read(go[0], 1)
                os._exit(0)
            os.write(ready[1], b"x")
            kills.die() if os.read(go[0], 1) else None

    child = os.fork()
    if child == 0:
        hold()
    os.read(ready[0], 1)
    with (
        pytest.raises(CheckpointError, match=f"in use by another process \\({child}\\); wait for it"),
        ck.folder.locked(tmp_path),
    ):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with ck.folder.locked(tmp_path):
        pass
    os.write(go[1], b"x")


@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_loaders_with_workers(settings, tmp_path) -> None:
    def run(folder, stop_at=None):
        torch.manual_seed(0)
        real, steps = ck.mixed.Run.step, [0]

        def step(self, closure=None):
            steps[0] += 1
            if steps[0] == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(self, closure)

        loader = torch.utils.data.DataLoader(chains.Augmented(), 16, shuffle=True, **settings)
        task = ck.Task(train=loader, val=loader, progress=ck.Progress(folder=folder, key="workers"))
        model = chains.Net()
        with pytest.MonkeyPatch.context() as patch, ck.progress.stoppable(folder) as task.progress.stop:
            patch.setattr(ck.mixed.Run, "step", step)
            return ck.Train(epochs=3, optimizer=chains.sgd)(model, task)

    wanted = run(tmp_path / "whole").state_dict()
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", stop_at=9)
    got = run(tmp_path / "stopped").state_dict()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_a_loader_that_cannot_be_replayed_is_told(tmp_path) -> None:
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
        progress = ck.Progress(folder=tmp_path / "p", key="own", every=ck.Every(seconds=None, steps=2))
        task = ck.Task(train=loader, val=loader, progress=progress)
        ck.fit_(chains.Net(), task, ck.Train(epochs=1), after_step=[stop])

    with pytest.raises(KeyboardInterrupt):
        run(stop_at=3)
    with pytest.warns(UserWarning, match="the training loader does not give again the batches that it gave before"):
        run()
