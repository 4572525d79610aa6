"""Networks most of whose weights are in embedding tables, as recommenders are."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.search.candidate import Candidate, Removable
from compresskit.search.explore import in_float
from compresskit.search.figures import Figures
from compresskit.search.outcome import Tried
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.script.source import SourceWriter


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
    """int8, int4 and dynamic store tables in eight bits, which are not few enough."""
    search = ck.compress(model, task, ck.at_most(bytes="0.2x"), out=tmp_path / "runs", trials=5, finalists=1, seconds=0.02)
    assert search.chosen.candidate.bits == "weights4"
    assert search.onnx.stat().st_size <= 0.2 * search.dense.bytes
    tried = {entry.candidate.name: entry.figures for entry in search.tried if entry.figures is not None}
    assert all(search.dense.bytes / 3 > tried[name].bytes > search.dense.bytes / 4 for name in ("int8", "dynamic"))
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
    assert not candidate.trains_in_two_parts
    cut, rounded = candidate.stages(order=Removable(), samples=7, train=train, dynamic=(0, 1))
    assert cut.finetune.epochs == 4
    assert (rounded.samples, rounded.dynamic) == (7, (0, 1))
    assert SourceWriter().source(rounded, "here") == (
        "ck.quant.WeightQuant(rounding=ck.quant.weight_only.gptq, embeddings=ck.quant.BlockScheme(),"
        " storage=ck.quant.weight_only.MATMUL_NBITS, dynamic=(0, 1), samples=7)"
    )
    (alone,) = Candidate(bits="weights4").stages(order=Removable(), samples=7, train=train)
    assert isinstance(alone, ck.quant.WeightQuant)


class Factors(nn.Module):
    """Matrix factorisation, which has tables and no MACs."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(50, 16), nn.Embedding(50, 16)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return (self.user(user) * self.item(item)).sum(-1)


def test_a_model_without_macs_is_compressed_to_a_budget_of_bytes_and_to_none_of_macs(tmp_path) -> None:
    torch.manual_seed(0)
    pairs = [(*torch.randint(0, 50, (2, 64)), torch.randn(64))]
    ratings = ck.Task(train=pairs, val=pairs, loss=F.mse_loss, metric=F.mse_loss, higher_is_better=False)
    quick = {"trials": 2, "finalists": 1, "seconds": 0.02}
    model = Factors()
    found = ck.compress(model, ratings, ck.at_most(bytes="0.6x"), out=tmp_path / "bytes", **quick)
    assert found.onnx.stat().st_size <= 0.6 * found.dense.bytes
    assert found.figures.macs == found.dense.macs == 0
    wanted = r"at_most\(macs=...\): wanted a share of the MACs of Factors, which has none .* give a budget of bytes"
    with pytest.raises(ck.SettingError, match=wanted):
        ck.compress(model, ratings, ck.at_most(macs="0.5x"), out=tmp_path / "macs", **quick)
    found = ck.compress(model, ratings, ck.at_most(macs=100, bytes="0.6x"), out=tmp_path / "bytes", **quick)
    assert found.figures.macs == 0  # within any number of them


def test_shares_of_nothing() -> None:
    nothing = Figures(metric=1.0, drop=0.0, latency=1.0, bytes=10, macs=0)
    assert nothing.excesses({"macs": 0.0, "bytes": 10}) == {}
    assert replace(nothing, macs=1).excesses({"macs": 0.0}) == {"macs": math.inf}
    lost = replace(nothing, latency=3.0)
    tried = {c: Tried(candidate=c, figures=lost) for c in (Candidate(), Candidate(blocks=1))}
    assert in_float(tried, {"latency": 2.0}, nothing) == Candidate(blocks=1, bits="float")
