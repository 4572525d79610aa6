"""Settings nobody should give: each is taken, or refused by a SettingError that names it; nothing else comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.base.fingerprint import describe

NET = nn.Linear(2, 2).eval()
STAGES = {
    ck.Train: {"epochs": 1},
    ck.Distill: {"epochs": 1},
    ck.Prune: {"budget": ck.keep(macs=0.5)},
    ck.Sparsify: {"budget": ck.remove(weights=0.5), "finetune": ck.Train(epochs=1)},
    ck.Densify: {},
    ck.LotteryTicket: {"budget": ck.remove(weights=0.5), "train": ck.Train(epochs=1)},
    ck.StaticQuant: {},
    ck.QAT: {"epochs": 1},
    ck.WeightQuant: {},
    ck.DynamicQuant: {},
    ck.Every: {},
}
VALUES = [None, True, 0, -1, 1, 2**70, 0.0, -0.5, 1.5, math.nan, math.inf, -math.inf, 1e-300, "", "x", b"x", (), ("a",), [1], {},
          {"a": 1}, len, NET, torch.zeros(2), torch.float16, ck.Train(epochs=1), ck.mixed.FP32,
          functools.partial(max, 1)]  # fmt: skip


def tries():
    for stage, settings in STAGES.items():
        for field in dataclasses.fields(stage):
            yield stage, settings, field.name


def check_description(settings):
    """Settings that were taken can be written into a run's record, and hold no memory address."""
    record = json.dumps(describe(settings))
    assert json.loads(record)["kind"] == type(settings).__name__
    assert " at 0x" not in record


@pytest.mark.parametrize(
    ("stage", "settings", "name"), list(tries()), ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else "")
)
def test_each_setting(stage, settings, name) -> None:
    for value in VALUES:
        try:
            made = stage(**settings | {name: value})
        except SettingError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert len(str(error)) > 20  # noqa: PT017
        else:
            check_description(made)


@pytest.mark.slow
def test_two_thousand_pairs() -> None:
    draw = random.Random(0)
    all_tries = list(tries())
    for _ in range(2000):
        stage, settings, name = draw.choice(all_tries)
        other = draw.choice(dataclasses.fields(stage)).name
        with contextlib.suppress(SettingError):
            check_description(stage(**settings | {name: draw.choice(VALUES), other: draw.choice(VALUES)}))


@pytest.mark.parametrize(
    "one", [np.array(0), torch.tensor(0), np.int64(0), {"input": np.array(0)}], ids=["array", "tensor", "number", "named"]
)
def test_one_number_in_the_place_of_dimensions_that_vary_is_refused(one, tmp_path) -> None:
    data = [(torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))]
    recipe = ck.Recipe(ck.Train(epochs=1), dynamic=one)
    for made in (
        lambda: ck.StaticQuant(dynamic=one),
        lambda: ck.export_onnx(NET, tmp_path / "model.onnx", data[0][:1], dynamic=one),
        lambda: recipe.run(NET, ck.Task(train=data, val=data), tmp_path / "run"),
    ):
        with pytest.raises(SettingError, match=r"dynamic.*: wanted dimensions, such as \(0, 2, 3\), or their names .*, got"):
            made()
