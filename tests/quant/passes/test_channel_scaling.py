"""Factors and shifts that move into other layers leave the float model's function as it is, however often a value is read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import oracles
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.graph.surgery import get_tensor
from compresskit.quant import BlockScheme, quantize_static, quantize_weights, smooth_
from compresskit.quant.calibration import smoothquant


class Net(nn.Module):
    """Layers of 8, 16 and 4 channels, of which those between are uneven, and a function of them and of the input."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.a, self.gate, self.one, self.b, self.square = (
            nn.Linear(*sizes) for sizes in ((8, 16), (8, 16), (8, 1), (16, 4), (16, 16))
        )
        self.norm, self.vector, self.matrix = nn.LayerNorm(16), nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16, 16))
        with torch.no_grad():
            for values in (self.a.weight, self.gate.weight, self.matrix):
                values.mul_(torch.logspace(-1.5, 1.5, 16)[torch.randperm(16)].view(-1, 1))
            self.a.bias.normal_(std=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def of(value: Tensor, function: Callable[[Tensor], Any]) -> Any:
    return function(value)


READS: dict[str, Callable[[Net, Tensor], Any]] = {
    "product": lambda n, x: of(n.a(x), lambda h: n.b(h * h)),
    "self gating": lambda n, x: of(n.a(x), lambda h: n.b(h * torch.sigmoid(h))),
    "gate of one channel": lambda n, x: n.b(n.one(x) * F.silu(n.gate(x))),
    "product and addend": lambda n, x: of(n.norm(n.a(x)), lambda h: torch.addmm(h, h, n.matrix)),
    "scaled bias": lambda n, x: torch.addmm(n.vector, n.a(x), n.matrix, beta=0.5, alpha=2.0),
    "weight as bias": lambda n, x: n.b(F.layer_norm(n.a(x), (16,), n.vector, n.vector)),
    "norm with a bias alone": lambda n, x: n.b(F.layer_norm(n.a(x), (16,), None, n.vector)),
    "one channel as often as there are": lambda n, x: n.b(n.norm(n.a(x)).unsqueeze(1).expand(-1, 16, -1)[..., 0]),
    "bias in two places": lambda n, x: n.b(n.a(x)) + n.b.bias,
    "weight in two places": lambda n, x: n.a(x) @ n.matrix @ n.matrix,
    "layer called twice": lambda n, x: of(n.a(x), lambda h: n.square(h) * n.square(h)),
}


def made(case: str) -> Net:
    torch.manual_seed(0)
    return Net(READS[case]).eval()


@pytest.mark.parametrize("case", READS)
def test_smoothing_keeps_the_function_of_values_that_are_read_twice(case) -> None:
    model, x = made(case).double(), torch.randn(64, 8, dtype=torch.float64)
    before = copy.deepcopy(model)
    smooth_(model, [(x,)])
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-9, rtol=1e-9)


def test_a_bias_as_large_as_a_batch_is_no_bias_of_channels() -> None:
    torch.manual_seed(0)
    model, x = Net(lambda n, x: n.b(torch.addmm(n.matrix, x, n.a.weight.t()))).eval().double(), torch.randn(16, 8).double()
    before = copy.deepcopy(model)
    smooth_(model, [(x,)], dynamic=())
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-9, rtol=1e-9)


def test_gated_layers_are_still_smoothed() -> None:
    torch.manual_seed(0)
    model, x = Net(lambda n, x: n.b(n.a(x) * F.silu(n.gate(x)))).eval().double(), torch.randn(64, 8, dtype=torch.float64)
    before = copy.deepcopy(model)
    assert smooth_(model, [(x,)]) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(x), before(x), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("case", ["product", "product and addend"])
def test_static_integers_are_as_exact_as_without_smoothing(case) -> None:
    model, x = made(case), torch.randn(256, 8)
    with torch.no_grad():
        smoothed, plain = (oracles.sqnr(model(x), quantize_static(model, [(x,)], smooth=on)(x)) for on in (True, False))
    assert smoothed > plain - 1


@pytest.mark.parametrize("case", ["layer called twice", "weight in two places"])
def test_weights_that_two_products_read_are_not_scaled_twice(case) -> None:
    model, x = made(case), torch.randn(64, 8)
    quantized = quantize_weights(model, [(x,)], scheme=BlockScheme(bits=8), awq=True)
    with torch.no_grad():
        assert oracles.sqnr(model(x), quantized(x)) > 35


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a large output"])
def test_a_change_of_the_function_is_undone(beside, monkeypatch) -> None:
    monkeypatch.setattr(smoothquant, "divide_", lambda module, link, factor: get_tensor(module, "b.weight").mul_(2))
    torch.manual_seed(0)

    def function(n: Net, x: Tensor) -> Any:
        return (n.b(n.norm(n.a(x))), x * 1e5) if beside else n.b(n.norm(n.a(x)))

    model, x = Net(function).eval(), torch.randn(64, 8)
    with torch.no_grad():
        model.norm.weight[::5] = 25
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match=r"smooth_: Net computes something else .* by \d+\.\d% of its outputs, so they stay"):
        assert smooth_(model, [(x,)]) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match="computes something else"):
        quantized = quantize_static(model, [(x,)])
    with torch.no_grad():
        wanted, got = ((v[0] if beside else v) for v in (model(x), quantized(x)))
        assert oracles.sqnr(wanted, got) > 20


def test_a_value_scaled_by_a_computed_number_is_quantized() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x) * self.scale.exp())

    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(64, 8)
    error = quantize_static(model, [x])(x) - model(x)
    assert error.norm() < 0.05 * model(x).norm()
