"""Networks most of whose weights are in embedding tables, as recommenders are."""

from __future__ import annotations

import runpy

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.proxy import Workshop
from compresskit.search.source import SourceWriter


class Recommender(nn.Module):
    def __init__(self, users: int = 3000, items: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.score = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.score(torch.cat([self.user(user), self.item(item)], -1)).squeeze(-1)


def near(predictions, targets):
    return -F.mse_loss(predictions, targets)


@pytest.fixture(scope="module")
def task() -> ck.Task:
    generator = torch.Generator().manual_seed(0)
    user, item = (torch.randint(0, count, (512,), generator=generator) for count in (3000, 1000))
    rows = [(user[i : i + 64], item[i : i + 64], torch.sin(user[i : i + 64].float())) for i in range(0, 512, 64)]
    return ck.Task(train=rows[:6], val=rows[6:], loss=F.mse_loss, metric=near, higher_is_better=True)


@pytest.fixture(scope="module")
def model() -> Recommender:
    torch.manual_seed(0)
    return Recommender().eval()


def shop(model, task, tmp_path, target=ck.quant.X86) -> Workshop:
    return Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=8, batch=1, threads=1, seconds=0.02, seed=0, target=target
    )  # fmt: skip


def test_tables_are_stored_in_four_bits_where_the_budget_asks_for_it(model, task, tmp_path) -> None:
    """int8 and int4 leave tables float, and eight bits are not few enough."""
    search = ck.compress(model, task, ck.at_most(bytes="0.2x"), out=tmp_path / "runs", trials=5, finalists=1, seconds=0.02)
    assert search.chosen.candidate.bits == "weights4"
    assert search.onnx.stat().st_size <= 0.2 * search.dense.bytes
    tried = {entry.candidate.name: entry.figures for entry in search.tried if entry.figures is not None}
    assert tried["int8"].bytes > 0.9 * search.dense.bytes > 2 * tried["dynamic"].bytes > 2 * 0.2 * search.dense.bytes
    stored = {t.name: t for t in onnx.load(search.onnx).graph.initializer}
    assert max(len(t.raw_data) for t in stored.values()) == 3000 * 32 // 2  # the larger table
    written = runpy.run_path(str(search.code))["recipe"]
    assert repr(written) == repr(search.recipe)


def test_few_bits_for_tables_are_tried_where_they_are_large_and_can_be_looked_up(model, task, tmp_path) -> None:
    assert shop(model, task, tmp_path).storages == ("float", "int8", "int4", "dynamic", "weights4")
    elsewhere = shop(model, task, tmp_path, ck.quant.OPENVINO)
    assert "weights4" not in elsewhere.storages
    small = nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 64), nn.Linear(64, 64))
    assert "weights4" not in shop(small, task, tmp_path).storages
    tied = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64, bias=False))
    tied[1].weight = tied[0].weight
    assert shop(tied, task, tmp_path).storages[3:] == ("dynamic", "weights4")
    assert shop(nn.ReLU(), task, tmp_path).storages == ("float", "int8", "int4")


def test_what_is_cut_is_trained_before_its_weights_are_rounded() -> None:
    train = ck.Train(epochs=4, optimizer=torch.optim.SGD)
    candidate = Candidate(macs=0.5, bits="weights4")
    assert not candidate.trains_in_two_parts(train)
    cut, rounded = candidate.stages(order=Removable(), samples=7, train=train, dynamic=(0, 1))
    assert cut.finetune.epochs == 4
    assert (rounded.samples, rounded.dynamic) == (7, (0, 1))
    assert SourceWriter().source(rounded, "here") == (
        "ck.quant.WeightQuant(rounding=ck.quant.weight_only.gptq, embeddings=ck.quant.BlockScheme(),"
        " storage=ck.quant.weight_only.MATMUL_NBITS, samples=7, dynamic=(0, 1))"
    )
    (alone,) = Candidate(bits="weights4").stages(order=Removable(), samples=7, train=train)
    assert isinstance(alone, ck.quant.WeightQuant)
