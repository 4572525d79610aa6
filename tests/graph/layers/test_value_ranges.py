"""Activations that change no value that they can read are taken out of graphs and files; all others stay."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.layers.value_ranges import clipped_to


def function(f):
    class Model(nn.Module):
        def forward(self, x):
            return f(x)

    return Model()


def clips(model, x) -> int:
    return sum(clipped_to(node) is not None for node in capture(model, x).module.graph.nodes)


IDLE = {
    "relu of relu": (lambda x: torch.relu(torch.relu(x)), 1),
    "in place": (lambda x: torch.relu_(torch.relu(x)), 1),
    "behind pooling": (lambda x: torch.relu(F.max_pool2d(torch.relu(x), 2)), 1),
    "behind a mean": (lambda x: torch.relu(F.avg_pool2d(torch.relu(x), 2)), 1),
    "behind a reshape": (lambda x: torch.relu(torch.relu(x).flatten(1)), 1),
    "behind a sigmoid": (lambda x: F.relu6(torch.sigmoid(x)), 0),
    "of joined values": (lambda x: torch.relu(torch.cat([torch.relu(x), F.relu6(x)], 1)), 2),
    "wider": (lambda x: torch.clamp(F.relu6(x), min=-1), 1),
}
BUSY = {
    "of the input": (torch.relu, 1),
    "narrower": (lambda x: F.relu6(torch.relu(x)), 2),
    "shifted": (lambda x: torch.relu(torch.relu(x) - 1), 2),
    "of joined values": (lambda x: torch.relu(torch.cat([torch.relu(x), x], 1)), 2),
    "above a mean": (lambda x: torch.clamp(F.avg_pool2d(torch.clamp(x, min=2), 3, padding=1), min=1), 2),
    "written over": (lambda x: torch.relu(torch.relu(x).add_(-1)), 2),
}


@pytest.mark.parametrize(("f", "left"), [*IDLE.values(), *BUSY.values()], ids=[*IDLE, *BUSY])
def test_activations_that_change_nothing_go(f, left) -> None:
    model, x = function(f), 3 * torch.randn(4, 3, 8, 8)
    assert clips(model, x) == left
    torch.testing.assert_close(capture(model, x).module(x), model(x))


def test_none_is_left_in_the_file(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU())
    file = ck.export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 3, 8, 8))
    assert [node.op_type for node in onnx.load(file).graph.node].count("Relu") == 2
    assert ck.verify_onnx(file, model, [torch.randn(2, 3, 8, 8)])
