"""Trainings that fail: losses, labels, batches and loaders that cannot be used; each error names the batch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import checkout
import networks
import numpy as np
import pytest
import torch
from networks import build, images_task
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import compresskit as ck
from compresskit.base.errors import CheckpointError, DataError, TrainingError
from compresskit.base.progress import Progress
from compresskit.train.length import check_last_row


def task(**settings):
    return images_task(ck, samples=32, batch=16, **settings)


def fit(given):
    return ck.Train(epochs=1)(build(networks.Chain), given)


class Fragile(Dataset):
    def __init__(self, how):
        self.how, self.x, self.y = how, *task().train[0]

    def __len__(self):
        return 16

    def __getitem__(self, i):
        if i == 13:
            self.how()
        return self.x[i], self.y[i]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def missing():
    raise FileNotFoundError(2, "No such file or directory", "picture13.png")


def lose_a_sample(how, workers):
    fit(ck.Task(train=DataLoader(Fragile(how), 4, num_workers=workers), val=task().val))


NO_BATCH = r"epoch 1, batch 4: the training loader gives no batch: .*{}.*num_workers=0"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(("workers", "said"), [(0, "picture13.png"), (1, "FileNotFoundError")])
def test_a_sample_that_cannot_be_read_names_its_batch(workers, said) -> None:
    with pytest.raises(DataError, match="(?s)" + NO_BATCH.format(said)):
        lose_a_sample(missing, workers)


def test_a_killed_worker_of_the_loader_names_the_batch() -> None:
    # In a process of its own: torch raises the death of a worker again whenever another child ends.
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_failures as t\n"
        "try: t.lose_a_sample(t.killed, 1)\n"
        "except t.DataError as error: print(error, flush=True)"
    )
    done = checkout.python("-c", code, check=False)
    # It is noticed at that batch or, as loaders read ahead, at one before, by torch or by the pipe that closed.
    said = r"epoch 1, batch [1-4]: the training loader gives no batch: .*num_workers=0"
    assert re.search(said, done.stdout, re.S), done.stdout + done.stderr[-2000:]


def dies(*_, **__):
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


@pytest.mark.parametrize("before", [True, False])
def test_a_death_that_torch_raises_in_the_cleanup_names_what_is_known(monkeypatch, before) -> None:
    # torch's signal handler interrupts any line: that which cleans up after the loader's error was the unlucky one.
    monkeypatch.setattr(ck.mixed.Run, "finish", dies)
    loader = DataLoader(Fragile(missing), 4) if before else task().train
    where = "epoch 1, batch 4" if before else "train"
    with pytest.raises(DataError, match=f"^{where}: the training loader gives no batch: .*num_workers=0"):
        fit(ck.Task(train=loader, val=task().val))


def test_a_death_that_torch_raises_between_two_steps_names_the_batch(monkeypatch) -> None:
    monkeypatch.setattr("compresskit.train.history.History.add_loss", dies)
    with pytest.raises(DataError, match="^epoch 1, batch 1: the training loader gives no batch: .*num_workers=0"):
        fit(task())


class Changing(list):
    def __len__(self):
        return 4


@pytest.mark.parametrize("count", [3, 5])
def test_a_loader_that_gives_another_number_of_batches_is_refused(count) -> None:
    given = ck.Task(train=Changing([task().train[0]] * count), val=task().val)
    with pytest.raises(DataError, match="the training loader has length 4 and gave (3|more) batches; it must not change"):
        fit(given)


def test_a_loss_that_is_not_finite_names_its_cause() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    task = ck.Task(train=[(x, y)] * 10, val=[(x, y)])
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: the loss is not finite \(loss = nan\); the first .* is weight"):
        ck.Train(epochs=1)(model, task)
    bad = ck.Task(train=[(x / 0, y)], val=[(x, y)])
    with pytest.raises(TrainingError, match="the batch itself holds nan or inf"):
        ck.Train(epochs=1)(nn.Linear(4, 3), bad)
    odd = ck.Task(train=[(x, y)], val=[(x, y)], loss=lambda p, t: p.sum() / 0)
    with pytest.raises(TrainingError, match="so the forward pass overflowed"):
        ck.Train(epochs=1)(nn.Linear(4, 3), odd)
    picky = ck.Task(train=[(x, y)], val=[(x, y)], loss=lambda p, t: nn.functional.binary_cross_entropy(p.sigmoid()[:, 0], t / 2))
    with pytest.raises(TrainingError, match=r"cannot be computed .* between 0 and 1; the first parameter .* finite is weight"):
        ck.Train(epochs=1)(model, picky)


def test_a_batch_without_rows_is_named() -> None:
    """The mean of its loss is NaN, for which a learning rate was blamed."""
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    empty = ck.Task(train=[(x, y), (x[:0], y[:0])], val=[(x, y)])
    with pytest.raises(
        DataError, match=r"epoch 1, batch 2: wanted one row at least, got tensors of shape \[\(0, 4\), \(0,\)\]; leave"
    ):
        ck.Train(epochs=1)(nn.Linear(4, 3), empty)
    edges = torch.zeros(2, 0, dtype=torch.long)  # a graph without edges has values
    graphs = ck.Task(train=[{"x": x, "edges": edges, "labels": y}], val=[(x, y)])
    ck.fit_(_Graph(), graphs, ck.Train(epochs=1))


def test_a_batch_without_rows_is_no_fault_where_its_loss_is_a_number() -> None:
    """A loss by sum is 0; pictures that are no tensors are rows though no object is in them."""
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    summed = ck.Task(train=[(x, y), (x[:0], y[:0])], val=[(x, y)], loss=lambda p, t: (p - t).square().sum())
    ck.fit_(nn.Linear(4, 3), summed, ck.Train(epochs=1))
    batches = [([np.ones(4, np.float32)] * 2, [{"boxes": torch.zeros(0, 4)}] * 2)]
    ck.fit_(_Pictures(), ck.Task(train=batches, val=batches, loss=lambda p, t: p.square().mean()), ck.Train(epochs=1))
    odd = ck.Task(train=batches, val=batches, loss=lambda p, t: p.sum() / 0)
    with pytest.raises(TrainingError, match="so the forward pass overflowed"):
        ck.fit_(_Pictures(), odd, ck.Train(epochs=1))


class _Pictures(nn.Linear):
    """Of a list of arrays."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, pictures):
        return super().forward(torch.stack([torch.as_tensor(picture) for picture in pictures]))


