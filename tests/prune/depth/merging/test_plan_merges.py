"""Plans of merges: budgets are met, nothing slower is chosen, plans print, serialize and apply; bad input."""

from __future__ import annotations

import copy
import itertools
import json

import oracles
import pytest
import torch
from convolution_runs import InCode, Narrow
from networks import Chain, build, image, images_task
from residual import ResNet
from terminal import show_terminal
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune.depth import MergePlan, importance, plan_merges
from compresskit.prune.depth.merging import find_runs, metric_loss, saved_macs, saved_milliseconds
from compresskit.prune.depth.merging.choose_runs import least_important
from compresskit.prune.depth.merging.merge_runs import ConvolutionRun

WHOLE = "blocks.1.0 + blocks.1.3 + blocks.1.6"


def by_order(scoring):
    """The first runs count least."""
    return {run.name: i + 1.0 for i, run in enumerate(scoring.runs)}


def test_a_budget_of_macs_is_met_with_what_matters_least() -> None:
    model = build(Narrow)
    plan = plan_merges(model, image(2), ck.keep(macs=0.8), importance=by_order, cost=saved_macs)
    small = plan.apply_(copy.deepcopy(model))
    assert ck.count_macs(small, image(2)) == plan.macs <= 0.8 * plan.macs_before
    assert len(plan.runs) == 2
    saved = saved_macs(model, image(2), {run.name: run for run in plan.runs})
    assert plan.macs_before - plan.macs == sum(saved.values())
    assert all(line.cost == saved[line.name] > 0 for line in plan.lines)


def test_a_budget_of_parameters_is_met() -> None:
    model = build(Narrow)
    assert plan_merges(model, image(2), ck.keep(parameters=1.0), importance=by_order, cost=saved_macs).runs == ()
    plan = plan_merges(model, image(2), ck.keep(parameters=0.85), importance=by_order, cost=saved_macs)
    small = plan.apply_(copy.deepcopy(model))
    assert ck.count_parameters(small) <= 0.85 * ck.count_parameters(model)


def test_a_latency_is_measured_on_the_file() -> None:
    """An inverted residual of 4 channels at 24 takes half of the time as one convolution."""
    plan = plan_merges(build(Narrow), image(2), ck.keep(latency=0.9), importance=by_order)
    assert "in ONNX Runtime" in plan.note
    assert plan.unit == "ms"
    assert all(line.cost > 0 for line in plan.lines)


def test_what_is_slower_is_never_merged() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.MaxPool2d(1), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2)
    ).eval()
    message = r"one convolution is not faster, it saves -.* of its cost; leave it out"
    with pytest.raises(SettingError, match=message):
        plan_merges(model, image(2), runs=("2 + 4",), cost=saved_macs)
    for asked in ({"runs": 1}, {"budget": ck.keep(macs=0.9)}, {"budget": ck.keep(latency=0.9)}):
        with pytest.raises(ModelError, match=r"ask for less"):
            plan_merges(model, image(2), cost=saved_macs, **asked)
    (saved,) = saved_milliseconds(model, image(1), find_runs(model, image(1)).runs).values()
    assert saved < 0  # 81 positions in the place of twice 25


def test_a_shrunk_layer_makes_what_was_slower_faster() -> None:
    model = build(InCode)
    plan = plan_merges(model, image(2), ck.keep(macs=0.9), shrink=True, importance=by_order, cost=saved_macs)
    assert all("(1x1)" in name for name in plan.names)
    assert all("(1x1)" in name or "not faster" in why for name, why in plan.locked.items() if name.startswith("blocks.0.conv1"))
    small = plan.apply_(copy.deepcopy(model))
    assert ck.count_macs(small, image(2)) == plan.macs <= 0.9 * plan.macs_before
    assert MergePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(ModelError, match="ask for less, or allow shrink=True"):
        plan_merges(model, image(2), ck.keep(macs=0.9), importance=by_order, cost=saved_macs)


def test_importances() -> None:
    """Against plain loops on the network whose BatchNorm statistics were estimated again."""
    task, model = images_task(ck, samples=64, classes=4), build(Narrow)
    plan = plan_merges(model, image(4), runs=(WHOLE,), task=task, samples=64, cost=saved_macs)
    changed = plan.apply_(copy.deepcopy(model), merge=False)
    batches = [x for x, _ in task.train]
    ck.prune.reestimate_batchnorm_(changed, batches)
    with torch.no_grad():
        errors = [float(oracles.soft_targets(changed(x), model(x), temperature=1.0)) for x in batches]
    assert plan.lines[0].importance == pytest.approx(sum(errors) / len(errors), rel=1e-3)
    other = plan_merges(model, image(4), runs=(WHOLE,), importance=metric_loss, task=task, samples=64, cost=saved_macs)
    assert other.lines[0].importance == pytest.approx(ck.evaluate(model, task) - ck.evaluate(changed, task))


def test_the_choice_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [f"c{i}" for i in range(7)]
    runs = {}
    for start, length in itertools.product(range(6), (2, 3)):
        parts = tuple(layers[start : start + length])
        if len(parts) == length:
            run = ConvolutionRun(layers=parts, norms=("",) * (length - 1), activations=("",) * (length - 1))
            runs[run.name] = run
    lost = {name: float(torch.rand((), generator=generator)) for name in runs}
    saved = {name: float(torch.rand((), generator=generator)) + 0.1 for name in runs}

    def sets():
        for count in range(1, 4):
            for names in itertools.combinations(runs, count):
                used = [path for name in names for path in runs[name].layers]
                if len(used) == len(set(used)):
                    yield names

    needed = 1.2
    best = min((n for n in sets() if sum(saved[k] for k in n) >= needed), key=lambda n: sum(lost[k] for k in n))
    assert set(least_important(runs, lost, saved, needed=needed)) == set(best)
    two = min((n for n in sets() if len(n) == 2), key=lambda n: sum(lost[k] for k in n))
    assert set(least_important(runs, lost, saved, count=2)) == set(two)
    most = max(sum(saved[k] for k in n) for n in sets())
    assert sum(saved[name] for name in least_important(runs, lost, saved)) == pytest.approx(most)
    assert least_important(runs, lost, saved, needed=most + 0.01) is None
    assert least_important({}, {}, {}, count=1) is None


