"""Weights that are rounded up and down in turn: damped, and frozen."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, SettingError
from compresskit.quant import Bits, prepare_qat
from compresskit.quant.qat import FreezeOscillating, Oscillations, damping_loss
from compresskit.quant.qat.oscillations import latent_weights


def one_layer(bits: int = 2) -> ck.quant.Quantized:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.Flatten()).eval()
    return prepare_qat(model, [torch.randn(8, 3, 2, 2)], bits=Bits(weights=bits), learned=True)


def test_the_damping_loss_is_the_squared_distance_from_the_step_inside_the_range() -> None:
    quantized = one_layer()
    weight = quantized.body.get_parameter("0.weight")
    scale = next(quantizer for quantizer, _ in quantized.rounded_weights()).scale
    with torch.no_grad():
        scale.copy_(torch.tensor([1.0, 2.0]))
        weight.copy_(torch.tensor([[0.3, -0.6, 5.0], [0.3, -1.5, 1.1]]).view(2, 3, 1, 1))
    loss = damping_loss(quantized)
    assert loss.item() == pytest.approx(0.3**2 + 0.4**2 + 0.3**2 + 0.5**2 + 0.9**2, rel=1e-5)  # 5.0 lies outside
    loss.backward()
    wanted = [[0.6, 0.8, 0.0], [0.6, 1.0, -1.8]]
    torch.testing.assert_close(weight.grad.flatten(1), torch.tensor(wanted))
    assert scale.grad is None or not scale.grad.any()


def test_what_oscillates_is_fixed_to_its_mean_step() -> None:
    """Against the paper's recursion for one weight at a time."""
    quantized, momentum, threshold = one_layer(bits=3), 0.2, 0.35
    weight = quantized.body.get_parameter("0.weight")
    scale = next(quantizer for quantizer, _ in quantized.rounded_weights()).scale
    with torch.no_grad():
        scale.fill_(1.0)
    turns = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0])
    climbs = torch.tensor([-3.0, -2.0, -2.0, -1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 3.0])
    freezer = FreezeOscillating(quantized, threshold, momentum)
    for turn, climb in zip(turns, climbs, strict=True):
        with torch.no_grad():
            weight.copy_(torch.stack([turn, climb, -turn]).repeat(2).view(2, 3, 1, 1) * 1.01)
        freezer.step_()
    before, direction, frequency, mean, fixed = float(turns[0]), 0.0, 0.0, float(turns[0]), None
    for turn in turns[1:].tolist():
        sign = float((turn > before) - (turn < before))
        frequency = momentum * (sign != 0 and sign == -direction) + (1 - momentum) * frequency
        mean = momentum * turn + (1 - momentum) * mean
        direction, before = sign or direction, turn
        if fixed is None and frequency > threshold:
            fixed = round(mean)
    assert fixed is not None
    assert weight.flatten(1).tolist() == [[fixed, pytest.approx(3.03), -fixed]] * 2
    assert freezer.fraction() == pytest.approx(2 / 3)
    again = FreezeOscillating(quantized, threshold, momentum)
    again.resume_from_(freezer.resume_state())
    with torch.no_grad():
        weight.zero_()
    again.step_()
    assert weight.flatten(1).tolist() == [[fixed, 0.0, -fixed]] * 2
    other = FreezeOscillating(one_layer(), threshold)
    with pytest.raises(CheckpointError, match=r"oscillations: the state of 'nowhere' belongs to another model"):
        other.resume_from_({"nowhere": {}})


