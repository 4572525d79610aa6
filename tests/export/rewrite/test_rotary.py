"""Rotary positions that are computed once for all rows."""

from __future__ import annotations

import onnx
import torch
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_dynamic


class Rotary(nn.Linear):
    def forward(self, x):
        q = super().forward(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
        angles = torch.arange(x.shape[1])[None, :, None] * self.bias[:4].exp()
        angles = torch.cat((angles, angles), -1)
        turned = torch.cat((-q[..., 4:], q[..., :4]), -1)
        return q * angles.cos()[:, None] + turned * angles.sin()[:, None]


def test_a_file_with_rotary_positions_runs_with_any_batch_and_length(tmp_path):
    x = torch.randn(4, 6, 16)
    quantized = quantize_dynamic(Rotary(16, 16).eval(), (x,), dynamic=(0, 1))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", (x,))
    assert any(node.op_type == "RotaryEmbedding" for node in onnx.load(path).graph.node)
    for rows, steps in ((1, 6), (3, 6), (2, 9)):
        assert ck.verify_onnx(path, quantized, [(torch.randn(rows, steps, 16),)]).passed
