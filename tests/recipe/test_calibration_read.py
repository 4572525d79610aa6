"""The calibration data that stages say they read, which are looked at before the first one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import compresskit as ck
from compresskit.base.errors import DataError
from compresskit.prune.criteria import output_energy
from compresskit.prune.low_rank import LowRank
from compresskit.quant.weight_only import gptq
from compresskit.recipe.preflight import preflight_check


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def pictures(count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8, 3, 12, 12), torch.arange(8) % 4) for _ in range(count)]


@pytest.mark.parametrize(
    ("stage", "refused"),
    [
        (ck.StaticQuant(samples=16), ""),
        (ck.StaticQuant(samples=17), "StaticQuant"),
        (ck.quant.WeightQuant(), ""),
        (ck.quant.WeightQuant(rounding=gptq), "WeightQuant"),
        (LowRank(budget=ck.keep(macs=0.5), samples=0), ""),
        (ck.Prune(budget=ck.keep(macs=0.5), criterion=output_energy, samples=17), "Prune"),
        (ck.Prune(budget=ck.keep(macs=0.5), reconstruct=False), ""),
        (ck.Sparsify(budget=ck.remove(weights=0.5)), ""),
    ],
)
def test_nan_that_a_stage_does_not_read_is_not_refused(stage, refused) -> None:
    """A model without BatchNorm; the third batch of eight rows has nan."""
    data = pictures()
    task = ck.Task(train=data, val=data, calibration=[*pictures(2), (torch.full((8, 3, 12, 12), torch.nan), torch.arange(8) % 4)])
    if not refused:
        preflight_check(network(), task, [stage])
        return
    # The first stage ends before that batch, and the message names the one that reads it.
    with pytest.raises(DataError, match=f"^stage 2, {refused}: batch 3 of the calibration data: values of input are nan"):
        preflight_check(network(), task, [ck.StaticQuant(samples=8), stage])


def test_calibration_data_are_read_once_and_no_more_than_the_stages_need() -> None:
    read = []

    class Rows(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            read.append(index)
            return torch.randn(3, 12, 12), index % 4

    task = ck.Task(train=pictures(), val=pictures(), calibration=DataLoader(Rows(), batch_size=8))
    preflight_check(network(), task, [])
    without = len(read)
    read.clear()
    preflight_check(network(), task, [ck.Prune(budget=ck.keep(macs=0.5), samples=20), ck.StaticQuant(samples=32)])
    assert len(read) - without == 32
