"""Students that start from their teacher's layers."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build
from torch import nn

from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError


def test_layer_map_spaces_layers_evenly() -> None:
    assert kd.layer_map(4, 12) == {0: 2, 1: 5, 2: 8, 3: 11}
    assert kd.layer_map(3, 3) == {0: 0, 1: 1, 2: 2}
    assert kd.layer_map(2, 5) == {0: 1, 1: 4}
    for pair in ((0, 4), (5, 4)):
        with pytest.raises(SettingError, match=rf"layer_map\(\): wanted 1 <= student's layers <= teacher's, got {pair[0]} and 4"):
            kd.layer_map(*pair)


def test_a_student_starts_from_its_teachers_layers() -> None:
    def transformer(layers):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    teacher, student = transformer(6), transformer(2)
    for p in teacher.parameters():
        nn.init.normal_(p)
    kd.init_from_(student, teacher, {f"layers.{s}": f"layers.{t}" for s, t in kd.layer_map(2, 6).items()})
    for s, t in ((0, 2), (1, 5)):
        for a, b in zip(student.layers[s].parameters(), teacher.layers[t].parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.requires_grad
            assert a.data_ptr() != b.data_ptr()


def test_modules_that_differ_are_refused_and_nothing_is_copied() -> None:
    student, teacher = build(networks.Chain), build(networks.Residual)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ModelError, match="tap 'stam': Residual has no such module; the nearest are .'stem'"):
        kd.init_from_(student, teacher, {"a": "stam"})
    with pytest.raises(ModelError, match="init_from_: head and stem are not alike: only one of them has '0.weight'"):
        kd.init_from_(student, teacher, {"a": "stem", "head": "stem"})
    with pytest.raises(
        ModelError, match=r"init_from_: b.0.weight is \(32, 16, 3, 3\), the teacher's inner.0.weight \(16, 16, 3, 3\)"
    ):
        kd.init_from_(student, teacher, {"a": "stem", "b": "inner"})
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())
