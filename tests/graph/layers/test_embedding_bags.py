"""Bags of embeddings of one size are look-ups, in captured graphs and in files."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.quant import quantize_dynamic


class Bag(nn.Module):
    """Indices (N, L), and their factors (N, L), to (N, 3)."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 8, **settings), nn.Linear(8, 3)

    def forward(self, ids, factors=None):
        return self.head(self.bag(ids, per_sample_weights=factors))


class Listed(nn.Module):
    """Indices in a row, and where each bag begins."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8)

    def forward(self, ids, offsets):
        return self.bag(ids, offsets)


def ids(n=4, length=5):
    x = torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(0))
    x[0], x[1, :2] = 3, 3  # a bag of padding alone, where 3 is padding, and one with some
    return x


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


CASES = [
    ({"mode": "mean"}, False),
    ({"mode": "sum"}, False),
    ({"mode": "max"}, False),
    ({"mode": "mean", "padding_idx": 3}, False),
    ({"mode": "sum", "padding_idx": 3}, False),
    ({"mode": "sum"}, True),
    ({"mode": "sum", "padding_idx": 3}, True),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("settings", "factors"), CASES, ids=str)
@pytest.mark.parametrize("dynamic", [(0,), (), (0, 1)])
def test_a_file_looks_up_and_has_no_loop(settings, factors, dynamic, tmp_path) -> None:
    torch.manual_seed(0)
    model, inputs = Bag(**settings).eval(), (ids(), *([torch.rand(4, 5)] if factors else []))
    path = ck.export_onnx(model, tmp_path / "m.onnx", inputs, dynamic=dynamic)
    assert "Loop" not in operators(path)
    assert operators(path).count("Gather") == 1
    other = inputs if not dynamic else (ids(7, 9 if len(dynamic) == 2 else 5),)
    other += (torch.rand(other[0].shape),) if len(other) < len(inputs) else ()
    assert ck.verify_onnx(path, model, [inputs, other]).passed
    with torch.no_grad():
        torch.testing.assert_close(capture(model, inputs, dynamic=dynamic).module(*inputs), model(*inputs))


def test_other_bags_stay_and_are_right(tmp_path) -> None:
    """Sizes that the data say, and a maximum that leaves out padding."""
    row, offsets = ids().flatten(), torch.tensor([0, 3, 11])
    for model, inputs in ((Listed(), (row, offsets)), (Bag(mode="max", padding_idx=3), (ids(),))):
        path = ck.export_onnx(model.eval(), tmp_path / "m.onnx", inputs, dynamic=())
        assert "Loop" in operators(path)
        assert ck.verify_onnx(path, model, [inputs]).passed


def test_the_table_of_a_bag_is_quantized(tmp_path) -> None:
    model = Bag(mode="mean").eval()
    quantized = quantize_dynamic(model, [(ids(),)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (ids(),))
    kinds = {t.name: t.data_type for t in onnx.load(path).graph.initializer if list(t.dims) == [50, 8]}
    assert set(kinds.values()) <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert kinds
