"""Other machines: proved from weights alone, or products computed as their kernels do, against loops over plain integers."""

from __future__ import annotations

from dataclasses import replace

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import ExportError, SettingError
from compresskit.export.check.machines import MACHINES, MachineCheck
from compresskit.quant import X86, quantize_dynamic, quantize_static

UNGUARDED = replace(X86, saturates=False)


def test_a_file_for_x86_is_proved_on_every_machine(tmp_path) -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    proof = ck.verify_onnx(path, quantized, [image(8)], machines="all")
    assert proof.passed
    assert [each.machine for each in proof.machines] == list(MACHINES)
    assert all(each.proved for each in proof.machines)
    assert "avx512      the same integers, whatever the inputs" in str(proof)
    assert proof.to_json()["machines"][0]["proved"] is True


def test_sums_that_overflow_are_counted(tmp_path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(4, 6) * 0.1 + 0.9)  # of one sign: every pair may overflow
        layer.weight[3, 1::2].neg_()
    x = (torch.rand(5, 6),)
    quantized = quantize_dynamic(layer, x, target=UNGUARDED)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    check = MachineCheck(path, ("avx2", "vnni"))
    check.add(x)
    avx2, vnni = check.result()
    assert vnni.proved
    integers = np.clip(np.rint(x[0].numpy() / np.float32(x[0].max() / 255)), 0, 255).astype(int)
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer]
    (weight,) = [v for v in stored if v.dtype == np.int8 and v.ndim == 2]
    pairs = [
        [sum(int(row[k + i] * w[k + i]) for i in (0, 1)) for k in (0, 2, 4)] for row in integers for w in weight.T.astype(int)
    ]
    wrong = sum(max(sums) > 2**15 - 1 or min(sums) < -(2**15) for sums in pairs)
    assert 0 < wrong < 20
    assert avx2.overflowing == pytest.approx(wrong / 20)
    proof = ck.verify_onnx(path, quantized, [x], machines=["avx2"])
    assert not proof.passed


def test_a_convolution_that_never_overflows_passes_on_its_samples(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    nn.init.constant_(model[0].weight, 0.5)
    bright, dark = (torch.full((2, 3, 6, 6), v) + torch.rand(2, 3, 6, 6) * 0.01 for v in (1.0, 0.2))
    quantized = quantize_static(model, (bright,), target=UNGUARDED)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (bright,))
    for x, layer in ((bright, True), (dark, False)):
        check = MachineCheck(path, ("avx512",))
        check.add((x,))
        (found,) = check.result()
        assert bool(found.layer) is layer
        assert not found.proved
        assert ("overflow int16" in str(found)) is layer


def test_what_cannot_be_simulated_is_refused(tmp_path) -> None:
    model, x = nn.Linear(4, 2), (torch.randn(2, 4),)
    path = ck.export_onnx(model, tmp_path / "q.onnx", x)
    with pytest.raises(SettingError, match=r'wanted "all" or names of vnni, .*, got \[.riscv.\]'):
        ck.verify_onnx(path, model, [x], machines=["avx2", "riscv"])
    file = onnx.load(path)
    del file.metadata_props[:]
    file.producer_name = "pytorch"
    onnx.save(file, path)
    with pytest.raises(ExportError, match=r"this one was made by pytorch: which kernels run it, and how they pair its"):
        ck.verify_onnx(path, model, [x], machines="all")
