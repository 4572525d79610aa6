"""Labels reach the output of a model rule by rule."""

from __future__ import annotations

import logging

import pytest
import torch
from pruned import planned
from torch import nn

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
