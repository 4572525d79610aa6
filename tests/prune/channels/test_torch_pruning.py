"""A model that Torch-Pruning made narrower is an ordinary model: stages take it as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck

tp = pytest.importorskip("torch_pruning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.inner, self.inner_norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.inner_norm(self.inner(x)) + x)
        return self.head(x.mean((2, 3)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_it_is_pruned_further_quantized_and_verified(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 3, 8, 8)
    importance = tp.importance.MagnitudeImportance(p=2)
    tp.pruner.MagnitudePruner(model, x[:2], importance=importance, pruning_ratio=0.5, ignored_layers=[model.head]).step()
    assert model.stem.weight.shape == (8, 3, 3, 3)
    loader = DataLoader(TensorDataset(x, torch.arange(32) % 4), 8)
    prune = ck.Prune(budget=ck.keep(macs=0.6), round_to=1, finetune=ck.Train(epochs=1))
    result = ck.Recipe(prune, ck.StaticQuant()).run(model, ck.Task(train=loader, val=loader), out=tmp_path / "run")
    assert [row.verified for row in result.rows] == [True, True, True]
    before, after = (row.macs for row in result.rows[:2])
    assert after <= 0.61 * before < ck.count_macs(Net(), x[:1])
