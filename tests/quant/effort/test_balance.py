"""Balancing channels changes no output in float, through depthwise layers, sums and concatenation, and helps uneven channels."""

from __future__ import annotations

import networks
import oracles
import pytest
import torch
from networks import build, image
from torch import nn

from compresskit.graph.capture import capture
from compresskit.graph.surgery import copy_model
from compresskit.quant import X86
from compresskit.quant.build import build_quantized
from compresskit.quant.effort import least_noise
from compresskit.quant.effort.balance import balance_channels_, scale_channels_


class Uneven(nn.Module):
    """A depthwise layer, a sum of two layers, a concatenation, PReLU and a linear head, with channels of very different size."""

    def __init__(self):
        super().__init__()
        self.a, self.depth = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.b, self.c, self.d = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
        self.slope, self.join, self.head = nn.PReLU(8), nn.Conv2d(12, 6, 1), nn.Linear(6, 5)
        with torch.no_grad():
            self.a.weight.mul_(torch.logspace(-1, 0.5, 8).view(-1, 1, 1, 1))
            self.depth.weight.mul_(torch.logspace(1, -0.5, 8).view(-1, 1, 1, 1))

    def forward(self, x):
        x = torch.relu(self.depth(torch.relu(self.a(x))))
        x = torch.relu(self.b(x) + self.c(x))
        x = torch.relu(self.join(torch.cat([self.slope(x), self.d(x)], 1)))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def for_least_noise_(captured, model: nn.Module, x: tuple[torch.Tensor, ...]) -> int:
    rounded = {point.node for point in build_quantized(model, x, X86, None).placement.points}
    return scale_channels_(captured.module, least_noise.least_noise_factors(captured.module, [x], x, rounded))


def separable() -> nn.Module:
    """A convolution whose channels differ by a factor of 16, a depthwise layer that makes up for it, and one that reads both."""
    size = torch.logspace(-0.9, 0.3, 8).view(-1, 1, 1, 1)
    first, depth = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    with torch.no_grad():
        first.weight.mul_(size)
        depth.weight.div_(size)
    return nn.Sequential(first, nn.ReLU(), depth, nn.ReLU(), nn.Conv2d(8, 6, 1))


@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_the_float_model_computes_the_same(strength: float) -> None:
    model, x = build(Uneven), image(8)
    captured = capture(copy_model(model), x)
    assert balance_channels_(captured.module, [x], strength=strength) >= 25
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


def test_the_float_model_computes_the_same_for_least_noise() -> None:
    model, x = build(Uneven), image(8)
    captured = capture(copy_model(model), x)
    before = {name: value.clone() for name, value in captured.module.named_parameters()}
    assert for_least_noise_(captured, model, x) >= 25
    assert any(not torch.equal(before[name], value) for name, value in captured.module.named_parameters())
    assert all(value.grad is None for value in captured.module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("all_steps")
def test_of_large_layers_some_outputs_stand_for_all(monkeypatch) -> None:
    model, x = build(Uneven), image(32)
    rounded = {point.node for point in build_quantized(model, x, X86, None).placement.points}
    found = []
    for entries in (2**16, 16):
        monkeypatch.setattr(least_noise, "MOST_ENTRIES", entries)
        found.append(least_noise.least_noise_factors(capture(copy_model(model), x).module, [x], x, rounded))
    every, some = (torch.tensor(list(factors.values())).log() for factors in found)
    assert not torch.equal(every, some)
    assert torch.corrcoef(torch.stack([every, some]))[0, 1] > 0.8


def test_a_model_without_gradients_is_not_changed() -> None:
    class Best(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = separable()

        def forward(self, x):
            return self.body(x).argmax(1)

    model, x = build(Best), image(8)
    captured = capture(copy_model(model), x)
    before = [value.clone() for value in captured.module.parameters()]
    assert for_least_noise_(captured, model, x) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, captured.module.parameters(), strict=True))


def test_what_a_depthwise_layer_reads_has_one_range() -> None:
    model, x = build(separable), image(8)
    captured = capture(copy_model(model), x)
    balance_channels_(captured.module, [x])
    with torch.no_grad():
        weight = captured.module.get_parameter("0.weight")
        highest = torch.relu(nn.functional.conv2d(x[0], weight, padding=1)).amax((0, 2, 3))
    torch.testing.assert_close(highest, highest.max().expand_as(highest), rtol=1e-3, atol=0)


def test_uneven_channels_are_rounded_less() -> None:
    model, x = build(separable), image(32)
    with torch.no_grad():
        wanted, found = model(*x), []
        for adjust in (
            None,
            lambda captured: balance_channels_(captured.module, [x]),
            lambda captured: for_least_noise_(captured, model, x),
        ):
            quantized = build_quantized(model, x, X86, None, adjust=adjust)
            quantized.calibrate_([x])
            found.append(oracles.sqnr(wanted, quantized(*x)))
    assert min(found[1:]) > found[0] + 1


def test_a_layer_that_is_called_twice_stays() -> None:
    model, x = build(networks.Twice), image(4)
    captured = capture(copy_model(model), x)
    balance_channels_(captured.module, [x])
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


