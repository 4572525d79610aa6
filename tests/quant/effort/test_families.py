"""Effort levels on networks of other shapes: norms that nothing folds, sizes that vary, outputs without rows, a fixed batch."""

from __future__ import annotations

import logging

import oracles
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError
from compresskit.quant import quantize_static
from compresskit.quant.effort.samples import OutputError


class PreActivation(nn.Module):
    """A norm that reads a shortcut, which no convolution folds."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        return x + self.second(torch.relu(self.norm(x)))


class Shortcut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x + self.second(x))


class Anchors(nn.Module):
    """A product of what is stored, beside the outputs of a detector."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 6, 3, 2, 1))
        self.register_buffer("anchors", torch.rand(4, 4))
        self.register_buffer("stride", torch.tensor(8.0))

    def forward(self, x):
        return self.body(x), self.anchors * self.stride


class TimeFirst(nn.Module):
    """Outputs (width, N, channels): their first dimension is not the batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 6, 3, padding=1))

    def forward(self, x):
        return self.body(x).mean(2).permute(2, 0, 1)


class AndMean(nn.Module):
    """A second output for the whole batch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, x):
        y = self.body(x)
        return y, y.mean()


class OneSample(nn.Module):
    """A forward pass that is written for one sample."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(392, 10)

    def forward(self, x):
        return self.head(self.body(x).relu().view(1, -1)).view(1, 10)


class Classes(nn.Module):
    """Integers are all that it returns."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))

    def forward(self, x):
        return self.body(x).argmax(1)


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("network", "dynamic"),
    [(PreActivation, (0,)), (Shortcut, (0, 2, 3)), (Anchors, (0,)), (TimeFirst, (0,)), (AndMean, (0,))],
)
def test_a_network_of_another_shape_is_improved(network, dynamic) -> None:
    model, x = build(network), image(16)
    quantized = quantize_static(model, [x, image(16)], effort="balanced", choose="rules", dynamic=dynamic)
    remedies = quantized.origin.remedies
    assert remedies[-1].name.startswith("imitate")
    fresh = image(3)
    with torch.no_grad():
        assert oracles.sqnr(first(model(*fresh)), first(quantized(*fresh))) > 28


def test_a_prelu_behind_a_norm_that_nothing_folds_runs_in_integers() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.PReLU(), nn.Conv2d(8, 4, 1)]
    model, x = build(lambda: nn.Sequential(*layers)), image(8)
    quantized = quantize_static(model, [x])
    with torch.no_grad():
        assert oracles.sqnr(model(*x), quantized(*x)) > 28


def test_outputs_without_rows_are_imitated_by_those_of_the_same_samples() -> None:
    """As many positions as samples: only running the float model again tells them apart."""
    model, x = build(TimeFirst), image(16)
    error = OutputError(model, [x], 16)
    rows = torch.tensor([3, 12, 7])
    inputs, wanted = error.rows_of(0, rows)
    with torch.no_grad():
        torch.testing.assert_close(wanted[0], model(*inputs))


@pytest.mark.matrix
@pytest.mark.parametrize(("network", "batch", "count"), [(Shortcut, 4, 8), (OneSample, 1, 20)])
@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_batches_of_a_fixed_size_are_neither_cut_nor_joined(network, batch, count, effort) -> None:
    model = network()
    quantized = quantize_static(model, [image(batch) for _ in range(count)], effort=effort, choose="rules", dynamic=())
    assert quantized.origin.remedies
    fresh = image(batch)
    with torch.no_grad():
        assert oracles.sqnr(model(*fresh), quantized(*fresh)) > 28


def test_rounding_is_not_learned_by_batches_of_a_fixed_size_which_is_said(caplog) -> None:
    with caplog.at_level(logging.INFO):
        quantized = quantize_static(
            Shortcut(), [image(4) for _ in range(8)], effort="best", choose="rules", dynamic=(), bits=ck.quant.Bits(weights=3)
        )
    assert "blocks are not reconstructed: that mixes the rows of batches" in caplog.text
    assert not any(remedy.name.startswith("reconstruct") for remedy in quantized.origin.remedies)


def test_too_few_batches_of_a_fixed_size_are_refused_before_anything_is_timed(monkeypatch) -> None:
    monkeypatch.setattr("compresskit.quant.static.measured_choice", lambda *_: pytest.fail("timed"))
    model = build(Shortcut)
    with pytest.raises(DataError, match=r"wanted at least 16 calibration samples, .* got 9, 5 and 4"):
        quantize_static(model, [image(1) for _ in range(9)], effort="balanced", choose="measure", dynamic=())


def test_outputs_of_integers_cannot_be_judged_which_is_said(caplog) -> None:
    model, x = build(Classes), image(16)
    with caplog.at_level(logging.INFO):
        quantized = quantize_static(model, [x], effort="balanced", choose="rules")
    assert "Classes has no output in floating point to compare, so no remedy can be judged" in caplog.text
    assert not quantized.origin.remedies
    caplog.clear()
    with caplog.at_level(logging.INFO):
        ck.quant.quantize_dynamic(model, [x])
    assert "what it loses is not judged" in caplog.text
    assert " dB" not in caplog.text
    with pytest.raises(ModelError, match="wanted an output in floating point to compare, the model has none"):
        ck.quant.quantize_to_accuracy(model, [x], sqnr=30.0)


@pytest.mark.parametrize("measure", ["psnr", "sqnr"])
def test_an_agreement_in_decibels_is_lost_by_the_power_of_the_error(measure) -> None:
    model, batches = build(Shortcut), [image(16), image(16)]
    task = ck.Task(val=ck.metrics.float_targets(model, batches), metric=ck.metrics.agreement(measure))
    _, report = ck.quant.repair(model, batches, task=task, drop=0.5)
    assert report.reached
    assert report.before < 0.5
    assert not report.remedies
