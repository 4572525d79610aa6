"""Weights of layers that are fitted again after blocks are removed: against least squares over all positions of their outputs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import build
from torch import Tensor, nn

from compresskit.prune.depth import costs, plan_blocks, refit_stream, refit_stream_


class Branch(nn.Module):
    """x + a factor for each channel times a convolution of relu(x)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.factor = nn.Parameter(torch.linspace(0.2, 3, width).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * self.conv(x.relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(Branch(), Branch()), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).relu().mean((2, 3)))


BATCHES = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(k)) + 0.5 for k in range(4)]


def refitted(dense: nn.Module, *paths: str, batches=BATCHES) -> tuple[nn.Module, dict[str, float]]:
    plan = plan_blocks(dense, batches[0], blocks=paths, cost=costs.parameters)
    small = plan.apply_(copy.deepcopy(dense))
    return small, refit_stream_(small, dense, plan.paths, batches)


def rows(values: Tensor) -> Tensor:
    return values.movedim(1, -1).flatten(0, 2)


def least_squares(read: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and bias of a convolution over 3x3 that comes closest to what is wanted, and the variance that is left, in all."""
    patches = F.unfold(read.double(), 3, padding=1).transpose(1, 2).flatten(0, 1)
    ones = torch.cat([patches, torch.ones(len(patches), 1)], 1)
    found = torch.linalg.lstsq(ones, rows(wanted.double())).solution
    left = (rows(wanted.double()) - ones @ found).square().mean(0)
    return found[:-1].T.reshape(wanted.shape[1], read.shape[1], 3, 3), found[-1], left


@pytest.mark.parametrize(("held", "read"), [(2**28, 3), (16 * 6 * 8 * 8, 2)])  # the last batch judges
def test_the_layer_before_removed_blocks_is_fitted_to_what_the_last_of_them_gave(held, read, monkeypatch) -> None:
    """On all samples whose stream can be held at once."""
    monkeypatch.setattr(refit_stream, "DAMPINGS", (1e-12,))
    monkeypatch.setattr(refit_stream, "MOST_IN_STREAM", held)
    dense = build(Net).eval()
    small, lost = refitted(dense, "blocks.0", "blocks.1")
    x = torch.cat(BATCHES[:read])
    with torch.no_grad():
        wanted = dense.blocks(dense.stem(x))
    weight, bias, left = least_squares(x, wanted)
    torch.testing.assert_close(small.stem.weight.double(), weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(small.stem.bias.double(), bias, rtol=1e-3, atol=1e-4)
    assert lost == {"stem": pytest.approx(float(left.sum() / rows(wanted).var(0, unbiased=False).sum()), rel=1e-3)}


def test_a_layer_whose_output_is_scaled_and_added_gets_what_the_sum_lacks(monkeypatch) -> None:
    monkeypatch.setattr(refit_stream, "DAMPINGS", (1e-12,))
    dense = build(Net).eval()
    small, lost = refitted(dense, "blocks.1")
    with torch.no_grad():
        stream = dense.stem(torch.cat(BATCHES[:3]))
        lacks = dense.blocks(stream) - stream
    weight, bias, left = least_squares(stream.relu(), lacks)
    factor = dense.blocks[0].factor.detach().double().view(-1)
    torch.testing.assert_close(small.blocks[0].conv.weight.double() * factor.view(-1, 1, 1, 1), weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(small.blocks[0].conv.bias.double() * factor, bias, rtol=1e-3, atol=1e-4)
    assert lost == {"blocks.0.conv": pytest.approx(float(left.sum() / rows(lacks).var(0, unbiased=False).sum()), rel=1e-3)}
    assert torch.equal(small.stem.weight, dense.stem.weight)


def test_a_layer_that_few_positions_say_little_of_keeps_its_weights(monkeypatch) -> None:
    """As many positions as inputs, three quarters of which make up for anything, say nothing of the rest."""
    monkeypatch.setattr(refit_stream, "DAMPINGS", (1e-12, 1e6))
    dense, few = build(Net).eval(), [BATCHES[0][:1, :, :6, :6]]
    with torch.no_grad():
        dense.blocks[1].conv.weight.mul_(5)
    small, lost = refitted(dense, "blocks.1", batches=few)
    assert lost
    assert (small.blocks[0].conv.weight - dense.blocks[0].conv.weight).abs().max() < 1e-4
    assert (small.blocks[0].conv.bias - dense.blocks[0].conv.bias).abs().max() > 1e-2


class FixedBatch(Net):
    """Its code fixes the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(8, 3, 8, 8))


def test_where_the_code_fixes_the_batch_others_are_not_read() -> None:
    dense = FixedBatch().eval()
    small, lost = refitted(dense, "blocks.1", batches=[*BATCHES[:2], BATCHES[2][:4], BATCHES[3]])
    again, _ = refitted(dense, "blocks.1", batches=[*BATCHES[:2], BATCHES[3]])
    assert lost
    assert torch.equal(small.blocks[0].conv.weight, again.blocks[0].conv.weight)
