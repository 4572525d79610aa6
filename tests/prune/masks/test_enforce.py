"""`enforce_masks_` of a model without masks: silent where it is dense, and a warning where zeros say that masks were lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.prune import Masks, enforce_masks_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_zeros_without_masks_are_warned_of() -> None:
    sparse = net()
    Masks({"0.weight": torch.rand(16, 8) > 0.6}).apply_(sparse)
    loaded = net()
    loaded.load_state_dict(sparse.state_dict())
    wanted = r"enforce_masks_: Sequential has no masks, though \d+% of 0.weight are zero .*\. If these were pruned, training will"
    with pytest.warns(UserWarning, match=wanted):
        enforce_masks_(loaded, sgd(loaded))()
    Masks({"0.weight": loaded[0].weight != 0}).apply_(loaded)  # as the warning says
    enforce_masks_(loaded, sgd(loaded))()


def test_dense_models_and_zero_initialized_layers_are_not() -> None:
    model = net()
    enforce_masks_(model, sgd(model))()
    nn.init.zeros_(model[2].weight)
    with torch.no_grad():
        model[0].weight[0] = 0
    enforce_masks_(model, sgd(model))()


def test_a_training_that_is_meant_to_be_dense_is_quiet() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[:8] = 0
    enforce_masks_(model, sgd(model), quiet=True)()
    batches = [(torch.randn(8, 8), torch.arange(8) % 4)]
    ck.Train(epochs=1)(model, ck.Task(train=batches, val=batches))
