"""Quantized models are rebuilt from files."""

from __future__ import annotations

import copy
import operator

import networks
import torch
from networks import build, image

import compresskit as ck
from compresskit.quant import Quantized, quantize_static


def test_a_saved_model_is_rebuilt_to_the_bit(tmp_path) -> None:
    model = build(networks.Residual)
    quantized = quantize_static(model, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    assert isinstance(again, Quantized)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))
    assert operator.eq(str(again.placement), str(quantized.placement))


def test_a_pruned_and_quantized_model_is_rebuilt_to_the_bit(tmp_path) -> None:
    model = build(networks.Residual)
    pruned = copy.deepcopy(model)
    ck.prune.apply_(pruned, ck.prune.plan_channels(pruned, image(2), budget=ck.keep(macs=0.6), round_to=4))
    quantized = quantize_static(pruned, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))
