"""Optimizers that refuse the gradients of a model: named at the first step, and warned of before a recipe trains."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import TrainingError
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
def test_optimizers_that_take_no_sparse_gradients_are_refused_at_the_first_step(kind) -> None:
    optimizer = getattr(torch.optim, kind)
    with pytest.raises(TrainingError, match=rf"batch 1: {kind} cannot make its step: .*sparse gradients.*; set sparse=False"):
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


def test_a_weight_that_is_read_by_itself_has_a_dense_gradient(tmp_path) -> None:
    class Read(Bag):
        def forward(self, x):
            return self.head(nn.functional.embedding(x, self.words.weight).mean(1))

    model = Read()
    before = model.words.weight.detach().clone()
    ck.Train(epochs=1)(model, TASK)
    assert not torch.equal(model.words.weight, before)
    ck.Recipe(ck.Train(epochs=1)).run(Read(), TASK, out=tmp_path / "run")


def test_sparse_adam_takes_nothing_dense(caplog) -> None:
    with pytest.raises(TrainingError, match=r"SparseAdam cannot make its step: .*dense gradients.*; set sparse=False"):
        ck.Train(epochs=1, optimizer=torch.optim.SparseAdam)(Bag(), TASK)
    ck.Train(epochs=1, optimizer=torch.optim.SparseAdam).check_fits(Bag(), TASK)
    assert "SparseAdam takes no dense gradients, as head.weight has" in caplog.text


def test_what_an_optimizer_says_of_its_step_names_the_batch() -> None:
    class Own(torch.optim.Adam):  # of a user, of which nothing is known before
        pass

    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: Own cannot make its step: .*sparse gradients.*; set sparse"):
        ck.Train(epochs=1, optimizer=Own)(Bag(), TASK)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_recipe_warns_before_it_trains(tmp_path, caplog) -> None:
    said = []
    first = ck.Train(epochs=1, optimizer=torch.optim.SGD, on_step=lambda report: said.append(caplog.text))
    with pytest.raises(TrainingError, match=r"AdamW cannot make its step"):
        ck.Recipe(first, ck.Train(epochs=1)).run(Bag(), TASK, out=tmp_path / "run")
    assert "AdamW takes no sparse gradients, as words has by sparse=True; set sparse=False" in said[0]
