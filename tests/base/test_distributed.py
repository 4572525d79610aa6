"""Splitting batches between processes, and reading sharded loaders whole."""

from __future__ import annotations

import pytest
import torch

import compresskit as ck
from compresskit.base import distributed


def test_parts_of_a_batch_weigh_what_they_hold(monkeypatch) -> None:
    x, y = torch.arange(7.0), torch.arange(7)
    for count in (2, 3, 9):
        seen, weights = [], []
        for number in range(count):
            monkeypatch.setattr(distributed, "world_size", lambda count=count: count)
            monkeypatch.setattr(distributed, "rank", lambda number=number: number)
            (part, target), weight = distributed.shard_batch((x, y), None)
            assert torch.equal(part.long(), target)
            seen.append(weight * part.mean() if weight else torch.zeros(()))
            weights.append(weight)
        assert torch.stack(seen).mean().item() == pytest.approx(x.mean().item())
        assert sum(weights) == pytest.approx(count)
    with pytest.raises(ck.DataError, match=r"no rows to share out in a batch of shapes \[\(7,\), \(3,\)\]"):
        distributed.shard_batch((x, y[:3]), None)
    sampler = torch.utils.data.distributed.DistributedSampler(list(range(8)), num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(list(range(8)), 2, sampler=sampler)
    assert distributed.shard_batch((x, y), loader) == ((x, y), 1.0)


def test_unequal_machines_are_named_once(monkeypatch, caplog) -> None:
    own = distributed._machine(torch.device("cpu"))
    other = own | {"cores": own["cores"] + 2, "torch": "2.11.0"}
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for number, machines in ((0, [own, own]), (1, [own, other]), (0, [own, other])):

        def gather(into, mine, machines=machines) -> None:
            assert mine == own
            into[:] = machines

        monkeypatch.setattr(distributed.dist, "all_gather_object", gather)
        monkeypatch.setattr(distributed, "rank", lambda number=number: number)
        distributed._warn_of_unequal_machines(torch.device("cpu"))
    (record,) = caplog.records
    assert f"cores {own['cores']}, {other['cores']}; torch {torch.__version__}, 2.11.0" in record.getMessage()
    assert "Every step waits for the slowest" in record.getMessage()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sharded_loader_is_read_whole_outside_of_training(shuffle, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    data = [(torch.full((1,), float(i)), i) for i in range(11)]
    seen = []
    for number in range(2):
        sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=2, rank=number, shuffle=shuffle)
        task = ck.Task(train=None, val=torch.utils.data.DataLoader(data, 4, sampler=sampler))
        assert task.length("val") == 3
        seen.append([label for _, labels in task.batches("val") for label in labels.tolist()])
    assert seen[0] == seen[1]
    assert sorted(seen[0]) == list(range(11))
    assert (seen[0] != list(range(11))) == shuffle
    batches = torch.utils.data.BatchSampler(sampler, 4, drop_last=False)
    with pytest.raises(ck.DataError, match="calibration and validation need all samples in every process"):
        ck.Task(val=torch.utils.data.DataLoader(data, batch_sampler=batches)).batches("val")
