"""Optimizers that refuse the gradients of a model: found before the first batch where torch's classes say it, else named."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError, TrainingError
from compresskit.train.param_groups import DENSE_ALONE

WORDS = torch.arange(40).reshape(8, 5) % 20
BATCHES = [(WORDS, torch.arange(8) % 4)] * 2
TASK = ck.Task(train=BATCHES, val=BATCHES)


class Bag(nn.Module):
    def __init__(self, *, sparse=True):
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(20, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.words(x))


@pytest.mark.parametrize("kind", DENSE_ALONE)
def test_optimizers_that_take_no_sparse_gradients_are_refused_before_the_first_batch(kind) -> None:
    optimizer = getattr(torch.optim, kind)
    with pytest.raises(SettingError, match=rf"{kind} takes no sparse gradients, as words has by sparse=True; set sparse=False"):
        ck.Train(epochs=1, optimizer=optimizer)(Bag(), TASK)
    weight = nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):  # torch says the same
        optimizer([weight], lr=0.1).step()
    ck.Train(epochs=1, optimizer=optimizer)(Bag(sparse=False), TASK)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_those_that_the_message_names_train_it(kind) -> None:
    model = Bag()
    before = model.words.weight.detach().clone()
    ck.Train(epochs=1, optimizer=partial(getattr(torch.optim, kind), lr=0.1))(model, TASK)
    assert not torch.equal(model.words.weight, before)


def test_an_embedding_that_is_tied_or_frozen_has_no_sparse_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(20, 20, sparse=True), nn.Linear(20, 20)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x).mean(1))

    ck.Train(epochs=1)(Tied(), TASK)
    frozen = Bag()
    frozen.words.requires_grad_(False)
    ck.Train(epochs=1)(frozen, TASK)


def test_sparse_adam_takes_nothing_dense() -> None:
    with pytest.raises(SettingError, match=r"SparseAdam takes no dense gradients, as head.weight has; give torch.optim.SGD"):
        ck.Train(epochs=1, optimizer=torch.optim.SparseAdam)(Bag(), TASK)


def test_what_an_optimizer_says_of_its_step_names_the_batch() -> None:
    class Own(torch.optim.Adam):  # of a user, of which nothing is known before
        pass

    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: Own cannot make its step: .*sparse gradients.*; give torch"):
        ck.Train(epochs=1, optimizer=Own)(Bag(), TASK)


def test_a_recipe_says_it_before_it_trains(tmp_path) -> None:
    steps = []
    first = ck.Train(epochs=1, optimizer=torch.optim.SGD, on_step=lambda report: steps.append(report))
    with pytest.raises(SettingError, match=r"stage 2, Train: .*AdamW takes no sparse gradients"):
        ck.Recipe(first, ck.Train(epochs=1)).run(Bag(), TASK, out=tmp_path / "run")
    assert not steps
