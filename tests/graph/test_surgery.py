"""Operations on modules by dotted name."""

from __future__ import annotations

import json

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph import surgery


def test_structure_rebuilds_a_pruned_model() -> None:
    model = build(networks.Depthwise)
    ck.prune.apply_(model, ck.prune.plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4))
    record = json.loads(json.dumps(surgery.structure(model)))
    fresh = networks.Depthwise()
    surgery.restructure_(fresh, record)
    fresh.load_state_dict(model.state_dict())
    x = image(4)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(*x), model.eval()(*x))
    assert fresh.depth[0].groups == model.depth[0].groups
    with pytest.raises(CheckpointError, match="made of another model"):
        surgery.restructure_(networks.Chain(), record)


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    with surgery.mode(model, training=False):
        assert not model[0].training
    assert [m.training for m in model] == [True, False]


def test_unknown_names_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"a\.b: Linear has no module 'a'"):
        surgery.get_tensor(model, "a.b")
    with pytest.raises(ModelError, match="wait: Linear has no parameter or buffer"):
        surgery.get_tensor(model, "wait")
