"""The pruned model meets its budget, counted or measured, within the limits of the plan."""

from __future__ import annotations

import copy
import json

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit import count_macs, count_parameters
from compresskit.base.errors import ModelError, SettingError
from compresskit.export import export_onnx
from compresskit.measure import latency
from compresskit.prune import apply_, plan_channels
from compresskit.prune.channels import candidates, selector

HALF = ck.keep(macs=0.5)


def cut(model, **settings):
    plan = plan_channels(model, image(2), **{"round_to": 4, **settings})
    return plan, apply_(copy.deepcopy(model), plan)


@pytest.mark.parametrize("kind", [networks.Residual, networks.Concat, networks.Depthwise], ids=lambda k: k.__name__)
@pytest.mark.parametrize("share", [0.8, 0.55])
def test_macs_and_parameters(kind, share) -> None:
    model = build(kind)
    _, small = cut(model, budget=ck.keep(macs=share))
    assert share - 0.1 <= count_macs(small, image(2)) / count_macs(model, image(2)) <= share
    _, small = cut(model, budget=ck.keep(parameters=share))
    assert share - 0.1 <= count_parameters(small) / count_parameters(model) <= share


def test_a_refusal_names_the_alignment_of_widths_where_that_is_the_obstacle() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    example, budget = (torch.randn(4, 8),), ck.keep(parameters=0.1)
    with pytest.raises(
        ModelError, match=r"only \d+\.\d% can be reached; locked: .*; with round_to=1 in the place of 8, 8\.9% is reached"
    ):
        plan_channels(model, example, budget, round_to=8)
    assert plan_channels(model, example, budget, round_to=1).remove


class Listener(nn.Module):
    """A narrow convolution before a recurrent layer that has nearly all MACs, whose channels cost many each."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(20, 48, 3, 2, 1), nn.BatchNorm1d(48)
        self.rnn, self.head = nn.GRU(48, 64, 2, batch_first=True, bidirectional=True), nn.Linear(128, 12)

    def forward(self, x):
        return self.head(self.rnn(torch.relu(self.norm(self.conv(x))).transpose(1, 2))[0])


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.35])
def test_a_layer_is_not_emptied_where_one_larger_step_costs_less(share) -> None:
    torch.manual_seed(0)
    plan = plan_channels(Listener(), (torch.zeros(1, 20, 32),), ck.keep(macs=share))
    widths = {line.layer: line.keep for line in plan.lines}
    assert widths["conv"] == 48
    assert plan.macs <= share * plan.macs_before


def test_other_rankings_take_their_steps_in_turn() -> None:
    plan = plan_channels(Listener(), (torch.zeros(1, 20, 32),), HALF, ranking=ck.prune.rankings.uniform)
    kept = {line.layer: line.keep / line.size for line in plan.lines}
    assert kept["conv"] == pytest.approx(kept["rnn"], abs=0.2)


def test_ratio_counts_channels() -> None:
    plan, _ = cut(build(networks.Concat), budget=ck.remove(channels=0.5), round_to=1)
    gone, size = sum(line.size - line.keep for line in plan.lines), sum(line.size for line in plan.lines)
    assert gone / size == pytest.approx(0.5, abs=1 / size)
    assert not cut(build(networks.Concat), budget=ck.remove(channels=0))[0].remove


def test_bytes_are_those_of_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(selector, "CLOSE_ENOUGH", 0.2)
    model = build(networks.Chain)
    plan, small = cut(model, budget=ck.keep(bytes=0.7))
    before, after = (export_onnx(m, tmp_path / f"{n}.onnx", image(2)).stat().st_size for n, m in enumerate((model, small)))
    assert 0.5 < after / before <= 0.7
    assert f"ONNX file of {after} bytes" in plan.note
    assert plan.note in str(plan)
    assert ck.prune.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


class Wide(networks.Chain):
    """Large enough for its milliseconds to follow its widths."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = networks.conv(3, 64), networks.conv(64, 64), torch.nn.Linear(64, 10)


def test_latency_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(selector, "CLOSE_ENOUGH", 0.5)  # the first candidate that is fast enough ends the search
    monkeypatch.setattr(candidates, "SECONDS", 0.2)
    model = build(Wide)
    plan, small = cut(model, budget=ck.keep(latency=0.6), round_to=8)
    assert "ms in ONNX Runtime" in plan.note
    files = [export_onnx(m, tmp_path / f"{n}.onnx", image(2)) for n, m in enumerate((model, small))]
    slow, fast = latency(files, image(1), seconds=0.5)
    assert fast / slow < 0.8  # wanted 0.6; the machine may be busy


