"""The stage Depth: fine-tuned, resumed, exported, loaded again, pruned and quantized afterwards."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from networks import build, image, images_task
from quick import make_quick
from residual import ResNet, Transformer
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.prune.depth import Depth, costs, importance

SGD = partial(torch.optim.SGD, lr=0.05)
FAST = {"importance": importance.influence, "cost": costs.macs, "samples": 32, "repair": 64}


def test_a_model_without_blocks_is_saved_exported_and_loaded(tmp_path) -> None:
    make_quick()
    model, task = build(Transformer), images_task(ck, samples=32, classes=4)
    small = Depth(blocks=2, **FAST)(model, task)
    ck.save(small, tmp_path)
    loaded = ck.load(build(Transformer), tmp_path)
    inputs = image(3)
    torch.testing.assert_close(loaded(*inputs), small(*inputs))
    assert [type(layer).__name__ for layer in loaded.layers] == [type(layer).__name__ for layer in small.layers]
    assert ck.verify_onnx(ck.export_onnx(small, tmp_path / "m.onnx", image(2)), small, [image(1), image(7)])


@pytest.mark.slow
def test_a_recipe_removes_blocks_then_channels_then_bits(tmp_path) -> None:
    make_quick()
    torch.manual_seed(0)
    task, model = images_task(ck, samples=64, classes=4), build(ResNet)
    dense = ck.count_parameters(model)
    recipe = ck.Recipe(
        Depth(budget=ck.keep(macs=0.7), finetune=ck.Train(epochs=1, optimizer=SGD, objective=ck.imitate()), **FAST),
        ck.Prune(budget=ck.keep(macs=0.7), round_to=4, samples=64),
        ck.QAT(epochs=1, optimizer=SGD, samples=32),
        export="last",
    )
    result = recipe.run(model, task, out=tmp_path)
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir() and path.name[:1].isdigit())
    saved = json.loads((folders[-3] / "structure.json").read_text())["structure"]
    assert saved["replaced"]
    assert result.onnx.exists()  # it was verified
    for folder in folders[-2:]:
        loaded = ck.load(build(ResNet), folder)
        assert ck.count_parameters(loaded) < 0.8 * dense
    inputs = image(7)
    torch.testing.assert_close(loaded(*inputs), result.model(*inputs))
    again = ck.load(build(ResNet), folders[-3])
    assert type(again) is ResNet
    assert set(saved["replaced"]) == {n for n, m in again.named_modules() if type(m).__name__ == "Bypass"}


@pytest.mark.slow
def test_a_finished_stage_is_read_again(tmp_path) -> None:
    make_quick()
    task, model = images_task(ck, samples=32, classes=4), build(Transformer)
    recipe = ck.Recipe(Depth(blocks=2, **FAST), ck.Train(epochs=1), export="last")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first = recipe.run(model, task, out=tmp_path)
    fresh = build(Transformer)
    fresh.load_state_dict(state)
    second = recipe.run(fresh, task, out=tmp_path)
    inputs = image(3)
    torch.testing.assert_close(second.model(*inputs), first.model(*inputs))
    assert ck.count_macs(second.model, image(2)) == ck.count_macs(first.model, image(2))


def test_fine_tuning_brings_accuracy_back_and_statistics_are_new() -> None:
    torch.manual_seed(0)
    task, model = images_task(ck, samples=128, classes=4), build(ResNet)
    ck.fit_(model, task, ck.Train(epochs=6, optimizer=partial(torch.optim.Adam, lr=3e-3)))
    before = model.layer2[1].a[1].running_mean.clone()
    small = Depth(blocks=2, finetune=ck.Train(epochs=6, optimizer=partial(torch.optim.Adam, lr=3e-3)), **FAST)(model, task)
    assert ck.evaluate(small, task) > 0.8
    assert not small.training
    stays = [m for m in small.layer2[1:] if type(m).__name__ != "Bypass"]
    assert not stays or not torch.equal(stays[0].a[1].running_mean, before)


def test_the_stage_measures_the_form_it_was_given() -> None:
    seen = []

    def form(module: nn.Module, inputs: object) -> nn.Module:
        seen.append(type(module))
        return ck.quant.quantize_static(module, inputs)

    Depth(budget=ck.keep(bytes=0.9), form=form, **FAST)(build(ResNet), images_task(ck, samples=32, classes=4))
    assert seen.count(ResNet) >= 2  # the whole and a candidate


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"Depth\(\): wanted either budget="),
        ({"blocks": 1, "repair": 0}, r"Depth\(repair=...\): wanted a whole number >= 1, got 0"),
        ({"blocks": 1, "cost": 3}, r"Depth\(cost=...\): wanted a function of prune.depth, got 3"),
        ({"blocks": 1, "form": "int8"}, r"Depth\(form=...\): wanted a function of prune.depth, got 'int8'"),
        ({"macs": 0.5}, r"Depth\(macs=...\): it is not a setting; write budget=ck.keep\(macs=...\)"),
    ],
)
def test_bad_settings(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Depth(**settings)
