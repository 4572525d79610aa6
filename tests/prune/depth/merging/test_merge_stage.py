"""The stage Merge: fine-tuned apart, merged, resumed, exported, loaded again, pruned and quantized afterwards."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from convolution_runs import InCode, Narrow
from networks import build, image, images_task
from quick import make_quick
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.graph.replacements import Factored, Merged, Signed, Unmerged, replace_module_
from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.depth import Merge, plan_merges
from compresskit.prune.depth.merging import merge_stage, saved_macs
from compresskit.prune.depth.merging.prove_merges import merge_checked_


def equal_costs(model, example, runs):
    return dict.fromkeys(runs, 1.0)


SGD = partial(torch.optim.SGD, lr=0.05)
FAST = {"cost": saved_macs, "samples": 32, "repair": 64}


def test_a_merged_model_is_saved_exported_and_loaded(tmp_path) -> None:
    make_quick()
    model, task = build(Narrow), images_task(ck, samples=32, classes=4)
    seen = []

    def look(report):
        seen.append([type(module).__name__ for module in model.modules()].count("Unmerged"))

    tune = ck.Train(epochs=1, optimizer=SGD, objective=ck.imitate(), on_step=look)
    small = Merge(runs=2, finetune=tune, **FAST)(model, task)
    assert seen
    assert set(seen) == {2}  # the layers train apart
    assert sum(isinstance(module, Merged) for module in small.modules()) == 2
    assert not small.training
    ck.save(small, tmp_path)
    loaded = ck.load(build(Narrow), tmp_path)
    inputs = image(3)
    torch.testing.assert_close(loaded(*inputs), small(*inputs))
    assert ck.verify_onnx(ck.export_onnx(small, tmp_path / "m.onnx", image(2)), small, [image(1), image(7)])


@pytest.mark.slow
def test_a_recipe_merges_then_removes_channels_then_bits(tmp_path) -> None:
    make_quick()
    torch.manual_seed(0)
    task, model = images_task(ck, samples=64, classes=4), build(Narrow)
    dense = ck.count_macs(model, image(2))
    recipe = ck.Recipe(
        Merge(budget=ck.keep(macs=0.8), finetune=ck.Train(epochs=1, optimizer=SGD, objective=ck.imitate()), **FAST),
        ck.Prune(budget=ck.keep(macs=0.8), round_to=2, samples=64),
        ck.QAT(epochs=1, optimizer=SGD, samples=32),
        export="last",
    )
    result = recipe.run(model, task, out=tmp_path)
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir() and path.name[:1].isdigit())
    saved = json.loads((folders[-3] / "structure.json").read_text())["structure"]
    assert {record["kind"] for record in saved["replaced"].values()} == {"bypass", "merged"}
    assert result.onnx.exists()  # it was verified
    for folder in folders[-3:]:
        loaded = ck.load(build(Narrow), folder)
    assert ck.count_macs(ck.load(build(Narrow), folders[-2]), image(2)) < 0.65 * dense
    inputs = image(7)
    torch.testing.assert_close(loaded(*inputs), result.model(*inputs))


@pytest.mark.slow
def test_an_interrupted_stage_goes_on_with_the_same_plan_and_bits(tmp_path, monkeypatch) -> None:
    make_quick()

    made: list[int] = []

    def counted(*args, **settings):
        made.append(1)
        return plan_merges(*args, **settings)

    monkeypatch.setattr(merge_stage, "plan_merges", counted)
    task, start = images_task(ck, samples=64, classes=4), build(InCode)
    state = {name: value.clone() for name, value in start.state_dict().items()}

    def run(folder, interrupted=False):
        def stop(report):
            if interrupted and report.step == 5:
                raise KeyboardInterrupt

        model = InCode()
        model.load_state_dict(state)
        tune = ck.Train(epochs=4, optimizer=SGD, on_step=stop)
        stage = Merge(runs=2, finetune=tune, cost=equal_costs, samples=32, repair=64)
        return ck.Recipe(stage, save=ck.Every(seconds=None, steps=2), export="last").run(model, task, out=tmp_path / folder)

    whole = run("whole")
    with pytest.raises(BaseException):  # noqa: B017, PT011  how a run ends is not what this tests
        run("cut", interrupted=True)
    resumed = run("cut")
    assert len(made) == 2  # the resumed stage did not plan again
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_fine_tuning_brings_accuracy_back() -> None:
    torch.manual_seed(0)
    task, model = images_task(ck, samples=128, classes=4), build(InCode)
    adam = ck.Train(epochs=6, optimizer=partial(torch.optim.Adam, lr=3e-3))
    ck.fit_(model, task, adam)
    small = Merge(runs=2, finetune=adam, cost=equal_costs, samples=32, repair=64)(model, task)
    assert ck.evaluate(small, task) > 0.8
    assert sum(isinstance(module, nn.Conv2d) for module in small.modules()) == 4


def test_a_merge_that_is_not_exact_is_refused() -> None:
    model = build(Narrow)
    plan = ck.prune.depth.plan_merges(model, image(2), runs=1, cost=saved_macs)
    plan.apply_(model, merge=False)
    (gathered,) = [module for module in model.modules() if isinstance(module, Unmerged)]
    gathered[1].running_mean[0] = float("nan")
    merge_checked_(model, image(2))  # the same values that are no numbers are the same
    model = build(Narrow)
    plan.apply_(model, merge=False)
    (gathered,) = [module for module in model.modules() if isinstance(module, Unmerged)]
    gathered[0].register_forward_hook(lambda _, __, output: output + 1)
    with pytest.raises(ModelError, match="with one convolution in the place of each run its outputs differ by"):
        merge_checked_(model, image(2))
    assert any(isinstance(module, Unmerged) for module in model.modules())


def test_what_later_takes_the_place_of_a_merged_convolution_is_made_again() -> None:
    model = build(Narrow)
    plan_merges(model, image(2), runs=3, cost=saved_macs).apply_(model)
    layers = [path for path, module in model.named_modules() if isinstance(module, Merged)]
    factored = Factored.like(model.get_submodule(layers[0]), (2, 2))
    replace_module_(model, layers[0], factored)
    replace_module_(model, layers[1], Signed(model.get_submodule(layers[1])))
    model.eval()
    again = Narrow().eval()
    record = json.loads(json.dumps(structure(model)))
    for _ in range(2):
        restructure_(again, record)
    again.load_state_dict(model.state_dict())
    inputs = image(3)
    torch.testing.assert_close(again(*inputs), model(*inputs))
    assert structure(again) == structure(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"Merge\(\): wanted either budget="),
        ({"runs": 1, "repair": 0}, r"Merge\(repair=...\): wanted a whole number >= 1, got 0"),
        ({"runs": 1, "cost": 3}, r"Merge\(cost=...\): wanted a function of prune.depth.merging, got 3"),
        ({"macs": 0.5}, r"Merge\(macs=...\): it is not a setting; write budget=ck.keep\(macs=...\)"),
    ],
)
def test_bad_settings(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Merge(**settings)


MERGED = {
    "kind": "merged", "outputs": 4, "inputs": 4, "groups": 1, "bias": True, "kernel_size": [3, 3], "stride": [1, 1],
    "padding": [1, 1], "dilation": [1, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "record", "message"),
    [
        ("blocks.0.6", MERGED | {"outputs": -1}, "blocks.0.6: not the record of a merged convolution"),
        ("blocks.0.6", MERGED | {"groups": 3}, "not the record of a merged convolution"),
        ("blocks.0.6", MERGED | {"kernel_size": [3]}, "not the record of a merged convolution"),
        ("blocks.0.6", MERGED | {"kernel_size": [60000, 60000]}, "not the record of a merged convolution"),
        ("blocks.0.6", MERGED | {"bias": 1}, "not the record of a merged convolution"),
        ("blocks.0.7", MERGED, "the record says a merged convolution, the model has BatchNorm2d; it is of another model"),
        ("blocks.0.6", {"kind": "unmerged", "sources": ["blocks.0.3"]}, "blocks.0.6: not the record of layers to merge"),
        ("blocks.0.6", {"kind": "unmerged", "sources": ["nothing", "blocks.0.6"]}, "has no module 'nothing'"),
        ("blocks.0.0", {"kind": "bypass", "argument": 0, "outputs": 0, "index": 0, "copies": 3}, "not the record of a replaced"),
    ],
)
def test_a_damaged_record_is_refused(path, record, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        restructure_(Narrow(), structure(Narrow()) | {"replaced": {path: record}})