class Handed(nn.Module):
    """Operators that hand factors on: cut and padded shortcuts, parts and joins, groups, resizing, a gate, means."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.far = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
        self.grouped, self.gate, self.c = nn.Conv2d(12, 12, 3, padding=1, groups=3), nn.Conv2d(12, 12, 1), nn.Conv2d(12, 12, 1)
        self.scale, self.head = nn.Parameter(torch.rand(12, 1, 1) + 0.5), nn.Linear(18, 5)

    def forward(self, x):
        x = torch.relu(self.a(x))
        x = torch.relu(self.b(x) - x[:, :, ::2, ::2])
        x = torch.relu(self.far(x) + nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 3)))
        left, right = x.chunk(2, 1)
        first, rest = torch.cat([right, left], 1).split([3, 9], 1)
        x = self.grouped(torch.cat([rest[:, 2:8], first, rest[:, 0:3]], 1))
        x = nn.functional.interpolate(nn.functional.interpolate(x, scale_factor=2), scale_factor=2, mode="bilinear")
        x = nn.functional.pad(self.scale * x / 3, (1, 1, 1, 1), mode="reflect").abs()
        x = torch.relu(self.c(x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))))
        x = nn.functional.pad(nn.functional.adaptive_avg_pool2d(x, 1), (0, 0, 0, 0, 0, 2))
        return self.head(torch.cat([x.flatten(1), x.amax((2, 3))[:, 4:8]], 1))


def test_factors_pass_all_that_hands_them_on() -> None:
    model, x = build(Handed), image(8)
    with torch.no_grad():
        for layer in (model.a, model.b, model.far, model.grouped, model.c):
            layer.weight.mul_(torch.logspace(-1, 0.5, len(layer.weight)).view(-1, 1, 1, 1))
    captured = capture(copy_model(model), x)
    assert balance_channels_(captured.module, [x]) >= 8 + 12 + 12
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: nn.functional.pad(x, (1, 1), value=1.0),
        lambda x: x.transpose(1, 2).reshape(x.shape),
        lambda x: x.cumsum(1),
        lambda x: x.mean(0, keepdim=True) + x.mean(1, keepdim=True),
        lambda x: 1 / (x + 3),
        lambda x: x * x,
        lambda x: nn.functional.relu6(x),
        lambda x: torch.cat(x.split(4, 2), 1)[:, 8:16],
    ],
)
def test_other_operators_keep_their_factors(change) -> None:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.b(change(self.a(x)))

    model, x = build(Model), image(8)
    captured = capture(copy_model(model), x)
    balance_channels_(captured.module, [x])
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_pooling_of_channels_ties_nothing(rank) -> None:
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(8, 16), nn.Linear(16, 4)) if rank == 2 else (nn.Conv1d(3, 16, 3), nn.Conv1d(16, 4, 3))
            with torch.no_grad():
                self.a.weight.mul_(torch.logspace(-1.5, 1.5, 16).view(-1, *[1] * (rank - 1)))

        def forward(self, x):
            pool = nn.functional.max_pool1d if rank == 2 else nn.functional.max_pool2d
            return self.b(pool(self.a(x), 3, 1, 1))  # a value of this rank is taken for one without a batch

    torch.manual_seed(0)
    model, x = Pooled().eval(), (torch.randn(32, *((8,) if rank == 2 else (3, 9))),)
    graph = capture(copy_model(model), x).module
    assert balance_channels_(graph, [x]) == 0
    with torch.no_grad():
        torch.testing.assert_close(graph(*x), model(*x))


def test_values_whose_noise_fp32_does_not_hold_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[0].weight.mul_(1e22)
        model[2].weight.mul_(1e-22)
    x = (torch.randn(8, 3, 12, 12),)
    captured = capture(copy_model(model), x)
    assert for_least_noise_(captured, model, x) == 0
    torch.testing.assert_close(captured.module(*x), model(*x))


@pytest.mark.parametrize("gate", [torch.sigmoid, torch.relu])
def test_a_gate_has_a_factor_of_one(gate) -> None:
    """Also where it is made by what hands factors on; uneven channels of a gate do not make it less."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.gate, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)
            with torch.no_grad():
                for layer in (self.a, self.gate):
                    layer.weight.mul_(torch.logspace(-1, 0.5, 8).view(-1, 1, 1, 1))

        def forward(self, x):
            x = torch.relu(self.a(x))
            return self.b(x * gate(self.gate(x.mean((2, 3), keepdim=True))))

    model, x = build(Gated), image(8)
    captured = capture(copy_model(model), x)
    assert balance_channels_(captured.module, [x]) == 8
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)


def test_layers_that_share_a_bias_keep_their_factors() -> None:
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
            self.d, self.b.bias = nn.Conv2d(8, 4, 1), self.a.bias
            with torch.no_grad():
                self.a.weight.mul_(torch.logspace(-1, 0.5, 8).view(-1, 1, 1, 1))

        def forward(self, x):
            return self.c(torch.relu(self.a(x))) + self.d(torch.relu(self.b(x)))

    model, x = build(Shared), image(8)
    captured = capture(copy_model(model), x)
    balance_channels_(captured.module, [x])
    with torch.no_grad():
        torch.testing.assert_close(captured.module(*x), model(*x), rtol=1e-4, atol=1e-5)
