"""Batches that carry the indices of their samples."""

from __future__ import annotations

import pytest
import torch
from networks import indexed_task

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_carry_the_indices_of_their_samples(workers) -> None:
    task, x, y = indexed_task(ck, shuffle=True, num_workers=workers)
    seen = []
    for batch in task.train:
        (inputs,), target = task.split(batch)
        assert torch.equal(inputs, x[batch.indices])
        assert torch.equal(target, y[batch.indices])
        seen.append(batch.indices)
    assert torch.cat(seen).sort().values.tolist() == list(range(96))
    named = kd.indexed_loader([{"x": torch.ones(2), "labels": 1}] * 4, batch_size=2)
    batch = next(iter(named))
    assert set(batch) == {"x", "labels"}
    assert batch.indices.tolist() == [0, 1]


def test_data_that_cannot_be_indexed_is_refused() -> None:
    with pytest.raises(DataError, match="indexed_loader: wanted a data set with a length .*, got generator"):
        kd.indexed_loader(i for i in range(3))
    with pytest.raises(DataError, match=r"with_indices: wanted a batch \(inputs..., target\) or a dict, got Tensor"):
        kd.with_indices(torch.zeros(2), torch.arange(2))
