"""`Train(channels_last=True)`: the same training on weights and images that lie otherwise in memory, and nothing left behind."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import TrainingError

LAST = torch.channels_last


class Watched(nn.Module):
    """Notes in which form images and weights reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)  # before BatchNorm a bias has rounding for a gradient
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 4)
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append((x.is_contiguous(memory_format=LAST), self.conv.weight.is_contiguous(memory_format=LAST)))
        return self.head(self.depthwise(self.norm(self.conv(x)).relu()).mean((2, 3)))


def task() -> ck.Task:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(32) % 4
    x = torch.randn(32, 3, 10, 10, generator=draw) + y.view(-1, 1, 1, 1)
    batches = list(zip(x.split(16), y.split(16), strict=True))
    return ck.Task(train=batches, val=batches)


def trained(stage: ck.Train) -> nn.Module:
    torch.manual_seed(0)
    return stage(Watched(), task())


@pytest.mark.parametrize("precision", [ck.mixed.FP32, ck.mixed.MASTER_BF16, ck.mixed.SPLIT_BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("fused", [False, True])
def test_the_result_is_that_of_the_other_layout(precision, fused) -> None:
    stage = ck.Train(epochs=3, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=fused), precision=precision)
    plain, last = trained(stage), trained(replace(stage, channels_last=True))
    assert plain.seen == [(False, False)] * 6
    assert last.seen == [(True, True)] * 6
    exact = precision is ck.mixed.FP32
    for name, value in plain.state_dict().items():
        found = last.state_dict()[name]
        assert found.is_contiguous()
        torch.testing.assert_close(found, value, rtol=1e-3 if exact else 0.05, atol=1e-3 if exact else 0.05)


def test_a_network_is_quantized_and_exported_after_it(tmp_path) -> None:
    stages = [ck.Train(epochs=2, channels_last=True), ck.QAT(epochs=1, channels_last=True, objective=ck.imitate())]
    torch.manual_seed(0)
    result = ck.Recipe(*stages).run(Watched(), task(), out=tmp_path)
    assert all(row.verified for row in result.rows)


def test_code_that_views_images_says_what_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(256, 4))
    viewing = copy.deepcopy(model)
    viewing[1] = Viewing()
    ck.Train(epochs=1, channels_last=True)(model, task())
    with pytest.raises(TrainingError, match=r"the loss cannot be computed .*view size is not compatible.*reshape"):
        ck.Train(epochs=1, channels_last=True)(viewing, task())
    assert viewing[0].weight.is_contiguous()


class Viewing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1)