class _Graph(nn.Linear):
    """Of nodes and their edges, which may be none."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x, edges):
        return super().forward(x)


class _Pair(nn.Module):
    """Of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, user, item):
        return self.layer(user) + self.layer(item)


def test_inputs_inside_of_one_another_are_named() -> None:
    """A dataset of ((a, b), label)."""
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    wanted = r"wanted 2 inputs \(user, item\), got one, a tuple of 2; give them side by side, .* \(user, item, target\)"
    with pytest.raises(TrainingError, match=wanted):
        ck.Train(epochs=1)(_Pair(), ck.Task(train=[((x, x), y)], val=[((x, x), y)]))
    with pytest.raises(TrainingError, match="missing 1 required positional argument"):  # a batch of another form
        ck.Train(epochs=1, objective=lambda model, batch: {"loss": model(batch["a"]).sum()})(_Pair(), ck.Task(train=[{"a": x}]))


def test_labels_outside_the_classes_are_refused() -> None:
    x, y = torch.randn(8, 4), torch.arange(8)
    with pytest.raises(DataError, match=r"training data: the model has 3 classes, so labels must be 0\.\.2, got 7"):
        ck.Train(epochs=1)(nn.Linear(4, 3), ck.Task(train=[(x, y)], val=[(x, y)]))


