"""`repair`: networks broken on purpose are diagnosed by name and mended, and what does not apply is said."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.quant import Bits, quantize_static, repair
from compresskit.quant.accuracy_target.few_bits import widened_bits
from compresskit.quant.accuracy_target.losses import MetricLoss, OutputLoss
from compresskit.quant.effort import trials
from compresskit.quant.effort.unusual import without_unusual
from compresskit.quant.passes import prepare_graph


@pytest.fixture(autouse=True)
def short_trainings(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(trials, "RECONSTRUCTION_STEPS", 3)
    monkeypatch.setattr("compresskit.quant.accuracy_target.repair.IMITATION_STEPS", 3)


def scaled(model: networks.Residual) -> networks.Residual:
    """One channel of the inner convolution 100 times as large, and read as much smaller."""
    with torch.no_grad():
        for vector in (model.inner[1].weight, model.inner[1].bias):
            vector[3] = 100 * vector[3].abs()
        model.out.weight[:, 3] /= 100
    return model


def unequalised(model: networks.Chain) -> nn.Module:
    """A depthwise convolution whose channels have ranges from 1 to 1,000, before one of 1x1."""
    depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1, groups=16), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU())
    with torch.no_grad():
        factor = 2.0 ** (torch.arange(16) / 1.5)
        depthwise[0].weight *= factor[:, None, None, None]
        depthwise[0].bias *= factor
        depthwise[2].weight /= factor[:, None, None]
    return nn.Sequential(model.a, depthwise, model.b, nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head).eval()


def outputs_sqnr(model: nn.Module, quantized: nn.Module) -> float:
    fresh = image(64)
    with torch.no_grad():
        return oracles.sqnr(model(*fresh), quantized(*fresh))


@pytest.mark.parametrize(
    ("model", "named"),
    [(lambda: scaled(build(networks.Residual)), "inner"), (lambda: unequalised(build(networks.Chain)), "1")],
    ids=["a channel of 100 times the size", "an unequalised depthwise pair"],
)
def test_uneven_channels_are_named_and_mended(model, named) -> None:
    model, x = model(), image(64)
    quantized, report = repair(model, [x], drop=0.02)
    assert any(cause.cause == "uneven channels" and named in cause.layer for cause in report.causes)
    assert report.reached
    assert report.before > 0.1
    assert any(remedy.kept and remedy.name.startswith("balance channels") for remedy in report.remedies)
    assert outputs_sqnr(model, quantized) > outputs_sqnr(model, quantize_static(model, [x])) + 8


def test_an_unusual_sample_is_named_and_left_out() -> None:
    model, x = build(networks.Residual), image(64)
    x[0][0, 0, 4, 4] = 300.0
    quantized, report = repair(model, [x], drop=0.1)
    kept = [remedy.name for remedy in report.remedies if remedy.kept]
    assert kept[0].startswith("leave out unusual samples (1, up to ")
    assert report.reached
    assert outputs_sqnr(model, quantized) > outputs_sqnr(model, quantize_static(model, [x])) + 8


def test_samples_are_unusual_only_where_they_are_few_and_large() -> None:
    model = build(networks.Chain)
    x = image(40)[0]
    quantized = quantize_static(model, [(x,)])
    assert without_unusual(quantized, [(x[:20],), (x[20:],)])[1:] == (0, 1.0)
    assert all(quantizer.enabled for quantizer in quantized.quantizers())
    x[7] *= 50
    rest, count, times = without_unusual(quantized, [(x[:20],), (x[20:],)])
    assert (count, [len(part[0]) for part in rest]) == (1, [19, 20])
    assert times > 30
    torch.testing.assert_close(rest[0][0], torch.cat([x[:7], x[8:20]]), rtol=0, atol=0)
    x[:8] *= 50  # a fifth of the data is a kind of its own
    assert without_unusual(quantized, [(x[:20],), (x[20:],)])[1:] == (0, 1.0)


def test_what_is_good_enough_is_only_quantized() -> None:
    model, x = build(networks.Chain), image(32)
    quantized, report = repair(model, [x], drop=5.0)
    assert report.reached
    assert report.remedies == ()
    assert report.before == report.after
    same = quantize_static(model, [x])
    with torch.no_grad():
        torch.testing.assert_close(quantized(*x), same(*x), rtol=0, atol=0)


def test_the_plan_is_logged_before_anything_is_tried_and_the_work_is_repeatable(caplog) -> None:
    model, x = scaled(build(networks.Residual)), image(48)
    with caplog.at_level(logging.INFO):
        first, report = repair(model, [x], drop=0.0, most_float=0.2)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("compresskit.quant")]
    planned = next(i for i, text in enumerate(lines) if text.startswith("repair: outputs, of classes: "))
    tried = [i for i, text in enumerate(lines) if text in [str(remedy) for remedy in report.remedies]]
    assert len(tried) == len(report.remedies) > 4
    assert planned < min(tried)
    for planned_remedy in report.plan:
        assert str(planned_remedy) in lines[planned]
    again, second = repair(model, [x], drop=0.0, most_float=0.2)
    assert [(r.name, r.after, r.kept) for r in report.remedies] == [(r.name, r.after, r.kept) for r in second.remedies]
    with torch.no_grad():
        torch.testing.assert_close(first(*x), again(*x), rtol=0, atol=0)
    assert not report.reached
    assert "not within the 0 % that are allowed" in str(report)


def test_what_costs_the_file_comes_last_and_what_does_not_apply_is_listed() -> None:
    _, report = repair(build(networks.Chain), [image(32)], drop=50, strict=True, observer=ck.quant.observers.MinMax)
    left_out = {planned.name: planned.skipped for planned in report.plan if planned.skipped}
    assert left_out["choose ranges"] == "observer= says which ranges are taken"
    assert left_out["leave out unusual samples"] == "there are none"
    assert left_out["more bits for weights"] == "all weights have 8 bits"
    assert left_out["up to 15% of the work in float"] == "strict=True"
    assert "round weights in turn" not in left_out
    _, report = repair(build(networks.Chain), [image(32)], drop=50)
    costs = [planned.costs != "nothing" for planned in report.plan if not planned.skipped]
    assert costs[-2:] == [True, True]


def test_few_bits_get_more_where_they_hurt(tmp_path) -> None:
    model, x = build(networks.Residual), image(48)
    quantized, report = repair(model, [x], drop=0.5, bits=Bits(weights=2), most_float=0.0)
    assert any(remedy.kept and remedy.name.startswith("8 bits for ") for remedy in report.remedies)
    assert {p.name: p.skipped for p in report.plan}["round weights in turn"] == "the rounding is learned below"
    bits = quantized.origin.bits
    widened = {name for name, given in bits.items() if name and given.weights == 8}
    assert widened
    assert bits[""].weights == 2
    narrow, _ = widened_bits(quantize_static(model, [x], bits=Bits(weights=2)), x, 0.0)
    assert narrow == {"": Bits(weights=2)}
    file = ck.export_onnx(quantized, tmp_path / "repaired.onnx", x)
    assert ck.verify_onnx(file, quantized, [x]).passed
    ck.save(quantized, tmp_path / "saved")
    loaded = ck.load(build(networks.Residual), tmp_path / "saved")
    assert loaded.origin.remedies == quantized.origin.remedies == report.remedies
    with torch.no_grad():
        torch.testing.assert_close(loaded(*x), quantized(*x), rtol=0, atol=0)


def test_a_task_judges_by_its_metric() -> None:
    model, x = scaled(build(networks.Residual)), image(48)
    held = ck.metrics.float_targets(model, [image(20), image(20)])
    task = ck.Task(val=held, metric=ck.metrics.agreement("sqnr"))
    quantized, report = repair(model, [x], task=task, drop=0.02)  # percent of the power of the outputs
    assert report.samples == 40
    assert report.before > report.after
    assert report.after == pytest.approx(100 * 10 ** (-ck.evaluate(quantized, task) / 10))
    undirected = ck.Task(val=held, metric=lambda predictions, targets: 1.0)
    with pytest.raises(SettingError, match=r"repair\(task=...\): whether more of .* is better is not said; pass Task\(higher"):
        repair(model, [x], task=undirected)


def test_a_metric_without_a_value_loses_everything() -> None:
    """As a correlation, of outputs that rounding made constant."""
    model, x = scaled(build(networks.Residual)), image(48)
    calls = []

    def metric(predictions, targets):
        calls.append(predictions)
        return float("nan") if len(calls) == 2 else 1.0  # of the model without remedies

    held = ck.metrics.float_targets(model, [image(20)])
    _, report = repair(model, [x], task=ck.Task(val=held, metric=metric, higher_is_better=True), drop=0.02)
    assert report.before == math.inf
    assert report.after == 0
    assert [remedy.kept for remedy in report.remedies] == [True]  # it brought a value, of no loss


def test_losses_are_those_of_plain_loops() -> None:
    model, x = build(networks.Chain), image(20)
    quantized = quantize_static(model, [x], bits=Bits(weights=3))
    with torch.no_grad():
        wanted, got = (m(*x).double() for m in (model, quantized))
    error = probability = 0.0
    for clean, rounded in zip(wanted, got, strict=True):
        chances = (clean - clean.max()).exp() / (clean - clean.max()).exp().sum()
        probability += float(chances[clean.argmax()] - chances[rounded.argmax()]) / 20
        clean, rounded = clean - clean.mean(), rounded - rounded.mean()
        error += float((clean - rounded).square().sum() / clean.square().sum()) / 20
    loss = OutputLoss(model, [tuple(v[:7] for v in x), tuple(v[7:] for v in x)])
    assert loss(quantized) == pytest.approx(100 * max(error, probability))
    dense = nn.Sequential(model.a, model.b)
    assert OutputLoss(dense, [x])(dense) == 0
    labels = wanted.argmax(1)
    labels[:5] = (labels[:5] + 1) % 10
    task = ck.Task(val=[(*x, labels)])
    right = float((got.argmax(1) == labels).double().mean())
    assert MetricLoss(model, task, lambda q: q)(quantized) == pytest.approx(100 * (0.75 - right))


def test_one_huge_sample_does_not_count_for_all() -> None:
    model, x = build(networks.Chain), image(16)
    quantized = quantize_static(model, [x])
    x[0][3] *= 1e4
    assert OutputLoss(model, [x])(quantized) < 100 / 16 + 1


def test_the_time_allowed_leaves_slow_remedies_out() -> None:
    _, report = repair(scaled(build(networks.Residual)), [image(32)], drop=0.0, minutes=1e-6)
    assert report.remedies == ()


@pytest.mark.parametrize("way", ["repair", "effort"])
def test_the_model_is_captured_once(way, monkeypatch) -> None:
    """Each remedy begins with a copy of the graph that was captured first."""
    captures, real = [], prepare_graph.capture
    monkeypatch.setattr(prepare_graph, "capture", lambda *given, **settings: captures.append(1) or real(*given, **settings))
    model, x = build(networks.Chain), image(32)
    if way == "repair":
        _, report = repair(model, [x], drop=0.0, minutes=1e-6)
        assert report.remedies == ()
    else:
        assert quantize_static(model, [x], effort="balanced", float_macs=0.0).origin.remedies
    assert captures == [1]


def test_a_part_of_a_model_is_repaired_in_its_place() -> None:
    model = nn.Sequential(scaled(build(networks.Residual))).eval()
    whole, report = repair(model, [image(48)], inside="0", drop=0.1)
    assert report.reached
    assert whole[0].origin.remedies == report.remedies


@pytest.mark.slow
def test_the_stage_repairs_by_outputs_or_by_the_metric(caplog) -> None:
    task = images_task(ck, samples=96)
    model = scaled(build(networks.Residual))
    quantized = ck.quant.Repair(drop=0.0, samples=64, most_float=0.0)(model, task)
    assert any(remedy.kept for remedy in quantized.origin.remedies)
    with caplog.at_level(logging.WARNING):
        by_metric = ck.quant.Repair(drop=0.0, samples=64, by_metric=True, most_float=0.0)(
            model, replace(task, metric=worsening())
        )
    assert "Repair: " in caplog.text
    assert "are lost, 0 % were allowed" in caplog.text
    assert by_metric.origin.remedies


def test_a_run_keeps_what_each_remedy_bought(tmp_path) -> None:
    task = images_task(ck, samples=64)
    recipe = ck.Recipe(ck.Train(epochs=1), ck.quant.Repair(drop=0.0, samples=64, most_float=0.0), export="last")
    result = recipe.run(networks.Chain(), task, tmp_path / "run")
    assert result.rows[-1].verified
    details = json.loads(next((tmp_path / "run").glob("*repair/details.json")).read_text())
    assert details["remedies"] == [str(remedy) for remedy in result.model.origin.remedies] != []


class worsening:
    """A metric that falls with every call, so that nothing pays."""

    higher_is_better = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, predictions, targets) -> float:
        self.calls += 1
        return 1 / self.calls


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(drop=-1.0), r"repair\(drop=...\): wanted a percentage, 0 <= drop < 100, got -1.0"),
        (dict(most_float=2.0), r"repair\(most_float=...\): wanted a share of the work in 0..1, got 2.0"),
        (dict(minutes=0.0), r"repair\(minutes=...\): wanted a positive number, or None, got 0.0"),
        (dict(effort="best"), r"repair: it tries all remedies until the loss is small enough; leave effort= and float_macs= out"),
    ],
)
def test_settings_out_of_range_are_refused(given, message) -> None:
    with pytest.raises(SettingError, match=message):
        repair(build(networks.Chain), [image(32)], **given)


def test_too_little_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"repair: wanted at least 16 calibration samples.* got 10"):
        repair(build(networks.Chain), [image(10)])
    with pytest.raises(DataError, match=r"repair: "):
        repair(build(networks.Chain), [])
