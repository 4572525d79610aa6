"""Where quantizers are inserted."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, image
from torch import Tensor, nn

import compresskit as ck
from compresskit.graph.normalize import aten
from compresskit.metrics import decibels
from compresskit.quant import prepare_qat, quantize_static


def test_relu_is_merged_into_the_quantizer() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    assert not any(n.target is aten.relu.default for n in quantized.body.graph.nodes)
    assert sum(q.clamp == (0.0, None) for q in quantized.activation_quantizers()) == 2
    assert all(q.zero_point == 0 for q in quantized.activation_quantizers() if q.clamp)


def test_inputs_of_a_concat_share_a_quantizer() -> None:
    quantized = quantize_static(build(networks.Concat), [image(16)])
    names = [n.target for n in quantized.body.graph.nodes if n.op == "call_module"]
    concat = next(n for n in quantized.body.graph.nodes if n.target is aten.cat.default)
    assert len({n.target for n in concat.args[0]}) == 1
    assert names.count(concat.args[0][0].target) == 3


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("bound", "ends"), [
    (lambda x: x.clamp(min=0), (0.0, None)), (lambda x: x.clamp_min(0), (0.0, None)), (lambda x: x.clamp(0, 6), (0.0, 6.0)),
    (lambda x: torch.clamp(x, min=-1, max=1), (-1.0, 1.0)), (nn.functional.hardtanh, (-1.0, 1.0)),
    (lambda x: x.clamp_(min=-0.2), (-0.2, None)), (lambda x: nn.functional.hardtanh(x, -2.0, 3.0), (-2.0, 3.0)),
])  # fmt: skip
def test_a_clamp_around_zero_is_the_range_of_its_quantizer(bound, ends, tmp_path) -> None:
    """Computed in float behind a rounding of the whole range, values within bounds had few steps."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
            nn.init.normal_(self.first.weight, std=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(bound(self.first(x)))

    torch.manual_seed(0)
    model, x = Bounded().eval(), torch.randn(16, 3, 12, 12)
    quantized = quantize_static(model, [x])
    assert ends in {q.clamp for q in quantized.activation_quantizers()}
    assert not quantized.placement.floating
    with torch.no_grad():
        wanted, found = model(x), quantized(x)
    parts = wanted - wanted.mean((0, 2, 3), keepdim=True), found - wanted
    assert decibels(*(float(part.square().sum()) for part in parts)) > 28
    ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", x), quantized, [x])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (0.0, 1.0)])
def test_bounds_that_something_else_relies_on_stay_bounds(low, high) -> None:
    """The zero point of -1 to 1 lies beside the middle: a value became 1.004, of which acos is nan."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = (9 * self.first(x)).clamp(low, high)
            return self.last(x), torch.acos(x)

    class Pixels(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(low, high)

    torch.manual_seed(0)
    x = torch.randn(16, 3, 12, 12)
    assert torch.isfinite(quantize_static(Bounded().eval(), [x])(x)[1]).all()
    trained = prepare_qat(Pixels(nn.Conv2d(3, 4, 3)).eval(), [x], learned=True)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.3)
    for _ in range(5):
        optimizer.zero_grad()
        (trained(x) - 5).square().mean().backward()
        optimizer.step()
    trained.eval()
    assert low <= trained(x).min()
    assert trained(x).max() <= high


@pytest.mark.parametrize(("low", "high"), [(None, 1.0), (0.5, 2.0), (-2.0, -0.5)])
def test_a_clamp_that_no_range_replaces_is_computed_in_float(low, high) -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).clamp(low, high))

    quantized = quantize_static(Bounded().eval(), [torch.randn(16, 3, 12, 12)])
    assert "clamp" in quantized.placement.floating
