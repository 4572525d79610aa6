"""How much of a model runs in integers."""

from __future__ import annotations

import networks
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.measure import count_macs
from compresskit.quant import diagnose, quantize_static


def test_coverage_counts_layers_parameters_and_macs() -> None:
    model = build(networks.Residual)
    whole = quantize_static(model, [image(16)]).placement.coverage
    assert whole.layers == (5, 5)
    assert whole.macs[1] == count_macs(model, image(2))
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    weights = sum(m.weight.numel() + m.weight.shape[0] for m in layers)
    assert whole.parameters == (weights, weights)
    part = quantize_static(model, [image(16)], skip=("inner",))
    found = part.placement.coverage
    assert found.layers == (4, 5)
    assert found.macs[1] - found.macs[0] == 16 * 16 * 16 * 16 * 9
    assert found.reasons == {"inner.0": "skipped by the user"}
    assert "inner.0: float, skipped by the user" in str(diagnose(part, [image(8)]))
    row = next(r for r in diagnose(part, [image(8)]).rows if r.layer == "inner.0")
    assert row.runs == "float: skipped by the user"
    assert row.weights is None


def test_rows_that_the_data_chooses_count_as_all_rows(tmp_path) -> None:
    class Chosen(nn.Linear):
        def forward(self, x):
            rows = x[:, 0] > 0
            return x.index_put((rows,), super().forward(x[rows]))

    x = torch.randn(16, 8)
    for quantized in (quantize_static(Chosen(8, 8).eval(), [(x,)]), ck.quant.quantize_dynamic(Chosen(8, 8).eval(), (x,))):
        assert quantized.placement.coverage.macs == (64, 64)
        assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)), quantized, [(x,)]).passed
