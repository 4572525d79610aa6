"""How much of a model runs in integers."""

from __future__ import annotations

from pathlib import Path

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.measure import count_macs
from compresskit.quant import diagnose, quantize_static


def test_coverage_counts_layers_parameters_and_macs() -> None:
    model = build(networks.Residual)
    whole = quantize_static(model, [image(16)]).placement.coverage
    assert whole.layers == (5, 5)
    assert whole.macs[1] == count_macs(model, image(2))
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    weights = sum(m.weight.numel() + m.weight.shape[0] for m in layers)
    assert whole.parameters == (weights, weights)
    part = quantize_static(model, [image(16)], skip=("inner",))
    found = part.placement.coverage
    assert found.layers == (4, 5)
    assert found.macs[1] - found.macs[0] == 16 * 16 * 16 * 16 * 9
    assert found.reasons == {"inner.0": "skipped by the user"}
    assert "inner.0: float, skipped by the user" in str(diagnose(part, [image(8)]))
    row = next(r for r in diagnose(part, [image(8)]).rows if r.layer == "inner.0")
    assert row.runs == "float: skipped by the user"
    assert row.weights is None


def test_rows_that_the_data_chooses_count_as_all_rows(tmp_path) -> None:
    class Chosen(nn.Linear):
        def forward(self, x):
            rows = x[:, 0] > 0
            return x.index_put((rows,), super().forward(x[rows]))

    x = torch.randn(16, 8)
    for quantized in (quantize_static(Chosen(8, 8).eval(), [(x,)]), ck.quant.quantize_dynamic(Chosen(8, 8).eval(), (x,))):
        assert quantized.placement.coverage.macs == (64, 64)
        assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)), quantized, [(x,)]).passed


@pytest.mark.parametrize(
    ("layer", "operator"),
    [(nn.LeakyReLU(0.1), "LeakyRelu"), (nn.PReLU(), "LeakyRelu"), (nn.Upsample(scale_factor=2), "Resize")],
    ids=["leaky ReLU", "PReLU", "nearest"],
)
def test_between_integer_layers_it_runs_in_integers(layer: nn.Module, operator: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.Conv2d(8, 4, 3)).eval()
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    found = ck.audit(path)
    assert found.operators == {"Conv": (2, 2), operator: (1, 1)}
    assert found.conversions == 2  # of the input and the output
    other = torch.randn(5, *image(1)[0].shape[1:])
    assert ck.verify_onnx(path, quantized, [(other,)]).plain.within_one == 1.0


def test_slopes_that_differ_between_channels_stay_float() -> None:
    """Behind a convolution of more products than the target wants to compute twice."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.PReLU(32), nn.Conv2d(32, 4, 3), nn.PReLU(4)).eval()
    assert quantize_static(model, [image(16)]).placement.floating == {"prelu_1": "its slopes differ between channels"}


def test_products_of_values_count_for_one_sample() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 16), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) @ self.k(x).transpose(1, 2)

    model, x = Scores().eval(), torch.randn(16, 5, 8)
    assert quantize_static(model, [(x,)]).placement.coverage.macs[1] == count_macs(model, x) == 2 * 5 * 8 * 16 + 5 * 16 * 5


def test_a_transposed_convolution_in_groups_counts_what_it_reads() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1, groups=8)).eval()
    coverage = quantize_static(model, [image(16)]).placement.coverage
    assert coverage.layers == (1, 2)
    assert coverage.macs[1] == count_macs(model, image(2))


def test_a_recurrent_layer_multiplies_once_a_step() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 6, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    x = torch.randn(3, 10, 8)
    coverage = ck.quant.quantize_dynamic(Last().eval(), (x,), dynamic=(0, 1)).placement.coverage
    assert coverage.macs[1] == 10 * (24 * 8 + 24 * 6)


class Positions(nn.Module):
    """Adds what two layers make of a stored grid, as position biases are."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
        self.up, self.down = nn.Linear(6, wide), nn.Linear(wide, 6)
        self.register_buffer("grid", torch.randn(5, 2))

    def forward(self, x):
        return self.down(self.up(x + self.make(self.grid)).relu())


@pytest.mark.parametrize(("wide", "once"), [(256, True), (16, False)], ids=["small", "much of the model"])
def test_what_reads_stored_tensors_alone_is_computed_once(wide, once, tmp_path) -> None:
    model, x = Positions(wide).eval(), torch.randn(4, 5, 6)
    for quantized in (ck.quant.quantize_static(model, [x]), ck.quant.quantize_dynamic(model, x)):
        reasons = quantized.placement.coverage.reasons
        assert ("make.0" in reasons) == ("make.2" in reasons) == once
        assert not once or "a runtime computes it once" in reasons["make.0"]
        assert not once or quantized.placement.coverage.macs[0] == quantized.placement.coverage.macs[1] == 2 * 5 * 6 * wide
        ck.save(quantized, tmp_path / type(quantized.origin).__name__)
        assert torch.equal(ck.load(Positions(wide), tmp_path / type(quantized.origin).__name__)(x), quantized(x))
