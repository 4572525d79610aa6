"""Labels reach the output of a model rule by rule."""

from __future__ import annotations

import logging

import pytest
import torch
from pruned import assert_equals_zeroed, planned
from torch import nn

from compresskit import keep, remove
from compresskit.prune import plan_channels, rankings
from compresskit.prune.structure import propagate
from compresskit.prune.structure.rules import PROPAGATION_RULES
from compresskit.prune.structure.rules.base import OperatorCall


def with_a_mistake(call: OperatorCall):
    return call.no_such_attribute


def test_a_rule_that_fails_locks_its_channels_and_the_log_says_why(monkeypatch, caplog) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    assert planned(model, macs=0.8).remove.keys() >= {"0.weight", "2.weight"}
    monkeypatch.setitem(PROPAGATION_RULES, torch.ops.aten.hardswish.default, with_a_mistake)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        planned(model, macs=0.8)
    monkeypatch.setattr(propagate, "RULE_FAILURES", (AttributeError,))
    with caplog.at_level(logging.DEBUG, "compresskit.prune.structure.propagate"):
        plan = planned(model, macs=0.8)
    assert 0 not in plan.remove.get("0.weight", {})
    assert 0 in plan.remove["2.weight"]
    assert "the rule of aten.hardswish.default (1) failed: AttributeError: " in caplog.text


class ShapeOf(nn.Module):
    """Adds as many positions as a value of one channel has, of which the shape alone is read, as the encoder of BART does."""

    def __init__(self, like):
        super().__init__()
        self.like = like
        self.table, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.up, self.down, self.out = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, ids):
        y = self.table(ids)
        y = y + self.positions(torch.arange(self.like(y)))
        return self.out((y + self.down(self.up(y).relu())).mean(1))


IDS = (torch.arange(16).reshape(2, 8),)


@pytest.mark.parametrize(
    "like",
    [
        lambda y: y[:, :, -1].shape[1],
        lambda y: y[..., 0].detach().unsqueeze(-1).shape[1],
        lambda y: y[:, :, :3].transpose(1, 2).shape[2],
    ],
    ids=["select", "chain", "slice"],
)
def test_a_value_of_which_the_shape_alone_is_read_locks_nothing(like) -> None:
    torch.manual_seed(0)
    model = ShapeOf(like).eval()
    plan = plan_channels(model, IDS, budget=remove(channels=0.3), round_to=2, ranking=rankings.uniform)
    assert plan.locked == {"an output of the model": 5}
    assert plan.remove["table.weight"][1] == plan.remove["positions.weight"][1]
    assert_equals_zeroed(model, plan, IDS)


@pytest.mark.parametrize(
    "like",
    [
        lambda y: len(y[0, :, -1].tolist()),
        lambda y: 8 + int(y[0, 0, -1] > 1e9),
        lambda y: y[:, :, 20].shape[1],
        lambda y: len(y[0, :, 0].numpy()),
    ],
    ids=["tolist", "int", "other place", "numpy"],
)
def test_a_value_that_python_reads_or_that_needs_a_width_keeps_its_channels(like) -> None:
    plan = plan_channels(ShapeOf(like).eval(), IDS, budget=keep(macs=0.8), round_to=2)
    assert plan.locked["cut at fixed places by select in the model"] == 32
    assert "table.weight" not in plan.remove


class SecondHead(ShapeOf):
    """Runs a head whose result it does not give in this mode."""

    def __init__(self):
        super().__init__(lambda y: y.shape[1])
        self.second = nn.Linear(32, 3)

    def forward(self, ids):
        self.second(self.table(ids))[..., 0]
        return super().forward(ids)


def test_layers_of_which_no_result_is_read_are_cut_with_the_others() -> None:
    plan = plan_channels(SecondHead().eval(), IDS, budget=remove(channels=0.3), round_to=2, ranking=rankings.uniform)
    assert plan.remove["second.weight"][1] == plan.remove["table.weight"][1]
