"""Tasks: batches, predictions, accuracy, and loaders that cannot be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.base.task import first_tensor


def test_batches_are_split_into_inputs_and_target() -> None:
    x, z, y = torch.randn(4, 2), torch.randn(4, 3), torch.arange(4)
    task = ck.Task(val=[(x, y)])
    assert task.split((x, y))[0] == (x,)
    assert task.split([x, z, y])[0] == (x, z)
    inputs, target = task.split({"a": x, "b": z, "labels": y})
    assert list(inputs) == ["a", "b"]
    assert target is y
    assert list(ck.Task(val=[1], target="b").split({"a": x, "b": z})[0]) == ["a"]


def test_predictions_are_found_in_any_output() -> None:
    x = torch.randn(2, 3)
    for output in (x, (x, None), {"logits": x, "loss": 1}, {"out": x}, [[x]], {"anything": x}):
        assert first_tensor(output) is x
    with pytest.raises(DataError, match=r"pass Task\(predict="):
        first_tensor(3)


def test_accuracy_is_the_fraction_of_correct_labels() -> None:
    logits = torch.eye(3)
    assert ck.accuracy(logits, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)
    dense = torch.randn(2, 5, 4, 4)
    assert ck.accuracy(dense, dense.argmax(1)) == 1.0
    with pytest.raises(DataError, match=r"classes, so labels must be 0\.\.2, got 7"):
        ck.accuracy(logits, torch.tensor([0, 1, 7]))
    with pytest.raises(DataError, match="pass another metric"):
        ck.accuracy(torch.randn(4, 1), torch.randn(4, 1))


def test_loaders_and_batches_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(SettingError, match="wanted a loader that can be read many times, got a one-pass generator"):
        ck.Task(val=(i for i in range(3)))
    with pytest.raises(SettingError, match="wanted a loader of batches, got int"):
        ck.Task(val=3)
    with pytest.raises(SettingError, match=r"needs Task\(train="):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1]))
    with pytest.raises(DataError, match="the loader is empty"):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1], train=[]))
    with pytest.raises(DataError, match="the loader is empty"):
        ck.evaluate(nn.Linear(1, 1), ck.Task(val=[]))

    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    with pytest.raises(DataError, match="not known beforehand"):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1], train=DataLoader(Stream())))
    task = ck.Task(val=[1])
    with pytest.raises(DataError, match=r"no entry 'labels' for the target, got keys \['a'\]"):
        task.split({"a": 1})
    with pytest.raises(DataError, match="wanted \\(inputs..., target\\) or a dict, got Tensor"):
        task.split(torch.zeros(3))


def test_labels_of_minus_100_do_not_count_in_the_accuracy() -> None:
    assert ck.accuracy(torch.eye(4), torch.tensor([0, 1, -100, -100])) == 1.0
