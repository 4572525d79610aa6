"""Which part of the validation data candidates are judged by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import compresskit as ck
from compresskit.search.proxy.held_out import held_out


def batches(rows: int, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)) for _ in range(count)]


def test_the_example_of_held_out_data_has_few_rows_and_the_data_all() -> None:
    task = ck.Task(val=batches(100), target="y")
    held = held_out(task, 150, (0,))
    assert torch.equal(held.example()[0], task.example()[0][:8])
    assert [len(x) for x, _ in held.batches("val")] == [100, 100]
    assert held.target == "y"
    assert len(replace(held, reference=torch.nn.Linear(4, 2)).example()[0]) == 8  # as a stage gets it


@pytest.mark.parametrize("dynamic", [(), (1,), {"x": {0: "batch"}}], ids=repr)
def test_the_example_is_whole_where_the_file_may_take_that_many_rows_alone(dynamic) -> None:
    assert len(held_out(ck.Task(val=batches(100)), 150, dynamic).example()[0]) == 100


def test_the_example_is_whole_where_not_all_inputs_have_a_row_a_sample() -> None:
    nodes = [(torch.randn(20, 4), torch.zeros(2, 30, dtype=torch.long), torch.zeros(20, dtype=torch.long))]
    found = held_out(ck.Task(val=nodes), 10, (0,)).example()
    assert [tuple(value.shape) for value in found] == [(20, 4), (2, 30)]


def test_a_task_with_methods_of_its_own_keeps_them() -> None:
    class Mine(ck.Task):
        def example(self):
            return (torch.ones(3, 4),)

    held = held_out(Mine(val=batches(100)), 150, (0,))
    assert torch.equal(held.example()[0], torch.ones(3, 4))
    assert [len(x) for x, _ in held.batches("val")] == [100, 100]


def by_class(**settings) -> DataLoader:
    """Three classes of 40 samples, one class after another."""
    labels = torch.arange(120) // 40
    return DataLoader(TensorDataset(torch.randn(120, 4), labels), batch_size=8, **settings)


class Reading:
    """A loader that is neither a list nor of torch, and that counts what is read of it."""

    def __init__(self) -> None:
        self.batches, self.read = [*by_class()], 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            self.read += 1
            yield batch


@pytest.mark.parametrize(
    "loader",
    [
        by_class(),
        by_class(drop_last=True),
        by_class(num_workers=1),
        [*by_class()],
        tuple(by_class()),
        Reading(),
        DataLoader(by_class().dataset, batch_sampler=BatchSampler(range(120), 8, drop_last=False)),
    ],
    ids=["loader", "drop_last", "worker", "list", "tuple", "own", "batch_sampler"],
)
def test_held_out_data_are_spread_over_data_that_are_sorted_by_class(loader) -> None:
    task = ck.Task(val=loader)
    held, again = (held_out(task, 30, (0,)).val for _ in range(2))
    assert [len(y) for _, y in held] == [8, 8, 8, 8]  # whole batches, as some models take one size alone
    assert torch.cat([y for _, y in held]).bincount(minlength=3).min() >= 8
    assert all(torch.equal(x, y) for one, other in zip(held, again, strict=True) for x, y in zip(one, other, strict=True))
    assert torch.equal(held[0][0][0], next(iter(loader))[0][0])


def test_no_more_samples_are_read_than_are_held_out() -> None:
    read = []

    class Watched(TensorDataset):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    data = Watched(*by_class().dataset.tensors)
    held_out(ck.Task(val=DataLoader(data, batch_size=8)), 24, (0,))
    assert read == [*range(8), *range(0, 120, 5)]  # the first batch says how many rows there are


@pytest.mark.parametrize("samples", [113, 120, 1000])
def test_all_data_are_held_out_where_there_are_not_more(samples) -> None:
    data = by_class()
    held = held_out(ck.Task(val=data), samples, (0,)).val
    assert torch.equal(torch.cat([x for x, _ in held]), data.dataset.tensors[0])


def test_shuffled_data_are_held_out_like_others() -> None:
    first = held_out(ck.Task(val=by_class(shuffle=True, generator=torch.Generator().manual_seed(0))), 30, (0,)).val
    assert [len(y) for _, y in first] == [8, 8, 8, 8]
    assert torch.cat([y for _, y in first]).bincount(minlength=3).min() >= 8


@pytest.mark.parametrize("samples", [30, 120])
def test_each_process_holds_out_the_same_shuffled_data(samples) -> None:
    loader = by_class(shuffle=True)
    parts = []
    for seed in (1, 2):  # of the process
        torch.manual_seed(seed)
        parts.append(held_out(ck.Task(val=loader), samples, (0,)).val)
    assert all(torch.equal(x, y) for one, other in zip(*parts, strict=True) for x, y in zip(one, other, strict=True))
    torch.manual_seed(3)
    drawn = DataLoader(loader.dataset, batch_size=8, sampler=RandomSampler(loader.dataset, num_samples=40))
    assert [len(y) for _, y in held_out(ck.Task(val=drawn), 30, (0,)).val] == [8, 8, 8, 8]
