"""Programs in which nothing is promoted are exported without being run once more, to the file that torch would write."""

from __future__ import annotations

import networks
import onnx
import pytest
import special_networks
import torch
from networks import build, image
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

import compresskit as ck
from compresskit.export import exporter_tables


class Halves(nn.Module):
    def forward(self, x):
        return torch.relu(x - 0.5) / x.square().mean(1, keepdim=True)


class Integers(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[1])


class WholeNumber(nn.Module):
    def forward(self, x):
        return x * 2


class Batch(nn.Module):
    def forward(self, x):
        return x / x.shape[0]


class Mask(nn.Module):
    def forward(self, x):
        return (x > 0).sum(1)


class Sizes(nn.Module):
    """Two values of different dtypes in a list."""

    def forward(self, x):
        return torch.cat([x, torch.arange(x.shape[1])[None].expand_as(x)])


PLAIN = [networks.Chain, networks.Residual, networks.SqueezeExcite, networks.Mobile, Halves]
PROMOTED = [Integers, WholeNumber, Batch, Mask, Sizes]


def example_of(kind):
    if kind.__module__ == "networks":
        return image()
    return special_networks.example(kind) if kind.__module__ == "special_networks" else (torch.randn(3, 6),)


@pytest.fixture
def promotions(monkeypatch):
    """How often torch's pass ran."""
    calls, real = [], _fx_passes.insert_type_promotion_nodes
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", lambda module: calls.append(real(module)))
    return calls


def written(path):
    """Operators, their attributes and what is stored; not the names of values, which differ in the first file of a process."""
    graph = onnx.load(path).graph
    stored = {t.name: (tuple(t.dims), t.data_type, t.raw_data) for t in graph.initializer}
    return [(node.op_type, [str(a) for a in node.attribute], [stored.get(name) for name in node.input]) for node in graph.node]


def torchs_file(model, example, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(exporter_tables, "insert_where_promoted", lambda insert, table: insert)
        return ck.export_onnx(model, folder / "torch.onnx", example)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_a_plain_program_is_not_run_again(kind, promotions, tmp_path, monkeypatch) -> None:
    model, example = kind().eval(), example_of(kind)
    file = ck.export_onnx(model, tmp_path / "plain.onnx", example)
    assert promotions == []
    assert written(file) == written(torchs_file(model, example, tmp_path, monkeypatch))
    assert promotions == [None]


@pytest.mark.parametrize("kind", PROMOTED, ids=lambda kind: kind.__name__)
def test_torch_promotes_where_something_is_promoted(kind, promotions, tmp_path, monkeypatch) -> None:
    model, example = kind().eval(), example_of(kind)
    file = ck.export_onnx(model, tmp_path / "promoted.onnx", example)
    assert promotions == [None]
    assert written(file) == written(torchs_file(model, example, tmp_path, monkeypatch))
    assert ck.verify_onnx(file, model, [example, (torch.randn(7, 6),)]).passed


@pytest.mark.parametrize("kind", [special_networks.Encoder, special_networks.FusedAttention, special_networks.Gru])
def test_the_file_is_torchs(kind, tmp_path, monkeypatch) -> None:
    model, example = kind().eval(), example_of(kind)
    file = ck.export_onnx(model, tmp_path / "own.onnx", example)
    assert written(file) == written(torchs_file(model, example, tmp_path, monkeypatch))


def test_a_quantized_program_is_not_run_again(promotions, tmp_path, monkeypatch) -> None:
    x = image(8)
    quantized = ck.quant.quantize_static(build(networks.Residual), [x])
    file = ck.export_onnx(quantized, tmp_path / "quantized.onnx", x)
    assert promotions == []
    assert written(file) == written(torchs_file(quantized, x, tmp_path, monkeypatch))
