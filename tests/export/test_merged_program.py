"""Files of float models whose layers were merged: the same outputs in ONNX Runtime from fewer operators."""

from __future__ import annotations

import copy
from collections import Counter

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.export import merged_program
from compresskit.prune import plan_mask


class Network(nn.Module):
    """Normalized images, a RepVGG block, two layers in a row, a layer scale behind a permutation, scaled logits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.48, 0.45, 0.4]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.22, 0.23, 0.225]).view(3, 1, 1))
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.dense = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.point = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.linear, self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, image, factor=None):
        x = F.relu(self.stem((image - self.mean) / self.std))
        x = F.relu(self.dense(x) + self.point(x) + self.norm(x))
        x = x + self.scale * self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.head(self.hidden(x.mean((2, 3)))) / 8
        return {"logits": y if factor is None else y * factor, "features": x}


def trained(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Network()
    for _ in range(3):
        model(torch.rand(8, 3, 32, 32))
    return model.eval()


def operators(path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_a_float_file_has_merged_layers(tmp_path) -> None:
    model, x = trained(), torch.rand(4, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    found = operators(path)
    assert (found["Conv"], found["MatMul"] + found["Gemm"]) == (2, 2)
    assert not {"Sub", "Div", "Mul", "BatchNormalization"} & set(found)
    assert ck.verify_onnx(path, model, [x, torch.rand(1, 3, 32, 32), torch.rand(7, 3, 32, 32)]).passed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    file = onnx.load(path)
    assert [i.name for i in file.graph.input] == ["image"]
    assert [o.name for o in file.graph.output] == ["logits", "features"]


def test_inputs_by_name_and_dimensions_that_vary(tmp_path) -> None:
    model, x = trained(), {"image": torch.rand(4, 3, 32, 32), "factor": torch.rand(4, 1)}
    path = ck.export_onnx(model, tmp_path / "m.onnx", x, dynamic={"image": {0: "n", 2: "height", 3: "width"}, "factor": {0: "n"}})
    assert operators(path)["Conv"] == 2
    assert [i.name for i in onnx.load(path).graph.input] == ["image", "factor"]
    assert ck.verify_onnx(path, model, [x, {"image": torch.rand(3, 3, 64, 48), "factor": torch.rand(3, 1)}]).passed


def test_half_precision_and_masked_layers_stay(tmp_path) -> None:
    x = torch.rand(4, 3, 32, 32)
    path = ck.export_onnx(trained().bfloat16(), tmp_path / "half.onnx", x.bfloat16())
    assert operators(path)["Conv"] >= 3
    model = trained()
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    path = ck.export_onnx(model, tmp_path / "masked.onnx", x)
    assert operators(path)["Gemm"] + operators(path)["MatMul"] == 3  # a product of two sparse matrices has few zeros
    assert ck.verify_onnx(path, model, [x]).passed


@pytest.mark.parametrize("quantize", [ck.quant.quantize_static, ck.quant.quantize_dynamic, ck.quant.quantize_weights])
def test_a_quantized_file_has_merged_layers(tmp_path, quantize) -> None:
    model, x = trained(), torch.rand(16, 3, 32, 32)
    quantized = quantize(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert sum(n for name, n in operators(path).items() if "Conv" in name) == 2
    assert ck.verify_onnx(path, quantized, [x]).passed
    ck.save(quantized, tmp_path / "saved")
    assert torch.equal(ck.load(Network(), tmp_path / "saved")(x)["logits"], quantized(x)["logits"])


def test_a_graph_that_cannot_be_traced_again_is_written_as_it_is(tmp_path, monkeypatch, caplog) -> None:
    def refuse(*_):
        raise ModelError("no")

    monkeypatch.setattr(merged_program, "trace", refuse)
    model, x = trained(), torch.rand(4, 3, 32, 32)
    path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    assert "Network: its layers are not merged in the file, whose graph cannot be traced again: no" in caplog.text
    assert ck.verify_onnx(path, model, [x]).passed
    assert operators(path)["Conv"] == 3
