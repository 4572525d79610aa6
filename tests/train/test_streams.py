"""Training data without a known length: `Train(steps=...)`."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import compresskit as ck
from compresskit.base.errors import DataError, Interrupted, SettingError
from compresskit.base.progress import Every, Progress
from compresskit.train.train import fit_

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
X, Y = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]


class Stream(IterableDataset):
    """Samples whose number nobody knows, with noise from the generator that loaders draw from."""

    def __init__(self, samples: int | None = 40) -> None:
        self.samples = samples

    def __iter__(self):
        for i in count() if self.samples is None else range(self.samples):
            yield X[i % 40] + 0.1 * torch.rand(()), Y[i % 40]


class Shared(IterableDataset):
    """Samples, or whole batches, that the workers share as the page of torch says."""

    def __init__(self, items: list, length: int | None = None) -> None:
        self.items, self.length = items, len(items) if length is None else length

    def __iter__(self):
        worker = get_worker_info()
        yield from self.items[worker.id :: worker.num_workers] if worker else self.items

    def __len__(self) -> int:
        return self.length


def shared(samples: int, workers: int, *, drop_last: bool = False) -> DataLoader:
    items = [(X[i % 40], Y[i % 40]) for i in range(samples)]
    return DataLoader(Shared(items), batch_size=8, num_workers=workers, drop_last=drop_last)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))


def stream_task(samples: int | None = 40, **settings) -> ck.Task:
    return ck.Task(train=DataLoader(Stream(samples), batch_size=8), val=BATCHES, **settings)


class Unsized:
    """The batches of a list, without their number."""

    def __iter__(self):
        return iter(BATCHES)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_is_that_of_a_list_of_the_same_batches(accumulate: int) -> None:
    ends = [
        fit_(network(), ck.Task(train=train, val=BATCHES), ck.Train(steps=8, accumulate=accumulate, optimizer=SGD))
        for train in (Unsized(), BATCHES)
    ]
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))


def test_epochs_are_told_as_they_end() -> None:
    told: list = []
    fit_(network(), stream_task(), ck.Train(steps=8, accumulate=2, validate_every=4, on_epoch=told.append))
    assert [(report.epoch, report.step, report.epochs) for report in told] == [(1, 3, None), (2, 6, None), (3, 8, None)]
    assert [report.metric is None for report in told] == [True, True, False]
    endless: list = []
    fit_(network(), stream_task(None), ck.Train(steps=12, on_epoch=endless.append))
    assert [(report.epoch, report.step) for report in endless] == [(1, 12)]


@pytest.mark.parametrize("stop_after", [4, 6, 7])
def test_an_interrupted_training_ends_with_the_same_bits(stop_after: int, tmp_path) -> None:
    def run(folder, stop=None):
        progress = Progress(folder=folder, key="k", every=Every(seconds=None))

        def on_step(report) -> None:
            progress.stop.signal = "SIGTERM" if report.step == stop else None

        torch.manual_seed(1)
        settings = ck.Train(steps=8, accumulate=2, optimizer=SGD, validate_every=3, keep_best=True, on_step=on_step)
        return fit_(network(), stream_task(progress=progress), settings)

    whole = run(tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", stop_after)
    resumed = run(tmp_path / "stopped")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_recipe_trains_prunes_and_quantizes_on_a_stream(tmp_path) -> None:
    recipe = ck.Recipe(
        ck.Train(steps=6, optimizer=SGD),
        ck.Prune(budget=ck.keep(channels=0.5), finetune=ck.Train(steps=3)),
        ck.QAT(steps=3, samples=32),
        export="last",
    )
    result = recipe.run(network(), stream_task(), tmp_path / "run")
    assert result.rows[-1].verified
    assert [stage.action for stage in recipe.plan(network(), stream_task(), tmp_path / "run").stages] == ["reuse"] * 3


def test_epochs_of_unknown_length_are_refused_before_anything_runs(tmp_path) -> None:
    said = r"Task\(train=...\): its number of batches is not known beforehand \(DataLoader has no length\); count the training in"
    with pytest.raises(DataError, match=said):
        fit_(network(), stream_task(), ck.Train(epochs=1))
    with pytest.raises(DataError, match=said):
        stages = ck.Train(steps=3), ck.Prune(budget=ck.keep(channels=0.5), finetune=ck.Train(epochs=1))
        ck.Recipe(*stages).run(network(), stream_task(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for settings, message in (
        ({"keep_best": True}, "the training data have no length; pass validate_every=, in optimizer steps"),
        ({"schedule": ck.lr.EachEpoch(torch.optim.lr_scheduler.ConstantLR)}, "lr.EachEpoch counts epochs, and the training data"),
    ):
        with pytest.raises(SettingError, match=message):
            fit_(network(), stream_task(), ck.Train(steps=3, **settings))


def test_a_stream_that_is_empty_is_refused() -> None:
    with pytest.raises(DataError, match="the training loader has no length and gave 0 batches"):
        fit_(network(), stream_task(0), ck.Train(steps=3))


@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_that_end_in_batches_of_their_own_leave_the_length_unknown(drop_last: bool) -> None:
    """DataLoader guesses 3 or 4 batches of 26 samples: its two workers give 4, or 2."""
    train, told = shared(26, 2, drop_last=drop_last), []
    wrong = len(train)
    said = rf"its number of batches is not known beforehand \(DataLoader guesses {wrong}, but each of its 2 workers may end in a"
    with pytest.raises(DataError, match=said + r" smaller batch.* Train\(steps=...\), or .* with num_workers=1 at most"):
        fit_(network(), ck.Task(train=train), ck.Train(epochs=1))
    fit_(network(), ck.Task(train=train), ck.Train(steps=6, accumulate=1, on_epoch=told.append))
    ends = [2, 4, 6] if drop_last else [4, 6]
    assert [(report.step, report.epochs) for report in told] == [(step, None) for step in ends]


@pytest.mark.parametrize(("samples", "workers"), [(26, 1), (32, 2)])
def test_a_length_that_workers_do_not_change_is_known(samples: int, workers: int) -> None:
    told: list = []
    fit_(network(), ck.Task(train=shared(samples, workers)), ck.Train(epochs=1, on_epoch=told.append))
    assert [report.step for report in told] == [4]


def test_the_length_of_a_data_set_that_makes_the_batches_is_known() -> None:
    told: list = []
    train = DataLoader(Shared(BATCHES), batch_size=None, num_workers=2)
    fit_(network(), ck.Task(train=train), ck.Train(epochs=1, on_epoch=told.append))
    assert [report.step for report in told] == [5]


def test_a_guess_will_do_for_what_is_not_trained_on() -> None:
    loader = shared(26, 2)
    task = ck.Task(val=loader, calibration=loader)
    model = network().eval()
    assert repr(task) == "Task(val=DataLoader of 4, calibration=DataLoader of 4)"
    assert repr(stream_task()).startswith("Task(val=list of 5, train=DataLoader")
    assert ck.evaluate(model, task) == ck.evaluate(model, ck.Task(val=list(loader)))
    x = X[:4]
    ranges = [ck.StaticQuant(samples=26)(model, ck.Task(val=data, calibration=data)) for data in (loader, list(loader))]
    assert torch.equal(ranges[0](x), ranges[1](x))


def test_an_iterable_dataset_with_a_wrong_length_is_told_what_it_counts() -> None:
    items = [(X[i], Y[i]) for i in range(40)]
    said = r"has length 2 and gave more batches; it must not change; the __len__ of an IterableDataset counts the samples of all"
    with pytest.raises(DataError, match=said):
        fit_(network(), ck.Task(train=DataLoader(Shared(items, 16), 8)), ck.Train(epochs=1))