def test_a_batch_of_another_shape_is_refused() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    task = ck.Task(train=[(x, y), (torch.randn(8, 5), y)], val=[(torch.randn(8, 5), y)])
    with pytest.raises(
        TrainingError, match=r"epoch 1, batch 2: the loss cannot be computed \(tensors of shape \[\(8, 5\), \(8,\)\]\)"
    ):
        ck.Train(epochs=1)(nn.Linear(4, 3), task)
    with pytest.raises(DataError, match=r"validation data: the model does not run on inputs of shape \[\(8, 5\)\]"):
        ck.evaluate(nn.Linear(4, 3), task)


def test_a_death_that_the_pipe_tells_first_is_raised_where_it_is_waited_for(monkeypatch) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        dies()

    def reset() -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("compresskit.train.cursor.time.sleep", sleep)
    with pytest.raises(DataError, match="epoch 1, batch 4: the training loader gives no batch: ConnectionResetError"):
        lose_a_sample(reset, 0)
    assert len(waited) == 1


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            TrainingError,
            "no memory to load the checkpoint",
        ),
        (MemoryError(), TrainingError, "no memory to load the checkpoint, which is whole .*; end what else takes memory"),
        (RuntimeError("CUDA error: unspecified launch failure"), TrainingError, "failed while the checkpoint was loaded"),
        (RuntimeError("Error(s) in loading state_dict"), CheckpointError, "of another training .*; delete the folder"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_machine_that_fails_while_a_checkpoint_is_loaded_is_no_reason_to_delete_it(
    finished, failure, error, said, monkeypatch, tmp_path
) -> None:
    def train(**callbacks):
        progress = Progress(folder=tmp_path, key="k", every=ck.Every(seconds=None, steps=1))
        ck.fit_(build(networks.Chain), task(progress=progress), ck.Train(epochs=2, **callbacks), label="t")

    def stop(report):
        if report.step == 3:
            raise KeyboardInterrupt

    with contextlib.nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        train(on_step=None if finished else stop)
    held = sorted(path.name for path in tmp_path.iterdir())

    def fail(*args):
        raise failure

    monkeypatch.setattr("compresskit.train.loop.restore_module_states_", fail)
    with pytest.raises(error, match=said):
        train()
    assert sorted(path.name for path in tmp_path.iterdir()) == held


def rows_of_one(count: int) -> ck.Task:
    data = TensorDataset(torch.randn(count, 8), torch.arange(count) % 4)
    return ck.Task(train=DataLoader(data, batch_size=16, shuffle=True))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))


def test_a_last_batch_of_one_row_is_refused_before_the_first_step() -> None:
    """No generator is moved where it is not."""
    train = ck.Train(epochs=1)
    wanted = (
        r"train: the last batch of the training data has one row, of which BatchNorm .*pass DataLoader\(..., drop_last=True\)"
    )
    with pytest.raises(DataError, match=wanted):
        ck.fit_(model := normed(), rows_of_one(33), train)
    assert not model[1].num_batches_tracked
    (frozen := normed()).train()[1].eval()
    task, state = rows_of_one(33), torch.get_rng_state()
    check_last_row(frozen, task, train.length(task), "train")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_callback_may_freeze_statistics_before_a_last_batch_of_one_row(caplog) -> None:
    model = normed()
    ck.fit_(model, rows_of_one(33), ck.Train(epochs=1, on_step=lambda report: model[1].eval()))
    assert model[1].num_batches_tracked == 1
    assert "the last batch of the training data has one row" in caplog.text


def test_a_batch_of_one_row_says_what_to_do() -> None:
    """In the middle of the data it is met in the training alone."""
    batches = [(torch.randn(n, 8), torch.arange(n) % 4) for n in (16, 1, 16)]
    with pytest.raises(TrainingError, match=r"epoch 1, batch 2: .*more than 1 value per .*; pass DataLoader\(..., drop_last"):
        ck.fit_(normed(), ck.Task(train=batches), ck.Train(epochs=1))
