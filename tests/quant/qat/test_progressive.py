"""Training passes wider formats before the last ones."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import Bits, prepare_qat
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.qat.progressive import ProgressiveBits


def widths(quantized) -> set[tuple[str, int]]:
    kinds = {ActivationQuantizer: "a", WeightQuantizer: "w"}
    return {(kinds[type(q)], q.scheme.bits) for q in quantized.quantizers() if type(q) in kinds}


@pytest.mark.parametrize("learned", [False, True])
def test_bits_fall_in_equal_parts_of_the_first_half(learned) -> None:
    quantized = prepare_qat(build(networks.Residual), [image(16)], bits=Bits(weights=2, activations=5), learned=learned)
    bits = ProgressiveBits(quantized, (8, 4))
    seen = []
    for done in (0.0, 0.24, 0.25, 0.49, 0.5, 1.0):
        bits.step_(done)
        seen.append(widths(quantized))
        assert torch.isfinite(quantized(*image(16))).all()
    assert seen == [{("a", 8), ("w", 8)}] * 2 + [{("a", 5), ("w", 4)}] * 2 + [{("a", 5), ("w", 2)}] * 2


def test_learned_scales_change_as_their_first_values_would() -> None:
    """2 mean|w| / sqrt(largest integer), so from 7 to 1 by sqrt(7), and to mean|w| for one bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    four = {"": Bits(weights=1), "0": Bits(weights=2)}
    quantized = prepare_qat(model, [torch.randn(8, 3, 4, 4)], bits=four, learned=True)
    wide = prepare_qat(model, [torch.randn(8, 3, 4, 4)], bits=Bits(weights=4), learned=True)
    first = [rounding.scale.detach().clone() for rounding, _ in quantized.rounded_weights()]
    bits = ProgressiveBits(quantized, (4,))
    bits.step_(0.0)
    for (rounding, weight), (other, _) in zip(quantized.rounded_weights(), wide.rounded_weights(), strict=True):
        mean = weight.abs().mean((1, 2, 3))
        assert (other.scale.detach() <= 2 * mean / 7**0.5 + 1e-6).all()
        torch.testing.assert_close(rounding.scale.detach(), first[0] / 7**0.5 if weight.shape[1] == 3 else 2 * mean / 7**0.5)
    bits.step_(1.0)
    for (rounding, _), scale in zip(quantized.rounded_weights(), first, strict=True):
        torch.testing.assert_close(rounding.scale.detach(), scale)


def test_a_checkpoint_restores_the_bits() -> None:
    def made():
        return prepare_qat(build(networks.Residual), [image(16)], bits=Bits(weights=2), learned=True)

    before, after = made(), made()
    old, new = ProgressiveBits(before, (8, 4)), ProgressiveBits(after, (8, 4))
    old.step_(0.3)
    new.step_(0.0)
    new.resume_from_(old.resume_state())
    after.load_state_dict(before.state_dict())
    x = image(8)
    with torch.no_grad():
        assert torch.equal(before.eval()(*x), after.eval()(*x))
    assert widths(after) == widths(before) == {("a", 8), ("w", 4)}


def test_the_stage_ends_with_the_last_bits(tmp_path) -> None:
    task, seen = images_task(ck), []
    stage = ck.QAT(epochs=4, bits=Bits(weights=2), learned=True, progressive=(8, 4))
    plain = ck.QAT(epochs=4, bits=Bits(weights=2), learned=True)
    outcomes = []
    for one in (stage, plain):
        torch.manual_seed(0)
        outcomes.append(one(build(networks.Residual), task))
        seen.append(widths(outcomes[-1]))
    assert seen == [{("a", 8), ("w", 2)}] * 2
    x = image(8)
    with torch.no_grad():
        assert not torch.equal(outcomes[0](*x), outcomes[1](*x))
    path = ck.export_onnx(outcomes[0], tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, outcomes[0], [image(64)]).passed


@pytest.mark.parametrize("widths", [(4, 8), (8, 8), (1,), (9,), [8, 4], (8.0,)])
def test_bad_widths_are_refused(widths) -> None:
    with pytest.raises(SettingError, match=r"QAT\(progressive=\.\.\.\): wanted"):
        ck.QAT(epochs=1, progressive=widths)


def test_widths_that_change_nothing_are_refused() -> None:
    with pytest.raises(SettingError, match=r"QAT\(progressive=\(4,\)\): nothing has fewer bits than 4, the least is 4"):
        ck.QAT(epochs=1, bits=Bits(weights=4), progressive=(4,))(build(networks.Residual), images_task(ck))


def test_the_least_of_a_learned_scale_changes_with_it() -> None:
    quantized = prepare_qat(build(networks.Residual), [image(16)], bits=Bits(weights=2), learned=True)
    again = copy.deepcopy(quantized)
    bits, other = ProgressiveBits(quantized, (8, 4)), ProgressiveBits(again, (8, 4))
    for done in (0.0, 0.3):
        bits.step_(done)
        with torch.no_grad():
            for rounding, weight in quantized.rounded_weights():
                rounding.ratio.fill_(-1.0)
                torch.testing.assert_close(rounding.qparams(weight)[0], rounding.scale / 64)
    other.resume_from_(bits.resume_state())
    again.load_state_dict(quantized.state_dict())
    for (a, weight), (b, _) in zip(quantized.rounded_weights(), again.rounded_weights(), strict=True):
        assert torch.equal(a.qparams(weight)[0], b.qparams(weight)[0])


def test_zero_points_of_learned_scales_change_with_the_bits() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(64, 4) + 1
    quantized = prepare_qat(model, [x], bits=Bits(activations=4, weights=4), learned=True)
    moved = [q for q in quantized.quantizers() if isinstance(q, ActivationQuantizer) and int(q.zero_point) not in (0, 15)]
    before = [int(q.zero_point) for q in moved]
    assert moved
    ProgressiveBits(quantized, (8,)).step_(0.0)
    assert [int(q.zero_point) for q in moved] == [round(zero * 255 / 15) for zero in before]


def test_ranges_of_activations_change_with_the_bits() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval(), torch.randn(64, 4)
    quantized = prepare_qat(model, [x], bits=Bits(activations=4, weights=4))
    moved = [q for q in quantized.quantizers() if isinstance(q, ActivationQuantizer)]
    before = [float(q.scale) for q in moved]
    ProgressiveBits(quantized, (8,)).step_(0.0)
    assert [float(q.scale) for q in moved] == pytest.approx([scale * 15 / 255 for scale in before], rel=0.1)
