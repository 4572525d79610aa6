"""The training loop: steps, accumulation, labels."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import TrainingError


def test_labels_of_minus_100_do_not_count_in_the_accuracy() -> None:
    assert ck.accuracy(torch.eye(4), torch.tensor([0, 1, -100, -100])) == 1.0


def test_a_label_that_the_loss_ignores_may_lie_outside_the_classes() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    y[0] = 255
    model = nn.Linear(4, 3)
    without = copy.deepcopy(model)
    ck.Train(epochs=1)(model, ck.Task(train=[(x, y)], val=[(x, y)], loss=partial(F.cross_entropy, ignore_index=255)))
    ck.Train(epochs=1)(without, ck.Task(train=[(x[1:], y[1:])], val=[(x[1:], y[1:])]))
    torch.testing.assert_close(model.weight, without.weight)


def test_the_last_step_of_an_epoch_counts_its_batches() -> None:
    x, y = torch.randn(24, 4), torch.arange(24) % 3
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = nn.Linear(4, 3)
    wanted = copy.deepcopy(model)
    ck.Train(epochs=1, optimizer=sgd, schedule=ck.lr.Constant(), accumulate=2)(model, ck.Task(train=batches, val=batches))
    plain = sgd(wanted.parameters())
    for part in ((x[:16], y[:16]), (x[16:], y[16:])):
        plain.zero_grad()
        F.cross_entropy(wanted(part[0]), part[1]).backward()
        plain.step()
    torch.testing.assert_close(model.weight, wanted.weight)


def test_a_loss_without_a_gradient_is_refused() -> None:
    with pytest.raises(TrainingError, match="no gradient of the loss"):
        ck.Train(epochs=1)(networks.Chain(), images_task(ck, predict=lambda o: o.detach()))
