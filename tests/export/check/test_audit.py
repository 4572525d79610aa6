"""Auditing which operators of a file run in integers."""

from __future__ import annotations

import torch
from networks import image
from torch import nn

import compresskit as ck
from compresskit.export.rewrite.common import DATA_MOVEMENT


def test_data_movement_runs_on_integers(tmp_path) -> None:
    """Slicing, reshaping, concatenating and max pooling between integer operators handle uint8."""

    class Mover(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(16, 8, 1)

        def forward(self, x):
            x = torch.relu(self.a(x))
            x = torch.cat([nn.functional.max_pool2d(x, 2), x[:, :, ::2, ::2]], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
            return self.b(nn.functional.pad(x, (1, 1, 1, 1)))

    quantized = ck.quant.quantize_static(Mover().eval(), [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(path)
    kinds = set(audit.operators) & DATA_MOVEMENT
    assert {"MaxPool", "Concat", "Transpose", "Slice"} <= kinds
    assert all(audit.operators[k][0] == audit.operators[k][1] for k in kinds), audit
    assert ck.verify_onnx(path, quantized, [image(16)]).passed
