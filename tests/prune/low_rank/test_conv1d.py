"""Convolutions over one dimension: planned and factored as those over two with a window of one row."""

from __future__ import annotations

import copy

import pytest
import torch
from quick import make_quick
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError
from compresskit.graph.replacements import Factored
from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.low_rank import LowRank, plan_ranks

KINDS = {
    "size 1": {"kernel_size": 1, "stride": 2},
    "strides": {"kernel_size": 5, "stride": 3, "padding": 2},
    "dilation": {"kernel_size": 3, "dilation": 4, "padding": 4, "bias": False},
    "same": {"kernel_size": 5, "padding": "same"},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflect": {"kernel_size": 5, "padding": 2, "padding_mode": "reflect"},
}


def over_two(layer: nn.Conv1d) -> nn.Conv2d:
    """The same convolution, over images of one row."""
    pairs = {name: (1, vars(layer)[name][0]) for name in ("kernel_size", "stride", "dilation")}
    padding = layer.padding if isinstance(layer.padding, str) else (0, layer.padding[0])
    made = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        **pairs,
        padding=padding,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,
    )
    made.weight.data = layer.weight.data[:, :, None].clone()
    if made.bias is not None:
        made.bias.data = layer.bias.data.clone()
    return made


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_data", [True, False])
def test_it_is_what_a_convolution_over_one_row_is(kind, on_data) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv1d(16, 24, **KINDS[kind]), torch.randn(64, 16, 21) + 0.5
    one, two, image = nn.Sequential(layer), nn.Sequential(over_two(layer)), x[:, :, None]
    budget, settings = ck.keep(macs=0.6), {"round_to": 2}
    plan = plan_ranks(one, x, budget, batches=[x] if on_data else None, **settings)
    wanted = plan_ranks(two, image, budget, batches=[image] if on_data else None, **settings)
    assert (plan.lines[0].ranks, plan.macs, plan.macs_before) == (wanted.lines[0].ranks, wanted.macs, wanted.macs_before)
    assert plan.lines[0].lost == pytest.approx(wanted.lines[0].lost, rel=1e-4)
    small = plan.apply_(copy.deepcopy(one), [x] if on_data else None)
    assert ck.count_macs(small, x) == plan.macs
    assert [type(part) for part in small[0]] == [nn.Conv1d] * (2 if kind == "size 1" else 3)
    y = wanted.apply_(copy.deepcopy(two), [image] if on_data else None)(image)[:, :, 0]
    torch.testing.assert_close(small(x), y, rtol=1e-3, atol=1e-4)
    assert plan_ranks(one, x, budget, method="cp", **settings).lines[0].full == ((16,) if kind == "size 1" else (16, 24))


class Temporal(nn.Module):
    """A temporal convolutional network: dilated convolutions with residual connections, one of them with normed weights."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv1d(6, 32, 1), nn.ModuleList([nn.Conv1d(32, 32, 3, padding=d, dilation=d) for d in (1, 2)])
        self.depth = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(32, 32, 3, padding=1))
        self.up = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(32, 32, 2, 2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(self.up(self.normed(self.depth(x))).mean(-1))


def frames(rows: int) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 6, 20),)


def test_what_cannot_be_factored_is_named_as_the_layer() -> None:
    plan = plan_ranks(Temporal(), frames(2), ck.keep(macs=0.95))
    plain = "which has a parametrization; parametrize.remove_parametrizations makes it plain"
    assert plan.locked == {
        "depth": "32 groups",
        "normed": f"it is a ParametrizedConv1d, {plain}",
        "up": "ParametrizedConvTranspose1d is not factored",
    }


def test_a_stage_is_saved_loaded_pruned_and_exported(tmp_path) -> None:
    make_quick()
    torch.manual_seed(0)
    data = [(x, torch.randint(4, ())) for x in torch.randn(64, 6, 20)]
    task = ck.Task(
        train=torch.utils.data.DataLoader(data, batch_size=16),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    small = LowRank(budget=ck.keep(macs=0.8), round_to=2, samples=64)(Temporal(), task)
    assert [len(block) for block in small.blocks] == [3, 3]
    assert all(isinstance(block, Factored) for block in small.blocks)
    ck.save(small, tmp_path)
    loaded, inputs = ck.load(Temporal(), tmp_path), frames(3)
    torch.testing.assert_close(loaded(*inputs), small(*inputs))
    assert ck.verify_onnx(ck.export_onnx(small, tmp_path / "m.onnx", frames(2)), small, [frames(1), frames(7)])
    plan = ck.prune.plan_channels(small, frames(2), ck.keep(macs=0.9), round_to=2)
    assert ck.prune.apply_(small, plan)(*inputs).shape == (3, 4)


def test_a_damaged_record_is_refused() -> None:
    record = structure(nn.Sequential(nn.Conv1d(8, 4, 3)))
    for ranks in ([4], [9, 4], [8, 0], [8], None):
        with pytest.raises(CheckpointError, match=r"0: wanted a rank up to each of \(8, 4\), got"):
            restructure_(nn.Sequential(nn.Conv1d(8, 4, 3)), record | {"replaced": {"0": {"kind": "factored", "ranks": ranks}}})
