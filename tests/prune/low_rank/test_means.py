"""Who takes the mean of what is lost: a bias, the BatchNorm behind the layer, or nobody, so that it counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.prune.channels.reconstruct import input_statistics
from compresskit.prune.low_rank import factored, plan_ranks, spectrum


def with_norms(bias: bool) -> nn.Module:
    """Convolutions and a linear layer, each with a BatchNorm behind it, that read values whose mean is not 0."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1, bias=bias), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=bias), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 1, bias=bias), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(24, 32, bias=bias), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for part in net:
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.bias.data = torch.rand(len(part.bias), generator=generator) + 0.3
        elif isinstance(part, nn.Conv2d | nn.Linear):
            part.weight.data = torch.randn(part.weight.shape, generator=generator) / part.weight[0].numel() ** 0.5
            if part.bias is not None:
                part.bias.data.zero_()
    ck.prune.reestimate_batchnorm_(net, [torch.randn(64, 3, 6, 6, generator=generator)])
    return net.eval()


@torch.no_grad()
@pytest.mark.parametrize("method", ["tucker", "cp", "auto"])
def test_without_bias_before_a_norm_it_is_what_it_is_with_a_bias_of_zeros(method) -> None:
    plain, biased, batches = with_norms(False), with_norms(True), [torch.randn(64, 3, 6, 6) for _ in range(2)]
    torch.testing.assert_close(plain(batches[0]), biased(batches[0]))
    plans = [plan_ranks(m, batches[0], ck.keep(macs=0.3), batches=batches, round_to=2, method=method) for m in (plain, biased)]
    assert "3" in [line.layer for line in plans[0].lines]
    assert len(plans[0].lines) > 1
    assert [(line.layer, line.ranks) for line in plans[0].lines] == [(line.layer, line.ranks) for line in plans[1].lines]
    for mine, other in zip(plans[0].lines, plans[1].lines, strict=True):
        assert mine.lost == pytest.approx(other.lost, rel=1e-3)
    small, wanted = (plan.apply_(copy.deepcopy(m), batches) for plan, m in zip(plans, (plain, biased), strict=True))
    torch.testing.assert_close(small(batches[0]), wanted(batches[0]), rtol=1e-3, atol=1e-4)
    assert not torch.equal(small[4].running_mean, plain[4].running_mean)  # where the mean went
    for model in (small, wanted):
        ck.prune.reestimate_batchnorm_(model, batches)
    torch.testing.assert_close(small(batches[0]), wanted(batches[0]), rtol=1e-3, atol=1e-4)


class Read(nn.Module):
    """A layer and what reads it."""

    def __init__(self, layer: nn.Module, readers: str) -> None:
        super().__init__()
        self.layer, self.norm, self.readers = layer, nn.BatchNorm2d(24), readers

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return {"norm": self.norm, "nothing": lambda y: y, "both": lambda y: self.norm(y) + y}[self.readers](y)


def with_mean(rows: int) -> Tensor:
    """Inputs with a few main directions around a mean that is larger than they are."""
    torch.manual_seed(0)
    mixing = torch.randn(16, 16) * torch.linspace(0.1, 1, 16)
    return torch.einsum("nchw,cd->ndhw", torch.randn(rows, 16, 8, 8), mixing) + 4 * torch.randn(16, 1, 1)


@pytest.mark.matrix
@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("bias", "readers"), [(True, "nothing"), (False, "norm"), (False, "nothing"), (False, "both")])
def test_what_is_lost_is_the_error_of_the_outputs_on_the_data(size, bias, readers) -> None:
    """As a fraction of their variance; it is never below what the main directions around their mean lose."""
    x = with_mean(8)  # of which all positions are read
    model = Read(nn.Conv2d(16, 24, size, bias=bias), readers).eval()
    plan = plan_ranks(model, x, ck.keep(macs=0.5), batches=[x], round_to=2, method="auto")
    (line,) = plan.lines
    small, norm = plan.apply_(copy.deepcopy(model), [x]), model.norm.running_mean
    y, z = (m.layer(x).double().movedim(1, -1).flatten(0, 2) for m in (model, small))
    taken = small.norm.running_mean - norm
    error, centred = y - z + taken, y - y.mean(0)
    true = float(error.square().sum() / centred.square().sum())
    best = float(torch.linalg.svdvals(centred)[line.ranks[-1] :].square().sum() / centred.square().sum())
    assert line.lost == pytest.approx(true, rel=0.02)
    assert line.lost > (1 - 1e-3) * best
    assert bool(taken.any()) is (readers == "norm")
    assert f"{line.lost:.1%} of its variance lost" in str(plan)


class Beside(nn.Module):
    """Two layers of the same weights that read the same inputs, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.biased = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.biased.weight.data = self.plain.weight.data.clone()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain(x).relu(), self.biased(x).relu()


def test_layers_with_and_without_a_bias_are_compared_by_the_same_measure() -> None:
    """A large mean that no bias takes does not make a layer seem cheap."""
    torch.manual_seed(0)
    model, x = Beside().eval(), torch.randn(512, 32) + 5
    plan = plan_ranks(model, x, ck.keep(macs=0.75), batches=[x], round_to=1)
    assert [line.layer for line in plan.lines] == ["biased"]
    read = input_statistics(model, ["plain.weight", "biased.weight"], [(x,)], norms=True)
    plain, biased = (spectrum(model.get_submodule(name), read[f"{name}.weight"]) for name in ("plain", "biased"))
    assert all(plain.lost((rank,)) > biased.lost((rank,)) > 0 for rank in (1, 8, 16, 24))
    assert plain.lost((0,)) > 10 > biased.lost((0,)) == pytest.approx(1)


def test_a_layer_without_bias_that_reads_constants_has_nothing_but_its_mean_to_lose() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 12, bias=False), torch.randn(16).repeat(64, 1)
    found = input_statistics(nn.Sequential(layer), ["0.weight"], [(x,)])["0.weight"]
    directions = spectrum(layer, found)
    assert directions.lost((1,)) < 0.25 < 1e4 < directions.lost((0,))
    torch.testing.assert_close(factored(layer, (1,), directions)(x), layer(x), rtol=1e-4, atol=1e-4)


def test_one_row_says_no_more_of_a_layer_without_bias_than_its_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 12, bias=False)
    found = input_statistics(nn.Sequential(layer), ["0.weight"], [(torch.randn(1, 16),)])["0.weight"]
    for rank in (1, 4, 8):
        assert spectrum(layer, found).lost((rank,)) == pytest.approx(spectrum(layer, None).lost((rank,)), rel=1e-3)
