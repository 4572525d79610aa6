"""What is recorded of a stage for its report."""

from __future__ import annotations

import json
from dataclasses import replace

import networks
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.recipe.details import layer_times, measure_outcomes, stage_details


def test_the_samples_that_are_right_are_recorded() -> None:
    torch.manual_seed(0)
    model, task = networks.build(networks.Chain), networks.images_task(ck, samples=70)
    metric, correct, samples = measure_outcomes(model, task)
    with torch.no_grad():
        wanted = torch.cat([model(x).argmax(1) == y for x, y in task.val])
    assert metric == ck.evaluate(model, task) == wanted.double().mean().item()
    assert samples == 70
    assert [bit == "1" for bit in f"{int(correct, 16):070b}"] == wanted.tolist()
    quarter = replace(task, metric=lambda predictions, target: 0.25)
    assert measure_outcomes(model, quarter) == (0.25, None, 0)


def test_pixels_and_ignored_labels_are_no_samples() -> None:
    pixels = [(torch.randn(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))]
    assert measure_outcomes(nn.Identity(), ck.Task(val=pixels))[1:] == (None, 0)
    ignored = [(torch.randn(4, 3), torch.tensor([0, -100, 1, 2]))]
    assert measure_outcomes(nn.Identity(), ck.Task(val=ignored))[1:] == (None, 0)


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
    found = json.loads(json.dumps(stage_details(made, task, correct="f", samples=4), allow_nan=False))
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
