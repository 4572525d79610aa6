"""Measured placement: operators that are faster in float stay float, with the figures as the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from networks import Chain, Depthwise, Residual, build, image, images_task

import compresskit as ck
from compresskit import measure
from compresskit.base.errors import SettingError
from compresskit.export.check.profile.layers import profile_layers
from compresskit.quant import X86, prepare_qat, quantize_static
from compresskit.quant.measured_placement import latency_search
from compresskit.quant.measured_placement.latency_search import candidate_parts, choose_floating
from compresskit.quant.numerics.targets import Deployment
from compresskit.quant.passes.placement import place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


def short_profile(path, inputs, *, against, threads, **_):
    return profile_layers(path, inputs, against=against, threads=threads, seconds=0.02)


@pytest.fixture(autouse=True)
def profiles_are_short(monkeypatch) -> None:
    monkeypatch.setattr(latency_search, "profile_layers", short_profile)


def parts_of(kind: type) -> dict[str, list[str]]:
    captured, _, _ = prepare_graph(build(kind), image(4), X86)
    return candidate_parts(captured, place_quantizers(captured.module.graph, X86))


def test_parts_are_kinds_of_operators_and_regions_and_none_is_tried_twice() -> None:
    parts = parts_of(Depthwise)
    assert "depthwise convolutions" in parts
    assert not set(parts["depthwise convolutions"]) & set(parts["every conv"])
    assert len({frozenset(members) for members in parts.values()}) == len(parts)
    assert any(name.startswith("the region of") for name in parts_of(Residual))


PARTS = {"every conv": ["conv", "conv_1"], "every linear": ["linear"], "every add": ["add"]}


def measured(times: dict[frozenset[str], float]):
    """A stand-in for the measurement: milliseconds by the nodes that stay float."""
    return lambda variants: [times[frozenset(floating)] for floating in variants]


def alone(**nodes: float) -> dict[frozenset[str], float]:
    return {frozenset(PARTS[f"every {kind}"]): ms for kind, ms in nodes.items()}


def test_all_parts_that_help_stay_float_together() -> None:
    times = alone(conv=2.0, linear=2.5, add=2.99) | {frozenset(): 3.0, frozenset({"conv", "conv_1", "linear"}): 1.8}
    choice = choose_floating(PARTS, measured(times))
    assert set(choice.floating) == {"conv", "conv_1", "linear"}  # the add is within 2 %
    assert choice.floating["linear"] == "measured: with every linear in float the model takes 2.500 ms, not 3.000"
    assert (choice.ms, choice.all_integer_ms) == (1.8, 3.0)


def test_the_best_part_alone_where_together_is_slower() -> None:
    times = alone(conv=2.0, linear=2.5, add=3.0) | {frozenset(): 3.0, frozenset({"conv", "conv_1", "linear"}): 2.2}
    choice = choose_floating(PARTS, measured(times))
    assert set(choice.floating) == {"conv", "conv_1"}
    assert choice.ms == 2.0


def test_nothing_stays_float_where_nothing_helps() -> None:
    choice = choose_floating(PARTS, measured(alone(conv=3.0, linear=2.95, add=4.0) | {frozenset(): 3.0}))
    assert choice.floating == {}
    assert choice.ms == 3.0


def by_operators(times: dict[str, float]):
    """A `latency` that gives each file a made-up time, by the operators that it runs in integers."""

    def latency(paths, inputs, *, threads, seconds):
        kinds = [{kind for kind, (done, _) in ck.audit(path).operators.items() if done} for path in paths]
        return [times["all" if "Gemm" in k else "conv" if "Conv" in k else "float"] for k in kinds]

    return latency


def test_files_of_the_variants_are_timed_and_the_faster_operators_stay_float(monkeypatch, caplog) -> None:
    monkeypatch.setattr(latency_search, "latency", by_operators({"all": 3.0, "conv": 2.0, "float": 4.0}))
    with caplog.at_level(logging.WARNING):
        quantized = quantize_static(build(Chain), [image(8)], choose="measure")
    assert "linear" not in quantized.placement.integer.values()
    assert "conv" in quantized.placement.integer.values()
    assert any("not 3.000" in reason for reason in quantized.placement.floating.values())
    assert not caplog.records


def test_where_all_is_fastest_in_float_it_stays_in_integers_with_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(latency_search, "latency", by_operators({"all": 1.0, "conv": 1.0, "float": 0.4}))
    with caplog.at_level(logging.WARNING):
        quantized = quantize_static(build(Chain), [image(8)], choose="measure")
    assert quantized.placement.integer == quantize_static(build(Chain), [image(8)]).placement.integer
    assert "int8 is no faster than float here (1.000 ms against 0.400 ms at batch 1, 1 thread)" in caplog.text
    assert quantized.origin.measured.floating == 0


def test_the_choice_is_for_the_threads_and_the_batch_of_the_deployment(monkeypatch, caplog) -> None:
    seen = []

    def latency(paths, inputs, *, threads, seconds):
        seen.append((threads, inputs[0].shape[0]))
        return by_operators({"all": 3.0, "conv": 2.0, "float": 4.0})(paths, inputs, threads=threads, seconds=seconds)

    def profiled(path, inputs, *, against, threads, **_):
        seen.append((threads, inputs[0].shape[0]))
        return short_profile(path, inputs, against=against, threads=threads)

    monkeypatch.setattr(latency_search, "latency", latency)
    monkeypatch.setattr(latency_search, "profile_layers", profiled)
    with caplog.at_level(logging.INFO, logger="compresskit.quant.measured_placement.latency_search"):
        quantized = quantize_static(build(Chain), [image(4)], choose="measure", deployment=Deployment(threads=2, batch=6))
    assert set(seen) == {(2, 6)}
    found = quantized.origin.measured
    assert (found.threads, found.batch, found.milliseconds, found.float_milliseconds) == (2, 6, 2.0, 4.0)
    assert found.integer_milliseconds == 3.0
    assert found.floating > 0
    assert found.files >= 4
    assert f"Chain: measured placement (batch 6, threads 2): {found.floating} operators stay float, 2.000 ms" in caplog.text


def test_a_predicted_placement_wins_where_its_file_is_fastest(monkeypatch) -> None:
    """No part alone helps; the first convolution in float, which is no part, does."""

    def latency(paths, inputs, *, threads, seconds):
        convs = [ck.audit(path).operators["Conv"] for path in paths]
        return [2.0 if 0 < done < count else 3.0 for done, count in convs]

    monkeypatch.setattr(latency_search, "latency", latency)
    monkeypatch.setattr(latency_search, "predicted_placements", lambda graph, profile: [graph.members[0]])
    quantized = quantize_static(build(Chain), [image(8)], choose="measure")
    assert quantized.origin.measured.milliseconds == 2.0
    (name,) = [name for name, why in quantized.placement.floating.items() if why.startswith("measured")]
    assert (
        quantized.placement.floating[name]
        == "measured: the model takes 2.000 ms with this and 0 other operators in float, not 3.000"
    )


def test_qat_chooses_by_measurement_too(monkeypatch) -> None:
    monkeypatch.setattr(latency_search, "latency", by_operators({"all": 3.0, "conv": 2.0, "float": 4.0}))
    quantized = prepare_qat(build(Chain), [image(8)], choose="measure", deployment=Deployment(batch=2))
    assert "linear" not in quantized.placement.integer.values()
    assert quantized.origin.measured.batch == 2
    task = images_task(ck)
    result = ck.QAT(epochs=1, samples=32, choose="measure")(build(Chain), task)
    assert "linear" not in result.placement.integer.values()
    assert "linear" in ck.QAT(epochs=1, samples=32)(build(Chain), task).placement.integer.values()


def test_what_does_not_fit_a_deployment_is_one_error() -> None:
    with pytest.raises(SettingError, match=r"Deployment\(threads=\.\.\.\): wanted a whole number >= 1, got 0"):
        Deployment(threads=0)
    with pytest.raises(SettingError, match=r"Deployment\(batch=\.\.\.\): wanted a whole number, got 1\.5"):
        Deployment(batch=1.5)
    with pytest.raises(
        SettingError, match=r'StaticQuant\(deployment=\.\.\.\): only a measured choice depends on it; write choose="meas'
    ):
        ck.StaticQuant(deployment=Deployment(threads=2))
    with pytest.raises(SettingError, match=r"QAT\(deployment=\.\.\.\): wanted Deployment\(threads=, batch=\), got 2"):
        ck.QAT(epochs=1, choose="measure", deployment=2)
    with pytest.raises(
        SettingError, match=r"Deployment\(batch=3\): Chain takes 8 samples at a time, since dynamic= .*write batch=8"
    ):
        quantize_static(build(Chain), [image(8)], choose="measure", dynamic=(), deployment=Deployment(batch=3))


def test_a_measured_model_is_exported_saved_and_loaded(monkeypatch, tmp_path) -> None:
    """The one test that measures, though briefly."""
    monkeypatch.setattr(latency_search, "latency", lambda paths, inputs, **_: measure.latency(paths, inputs, seconds=0.05))
    model = build(Chain)
    quantized = quantize_static(model, [image(8)], choose="measure")
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(16)]).passed
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(model, tmp_path / "saved")
    assert again.placement.floating == quantized.placement.floating
    assert again.origin.measured == quantized.origin.measured
    x = image(4)
    assert torch.equal(again(*x), quantized(*x))


def test_a_third_way_of_placing_is_refused() -> None:
    with pytest.raises(SettingError, match="'fast'"):
        ck.StaticQuant(choose="fast")


@pytest.mark.parametrize("quantize", [quantize_static, prepare_qat])
def test_what_is_timed_has_the_form_that_the_ranges_ask_for(quantize, monkeypatch) -> None:
    """A hard-swish of small values is an addition in the timed files, as in the file that is handed over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Hardswish(), torch.nn.Conv2d(8, 8, 3)).eval()
    forms, write = [], latency_search.export_onnx

    def written(variant, path, example):
        points = variant.placement.points if hasattr(variant, "placement") else ()
        forms.append([point.saturates for point in points if point.node.startswith("hardsigmoid")])
        return write(variant, path, example)

    monkeypatch.setattr(latency_search, "export_onnx", written)
    monkeypatch.setattr(latency_search, "latency", lambda files, *_, **__: [1.0] * len(files))
    quantized = quantize(model, [(0.1 * torch.randn(8, 3, 8, 8),)], choose="measure")
    assert any(point.saturates for point in quantized.placement.points)
    assert next(form for form in forms if form) == [True]  # of the first, all in integers
