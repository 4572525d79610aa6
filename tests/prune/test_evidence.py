"""What criteria read besides weights leaves the model as it was, and is read along the channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.prune import criteria, plan_channels, plan_mask
from compresskit.prune.evidence import watched_calls


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


def test_calls_of_a_compiled_model_that_has_run_are_seen() -> None:
    """Its code calls no hooks of those that are registered later."""
    torch.manual_seed(0)
    model, x, found = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(6, 8), []
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    for whole, name in ((model, "2"), (compiled, "_orig_mod.2")):
        with watched_calls(whole, [name], lambda path, module, given, output: found.append((given, output))):
            whole(x)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Expert(nn.Module):
    """A layer that is called on the rows that are sent to it, or not at all where there are none."""

    called = True

    def __init__(self):
        super().__init__()
        self.enter, self.expert, self.leave = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, x):
        h, sent = self.enter(x).relu(), x[:, 0] > 0
        if self.called or bool(sent.any()):
            h = h.index_put((sent,), h[sent] + self.leave(self.expert(h[sent]).relu()))
        return h


@pytest.mark.parametrize("called", [False, True], ids=["not called", "called on no rows"])
@pytest.mark.parametrize("criterion", [criteria.apoz, criteria.mean_activation, criteria.output_energy])
def test_a_batch_that_sends_no_rows_to_an_expert_adds_nothing_to_its_scores(criterion, called) -> None:
    torch.manual_seed(0)
    model, x = Expert().eval(), torch.randn(12, 8)
    model.called, x[:, 0] = called, 1.0
    plans = []
    for batches in ([x], [x, -x]):
        task = ck.Task(train=[(batch, torch.zeros(12)) for batch in batches])
        plans.append(plan_channels(model, x, ck.remove(channels=0.3), criterion=criterion, task=task, round_to=1))
    assert plans[0].remove == plans[1].remove
    assert plans[0].remove["expert.weight"][0]
    task = ck.Task(train=[(-x, torch.zeros(12))])
    with pytest.raises(ck.ModelError, match=r"^expert\.weight: no convolution or linear layer of this group is called"):
        plan_channels(model, x, ck.remove(channels=0.3), criterion=criterion, task=task, round_to=1)
