"""CP of convolutions: exact where the weight has that rank, for every kind of convolution, and chosen where it loses less."""

from __future__ import annotations

import copy
import json

import networks
import numpy as np
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.graph.replacements import Factored
from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.channels.reconstruct import input_statistics
from compresskit.prune.low_rank import LowRank, RankPlan, factored, plan_ranks, spectrum
from compresskit.prune.low_rank.cp import cp_factors

KINDS = {
    "plain": {"kernel_size": 3},
    "strides": {"kernel_size": 3, "stride": (2, 3), "padding": 1},
    "dilation": {"kernel_size": (3, 5), "dilation": (2, 1), "padding": (2, 0), "bias": False},
    "same": {"kernel_size": (3, 5), "padding": "same"},
    "circular": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "circular"},
    "reflect": {"kernel_size": (5, 3), "padding": 2, "padding_mode": "reflect", "stride": 2},
}


def of_rank(rank: int, outputs: int, inputs: int, rows: int, columns: int) -> torch.Tensor:
    factors = [torch.randn(size, rank) for size in (outputs, inputs, rows, columns)]
    return torch.einsum("or,ir,yr,xr->oiyx", *factors) / (rank * inputs) ** 0.5


def statistics_of(layer: nn.Module, x: torch.Tensor):
    return input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)])["0.weight"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_data", [True, False])
def test_a_weight_of_the_rank_is_met(kind, on_data) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(8, 12, **KINDS[kind]), torch.randn(8, 8, 11, 12) + 0.5
    layer.weight.data = of_rank(2, 12, 8, *layer.kernel_size)
    small = factored(layer, (3,), spectrum(layer, statistics_of(layer, x) if on_data else None))
    assert [part.groups for part in small] == [1, 3, 3, 1]
    assert [part.kernel_size for part in small] == [(1, 1), (layer.kernel_size[0], 1), (1, layer.kernel_size[1]), (1, 1)]
    wanted = layer(x)
    assert (small(x) - wanted).norm() < 0.02 * wanted.norm()
    assert small(x).shape == wanted.shape
    assert small.record() == {"kind": "factored", "ranks": [3]}


def plain_als(target: np.ndarray, rank: int, seed: int) -> float:
    """Fraction of the squares that is left after 200 sweeps of textbook alternating least squares."""
    drawn = np.random.default_rng(seed)
    factors = [drawn.normal(size=(size, rank)) for size in target.shape]
    for _ in range(200):
        for mode in range(4):
            rest = [factors[i] for i in range(4) if i != mode]
            rows = np.einsum("ar,br,cr->abcr", *rest).reshape(-1, rank)
            unfolded = np.moveaxis(target, mode, 0).reshape(target.shape[mode], -1)
            factors[mode] = np.linalg.lstsq(rows, unfolded.T, rcond=None)[0].T
    return float(((target - np.einsum("ar,br,cr,dr->abcd", *factors)) ** 2).sum() / (target**2).sum())


def test_the_fit_is_that_of_textbook_least_squares() -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 8, 3, 3)
    found = cp_factors(weight, 6)
    best = min(plain_als(weight.numpy().astype(float), 6, seed) for seed in range(3))
    assert best - 1e-6 <= found.lost < 1.1 * best
    rest = weight.double() - found.whole()
    assert found.lost == pytest.approx(float(rest.square().sum() / weight.double().square().sum()), rel=1e-6)


@torch.no_grad()
def test_what_is_lost_is_that_of_the_outputs_on_data() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(8, 8) * torch.linspace(0.1, 2, 8)
    layer, x = nn.Conv2d(8, 12, 3), torch.einsum("nchw,cd->ndhw", torch.randn(64, 8, 9, 9), mixing) + 1
    statistics = statistics_of(layer, x)
    plan = plan_ranks(nn.Sequential(layer), x, ck.keep(macs=0.5), batches=[x], round_to=1, method="cp")
    lost = {}
    for name, seen in (("data", statistics), ("weights", None)):
        y, small = layer(x), factored(layer, plan.lines[0].ranks, spectrum(layer, seen))(x)
        varied = y - y.mean((0, 2, 3), keepdim=True)
        lost[name] = float((small - y - (small - y).mean((0, 2, 3), keepdim=True)).square().sum() / varied.square().sum())
    assert plan.lines[0].lost == pytest.approx(lost["data"], rel=0.1)
    assert lost["data"] < lost["weights"]


