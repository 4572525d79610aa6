"""Measured placement: operators that are faster in float stay float, with the figures as the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from networks import Chain, Depthwise, Residual, build, image

import compresskit as ck
from compresskit import measure
from compresskit.base.errors import SettingError
from compresskit.quant import X86, latency_search, quantize_static
from compresskit.quant.latency_search import candidate_parts, choose_floating
from compresskit.quant.passes.placement import place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


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

    def latency(paths, inputs, *, seconds):
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
    def latency(files, *_, **__):  # the whole in integers is slowest; all in float fastest
        return [1.0, *[0.5] * (len(files) - 1)] if len(files) > 2 else [0.4] * len(files)

    monkeypatch.setattr(latency_search, "latency", latency)
    with caplog.at_level(logging.WARNING):
        quantized = quantize_static(build(Chain), [image(8)], choose="measure")
    assert quantized.placement.integer == quantize_static(build(Chain), [image(8)]).placement.integer
    assert "int8 is no faster than float here (1.000 ms against 0.400 ms" in caplog.text


def test_a_measured_model_is_exported_saved_and_loaded(monkeypatch, tmp_path) -> None:
    """The one test that measures, though briefly."""
    monkeypatch.setattr(latency_search, "latency", lambda paths, inputs, *, seconds: measure.latency(paths, inputs, seconds=0.05))
    model = build(Chain)
    quantized = quantize_static(model, [image(8)], choose="measure")
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(16)]).passed
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(model, tmp_path / "saved")
    assert again.placement.floating == quantized.placement.floating
    x = image(4)
    assert torch.equal(again(*x), quantized(*x))


def test_a_third_way_of_placing_is_refused() -> None:
    with pytest.raises(SettingError, match="'fast'"):
        ck.StaticQuant(choose="fast")
