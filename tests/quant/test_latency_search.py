"""Measured placement: what is slower in integers stays float, with the figures as its reason."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
from networks import Depthwise, Residual, build, image

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import X86, quantize_static
from compresskit.quant import latency_search as choose
from compresskit.quant.passes.placement import place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


def parts_of(kind: type) -> dict[str, list[str]]:
    captured, _, _ = prepare_graph(build(kind), image(4), X86, ())
    return choose.parts(captured, place_quantizers(captured.module.graph, X86))


def test_parts() -> None:
    parts = parts_of(Depthwise)
    assert "depthwise convolutions" in parts
    assert not set(parts["depthwise convolutions"]) & set(parts["every conv"])
    assert len({frozenset(members) for members in parts.values()}) == len(parts)  # nothing is tried twice
    assert any(name.startswith("the region of") for name in parts_of(Residual))


def made_up(times: dict[str, float]):
    """A `latency` that says what it is told: by what stays in integers in each file."""

    def latency(paths, inputs, *, seconds):
        found = []
        for path in paths:
            kinds = {k for k, (done, count) in ck.audit(path).operators.items() if done}
            found.append(times["all" if "Gemm" in kinds else "conv" if "Conv" in kinds else "float"])
        return found

    return latency


def test_what_is_faster_in_float_stays_float(monkeypatch, caplog) -> None:
    monkeypatch.setattr(choose, "latency", made_up({"all": 3.0, "conv": 2.0, "float": 4.0}))
    with caplog.at_level(logging.WARNING):
        quantized = quantize_static(build(Residual), [image(8)], choose="measure")
    assert "linear" not in quantized.placement.integer.values()
    assert "conv" in quantized.placement.integer.values()
    assert any("not 3.000" in reason for reason in quantized.placement.floating.values())
    assert not caplog.records


def test_slower_than_float_is_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(choose, "latency", made_up({"all": 3.0, "conv": 3.0, "float": 2.95}))
    with caplog.at_level(logging.WARNING):
        assert choose.slower_in_integers(build(Residual), image(4), X86) == {}
    assert "no faster than float here (3.000 ms against 2.950 ms" in caplog.text


def test_for_real(tmp_path) -> None:
    quantized = quantize_static(build(Residual), [image(8)], choose="measure")
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(16)]).passed
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(build(Residual), tmp_path / "saved")
    assert again.placement.floating == quantized.placement.floating
    x = image(4)
    assert torch.equal(again(*x), quantized(*x))


def test_where_nothing_pays_all_stays_in_integers_and_it_says_so(monkeypatch, caplog) -> None:
    module = importlib.import_module("compresskit.quant.latency_search")

    def latency(files, *_, **__):  # the whole in integers is slowest; all in float fastest
        return [1.0, *[0.5] * (len(files) - 1)] if len(files) > 2 else [0.4] * len(files)

    monkeypatch.setattr(module, "latency", latency)
    quantized = quantize_static(build(Residual), [image(8)], choose="measure")
    assert quantized.placement.integer == quantize_static(build(Residual), [image(8)]).placement.integer
    assert "int8 is no faster than float here (1.000 ms against 0.400 ms" in caplog.text


def test_a_third_way_is_refused() -> None:
    with pytest.raises(SettingError, match="'fast'"):
        ck.StaticQuant(choose="fast")