def test_latency_that_cannot_be_reached() -> None:
    with pytest.raises(ModelError, match=r"wanted 0\.1% of the latency; the least that was measured is .* of the MACs; locked"):
        cut(build(networks.Chain), budget=ck.keep(latency=0.001))


def test_unreachable_targets_say_what_can_be_reached() -> None:
    model = build(networks.Chain)
    with pytest.raises(ModelError, match=r"wanted 1\.0% of the MACs, only (.*)% can be reached; locked: 10 channels: an output"):
        cut(model, budget=ck.keep(macs=0.01))
    with pytest.raises(ModelError, match="of the parameters, only"):
        cut(model, budget=ck.keep(parameters=0.001))
    with pytest.raises(ModelError, match=r"every group keeps at least 12"):
        cut(model, budget=ck.keep(macs=0.2), minimum=12)


class ManyLocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 16, 3)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 20), nn.Softmax(-1)) for _ in range(7))
        self.head = nn.Linear(140, 5)

    def forward(self, x):
        h = self.body(x).flip(1).mean((2, 3))
        return self.head(torch.cat([part(h) for part in self.parts], 1))


def test_a_refusal_names_the_locks_that_hold_the_most_macs() -> None:
    message = "no channel can be removed; locked: 16 channels: flip in the model mixes the channels; .*; 3 more reasons, which"
    with pytest.raises(ModelError, match=message):
        plan_channels(ManyLocks(), image(2), budget=HALF)


def test_minimum_width() -> None:
    assert min(line.keep for line in cut(build(networks.Concat), budget=ck.keep(macs=0.6))[0].lines) < 12
    assert min(line.keep for line in cut(build(networks.Concat), budget=ck.keep(macs=0.6), minimum=12)[0].lines) >= 12


def test_ratios_of_layers_are_kept_to() -> None:
    plan, _ = cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"a.0": 0.25})
    assert {line.layer: line.keep for line in plan.lines}["a.0"] == 12
    plan, _ = cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"a.0": 0.75})
    assert {line.layer: line.keep for line in plan.lines}["a.0"] == 4


def test_protected_layers() -> None:
    plan, _ = cut(build(networks.Concat), budget=ck.keep(macs=0.75), ignore=("a",))
    assert "a.0" not in {line.layer for line in plan.lines}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0.5}, r"\(budget=...\): wanted a budget such as ck.keep\(macs=0.5\), got 0.5"),
        ({"budget": ck.keep(weights=0.5)}, r"wanted a budget of macs or parameters or .* or channels, got keep\(weights=0.5\)"),
        ({"macs": 0.5}, r"\(macs=...\): it is not a setting; write budget=ck.keep\(macs=...\)"),
        ({"ratio": 0.5}, r"\(ratio=...\): it is not a setting; write budget=ck.remove\(channels=...\)"),
        ({"budget": HALF, "minimum": 0}, r"\(minimum=...\): wanted a whole number >= 1, got 0"),
        ({"budget": HALF, "round_to": 2.5}, r"\(round_to=...\): wanted a whole number"),
        ({"budget": HALF, "ratios": {"a.0": 1.0}}, r"ratios=\{'a.0': ...\}\): wanted the fraction that goes"),
        ({"budget": HALF, "ranking": "global"}, r"\(ranking=...\): wanted a function"),
    ],
)
def test_settings_out_of_range_are_refused_by_the_function_and_the_stage(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        plan_channels(build(networks.Chain), image(2), **settings)
    with pytest.raises(SettingError, match=message):
        ck.Prune(**settings)


def test_ratios_that_do_not_fit_the_model() -> None:
    with pytest.raises(SettingError, match=r"no layer of that name makes channels that can be cut; there are: a.0, b.0"):
        cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"c": 0.5})
    with pytest.raises(SettingError, match=r"would leave 0 of 16 channels"):
        cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"a.0": 0.98})


def test_of_the_measured_plans_within_the_budget_the_largest_is_taken(monkeypatch) -> None:
    measured = iter([(0.4, "first"), (0.6, "above"), (0.495, "close")])
    monkeypatch.setattr(candidates.ExportedCandidates, "measure", lambda self, model: next(measured))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    assert plan_channels(model, torch.randn(2, 16), ck.keep(bytes=0.5), round_to=1).note == "close"