class Two(nn.Module):
    """A convolution whose window is separable in many ways, and one of few channels in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.terms, self.narrow = nn.Conv2d(16, 24, 3, 2, 1), nn.Conv2d(24, 24, 3, padding=1)
        self.terms.weight.data = of_rank(24, 24, 16, 3, 3)
        core, ends = torch.randn(4, 4, 3, 3) / 6, (torch.randn(24, 4), torch.randn(4, 24) / 5)
        self.narrow.weight.data = torch.einsum("op,pqyx,qi->oiyx", ends[0], core, ends[1])

    def forward(self, x):
        return self.narrow(self.terms(x))


@torch.no_grad()
def test_each_layer_gets_the_form_that_loses_less() -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 16, 12, 12)
    plans = {m: plan_ranks(model, x, ck.keep(macs=0.4), round_to=1, method=m) for m in ("tucker", "cp", "auto")}
    forms = {m: [len(line.ranks) for line in plan.lines] for m, plan in plans.items()}
    assert forms == {"tucker": [2, 2], "cp": [1, 1], "auto": [1, 2]}
    errors = {m: float((plan.apply_(copy.deepcopy(model))(x) - model(x)).norm() / model(x).norm()) for m, plan in plans.items()}
    plan = plans["auto"]
    assert errors["auto"] < 0.5 * errors["tucker"]
    assert errors["auto"] < 1.05 * errors["cp"]
    assert plan.lines[1].lost < 1e-9 < plans["cp"].lines[1].lost
    assert f"  terms: CP of rank {plan.lines[0].ranks[0]} of 144," in str(plan)
    assert RankPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    small = plan.apply_(copy.deepcopy(model))
    assert ck.count_macs(small, x) == plan.macs <= 0.4 * plan.macs_before
    torch.testing.assert_close(small(x), plan.apply_(copy.deepcopy(model))(x), rtol=0, atol=0)  # always the same


@pytest.mark.slow
def test_a_model_with_cp_is_trained_pruned_saved_and_exported(tmp_path) -> None:
    torch.manual_seed(0)
    task, model = networks.images_task(ck, samples=64, classes=4), build(networks.WideChain)
    stage = LowRank(
        budget=ck.keep(macs=0.6), round_to=2, samples=64, method="cp", finetune=ck.Train(steps=4, objective=ck.imitate())
    )
    small = stage(model, task)
    assert any(isinstance(m, Factored) and len(m) == 4 for m in small.modules())
    ck.prune.apply_(small, ck.prune.plan_channels(small, image(2), ck.keep(macs=0.8), round_to=2))
    ck.save(small, tmp_path)
    loaded, inputs = ck.load(build(networks.WideChain), tmp_path), image(3)
    torch.testing.assert_close(loaded(*inputs), small(*inputs))
    assert ck.verify_onnx(ck.export_onnx(small, tmp_path / "m.onnx", image(2)), small, [image(1), image(7)])


def test_what_cannot_be_is_refused() -> None:
    model, x = nn.Sequential(nn.Conv2d(16, 16, (3, 1))), torch.randn(2, 16, 8, 8)
    with pytest.raises(ck.ModelError, match="whole layers: 0: no rank saves anything"):
        plan_ranks(model, x, ck.keep(macs=0.5), method="cp")
    assert plan_ranks(model, x, ck.keep(macs=0.5), method="auto", round_to=1).lines[0].full == (16, 16)
    with pytest.raises(ck.SettingError, match=r"plan_ranks\(method=...\): wanted one of .*'auto'.*, got 'als'"):
        plan_ranks(model, x, ck.keep(macs=0.5), method="als")
    with pytest.raises(ck.SettingError, match=r"LowRank\(method=...\): wanted one of"):
        LowRank(budget=ck.keep(macs=0.5), method=None)
    square = nn.Sequential(nn.Conv2d(4, 4, 3))
    for ranks in ([37], [0], [True]):
        damaged = structure(square) | {"replaced": {"0": {"kind": "factored", "ranks": ranks}}}
        with pytest.raises(ck.CheckpointError, match=r"wanted a rank up to each of \(36,\), got"):
            restructure_(nn.Sequential(nn.Conv2d(4, 4, 3)), damaged)


@torch.no_grad()
def test_cp_is_compared_with_what_saves_as_much() -> None:
    """Tucker-2 of almost full rank loses less, and saves almost nothing."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(16, 24, 3, padding=1, bias=False), torch.randn(4, 16, 12, 12)
    whole = of_rank(12, 24, 16, 3, 3)
    layer.weight.copy_(whole + 0.1 * whole.std() * torch.randn_like(whole))
    (line,) = plan_ranks(nn.Sequential(layer), x, ck.keep(macs=0.3), round_to=1, method="auto").lines
    assert len(line.ranks) == 1
    assert 0.001 < line.lost < 0.05
