"""Of how many rows latencies are, where the model does not take the batch of the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.search.latency.timed_batch import check_timed_batch
from compresskit.search.proxy.held_out import held_out
from compresskit.search.proxy.workshop import Workshop

QUICK = {"trials": 1, "finalists": 1, "seconds": 0.02}


class Views(nn.Module):
    """Several views of a thing are as many rows, which it compares with their mean."""

    def __init__(self, views: int) -> None:
        super().__init__()
        self.views, self.body, self.head = views, nn.Linear(12, 32), nn.Linear(32, 3)

    def forward(self, x):
        h = self.body(x).relu()
        return self.head(h.reshape(-1, self.views, 32).mean(1).repeat_interleave(self.views, 0) + h)


class Graph(nn.Module):
    """A layer over the neighbours of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 32), nn.Linear(32, 3)

    def forward(self, nodes, edges):
        h = self.body(nodes).relu()
        return self.head(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


def views_task(rows: int = 8) -> ck.Task:
    torch.manual_seed(0)
    batches = [(x, x[:, :3].argmax(1)) for x in torch.randn(4, rows, 12)]
    return ck.Task(train=batches, val=batches)


def graph_task() -> ck.Task:
    torch.manual_seed(0)
    edges = torch.randint(0, 20, (2, 30)).index_fill(1, torch.tensor([0]), 19)
    batches = [(x, edges, x[:, :3].argmax(1)) for x in torch.randn(4, 20, 12)]
    return ck.Task(train=batches, val=batches)


def workshop(model: nn.Module, task: ck.Task, out: Path, batch: int) -> Workshop:
    model.eval()
    return Workshop(
        model=model, task=task, held=held_out(task, 64, (0,), model), out=out, samples=8, batch=batch, threads=1, seconds=0.02,
        seed=0, target=ck.quant.X86,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 6, 9])
def test_a_batch_that_the_model_does_not_take_is_refused(batch, tmp_path) -> None:
    refusal = rf"at_most\(batch={batch}\): Views does not run on a batch of {batch}, but on the 8 .*; write at_most\(batch=8\)"
    with pytest.raises(ck.SettingError, match=refusal):
        ck.compress(Views(4), views_task(), ck.at_most(latency="2x", batch=batch), out=tmp_path / "s", **QUICK)
    assert not (tmp_path / "s").exists()


def test_a_model_of_a_fixed_batch_is_compressed_where_no_latency_is_asked(tmp_path) -> None:
    """The default batch is no wish."""
    found = ck.compress(Views(4), views_task(), ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    assert "Latencies are of the whole first validation batch, with inputs of shapes [(8, 12)]" in found.reason


@pytest.mark.parametrize("batch", [4, 8, 12])
def test_a_batch_that_it_takes_is_timed(batch, tmp_path) -> None:
    shop = workshop(Views(4), views_task(), tmp_path, batch)
    assert check_timed_batch(shop) == ""
    assert [x.shape for x in shop.timed_inputs()] == [(batch, 12)]


def test_the_example_is_a_whole_batch_where_the_model_takes_no_less(tmp_path) -> None:
    """Stages capture candidates on it."""
    model, task = Views(16).eval(), views_task(32)
    assert len(held_out(task, 64, (0,), model).example()[0]) == 32
    assert len(held_out(task, 64, (0,), Views(4).eval()).example()[0]) == 8


def test_a_whole_graph_is_timed_and_said_to_be(tmp_path, caplog) -> None:
    remark = check_timed_batch(workshop(Graph(), graph_task(), tmp_path, 1))
    assert remark == ". Latencies are of the whole first validation batch, with inputs of shapes [(20, 12), (2, 30)]"
    assert "Graph takes no part of a batch, so latencies are of the whole first one, [(20, 12), (2, 30)]" in caplog.text
