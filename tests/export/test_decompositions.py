"""Programs that need no decomposition are exported without one, to the file that a decomposition would give."""

from __future__ import annotations

import networks
import onnx
import pytest
import special_networks
import torch
from matrix import some
from torch import nn
from torch.onnx._internal.exporter import _fx_passes

import compresskit as ck
from compresskit.export import exporter_tables


class Views(nn.Module):
    """Reshapes of values in another order, casts that change something and not, and a chunk of uneven parts."""

    def forward(self, x):
        rows = x.transpose(1, 2).contiguous().reshape(x.shape[0], -1).to(torch.float64).to(torch.float32)
        turned = x.transpose(1, 2).reshape(x.shape[0], 2, -1).unflatten(1, (1, 2)).to(torch.float32).flatten(1)
        first, second = x.flatten(1).chunk(2, 1)
        return rows + turned, first, torch.relu_(second * 2), x.add(1).mul_(2).flatten(0, 1)


class OutputsAreReplaced(nn.Module):
    """Every output is of an operator that is replaced: one of them twice, one of them an input."""

    def forward(self, x):
        halves = (x * 2).relu_()
        return halves, x.flatten(1), torch.dropout(x, 0.5, False), halves.flatten(1).contiguous(), halves


class WritesIntoAView(nn.Module):
    def forward(self, x):
        y = x * 1
        y[:, :2] = 0
        return y


class Untranslated(nn.Module):
    """An operator that no operator of ONNX is."""

    def forward(self, x):
        return torch.special.xlogy(x.abs(), x.abs() + 1)


#: Networks whose program holds what is replaced.
PLAIN = [
    networks.Chain,
    networks.Residual,
    networks.Depthwise,
    networks.Shuffle,
    networks.Mobile,
    networks.Preactivation,
    networks.Tokens,
    special_networks.Encoder,
    special_networks.FusedAttention,
    special_networks.Gru,
]


def example_of(kind):
    return networks.image() if kind.__module__ == "networks" else special_networks.example(kind)


def nodes(path):
    """Operators, their attributes and the shapes of what is stored, without the names of values."""
    graph = onnx.load(path).graph
    stored = {t.name: (tuple(t.dims), t.data_type, t.raw_data) for t in graph.initializer}
    return [(node.op_type, [str(a) for a in node.attribute], [stored.get(name) for name in node.input]) for node in graph.node], [
        output.name for output in graph.output
    ]


def both_files(model, example, folder, monkeypatch):
    short = ck.export_onnx(model, folder / "short.onnx", example)
    with monkeypatch.context() as patch:
        patch.setattr(exporter_tables, "replace_or", lambda decompose: decompose)
        whole = ck.export_onnx(model, folder / "whole.onnx", example)
    return short, whole


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", some(PLAIN), ids=lambda kind: kind.__name__)
def test_the_file_is_that_of_a_decomposition(kind, tmp_path, monkeypatch) -> None:
    short, whole = both_files(kind().eval(), example_of(kind), tmp_path, monkeypatch)
    assert nodes(short) == nodes(whole)


def test_views_casts_and_chunks(tmp_path, monkeypatch) -> None:
    model, example = Views(), (torch.randn(2, 5, 6),)
    short, whole = both_files(model, example, tmp_path, monkeypatch)
    assert nodes(short)[1] == nodes(whole)[1]
    assert ck.verify_onnx(short, model, [example, (torch.randn(7, 5, 6),), (torch.randn(1, 5, 6),)])


def test_outputs_are_replaced(tmp_path, monkeypatch) -> None:
    model, example = OutputsAreReplaced(), (torch.randn(2, 5, 6),)
    short, whole = both_files(model, example, tmp_path, monkeypatch)
    assert nodes(short) == nodes(whole)
    assert ck.verify_onnx(short, model, [example])


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "kind", [networks.Chain, networks.Mobile, networks.Preactivation, special_networks.FusedAttention, special_networks.Cells]
)
def test_a_plain_program_is_not_traced_again(kind, tmp_path, monkeypatch) -> None:
    def decompose(program, registry):
        raise AssertionError("traced again")

    monkeypatch.setattr(_fx_passes, "decompose_with_registry", decompose)
    model, example = kind().eval(), example_of(kind)
    quantized = ck.quant.quantize_static(model, [example])
    for exported in (model, quantized):
        ck.verify_onnx(ck.export_onnx(exported, tmp_path / "plain.onnx", example), exported, [example])


@pytest.mark.parametrize("kind", [WritesIntoAView, Untranslated])
def test_any_other_program_is_decomposed_by_torch(kind, tmp_path, monkeypatch) -> None:
    calls = []
    whole = _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *args: calls.append(1) or whole(*args))
    model = kind().eval()
    example = (torch.randn(2, 4),)
    ck.verify_onnx(ck.export_onnx(model, tmp_path / "model.onnx", example), model, [example])
    assert calls == [1]
