"""Grouped convolutions written as whole ones for ONNX Runtime's integer kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session


def network(channels: int, outputs: int, groups: int, **how: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, outputs, 3, padding=1, groups=groups, **how), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def groups_of(path: Path) -> list[int]:
    convs = [node for node in onnx.load(path).graph.node if node.op_type == "Conv"]
    return [attribute.i for node in convs[1:2] for attribute in node.attribute if attribute.name == "group"]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("channels", "outputs", "groups", "joined"),
    [
        (64, 64, 16, True),
        (64, 32, 8, True),
        (48, 96, 48, True),  # two filters for each channel
        (24, 24, 8, False),  # other weights would be pairs without VNNI
        (240, 480, 240, False),  # too many weights
        (64, 64, 2, False),  # large groups: the kernel is busy with them
        (256, 256, 32, False),
        (32, 32, 32, False),  # depthwise
    ],
)
def test_small_groups_are_joined(channels, outputs, groups, joined, tmp_path) -> None:
    torch.manual_seed(0)
    model, x = network(channels, outputs, groups).eval(), torch.randn(3, 3, 24, 20)
    found = []
    for tuned in (False, True):
        quantized = ck.quant.quantize_static(model, [(x,)], target=replace(ck.quant.X86, tuned=tuned))
        path = ck.export_onnx(quantized, tmp_path / f"{tuned}.onnx", (x,))
        runtime = session(path)
        found.append(runtime.run(None, numpy_inputs(runtime, (x,)))[0])
    np.testing.assert_array_equal(*found)
    assert groups_of(tmp_path / "False.onnx") == [groups]
    assert groups_of(path) == [1 if joined else groups]
    assert ck.verify_onnx(path, quantized, [(x,)]).passed


def test_strides_and_dilations_stay_and_bits_are_few(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = network(32, 32, 8, stride=2, dilation=2).eval(), torch.randn(2, 3, 64, 60)
    quantized = ck.quant.quantize_static(model, [(x,)], bits=ck.quant.Bits(weights=4))
    path = ck.export_onnx(quantized, tmp_path / "model.onnx", (x,))
    assert groups_of(path) == [1]
    assert ck.verify_onnx(path, quantized, [(x,)]).passed
