"""Values whose range is known from their operator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import OPENVINO, X86, observers, prepare_qat, quantize_static

KNOWN = replace(X86, known_ranges=True)


class Gates(nn.Module):
    """Sigmoid, tanh, softmax, hard-sigmoid and a ReLU, each read by a layer; a sigmoid joined with a tanh, and with a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(c, 8, 1) for c in (3, 8, 8, 8, 8, 16, 16)])
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        a, b, c, d, e, f, g = self.layers
        x = torch.sigmoid(a(x))
        x = torch.tanh(b(x)).transpose(2, 3)
        x = F.softmax(c(x), 1)
        x = F.hardsigmoid(d(x)) * 0.5
        y = e(F.relu(x))
        y = f(torch.cat([torch.sigmoid(y), torch.tanh(y)], 1))
        y = g(torch.cat([torch.sigmoid(y), y + 1], 1))
        return self.head(y.mean((2, 3)))


def pictures(n=8, scale=0.1):
    return (scale * torch.randn(n, 3, 6, 6),)


def ranges(quantized):
    """Label of a quantizer -> the range of its grid."""
    found = {}
    for each in quantized.activation_quantizers():
        ends = [(limit - each.zero_point.item()) * each.scale.item() for limit in (each.scheme.low, each.scheme.high)]
        found[each.label] = (round(ends[0], 2) + 0.0, round(ends[1], 2))
    return found


@pytest.fixture(scope="module")
def gates():
    torch.manual_seed(0)
    return Gates().eval()


@pytest.mark.parametrize("target", [X86, OPENVINO], ids=lambda target: target.name)
@pytest.mark.parametrize("observer", [None, observers.HistogramMSE])
def test_known_ranges_are_taken_whatever_the_data_shows(gates, target, observer) -> None:
    plain = ranges(quantize_static(gates, pictures(), target=target, observer=observer))
    known = ranges(quantize_static(gates, pictures(), target=replace(target, known_ranges=True), observer=observer))
    assert set(plain) == set(known)
    assert list(known.values()).count((0.0, 1.0)) >= 2  # the first sigmoid, softmax
    assert (-1.0, 1.0) in [(round(low, 1), round(high, 1)) for low, high in known.values()]  # tanh; with the sigmoid, too
    assert (0.0, 1.0) not in plain.values()  # small inputs stay in the middle
    others = {label for label in known if known[label] != plain[label]}
    assert 3 <= len(others) < len(known)  # the others follow the data


def test_inputs_that_were_never_seen_stay_in_range() -> None:
    """A sigmoid that follows small inputs clips the large ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Sigmoid(), nn.Linear(8, 5)).eval()
    small, large = (0.01 * torch.randn(64, 3),), (5 * torch.randn(64, 3),)
    with torch.no_grad():
        wanted = model(*large)
        errors = [
            (quantize_static(model, small, target=target, skip=("0",))(*large) - wanted).square().mean()
            for target in (X86, KNOWN)
        ]
    assert errors[1] < errors[0] / 100


def test_files_saved_models_and_training(gates, tmp_path) -> None:
    quantized = quantize_static(gates, pictures(), target=KNOWN)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", pictures()), quantized, [pictures(7)]).passed
    ck.save(quantized, tmp_path / "saved")
    again = ck.load(gates, tmp_path / "saved")
    assert ranges(again) == ranges(quantized)
    trained = prepare_qat(gates, [pictures()], target=KNOWN).train()
    for _ in range(3):
        trained(*pictures(scale=3.0)).sum().backward()
    after = ranges(trained)
    for label, ends in ranges(quantized).items():
        if ends == (0.0, 1.0):
            assert after[label] == ends


def test_effort_leaves_known_ranges(gates) -> None:
    batches = [pictures() for _ in range(4)]
    found = ranges(quantize_static(gates, batches, target=KNOWN, effort="balanced"))
    assert list(found.values()).count((0.0, 1.0)) >= 2


def test_an_observer_of_a_known_range() -> None:
    found = observers.KnownRange(-2, 3)
    found.update(torch.randn(1, 100))
    assert [end.item() for end in found.range()] == [-2.0, 3.0]
    found.update(torch.tensor([[float("nan")]]))
    assert not torch.isfinite(torch.cat(found.range())).any()
    for wrong in ((1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0)):
        with pytest.raises(SettingError, match="wanted two finite numbers"):
            observers.KnownRange(*wrong)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    quantized = quantize_static(model, pictures(), observer=partial(observers.KnownRange, -1.0, 1.0))
    assert {ends for label, ends in ranges(quantized).items()} == {(-1.0, 1.0)}


class Joined(nn.Module):
    """A layer that reads a sigmoid joined with something else."""

    def __init__(self, other) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 5, 1), other

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([torch.sigmoid(x), self.other(x)], 1))


@pytest.mark.parametrize(
    ("other", "low", "high"), [(torch.tanh, -1.0, 1.0), (lambda x: x.sin() * 3 + 2, -0.9, 4.9)], ids=["known", "unknown"]
)
def test_the_range_of_joined_values_holds_all_of_them(other, low, high) -> None:
    torch.manual_seed(0)
    found = ranges(quantize_static(Joined(other).eval(), pictures(scale=4), target=KNOWN))
    assert any(begin < low + 0.05 and end > high - 0.05 for begin, end in found.values())
    assert not any((begin, end) == (0.0, 1.0) for begin, end in found.values())
