"""What a removed block is said to lose: by classes where they are, by numbers where there are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.prune.depth import costs, importance, plan_blocks


class Branch(nn.Module):
    """x + a linear layer of x."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Stack(nn.Module):
    """A block that adds the same number to predictions, and one that changes them a little."""

    def __init__(self, added: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.offset, self.small = Branch(torch.zeros(4, 4), added), Branch(0.05 * torch.randn(4, 4), torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.offset(x))


def by_position(predictions: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(predictions.transpose(1, 2), target)


OF_ONE_CLASS, OF_ALL = torch.tensor([0.0, 5.0, 0.0, 0.0]), torch.full((4,), 5.0)
X = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(1))
TASKS = {
    "a tagger": (OF_ONE_CLASS, ck.Task(train=[(X, X.argmax(2))], loss=by_position)),
    "a regression": (OF_ALL, ck.Task(train=[(X[:, 0], X[:, 0])], loss=F.mse_loss)),
    "a sequence of unknown meaning": (OF_ONE_CLASS, None),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("measure", [importance.output_error, importance.after_training])
def test_an_offset_of_one_class_or_of_all_numbers_counts(kind, measure) -> None:
    """A softmax over positions, or over numbers, sees none of it."""
    added, task = TASKS[kind]
    example = (X if task is None else task.train[0][0],)
    plan = plan_blocks(Stack(added).eval(), example, blocks=1, importance=measure, cost=costs.parameters, task=task)
    assert plan.paths == ("small",)


def test_predictions_of_two_dimensions_are_classes_where_nothing_says_otherwise() -> None:
    scoring = importance.BlockScoring(model=nn.Identity(), blocks=[], batches=[], predictions=[X[:, 0]], task=None, samples=8)
    assert scoring.class_dim == 1