def test_plans_print_serialize_and_apply_to_another_model() -> None:
    plan = plan_merges(build(Narrow), image(2), runs=(WHOLE,), cost=saved_macs)
    again = MergePlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    lines = str(plan).splitlines()
    assert lines[0].startswith("8 of 10 convolutions stay; ")
    assert lines[1].startswith(f"  {WHOLE}: one convolution of 3 x 3, ")
    other = again.apply_(build(Narrow))
    assert type(other) is Narrow
    assert ck.count_macs(other, image(2)) == plan.macs
    before = {name: type(module) for name, module in other.named_modules()}
    with pytest.raises(
        ModelError, match=r"blocks.1.0: the plan was made for a convolution with weights \(24, 4, 1, 1\), this Narrow"
    ):
        plan.apply_(other)
    assert {name: type(module) for name, module in other.named_modules()} == before
    with pytest.raises(ModelError, match="this Chain has no such layer; apply the plan to a model of the same class"):
        plan.apply_(build(Chain))
    with pytest.raises(ModelError, match="has masks, which are for its present layers; merge layers first, then Sparsify"):
        masked = build(Narrow)
        ck.prune.plan_mask(masked, ck.remove(weights=0.5)).apply_(masked)
        plan.apply_(masked)
    with pytest.raises(CheckpointError, match="not a plan of merges"):
        MergePlan.from_json({"runs": 3})
    with pytest.raises(CheckpointError, match=r"the plan of merges was changed after it was made, .*; plan again"):
        MergePlan.from_json(plan.to_json() | {"runs": []})


def test_channels_are_pruned_afterwards() -> None:
    model = build(Narrow)
    small = plan_merges(model, image(2), runs=2, cost=saved_macs).apply_(model)
    before = ck.count_macs(small, image(2))
    ck.prune.apply_(small, ck.prune.plan_channels(small, image(2), ck.keep(macs=0.7), round_to=2))
    assert ck.count_macs(small, image(2)) <= 0.7 * before


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, SettingError, r"plan_merges\(\): wanted either budget=ck.keep\(latency=0.7\), or runs="),
        ({"budget": ck.keep(bytes=0.5)}, SettingError, "wanted a budget of latency or macs or parameters"),
        ({"runs": 0}, SettingError, r"runs=...\): wanted a whole number >= 1, or a tuple of names, got 0"),
        ({"runs": 1, "longest": 1}, SettingError, r"longest=...\): wanted a whole number from 2 to 8, got 1"),
        ({"runs": 1, "samples": 0}, SettingError, r"samples=...\): wanted a whole number >= 1, got 0"),
        (
            {"runs": 1, "importance": importance.influence},
            SettingError,
            "wanted a function of prune.depth.merging.merge_importance",
        ),
        ({"runs": 1, "importance": importance.after_training}, SettingError, "wanted a function of prune.depth.merging"),
        (
            {"runs": ("stem + blocks.0.0",)},
            SettingError,
            "it cannot be merged: one convolution would take|one convolution is not fas",
        ),
        ({"runs": ("head",)}, SettingError, "it cannot be merged: it is no run of convolutions; there are: "),
        ({"runs": (WHOLE, "blocks.1.0 + blocks.1.3")}, SettingError, "blocks.1.0 is in two of .*; name each layer once"),
        ({"budget": ck.keep(macs=0.01)}, ModelError, "wanted 1.0% of the macs, only .*% can be reached; locked: "),
        ({"runs": 9}, ModelError, "wanted 9 runs to merge, at most 3 can be at once"),
        ({"runs": 1, "importance": metric_loss}, SettingError, "metric_loss: it reads the metric; pass task="),
    ],
)
def test_bad_input(settings, error, message) -> None:
    with pytest.raises(error, match=message):
        plan_merges(build(Narrow), image(2), **{"importance": by_order, "cost": saved_macs, **settings})


def test_a_model_without_runs_is_refused() -> None:
    model = build(ResNet)
    for block in (*model.layer1, *model.layer2):
        block.a = nn.Sequential(block.a, nn.MaxPool2d(1))
    with pytest.raises(ModelError, match="ResNet has no convolutions that can be merged: wanted a convolution whose output one"):
        plan_merges(model, image(2), runs=1)


def test_a_layer_whose_attributes_the_code_reads_stays() -> None:
    class Reads(InCode):
        def forward(self, x):
            return super().forward(x.to(self.blocks[0].conv1.weight.dtype))

    plan = plan_merges(build(Reads), image(2), runs=1, cost=lambda m, x, runs: dict.fromkeys(runs, 1.0))
    assert plan.names == ("blocks.1.conv1 + blocks.1.conv2",)
    assert plan.locked["blocks.0.conv1 + blocks.0.conv2"].startswith("the model does not run without it: AttributeError")


def test_progress_is_shown(monkeypatch) -> None:
    terminal = show_terminal(monkeypatch)
    plan_merges(build(Narrow), image(2), runs=(WHOLE,))
    assert {"time convolutions", "score runs"} <= set(terminal.bars)
