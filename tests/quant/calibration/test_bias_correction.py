"""Bias correction gives each channel the float model's mean output."""

from __future__ import annotations

from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image

from compresskit.base.errors import DataError
from compresskit.quant import X86, correct_bias_, quantize_static


def test_biases_make_up_for_the_mean() -> None:
    """After correction each channel of every layer has the float model's mean on the batches it was corrected with."""
    model, batches = build(networks.Residual), [image(32), image(32)]
    quantized = quantize_static(model, batches, target=replace(X86, name="W3", weights=replace(X86.weights, bits=3)))
    x = image(64)
    with torch.no_grad():
        wanted, before = model(*x), quantized(*x)
    assert correct_bias_(quantized, batches) == 5
    joined = tuple(torch.cat(values) for values in zip(*batches, strict=True))
    with torch.no_grad():
        mean, step = (quantized(*joined) - model(*joined)).mean(0), quantized.quantizers()[0].scale
        assert mean.abs().max() < 1e-3 + 1e-2 * step
        after = quantized(*x)
    assert (after - wanted).mean(0).abs().mean() < 0.5 * (before - wanted).mean(0).abs().mean()
    assert oracles.sqnr(wanted, after) > oracles.sqnr(wanted, before)


def test_no_batch_is_one_clear_error() -> None:
    quantized = quantize_static(build(networks.Chain), [image(4)])
    with pytest.raises(DataError, match="correct_bias_: no calibration batch"):
        correct_bias_(quantized, [])