def test_a_weight_behind_batchnorm_is_written_through_it() -> None:
    quantized = prepare_qat(build(networks.Residual), [image(16)], bits=Bits(weights=3), learned=True)
    weights = list(latent_weights(quantized))
    assert len(weights) == len([1 for _ in quantized.rounded_weights()])
    behind = next(weight for weight in weights if weight.factor is not None)
    wanted = torch.randn_like(behind.parameter)
    with torch.no_grad():
        behind.write_(wanted, torch.ones_like(wanted, dtype=torch.bool))
    torch.testing.assert_close(behind.rounded_value().detach(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "share"), [(Oscillations(damping=1.0), 0.98), (Oscillations(freezing=0.01, momentum=0.2), 0.999)]
)
def test_training_holds_weights_still(how, share) -> None:
    """Damped weights end nearer to their steps; frozen ones, of which there are few in so short a training, on them."""
    model, task = build(networks.Residual), images_task(ck)

    def trained(oscillations):
        torch.manual_seed(0)
        kept, optimizer = [], partial(torch.optim.SGD, lr=0.03, momentum=0.9)
        settings = {"bits": Bits(weights=3), "learned": True, "optimizer": optimizer, "oscillations": oscillations}
        result = ck.QAT(epochs=6, on_step=kept.append, **settings)(model, task)
        with torch.no_grad():
            parts = [(q, w, q.qparams(w)[0].view(-1, *[1] * (w.ndim - 1))) for q, w in result.rounded_weights()]
            return sum(float((w / s - q.steps(w, s.flatten())).abs().mean()) for q, w, s in parts)

    assert trained(how) < trained(Oscillations()) * share


def test_a_damped_objective_has_one_more_loss_that_rises() -> None:
    model, task, seen = build(networks.Residual), images_task(ck), []
    ck.QAT(epochs=2, oscillations=Oscillations(damping=0.1), on_step=lambda report: seen.append(report.losses))(model, task)
    strengths = [losses["oscillations"] for losses in seen]
    assert strengths[0] == 0
    assert strengths[-1] > strengths[1] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": -1.0}, r"Oscillations\(damping=\.\.\.\): wanted a number >= 0, got -1"),
        ({"freezing": 0.0}, r"Oscillations\(freezing=\.\.\.\): wanted a frequency between 0 and 1, got 0"),
        ({"momentum": 0.0}, r"Oscillations\(momentum=\.\.\.\): wanted a number in \(0, 1\], got 0"),
    ],
)
def test_bad_settings_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Oscillations(**settings)


def test_other_settings_are_refused_by_the_stage() -> None:
    with pytest.raises(SettingError, match=r"QAT\(oscillations=\.\.\.\): wanted quant\.qat\.Oscillations\(\.\.\.\), got 0\.1"):
        ck.QAT(epochs=1, oscillations=0.1)


class Sharpened(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.log_factor = nn.Parameter(torch.zeros(()))

    def forward(self, predictions, target):
        return nn.functional.cross_entropy(predictions * self.log_factor.exp(), target)


@pytest.mark.parametrize("oscillations", [Oscillations(), Oscillations(damping=1e-3)])
def test_a_loss_with_parameters_is_refused_with_and_without_damping(oscillations) -> None:
    task = images_task(ck, loss=Sharpened())
    with pytest.raises(SettingError, match=r"Task\(loss=...\): Sharpened has parameters that require gradients"):
        ck.QAT(epochs=1, oscillations=oscillations)(build(networks.Residual), task)


def test_a_weight_that_rests_between_its_turns_oscillates_too() -> None:
    quantized = one_layer(bits=3)
    weight = quantized.body.get_parameter("0.weight")
    freezer = FreezeOscillating(quantized, threshold=0.9, momentum=0.5)
    with torch.no_grad():
        next(quantizer for quantizer, _ in quantized.rounded_weights()).scale.fill_(1.0)
    for step in (1.0, 2.0, 2.0, 1.0):
        with torch.no_grad():
            weight.fill_(step)
        freezer.step_()
    (state,) = freezer.states.values()
    assert (state["frequency"] == 0.5).all()


def test_channels_that_batchnorm_scales_to_nothing_are_not_written() -> None:
    quantized = prepare_qat(build(networks.Residual), [image(16)], bits=Bits(weights=3), learned=True)
    behind = next(weight for weight in latent_weights(quantized) if weight.factor is not None)
    behind.factor[0] = 0
    before = behind.parameter.detach().clone()
    with torch.no_grad():
        behind.write_(torch.ones_like(before), torch.ones_like(before, dtype=torch.bool))
    changed = (behind.parameter != before).flatten(1).any(1)
    assert not changed[0]
    assert changed[1:].all()
