"""Layers that few positions of the data reach: what is lost is not understated, MACs are fractions, and reasons are true."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.prune.channels.reconstruct import input_statistics
from compresskit.prune.low_rank import factored, plan_ranks, spectrum


def correlated(rows: int, columns: int) -> torch.Tensor:
    mixing = torch.randn(columns, columns, generator=torch.Generator().manual_seed(1)) * 0.9 ** torch.arange(columns)
    return torch.randn(rows, columns) @ mixing.T / columns**0.5 + 0.5


def statistics_of(layer: nn.Module, x: torch.Tensor):
    return input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)])["0.weight"]


@torch.no_grad()
@pytest.mark.parametrize("rows", [6, 20, 60])
def test_what_is_lost_is_not_less_than_on_new_data(rows) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), correlated(5000, 64)
    y = layer(x)
    for rank in (8, 16, 24):
        true = {}
        for name, seen in (("few", statistics_of(layer, x[:rows])), ("weights", None)):
            error = factored(layer, (rank,), spectrum(layer, seen))(x) - y
            true[name] = float((error - error.mean(0)).square().sum() / (y - y.mean(0)).square().sum())
        said = spectrum(layer, statistics_of(layer, x[:rows])).lost((rank,))
        assert 0.8 * true["few"] < said < 1
        assert true["few"] < true["weights"]


def test_a_covariance_of_few_rows_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16, bias=False), correlated(20, 32)
    s = (x.T @ x / 20).double().numpy()
    trace, squares = np.trace(s), np.trace(s @ s)
    rho = ((1 - 2 / 32) * squares + trace**2) / ((20 + 1 - 2 / 32) * (squares - trace**2 / 32))
    assert 0 < rho < 1
    weight = layer.weight.detach().double().numpy()
    values = np.linalg.eigvalsh(weight @ ((1 - rho) * s + rho * trace / 32 * np.eye(32)) @ weight.T)[::-1]
    np.testing.assert_allclose(spectrum(layer, statistics_of(layer, x)).energy.numpy(), values / values.sum(), atol=1e-4)


class Experts(nn.Module):
    """Each row goes to the expert that its first value names; which are called with nothing is told by `all_called`."""

    def __init__(self, all_called: bool = True):
        super().__init__()
        self.experts, self.all_called = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)]), all_called

    def forward(self, x):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] == number).nonzero()[:, 0]
            if len(rows) or self.all_called:
                y = y.index_add(0, rows, expert(x[rows]))
        return y


def sent_to(*counts: int) -> torch.Tensor:
    """Rows for the experts, so many for each."""
    x = correlated(sum(counts), 32)
    x[:, 0] = torch.arange(3).repeat_interleave(torch.tensor(counts)).float()
    return x


@pytest.mark.parametrize("quantity", ["macs", "parameters"])
def test_an_expert_that_few_rows_reach_does_not_seem_to_be_free(quantity) -> None:
    torch.manual_seed(0)
    model, batches = Experts(), [sent_to(400, 4, 400) for _ in range(2)]
    example = batches[0]
    plan = plan_ranks(model, example, ck.keep(**{quantity: 0.9}), batches=batches)
    assert "experts.1" not in [line.layer for line in plan.lines]
    plan = plan_ranks(model, example, ck.keep(parameters=0.5), batches=batches)
    positions = {line.layer: line.positions for line in plan.lines}
    assert positions == {"experts.0": None, "experts.1": 8, "experts.2": None}
    assert "of its variance lost (of 8 positions, few for 32 inputs; give more batches)" in str(plan)
    assert plan.lines[1].lost > 0.1
    assert 0 < plan.lines[1].macs < plan.lines[1].macs_before < 32 * 32 / 100  # 4 of 804 rows
    assert ck.count_macs(plan.apply_(copy.deepcopy(model), batches), example) == pytest.approx(plan.macs, abs=1)


def test_macs_of_layers_that_not_every_row_reaches_are_counted() -> None:
    model, example = Experts(), sent_to(8, 9, 10)  # less than one of two rows for each
    plan = plan_ranks(model, example, ck.keep(macs=0.6))
    assert plan.macs <= 0.6 * plan.macs_before
    assert ck.count_macs(plan.apply_(model), example) == pytest.approx(plan.macs, abs=1)


@pytest.mark.parametrize("all_called", [True, False])
def test_an_expert_that_the_example_does_not_reach_is_named_truly(all_called) -> None:
    model, example = Experts(all_called), sent_to(40, 40, 0)
    plan = plan_ranks(model, example, ck.keep(macs=0.9), batches=[example, sent_to(40, 40, 40)])
    assert plan.locked == {"experts.2": "only batches reach it, not the example; give an example that does"}
    plan = plan_ranks(model, example, ck.keep(macs=0.9), batches=[example])
    called = "no position of the example reaches it; give an example that does"
    assert plan.locked == {"experts.2": called if all_called else "its weights are read without calling it, or not at all"}
    assert plan_ranks(
        model, sent_to(40, 40, 40), ck.keep(macs=0.9), batches=[example]
    ).lines  # which no batch reaches: of weights


@pytest.mark.parametrize(("side", "images", "positions"), [(26, 1, None), (18, 1, 256), (18, 2, 512), (18, 3, None)])
def test_a_convolution_is_scarce_only_where_all_positions_of_the_data_are_few(side, images, positions) -> None:
    """A window of 3x3 over 32 channels has 288 inputs, and 576 positions are enough: 24x24 of one image, or 16x16 of three."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Conv2d(32, 32, 3)).eval(), [torch.randn(1, 32, side, side) for _ in range(images)]
    plan = plan_ranks(model, batches[0], ck.keep(macs=0.6), batches=batches)
    assert [line.positions for line in plan.lines] == [positions]


def test_a_batch_gives_a_wide_layer_as_many_different_positions_as_it_needs() -> None:
    layer = nn.Linear(1100, 2)
    x = torch.eye(1100).repeat(3, 1) * torch.arange(1, 3301)[:, None]  # each row is another
    found = input_statistics(nn.Sequential(layer), ["0.weight"], [(x,), (x,)], for_each_input=2)["0.weight"]
    assert found.rows == 2200 + 550
    once = input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)], for_each_input=3)["0.weight"]
    assert once.rows == 3300
    torch.testing.assert_close(once.products, (x.T @ x).double())
