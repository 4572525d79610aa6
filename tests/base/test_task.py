"""Tasks: batches, predictions, accuracy, and loaders that cannot be used."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.base.task import batch_size, first_rows, first_tensor, repeated_rows, row_dims, rows_that_run
from compresskit.measure import evaluate
from compresskit.recipe.preflight import preflight_check


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


def test_predictions_that_are_not_numbers_are_wrong() -> None:
    """argmax takes NaN for the largest: a model that gives nothing else had the accuracy of class 0."""
    nan, classes = float("nan"), torch.tensor([0, 0, 0, 1])
    assert ck.accuracy(torch.full((4, 3), nan), classes) == 0.0
    assert ck.accuracy(torch.tensor([[nan, 1.0], [1.0, nan], [1.0, 0.0], [0.0, 1.0]]), classes) == 0.5
    dense = torch.zeros(2, 3, 4, 4)
    dense[1, 2, 0] = nan
    assert ck.accuracy(dense, torch.zeros(2, 4, 4, dtype=torch.long)) == 1 - 4 / 32
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    nn.init.constant_(model[1].running_var, -1)
    assert evaluate(model, ck.Task(val=[(torch.randn(4, 4), classes)])) == 0.0


def test_fractions_are_no_labels() -> None:
    with pytest.raises(
        DataError, match=r"wanted class indices as targets, whole numbers, got 0\.4 \(torch\.float32\); pass another"
    ):
        ck.accuracy(torch.eye(3), torch.tensor([0.4, 1.4, 2.4]))
    assert ck.accuracy(torch.eye(3), torch.tensor([0.0, 1.0, 0.0])) == pytest.approx(2 / 3)


def test_loaders_and_batches_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(SettingError, match="wanted a loader that can be read many times, got a one-pass generator"):
        ck.Task(val=(i for i in range(3)))
    with pytest.raises(SettingError, match=r"got TensorDataset; write DataLoader\(dataset, batch_size=\.\.\.\)"):
        ck.Task(val=TensorDataset(torch.zeros(2, 1)))
    with pytest.raises(SettingError, match=r"Task\(loss=\.\.\.\): .* got a class; write CrossEntropyLoss\(\)"):
        ck.Task(val=[1], loss=nn.CrossEntropyLoss)
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


def test_a_task_prints_as_a_line_without_its_data() -> None:
    batches = [(torch.zeros(2, 3), torch.zeros(2))]
    task = ck.Task(train=batches, val=DataLoader(batches), device="cpu", target="y", reference=nn.Linear(1, 1), loss=F.mse_loss)
    assert repr(task) == "Task(val=DataLoader of 1, train=list of 1, loss=mse_loss, target='y', reference=Linear)"


def test_labels_of_minus_100_do_not_count_in_the_accuracy() -> None:
    assert ck.accuracy(torch.eye(4), torch.tensor([0, 1, -100, -100])) == 1.0


LOSSES = {
    "partial": partial(F.cross_entropy, ignore_index=255),
    "module": nn.CrossEntropyLoss(ignore_index=255),
    "function": lambda p, y, ignore_index=255: F.cross_entropy(p, y, ignore_index=ignore_index),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_labels_that_the_loss_leaves_out_do_not_count(loss, tmp_path) -> None:
    labels = torch.randint(0, 4, (2, 8, 8), generator=torch.Generator().manual_seed(0))
    labels[:, :3] = 255
    batches = [(torch.randn(2, 3, 8, 8), labels)]
    task = ck.Task(train=batches, val=batches, loss=loss)
    assert task.ignore_index == 255
    model = nn.Conv2d(3, 4, 1)
    expected = (model(batches[0][0]).argmax(1) == labels)[:, 3:].double().mean().item()
    assert evaluate(model, task) == pytest.approx(expected)
    preflight_check(model, task)
    goal = ck.imitate(copy.deepcopy(model).eval(), loss=lambda s, t, target: (target == -100).float().mean() + 0 * s.sum())
    assert goal.bind(model, task)(model, batches[0])["imitate"].item() == pytest.approx(0.9 * 3 / 8)


def test_a_label_that_nobody_leaves_out_is_one_message() -> None:
    batches = [(torch.randn(2, 3, 8, 8), torch.full((2, 8, 8), 255))]
    with pytest.raises(
        DataError, match=r"labels must be 0..3, got 255; .*Task\(loss=partial\(F.cross_entropy, ignore_index=255\)\)"
    ):
        evaluate(nn.Conv2d(3, 4, 1), ck.Task(val=batches))


def test_no_label_that_counts_is_an_error_and_not_nan() -> None:
    batches = [(torch.randn(2, 3, 8, 8), torch.full((2, 8, 8), -100))]
    task = ck.Task(val=batches)
    with pytest.raises(DataError, match="accuracy: all 128 labels are ignored ones, -100, so that there is nothing to count"):
        evaluate(nn.Conv2d(3, 4, 1), task)
    preflight_check(nn.Conv2d(3, 4, 1), task)  # its first batch may be of padding alone


def test_rows_are_repeated_where_there_are_fewer() -> None:
    x, state, table = torch.arange(6.0).view(3, 2), torch.arange(24.0).view(2, 3, 4), torch.zeros(9, 4)
    rows, states, same = repeated_rows((x, state, table), 7)
    assert torch.equal(rows, x[[0, 1, 2, 0, 1, 2, 0]])
    assert torch.equal(states, state[:, [0, 1, 2, 0, 1, 2, 0]])
    assert same is table
    fewer = repeated_rows({"x": x, "state": state, "table": table}, 2)
    assert torch.equal(fewer["x"], x[:2])
    assert torch.equal(fewer["state"], state[:, :2])
    assert fewer["table"] is table


def test_first_rows_of_a_state_are_in_its_second_dimension() -> None:
    x, state = first_rows((torch.zeros(5, 6), torch.zeros(2, 5, 8)), 3)
    assert (x.shape, state.shape) == ((3, 6), (2, 3, 8))
    boxes = first_rows({"x": torch.zeros(5, 6), "anchors": torch.zeros(9, 4)}, 3)
    assert (boxes["x"].shape, boxes["anchors"].shape) == ((3, 6), (9, 4))  # a table
    tokens, mask = first_rows((torch.zeros(5, 5), torch.zeros(1, 5)), 3)  # as many positions as rows
    assert (tokens.shape, mask.shape) == ((3, 5), (1, 5))


def test_first_rows_leaves_what_has_no_rows() -> None:
    x, table, scale = torch.zeros(5, 9, 8), torch.zeros(9, 9), torch.tensor(2.0)
    rows, same, number, flag = first_rows((x, table, scale, True), 2)
    assert rows.shape == (2, 9, 8)
    assert same is table
    assert number is scale
    assert flag is True


NAMED = {
    "time first": ({"x": {0: "length", 1: "batch"}}, (1,)),
    "time first, of a fixed length": ({"x": {1: "batch_size"}}, (1,)),
    "a mask": ({"x": {0: "batch", 1: "l"}, "mask": {0: "l", 1: "l"}}, (0, None)),
    "a mask, no name of a batch": ({"x": {0: "b", 1: "l"}, "mask": {0: "l", 1: "l"}}, (0, None)),
    "a state": ({"x": {0: "b"}, "state": {1: "b"}}, (0, 1)),
    "a fixed batch": ({"x": {1: "length"}, "mask": {0: "length"}}, (None, None)),
    "a fixed second input": ({"x": {0: "batch"}, "table": {}}, (0, None)),
    "all": ((0, 1), None),
    "none": ((), (None,)),
}


@pytest.mark.parametrize("case", NAMED)
def test_names_of_dimensions_say_where_the_rows_are(case) -> None:
    dynamic, wanted = NAMED[case]
    assert row_dims(list(dynamic) if isinstance(dynamic, dict) else ["x"], dynamic) == wanted


def test_rows_are_cut_repeated_and_counted_where_they_are_said_to_be() -> None:
    x, mask = torch.arange(24.0).view(3, 4, 2), torch.zeros(3, 3)
    assert [v.shape for v in first_rows((x, mask), 2, (1, None))] == [(3, 2, 2), (3, 3)]
    assert torch.equal(repeated_rows((x, mask), 6, (1, None))[0], x[:, [0, 1, 2, 3, 0, 1]])
    assert [batch_size((x, mask), dims) for dims in (None, (1, None), (None, 0), (None, None))] == [3, 4, 3, 3]


def test_inputs_are_taken_whole_where_fewer_rows_do_not_run() -> None:
    inputs, seen = (torch.zeros(8, 3),), []

    def run(rows) -> None:
        seen.append(len(rows[0]))
        rows[0].view(-1, 4, 3)

    for count, wanted, runs in ((2, 8, [2]), (4, 4, [4]), (8, 8, [])):
        seen.clear()
        assert len(rows_that_run(run, first_rows(inputs, count), inputs)[0]) == wanted
        assert seen == runs


def test_the_rows_of_inputs_inside_a_dict() -> None:
    assert batch_size(({"x": torch.zeros(7, 5), "y": torch.zeros(3)},)) == 7
    assert batch_size(({"name": "a", "inner": {"x": torch.zeros(2, 5)}}, torch.zeros(3))) == 2

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 32), nn.Linear(32, 2)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.b(self.a(batch["x"]).relu())

    assert "a: keep 16 of 32" in str(ck.prune.plan_channels(Reads(), ({"x": torch.randn(7, 5)},), ck.keep(macs=0.6)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"val": "data"}, r"Task\(val=\.\.\.\): wanted a loader of batches, got str; read the data"),
        ({"train": {"x": torch.zeros(2, 3)}}, r"Task\(train=\.\.\.\): wanted a loader of batches, got dict; .* \[batch\]"),
        ({"loss": "ce"}, r"Task\(loss=\.\.\.\): wanted a function .*, such as F\.cross_entropy, got 'ce'"),
        ({"predict": 0}, r"Task\(predict=\.\.\.\): wanted a function of the model's output, got 0"),
        ({"higher_is_better": "no"}, r"Task\(higher_is_better=\.\.\.\): wanted True or False, got 'no'"),
        ({"target": 1}, r"Task\(target=\.\.\.\): wanted the key of the target .*, a text, got 1"),
        ({"device": "gpu"}, r"Task\(device=\.\.\.\): wanted a device of torch, such as .*, got 'gpu'"),
        ({"device": 1.5}, r"Task\(device=\.\.\.\): wanted a device of torch, such as .*, got 1\.5"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        ck.Task(**{"val": [1], **settings})


def test_settings_that_are_used_in_the_wild_are_taken() -> None:
    class Batches:
        def __iter__(self):
            return iter([1, 2])

    for settings in (
        {"val": Batches()},
        {"train": (1, 2), "calibration": torch.zeros(2, 3, 8)},
        {"loss": nn.CrossEntropyLoss()},
        {"loss": None},  # nothing reads it
        {"higher_is_better": np.bool_(False)},
        {"device": torch.device("cuda", 1)},
        {"target": None},
    ):
        ck.Task(**{"val": [1], **settings})
