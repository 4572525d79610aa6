"""What is recorded of a stage for its report."""

from __future__ import annotations

import json

import networks
import pytest
import torch

import compresskit as ck
from compresskit.recipe.details import layer_times, stage_details
from compresskit.recipe.outcomes import Outcomes


@pytest.mark.parametrize("how", ["float", "static", "dynamic", "weights"])
def test_layers_and_their_noise(how) -> None:
    torch.manual_seed(0)
    model, task = networks.build(networks.Chain), networks.images_task(ck, samples=32)
    first = next(iter(task.val))[0]
    made = {
        "float": lambda: model,
        "static": lambda: ck.quant.quantize_static(model, first),
        "dynamic": lambda: ck.quant.quantize_dynamic(model, first),
        "weights": lambda: ck.quant.quantize_weights(model, first),
    }[how]()
    with torch.no_grad():
        next(value for value in made.parameters() if value.ndim == 4)[0] = 0
    found = json.loads(json.dumps(stage_details(made, task, Outcomes(metric=1.0, correct="f", samples=4)), allow_nan=False))
    shapes = [list(value.shape) for value in model.parameters() if value.ndim >= 2]
    assert [layer["shape"] for layer in found["layers"]] == shapes
    assert found["layers"][0]["zeros"] >= shapes[0][1] * shapes[0][2] * shapes[0][3]
    if how == "static":
        assert len(found["noise"]["layers"]) == len(shapes)
        assert all(10 < layer["sqnr"] < 80 for layer in found["noise"]["layers"][1:])
        assert found["noise"]["layers"][0]["runs"] == "integer"
    assert found["remedies"] == []
    if how == "float":
        assert found["noise"] is None


def test_the_layers_of_a_file_are_timed(tmp_path) -> None:
    model, task = networks.build(networks.Chain), networks.images_task(ck, samples=4)
    inputs = next(iter(task.val))[:1]
    path = ck.export_onnx(model, tmp_path / "model.onnx", inputs)
    found = json.loads(json.dumps(layer_times(path, inputs, seconds=0.05), allow_nan=False))
    names = [layer["name"] for layer in found["layers"]]
    assert {"a.0", "b.0", "head"} <= set(names)
    total = found["outside"] + sum(layer["milliseconds"] for layer in found["layers"])
    assert total == pytest.approx(found["milliseconds"], rel=0.01)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert layer_times(tmp_path / "broken.onnx", inputs) is None
