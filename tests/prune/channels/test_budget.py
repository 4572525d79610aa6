"""Targets, rankings and limits of a plan, against what the cut model really is."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import networks
import pytest
import torch
from networks import build, image, images_task

import compresskit as ck
from compresskit import count_macs, count_parameters
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.export import export_onnx
from compresskit.measure import latency
from compresskit.prune import apply_, channel_sensitivity, plan_channels
from compresskit.prune.channels import candidates, selector
from compresskit.prune.criteria import Slices, l2
from compresskit.prune.normalizers import by_deviation, by_largest, by_mean, unscaled
from compresskit.prune.rankings import cost_aware, isomorphic, pooled, uniform
from compresskit.prune.sensitivity import ChannelSensitivity

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


def scored(values):
    """A criterion that gives every group of n channels what `values(n)` says."""
    return lambda s: values(len(s.weight))


def keeps(ranking, criterion=l2, **settings):
    plan, _ = cut(
        build(networks.Concat),
        **{"budget": ck.remove(channels=0.5), "round_to": 1, "ranking": ranking, "criterion": criterion, **settings},
    )
    return {line.layer: line.keep / line.size for line in plan.lines}


def test_uniform_cuts_every_group_alike() -> None:
    assert all(abs(share - 0.5) < 0.1 for share in keeps(uniform).values())


def test_pooled_cuts_the_lowest_scores_of_all() -> None:
    """One group's channels are worth ten times less: it alone is cut, unless scores are normalised first."""

    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) * (0.01 if len(s.weight) == 24 else 1)

    share = keeps(pooled, criterion, normalize=unscaled, budget=ck.remove(channels=0.3))
    assert share["b.0"] < 0.15
    assert all(v == 1 for name, v in share.items() if name != "b.0")
    assert all(v < 1 for v in keeps(pooled, criterion, normalize=by_mean, budget=ck.remove(channels=0.3)).values())


def test_normalisations_matter_to_pooled() -> None:
    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) ** (len(s.weight) / 8)

    found = [keeps(pooled, criterion, normalize=n) for n in (unscaled, by_mean, by_largest, by_deviation)]
    assert all(a != b for a, b in pairwise(found))


def test_isomorphic_ranks_only_groups_of_a_kind() -> None:
    """Groups of another kind are cut by the same ratio however their scores compare; `pooled` empties the cheap kind."""

    def criterion(s: Slices):
        return torch.linspace(1, 2, len(s.weight)) * (1e-3 if s.scales is None else 1)

    model = build(networks.Residual)
    settings = dict(budget=ck.remove(channels=0.4), round_to=1, criterion=criterion, normalize=unscaled)
    by = {}
    for ranking in (pooled, isomorphic):
        plan, _ = cut(model, ranking=ranking, **settings)
        by[ranking] = {line.layer: line.keep / line.size for line in plan.lines}
    assert by[pooled] != by[isomorphic]
    spread = {ranking: max(v.values()) - min(v.values()) for ranking, v in by.items()}
    assert spread[isomorphic] < 0.2 < spread[pooled]


def test_cost_aware_does_not_depend_on_the_scale_of_scores() -> None:
    model = build(networks.Concat)
    one = plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4)
    scales = {16: 3.0, 24: 0.1}
    other = plan_channels(
        model, image(2), budget=ck.keep(macs=0.6), round_to=4, criterion=lambda s: l2(s) * scales[len(s.weight)]
    )
    assert one.remove == other.remove
    assert cost_aware is not uniform


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
def test_bad_settings(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        plan_channels(build(networks.Chain), image(2), **settings)
    with pytest.raises(SettingError, match=message):
        ck.Prune(**settings)


def test_ratios_that_do_not_fit_the_model() -> None:
    with pytest.raises(SettingError, match=r"no layer of that name makes channels that can be cut; there are: a.0, b.0"):
        cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"c": 0.5})
    with pytest.raises(SettingError, match=r"would leave 0 of 16 channels"):
        cut(build(networks.Chain), budget=ck.keep(macs=0.5), ratios={"a.0": 0.98})


# -- sensitivity


def trained():
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    ck.Train(epochs=12, optimizer=lambda p: torch.optim.Adam(p, lr=3e-3))(model, task)
    return model, task


def test_sensitivity_is_what_cutting_one_group_costs() -> None:
    model, task = trained()
    before = copy.deepcopy(model.state_dict())
    curves = channel_sensitivity(model, task, ratios=(0.25, 0.75), round_to=4, samples=128)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert curves.dense == ck.evaluate(model, task)
    plan = plan_channels(model, image(2), budget=ck.remove(channels=0), ratios={"inner.0": 0.75}, round_to=4)
    cut_by_hand = apply_(copy.deepcopy(model), plan)
    ck.prune.reestimate_batchnorm_(cut_by_hand, (batch[:1] for batch in task.train))
    ratio, metric = curves.points["inner.0"][-1]
    assert ratio == 0.75
    assert metric == pytest.approx(ck.evaluate(cut_by_hand, task), abs=0.05)  # the last bits of statistics over a shuffled loader
    assert ChannelSensitivity.from_json(json.loads(json.dumps(curves.to_json()))) == curves
    assert "inner.0: 25% ->" in str(curves)
    refit = channel_sensitivity(model, task, ratios=(0.25, 0.75), round_to=4, samples=128, reconstruct=True)
    assert refit.points != curves.points


def test_allocation_spares_what_the_metric_needs() -> None:
    model = build(networks.Concat)
    plan = plan_channels(model, image(2), budget=ck.keep(macs=0.9), round_to=4)
    others = {line.layer: ((0.25, 0.88), (0.75, 0.8)) for line in plan.lines}
    flat, steep = {**others, "a.0": ((0.75, 0.9),)}, {**others, "a.0": ((0.25, 0.5), (0.75, 0.1))}
    ratios = {}
    for name, points in (("flat", flat), ("steep", steep)):
        curves = ChannelSensitivity(dense=0.9, points=points)
        ratios[name] = curves.ratios(model, image(2), budget=ck.keep(macs=0.7), round_to=4)
        small = apply_(
            copy.deepcopy(model), plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4, ratios=ratios[name])
        )
        assert count_macs(small, image(2)) <= 0.7 * count_macs(model, image(2))
    assert ratios["steep"]["a.0"] == 0
    assert ratios["flat"]["a.0"] >= 0.5
    assert plan_channels(model, image(2), budget=ck.keep(macs=0.7), round_to=4, ranking=curves.ranking()).remove


def test_drops_are_read_off_a_curve_that_never_rises() -> None:
    curves = ChannelSensitivity(dense=0.9, points={"a": ((0.25, 0.8), (0.5, 0.85), (0.75, 0.5))})
    assert curves.drop("a", 0.125) == pytest.approx(0.05)
    assert curves.drop("a", 0.5) == pytest.approx(0.1)
    assert curves.drop("a", 0.625) == pytest.approx(0.25)
    assert curves.drop("a", 0.875) == pytest.approx(0.55)


def test_bad_curves() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    with pytest.raises(SettingError, match=r"wanted different fractions in \(0, 1\), got \(0.5, 0.5\)"):
        channel_sensitivity(model, task, ratios=(0.5, 0.5))
    with pytest.raises(CheckpointError, match="not sensitivity curves"):
        ChannelSensitivity.from_json({"dense": 1})
