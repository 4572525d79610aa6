"""Data with nan or infinite values: what scores by them, or fits to them, names the batch."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import DataError
from compresskit.prune import criteria, depth, low_rank
from compresskit.prune.depth.costs import macs
from compresskit.prune.depth.importance import first_order, output_error
from compresskit.quant.qat import binarize_

VALUES = [(float("nan"), "nan"), (float("inf"), "infinite values")]


def with_bad_batch(value: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = [(image(8)[0], torch.arange(8) % 10) for _ in range(3)]
    data[1][0][:, :, 3:5, 3:5] = value
    return data


@pytest.mark.parametrize(("value", "held"), VALUES)
@pytest.mark.parametrize(
    "criterion", [criteria.taylor, criteria.taylor_samples, criteria.apoz, criteria.output_energy, criteria.shapley]
)
def test_scores(criterion, value, held) -> None:
    model, data = build(networks.Chain), with_bad_batch(value)
    with pytest.raises(DataError, match=f"^scoring: .* nan or infinite, since batch 2 holds {held}; clean the data"):
        ck.prune.plan_channels(model, image(2), ck.keep(macs=0.5), criterion=criterion, task=ck.Task(train=data, val=data))


@pytest.mark.parametrize("needs_labels", [False, True])
def test_masks(needs_labels) -> None:
    model, data = build(networks.Chain), with_bad_batch(float("nan"))
    with pytest.raises(DataError, match="^scoring: .* since batch 2 holds nan; clean the data"):
        criterion = criteria.snip if needs_labels else criteria.wanda
        ck.prune.plan_mask(model, ck.remove(weights=0.5), criterion=criterion, task=ck.Task(train=data, val=data))


def test_targets_count_where_the_loss_reads_them() -> None:
    model, data = build(networks.Chain), [(image(8)[0], torch.rand(8, 10)) for _ in range(2)]
    data[1][1][0, 0] = float("nan")
    task = ck.Task(train=data, val=data, loss=torch.nn.functional.mse_loss)
    with pytest.raises(DataError, match="^scoring: .* since batch 2 holds nan; clean the data"):
        ck.prune.plan_channels(model, image(2), ck.keep(macs=0.5), criterion=criteria.taylor, task=task)
    ck.prune.plan_channels(model, image(2), ck.keep(macs=0.5), criterion=criteria.apoz, task=task)  # reads no targets


@pytest.mark.parametrize(("value", "held"), VALUES)
def test_ranks(value, held) -> None:
    model, data = build(networks.Chain), [(x,) for x, _ in with_bad_batch(value)]
    with pytest.raises(DataError, match=rf"the input of a\.0 is nan or infinite, since batch 2 holds {held}; clean the data"):
        low_rank.plan_ranks(model, image(2), ck.keep(macs=0.5), batches=data)


@pytest.mark.parametrize(("value", "held"), VALUES)
def test_signs(value, held) -> None:
    model, data = build(networks.Chain), [(x,) for x, _ in with_bad_batch(value)]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        DataError, match=rf"^binarize_: the input of a\.0 is nan or .*, since batch 2 holds {held}; clean the data"
    ):
        binarize_(model, data, ends=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("importance", [output_error, first_order])
def test_blocks(importance) -> None:
    data = with_bad_batch(float("nan"))
    with pytest.raises(DataError, match="since batch 2 holds nan; clean the data"):
        depth.plan_blocks(Stack(), image(2), blocks=1, importance=importance, task=ck.Task(train=data, val=data), cost=macs)


class Stack(torch.nn.Module):
    """Two residual blocks that are modules."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 3, 1, 1)

        def forward(self, x):
            return x + self.conv(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.Sequential(self.Block(), self.Block()), torch.nn.Linear(3, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


STAGES = [
    ck.Prune(budget=ck.keep(macs=0.5)),
    ck.Sparsify(budget=ck.remove(weights=0.5)),
    low_rank.LowRank(budget=ck.keep(macs=0.5)),
    ck.quant.qat.Binarize(finetune=None, ends=True),
    ck.quant.qat.Ternarize(finetune=None, ends=True),
]


@pytest.mark.parametrize(("value", "held"), VALUES)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)
def test_stages(stage, value, held) -> None:
    data = with_bad_batch(value)
    with pytest.raises(DataError, match=f"nan or infinite, since batch 2 holds {held}; clean the data"):
        stage(build(networks.Chain), ck.Task(train=data, val=data[:1]))
