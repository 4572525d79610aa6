"""Values that calls of one module compute at the same place have one scale where their ranges are alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import compresskit as ck
from compresskit.quant import prepare_qat, quantize_static


def encoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(a), self.encoder(p), self.encoder(n)


class Maps(nn.Module):
    """One head on two maps, the second of which is `factor` times as large."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.head, self.factor = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), factor

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.head(y * self.factor)


class Steps(nn.Module):
    """One block three times in turn, and one ReLU at two places of it."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.act, self.last = nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1), nn.BatchNorm2d(3)), nn.ReLU(), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.step(x))
        return self.act(self.last(x))


def pictures(rows: int) -> Tensor:
    """Of different contrast, so that the largest value of some is not that of others."""
    return torch.randn(rows, 3, 16, 16) * (0.6 + 0.5 * torch.rand(rows, 1, 1, 1))


def triplets() -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model, batches = Triplet(), [(pictures(8), pictures(8), pictures(8)) for _ in range(4)]
    for batch in batches:
        model(*batch)
    return model.eval(), batches


def scales(quantized: ck.quant.Quantized) -> int:
    """How many scales of activations there are."""
    return len(quantized.activation_quantizers())


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_one_picture_has_one_embedding_whichever_branch_it_goes_through(effort, tmp_path) -> None:
    model, batches = triplets()
    quantized, x = quantize_static(model, batches, effort=effort), pictures(16)
    with torch.no_grad():
        first, *others = quantized(x, x, x)
        assert all(torch.equal(first, other) for other in others)
        ck.save(quantized, tmp_path)
        assert all(torch.equal(first, other) for other in ck.load(Triplet(), tmp_path)(x, x, x))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", batches[0])
    assert ck.verify_onnx(path, quantized, batches).passed


def test_the_joint_range_is_that_of_the_data_of_all_branches() -> None:
    model, batches = triplets()
    quantized = quantize_static(model, batches)
    pooled = quantize_static(model, [(x, x, x) for batch in batches for x in batch])
    assert scales(quantized) == scales(pooled) == 4
    for one, other in zip(quantized.activation_quantizers(), pooled.activation_quantizers(), strict=True):
        torch.testing.assert_close(one.scale, other.scale)


def test_training_shares_them_too() -> None:
    model, batches = triplets()
    quantized = prepare_qat(copy.deepcopy(model), batches)
    assert scales(quantized) == 4
    for batch in batches:
        sum(out.square().mean() for out in quantized(*batch)).backward()
    quantized.eval()
    quantized.convert_()
    x = pictures(16)
    with torch.no_grad():
        first, *others = quantized(x, x, x)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("factor", "count"), [(1.1, 3), (10.0, 6)])
def test_maps_of_other_sizes_keep_their_own(factor, count) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 3, 8, 8)
    assert scales(quantize_static(Maps(factor).eval(), [(x, x)])) == count


def test_steps_of_a_recurrence_and_activations_without_weights_keep_their_own() -> None:
    torch.manual_seed(0)
    assert scales(quantize_static(Steps().eval(), [torch.randn(16, 3, 8, 8)])) == 5
