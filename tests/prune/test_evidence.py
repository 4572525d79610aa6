"""What criteria read besides weights leaves the model as it was, and is read along the channels."""

from __future__ import annotations

import torch
from torch import nn

import compresskit as ck
from compresskit.prune import criteria, plan_mask


def test_gradients_of_the_user_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    batch = torch.randn(8, 8), torch.arange(8) % 4
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    before = [p.grad.clone() for p in model.parameters()]
    task = ck.Task(train=[batch], val=[batch])
    plan_mask(model, ck.remove(weights=0.5), criterion=criteria.snip, task=task)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


class EachAlone(nn.Module):
    """Calls its convolution on one sample at a time, without a batch dimension."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, x):
        return torch.stack([self.a(sample) for sample in x]) if self.alone else self.a(x)


def test_inputs_without_a_batch_dimension_are_read_along_their_channels() -> None:
    torch.manual_seed(0)
    model, x = EachAlone(), torch.randn(16, 8, 8) * torch.rand(8, 1)
    task, found = ck.Task(train=[(x, torch.zeros(16))], val=[]), []
    for model.alone in (True, False):
        found.append(plan_mask(model, ck.remove(weights=0.5), criterion=criteria.wanda, task=task).masks["a.weight"])
    assert torch.equal(*found)


def test_sparse_gradients_score_as_dense_ones_do() -> None:
    batch = torch.randint(30, (8, 5)), torch.arange(8) % 3
    task, found = ck.Task(train=[batch], val=[batch]), []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(30, 16, sparse=sparse), nn.Linear(16, 3))
        found.append(plan_mask(model, ck.remove(weights=0.5), criterion=criteria.snip, task=task).masks)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(m, found[1][name]) for name, m in found[0].items())
