"""What a new model holds and no training changes: buffers, also those that no state dict has, and frozen parameters."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.files import read_json, write_json

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
BATCHES = list(zip(X.split(16), (torch.arange(32) % 3).split(16), strict=True))
TASK = ck.Task(train=BATCHES, val=BATCHES)
TRAIN = ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.1))
RECIPE = ck.Recipe(TRAIN, export="last")


class Fixed(nn.Module):
    """Random features that no state dict has, a mean and a frozen scale, before a layer."""

    def __init__(self, features, *, mean=0.0, scale=1.0):
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("mean", torch.full((6,), mean))
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(((x - self.mean) @ self.features * self.scale).sin())


def drawn(seed, features=None, **constants):
    """A new model; its features are drawn, too, unless they are given."""
    torch.manual_seed(seed)
    return Fixed(torch.randn(6, 8) if features is None else features, **constants)


def plan(out, model, recipe=RECIPE):
    return [(stage.action, stage.why) for stage in recipe.plan(model, TASK, out).stages]


def test_the_model_of_a_finished_run_is_that_of_its_file(tmp_path) -> None:
    out = tmp_path / "run"
    first = RECIPE.run(drawn(0), TASK, out)
    others = r"kept as it is, also with other buffers and frozen parameters \(features\); delete the folder if you changed one"
    with pytest.warns(UserWarning, match=others):
        again = RECIPE.run(drawn(1), TASK, out)
    assert torch.equal(again.model.features, first.model.features)
    (found,) = ort.InferenceSession(str(again.onnx)).run(None, {"x": X.numpy()})
    np.testing.assert_allclose(found, again.model(X).detach().numpy(), atol=1e-5)
    longer = ck.Recipe(TRAIN, ck.DynamicQuant(), export="last")
    with pytest.warns(UserWarning, match=others):
        after = longer.run(drawn(2), TASK, out)
    assert after.rows[-1].metric == pytest.approx(first.rows[0].metric, abs=0.1)
    assert torch.equal(after.model.body.features, first.model.features)
    (why,) = plan(out, drawn(3))
    assert why == ("reuse", "done, from other new weights, and other buffers or frozen parameters: features")


def test_with_the_same_weights_another_fixed_value_is_a_change(tmp_path) -> None:
    """Without a seed, weights are others as well, and what is fixed may have been drawn with them."""
    out, recipe, features = tmp_path / "run", ck.Recipe(TRAIN, ck.DynamicQuant(), export="last"), torch.zeros(6, 8)
    recipe.run(drawn(0, features), TASK, out)
    assert [action for action, _ in plan(out, drawn(0, features), recipe)] == ["reuse"] * 2
    for change in ({"mean": 1.5}, {"scale": 2.0}, {"features": torch.ones(6, 8)}):
        (name,), constants = change, {"features": features} | change
        changed = ("run", f"buffers or frozen parameters have changed: {name}")
        assert plan(out, drawn(0, **constants), recipe) == [changed] * 2
        told = ("reuse", f"done, from other new weights, and other buffers or frozen parameters: {name}")
        assert plan(out, drawn(1, **constants), recipe) == [told] * 2
    result = recipe.run(drawn(0, **constants), TASK, out)  # a warning would be an error
    assert torch.equal(result.model(X), recipe.run(drawn(0, **constants), TASK, tmp_path / "anew").model(X))
    assert [action for action, _ in plan(out, drawn(0, **constants), recipe)] == ["reuse"] * 2
    assert [action for action, _ in plan(out, drawn(0, features), recipe)] == ["run"] * 2


def test_a_run_of_an_earlier_version_is_reused(tmp_path) -> None:
    """It did not compare what is fixed, and stored no buffers that no state dict has."""
    out = tmp_path / "run"
    RECIPE.run(drawn(0, torch.ones(6, 8)), TASK, out)
    record = read_json(out / "recipe.json", "a recipe")
    assert record["start"]["fixed"].keys() == {"features", "mean", "scale"}
    write_json(out / "recipe.json", {name: value for name, value in record.items() if name != "start"})
    row = read_json(out / "1-train" / "row.json", "a row")
    (_, ((key, _),)) = RECIPE._record_and_keys(drawn(0, torch.ones(6, 8)), RECIPE._described(TASK, {}), out)
    assert key != row["key"]
    write_json(out / "1-train" / "row.json", row | {"key": key})
    before = (out / "recipe.json").read_bytes()
    for features in (torch.ones(6, 8), torch.zeros(6, 8)):
        RECIPE.run(drawn(0, features), TASK, out)
        assert [action for action, _ in plan(out, drawn(0, features))] == ["reuse"]
    assert (out / "recipe.json").read_bytes() == before


def test_freezing_layers_runs_the_training_again(tmp_path) -> None:
    out, model = tmp_path / "run", nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    RECIPE.run(model, TASK, out)
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(False)
    assert plan(out, model) == [("run", "interrupted, or the model, or the weights it starts from, have changed")]
    result = RECIPE.run(model, TASK, out)  # a warning would be an error
    assert torch.equal(result.model[0].weight, before)
    assert not torch.equal(result.model[2].weight, model[2].weight)
    assert json.loads((out / "recipe.json").read_text())["start"]["fixed"].keys() == {"0.weight", "0.bias"}
