"""Hardsigmoids and hardswishes that are written by hand become one operator where their numbers are exactly right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import image
from torch import nn

import compresskit as ck
from compresskit.graph.capture import capture
from compresskit.graph.normalize import aten
from compresskit.graph.rewrites.hardsigmoids import write_hardsigmoids_
from compresskit.quant import quantize_static
from compresskit.quant.numerics.targets import TENSORRT


class Written(nn.Module):
    """The code, of one value or two."""

    def __init__(self, code) -> None:
        super().__init__()
        self.code = code

    def forward(self, *values):
        return self.code(*values)


HARDSIGMOIDS = [
    lambda x: F.relu6(x + 3) / 6,
    lambda x: F.relu6(3 + x, inplace=True) * (1 / 6),
    lambda x: (x + 3).clamp(0, 6) / 6,
    lambda x: torch.clamp(x + 3.0, min=0.0, max=6.0).mul(1 / 6),
    lambda x: x.add(3.0).clamp_(0.0, 6.0).div_(6.0),
    lambda x: 1 / 6 * F.hardtanh(torch.add(x, 3), 0.0, 6.0),
    lambda x: (x + 3).clamp(min=0).clip(max=6) / 6,
    lambda x: F.relu(x + 3).clamp(max=6).div(6),
    lambda x: (x / 6 + 0.5).clamp(0, 1),
    lambda x: torch.clip(0.5 + x * (1 / 6), 0.0, 1.0),
]
HARDSWISHES = [
    lambda x: x * F.relu6(x + 3) / 6,
    lambda x: x * (F.relu6(x + 3) / 6),
    lambda x: F.relu6(x + 3) * x * (1 / 6),
    lambda x: x * (x + 3).clamp(0, 6) / 6,
]


def rewritten(code, *values):
    """The operators of the graph behind the rewriting, and what it computes."""
    module = capture(Written(code).eval(), values, dynamic=(0,)).module
    write_hardsigmoids_(module)
    found = module(*values)
    return [node.target for node in module.graph.nodes if node.op == "call_function"], found


@pytest.mark.parametrize("code", HARDSIGMOIDS)
def test_every_spelling_of_a_hardsigmoid(code) -> None:
    x = torch.linspace(-5, 5, 201).view(3, 67)
    operators, found = rewritten(code, x)
    assert operators == [aten.hardsigmoid.default]
    torch.testing.assert_close(found, F.hardsigmoid(x))


@pytest.mark.parametrize("code", HARDSWISHES)
def test_every_spelling_of_a_hardswish(code) -> None:
    x = torch.linspace(-5, 5, 201).view(3, 67)
    operators, found = rewritten(code, x)
    assert operators == [aten.hardsigmoid.default, aten.mul.Tensor]
    torch.testing.assert_close(found, F.hardswish(x))


@pytest.mark.parametrize(
    "code",
    [
        lambda x, y: x * F.relu6(x + 3) * 0.1667,
        lambda x, y: F.relu6(x + 3.01) / 6,
        lambda x, y: F.relu6(torch.add(x, y, alpha=3)) / 6,
        lambda x, y: F.relu6(torch.add(x, 3, alpha=2)) / 6,
        lambda x, y: F.relu6(x + y) / 6,
        lambda x, y: (x + 3).clamp(0, 5) / 6,
        lambda x, y: F.relu(x + 3) / 6,
        lambda x, y: 6 / (F.relu6(x + 3) + 1),
        lambda x, y: torch.div(F.relu6(x + 3), 6, rounding_mode="floor"),
        lambda x, y: (0.2 * x + 0.5).clamp(0, 1),
        lambda x, y: (x / 6 + 0.5).clamp(0, 2),
        lambda x, y: (lambda t: t / 6 + t)(F.relu6(x + 3)),
        lambda x, y: (lambda t: F.relu6(t) / 6 + t)(x + 3),
        lambda x, y: (lambda t: t * t / 6)(F.relu6(x + 3)),
        lambda x, y: (lambda t: t / 6 + t)(x * F.relu6(y + 3)),
        lambda x, y: (x.int() + 3).clamp(0, 6) / 6,
        lambda x, y: x * (y.int() + 3).clamp(0, 6) / 6,
    ],
)
def test_what_is_something_else_stays(code) -> None:
    x, y = torch.linspace(-5, 5, 201).view(3, 67), torch.randn(3, 67)
    operators, found = rewritten(code, x, y)
    assert aten.hardsigmoid.default not in operators
    torch.testing.assert_close(found, code(x, y))


class Gated(nn.Module):
    """A convolution with a hardswish, a squeeze-and-excitation with a hardsigmoid, a convolution."""

    def __init__(self, swish, gate) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.swish, self.gate = swish, gate
        self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1)
        self.down, self.up = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)

    def forward(self, x):
        x = self.swish(self.a(x))
        return self.b(self.gate(x, self.up(self.down(x.mean((2, 3), keepdim=True)).relu())))


def test_they_run_in_integers_as_the_operators_of_torch_do(tmp_path: Path) -> None:
    by_hand = quantize_static(Gated(HARDSWISHES[0], lambda x, s: x * F.relu6(s + 3) / 6).eval(), [image(8)])
    native = quantize_static(Gated(F.hardswish, lambda x, s: x * F.hardsigmoid(s)).eval(), [image(8)])
    assert not by_hand.placement.floating
    assert sorted(by_hand.placement.integer.values()) == sorted(native.placement.integer.values())
    x = image(5)
    assert torch.equal(by_hand(*x), native(*x))
    path = ck.export_onnx(by_hand, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, by_hand, [x, image(1)]).passed
    assert ck.audit(path).conversions == 2


def test_a_target_without_hardsigmoid_gets_the_operators_as_they_are() -> None:
    model = Gated(HARDSWISHES[0], lambda x, s: x * F.relu6(s + 3) / 6).eval()
    placement = quantize_static(model, [image(8)], target=TENSORRT).placement
    assert not any("hardsigmoid" in name for name in (*placement.integer, *placement.floating))
