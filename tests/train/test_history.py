"""What a training records of itself."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import Interrupted
from compresskit.base.progress import Every, Progress
from compresskit.mixed.step.scaler import LossScaler
from compresskit.train.history import AT_ONCE, History
from compresskit.train.loop import TrainingLoop


def test_an_epoch_is_the_mean_of_its_losses() -> None:
    history = History(record := {})
    for value in range(2 * AT_ONCE + 1):
        history.add_loss(torch.tensor([float(value)]))
    assert history.close_epoch(1, 7, [0.5, 0.25], []) == AT_ONCE
    assert history.close_epoch(1, 7, [0.5], []) is None
    history.add_loss(torch.tensor(float("nan")))
    history.add_metric(9, float("inf"))
    scaler = LossScaler(8.0)
    scaler.skipped += 3
    history.close_epoch(2, 9, [0.125], [scaler])
    assert record == {
        "epochs": [
            {"epoch": 1, "step": 7, "loss": float(AT_ONCE), "rates": [0.5, 0.25]},
            {"epoch": 2, "step": 9, "loss": None, "rates": [0.125], "scale": 8.0, "skipped": 3},
        ],
        "metrics": [[9, None]],
    }


@pytest.mark.parametrize(("load", "step", "low", "high"), [(0.03, 0.0, 0.7, 1.0), (0.0, 0.03, 0.0, 0.3)])
def test_the_share_of_waiting_for_data_is_measured(load, step, low, high, tmp_path) -> None:
    class Slow(list):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(load)
                yield batch

    history = History(record := {})
    for _ in history.timed(iter(Slow(range(5)))):
        time.sleep(step)
        history.add_loss(torch.tensor(1.0))
    history.close_epoch(1, 5, [0.1], [])
    assert low <= record["epochs"][0]["waiting"] <= high

    torch.manual_seed(0)
    batches = Slow((torch.randn(8, 4), torch.arange(8) % 3) for _ in range(4))
    task = ck.Task(train=batches, progress=Progress(folder=tmp_path, key="k", every=Every(seconds=None)))
    ck.Train(epochs=2, optimizer=partial(torch.optim.SGD, lr=0.1), on_step=lambda report: time.sleep(step))(nn.Linear(4, 3), task)
    (found,) = task.progress.histories
    assert len(found["epochs"]) == 2
    assert all(low <= entry["waiting"] <= high for entry in found["epochs"][1:])


def trained(folder, stop_after=None):
    """The history of a training of three epochs of four steps, interrupted after a step and resumed."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.arange(8) % 3) for _ in range(4)]
    task = ck.Task(train=batches, val=batches)
    for stop in (stop_after, None):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        progress = Progress(folder=folder, key="k", every=Every(seconds=None))

        def on_step(report, stop=stop, progress=progress):
            if report.step == stop:
                progress.stop.signal = "SIGTERM"

        optimizer = partial(torch.optim.SGD, lr=0.1)
        settings = ck.Train(epochs=3, validate_every=1, optimizer=optimizer, schedule=ck.lr.Constant(), on_step=on_step)
        run = partial(ck.fit_, model, ck.Task(train=task.train, val=task.val, progress=progress), settings)
        if stop is not None:
            with pytest.raises(Interrupted):
                run()
            continue
        run()
    return progress.histories


def timeless(entry):
    return {key: value for key, value in entry.items() if key != "waiting"}


def test_a_resumed_training_has_the_history_of_one_that_was_not_interrupted(tmp_path) -> None:
    (plain,) = trained(tmp_path / "plain")
    assert plain["label"] == "train"
    assert [(e["epoch"], e["step"], e["rates"]) for e in plain["epochs"]] == [(1, 4, [0.1]), (2, 8, [0.1]), (3, 12, [0.1])]
    assert plain["epochs"][0]["loss"] > plain["epochs"][2]["loss"] > 0
    assert [step for step, _ in plain["metrics"]] == [4, 8, 12]
    for stop in (6, 8, 12):  # within an epoch, at the end of one, at the end of all
        (resumed,) = trained(tmp_path / str(stop), stop)
        for entry, wanted in zip(resumed["epochs"], plain["epochs"], strict=True):
            assert timeless(entry) == timeless(wanted) | {"loss": entry["loss"]}
            assert entry["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert resumed["metrics"] == plain["metrics"]
    again = Progress(folder=tmp_path / "6", key="k")
    state = again.training("train").finished()
    assert state is not None
    assert again.histories == [resumed | again.histories[0]]
    assert len(again.histories[0]["epochs"]) == 3


def test_a_state_of_the_layout_before_gives_the_sum_of_its_epoch(tmp_path, monkeypatch) -> None:
    """The sum of losses was of the run, and is of each process."""
    state = TrainingLoop._state

    def state_before(self):
        saved = state(self)
        return saved | {"epoch_losses": saved["ranks"][0].pop("losses")}

    (plain,) = trained(tmp_path / "plain", None)
    monkeypatch.setattr(TrainingLoop, "_state", state_before)
    (resumed,) = trained(tmp_path / "7", 7)
    assert [entry["loss"] for entry in resumed["epochs"]] == pytest.approx([e["loss"] for e in plain["epochs"]], rel=1e-6)
