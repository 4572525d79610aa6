"""Quantization of models that mask outputs: what code fills in makes no error look small."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import image

import compresskit as ck
from compresskit.quant import diagnose, quantize_static
from compresskit.quant.effort.samples import OutputError


class Masked(networks.Chain):
    """Writes a number over the outputs of one class."""

    def __init__(self, fill: float | None) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, x):
        x = super().forward(x)
        return x if self.fill is None else torch.cat([x, torch.full_like(x[:, :1], self.fill)], 1)


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min, -float("inf")])
def test_what_is_filled_in_counts_for_nothing(fill) -> None:
    torch.manual_seed(0)
    plain = networks.trained_like(Masked(None), image(32)).eval()
    model, data = Masked(fill).eval(), [image(32) for _ in range(2)]
    model.load_state_dict(plain.state_dict())
    quantized = [quantize_static(net, data) for net in (plain, model)]
    wanted, found = (diagnose(each, data) for each in quantized)
    assert 10 < wanted.sqnr < 60
    assert found.sqnr == pytest.approx(wanted.sqnr, abs=0.5)
    errors = [OutputError(net, data, 16).of(each) for net, each in zip((plain, model), quantized, strict=True)]
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
    agree = [
        ck.evaluate(each, ck.Task(val=ck.metrics.float_targets(net, data), metric=ck.metrics.agreement("sqnr")))
        for net, each in zip((plain, model), quantized, strict=True)
    ]
    assert agree[1] == pytest.approx(agree[0], abs=0.5)
