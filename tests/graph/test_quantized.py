"""Quantized models are found by their type, as a whole and in parts."""

from __future__ import annotations

import networks
from networks import build, image
from torch import nn

from compresskit.graph.quantized import QuantizedModule, is_quantized, quantized_parts
from compresskit.quant import X86, quantize_dynamic, quantize_static, quantize_weights


def test_every_way_of_quantizing_returns_a_quantized_module() -> None:
    for quantize in (quantize_static, quantize_dynamic, quantize_weights):
        quantized = quantize(build(networks.Chain), [image(2)])
        assert is_quantized(quantized)
        assert isinstance(quantized, QuantizedModule)
        assert quantized.float_class == "Chain"
        assert quantized.opset >= X86.opset
        assert quantized.dynamic == (0,)


def test_float_models_are_not_quantized() -> None:
    model = build(networks.Chain)
    model.deployed = lambda: None  # an attribute of that name does not make it one
    assert not is_quantized(model)
    assert quantized_parts(model) == {}


def test_quantized_parts_are_named_by_their_path() -> None:
    quantized = quantize_static(build(networks.Chain), [image(2)])
    whole = nn.ModuleDict({"first": nn.Identity(), "second": nn.Sequential(quantized)})
    assert not is_quantized(whole)
    assert list(quantized_parts(whole)) == ["second.0"]
    assert list(quantized_parts(quantized)) == [""]


def test_a_quantized_model_prints_what_it_is() -> None:
    quantized = quantize_static(build(networks.Chain), [image(2)])
    assert "Chain for X86, 3 of 3 layers in integers" in repr(quantized)
