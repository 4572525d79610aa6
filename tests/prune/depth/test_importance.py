"""What a removed block is said to lose: by classes where they are, by numbers where there are none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.prune.depth import costs, importance, plan_blocks
from compresskit.prune.depth.find_blocks import find_blocks


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


def test_batches_count_by_their_rows() -> None:
    got, wanted = X[:, 0], X[:, 1]
    together = importance.mean_error([got], [wanted], 1)
    assert importance.mean_error([got[:7], got[7:]], [wanted[:7], wanted[7:]], 1) == pytest.approx(together)
    assert importance.mean_error([got[:1], got[1:]], [wanted[:1], wanted[1:]], 1) == pytest.approx(together)


def test_the_first_order_importance_is_the_slope_of_the_loss_in_the_branch() -> None:
    """By differences, for each of two batches; the branch is a linear layer, which is scaled up and down."""
    model, data = Stack(torch.ones(4)).eval(), [(X[:, k], X[:, k].sin()) for k in (0, 1)]
    task = ck.Task(train=data, loss=F.mse_loss)

    def loss(batch: tuple[Tensor, Tensor], scale: float) -> float:
        scaled = copy.deepcopy(model).double()
        with torch.no_grad():
            for parameter in scaled.small.parameters():
                parameter.mul_(scale)
            return float(F.mse_loss(scaled(batch[0].double()), batch[1].double()))

    slopes = [(loss(batch, 1 + 1e-4) - loss(batch, 1 - 1e-4)) / 2e-4 for batch in data]
    settings = {"importance": importance.first_order, "cost": costs.parameters, "task": task, "samples": 16}
    plan = plan_blocks(model, (data[0][0],), blocks=("small",), **settings)
    assert plan.lines[0].importance == pytest.approx(sum(map(abs, slopes)) / 2, rel=1e-4)


class Normed(nn.Module):
    """A norm, and a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.block = nn.BatchNorm1d(4), Branch(torch.randn(4, 4), torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(x))


def test_a_norm_stays_as_it_is_where_one_of_the_batches_has_a_single_row() -> None:
    model, batches = Normed().eval(), [(X[:, 0],), (X[:1, 1],)]
    scoring = importance.BlockScoring(
        model=model, blocks=[find_blocks(model, batches[0]).removable["block"]], batches=batches,
        predictions=importance.original_predictions(model, batches, None), task=None, samples=9,
    )  # fmt: skip
    error = importance.output_error(scoring)["block"]
    assert error > 0
    assert importance.after_training(scoring)["block"] == pytest.approx(20 * error)  # times its parameters


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of hooks that are on all modules while a model is recorded
@pytest.mark.parametrize("measure", [importance.influence, importance.first_order])
def test_blocks_of_a_compiled_model_that_has_run_are_scored_as_written(measure) -> None:
    """Its code calls no hooks of those that are registered later: a block that nothing was seen of had an importance of 0."""
    model, x, found = Stack(torch.ones(4)).eval(), (X[:, 0],), []
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            compiled(*x)
    for whole in (model, compiled):
        scoring = importance.BlockScoring(
            model=whole,
            blocks=[*find_blocks(whole, x).removable.values()],
            batches=[x],
            predictions=[whole(*x).detach()],
            task=TASKS["a regression"][1],
            samples=8,
        )
        found.append([*measure(scoring).values()])
    assert found[0] == pytest.approx(found[1])
    assert min(found[0]) > 0
