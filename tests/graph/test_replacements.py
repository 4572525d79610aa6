"""Modules that took the place of others are recorded with the structure of a model, and made again from the record."""

from __future__ import annotations

import pytest
import torch
from residual import ResNet
from torch import nn

from compresskit.base.errors import CheckpointError
from compresskit.graph.replacements import Bypass, Factored, replace_module_
from compresskit.graph.surgery import restructure_, structure

BYPASS = {"kind": "bypass", "argument": 0, "outputs": 0, "index": 0}


def test_a_structure_makes_the_same_model_again() -> None:
    model = ResNet().eval()
    assert "replaced" not in structure(model)
    model.layer1[1] = Bypass()
    record = structure(model)
    assert record["replaced"] == {"layer1.1": BYPASS}
    again = ResNet().train()
    for _ in range(2):  # the second time there is nothing left to replace
        restructure_(again, record)
        assert structure(again) == record
    assert again.layer1[1].training


def test_a_bypass_returns_what_the_block_returned() -> None:
    x = torch.ones(2)
    assert Bypass(1)(0, x) is x
    assert Bypass("hidden", outputs=3, index=1)(0, hidden=x) == (None, x, None)
    assert str(Bypass("hidden", outputs=3, index=1)) == "Bypass(argument='hidden', outputs=3, index=1)"


@pytest.mark.parametrize(
    ("path", "record", "message"),
    [
        ("layer1.1", BYPASS | {"kind": "run"}, "layer1.1: not the record of a replaced module, got"),
        ("layer1.1", BYPASS | {"argument": -1}, "not the record of a replaced module"),
        ("layer1.1", BYPASS | {"outputs": 10**9}, "not the record of a replaced module"),
        ("layer1.1", BYPASS | {"index": 1}, "not the record of a replaced module"),
        ("layer1.1", 3, "not the record of a replaced module"),
        ("layer1.9", BYPASS, "made of another model: ResNet has no module 'layer1.9'"),
        ("", BYPASS, "made of another model: ResNet has no module ''"),
        ("layer1.0", BYPASS | {"outputs": 2, "index": 1}, "layer1.0: the record says Bypass.*it is of another model"),
    ],
)
def test_a_damaged_record_is_refused(path, record, message) -> None:
    model = ResNet()
    model.layer1[0] = Bypass()
    with pytest.raises(CheckpointError, match=message):
        restructure_(model, structure(ResNet()) | {"replaced": {path: record}})


def test_a_model_that_lacks_a_replacement_is_another() -> None:
    model = ResNet()
    model.layer1[0] = Bypass()
    with pytest.raises(CheckpointError, match="of another model"):
        restructure_(model, structure(nn.Sequential(nn.Linear(2, 2))))


def test_a_block_that_stands_in_two_places_is_removed_from_one() -> None:
    def twice() -> ResNet:
        model = ResNet()
        model.layer1[1] = model.layer1[0]
        return model

    model, again = twice(), twice()
    model.layer1[1] = Bypass()
    restructure_(again, structure(model))
    assert isinstance(again.layer1[1], Bypass)
    assert type(again.layer1[0]) is type(model.layer1[0])
    assert structure(again) == structure(model)


def test_factors_take_the_place_of_a_layer_under_all_its_names() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    made = Factored.like(layer, (2,))
    replace_module_(model, "0", made)
    assert model[2] is model[0] is made
    assert not made.training
