"""Learned zero points of activations (LSQ+)."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.quant import Bits, Scheme, prepare_qat
from compresskit.quant.numerics.scheme import fake_quantize
from compresskit.quant.numerics.targets import TENSORRT


def test_the_gradient_of_an_offset_is_that_of_clipped_values() -> None:
    """Equation 7 of 2004.09576, one value at a time."""
    torch.manual_seed(0)
    x, grad, scale, scheme = torch.randn(300), torch.randn(300), torch.tensor(0.2), Scheme(bits=3)
    offset = torch.tensor(-0.6, requires_grad=True)
    zero_point = torch.tensor(3, dtype=torch.int32)
    fake_quantize(x, scale, zero_point, scheme, gradient_scale=0.5, offset=offset).backward(grad)
    wanted = 0.0
    for value, g in zip((x / scale).tolist(), grad.tolist(), strict=True):
        wanted += 0.5 * g * (value <= -3.5 or value >= 4.5)
    assert offset.grad.item() == pytest.approx(wanted, rel=1e-4)


def test_offsets_are_learned_exported_and_saved(tmp_path) -> None:
    model = build(networks.Residual)
    calibration = [image(16)]
    plain = prepare_qat(model, calibration, bits=Bits(activations=4), learned=True)
    alive = prepare_qat(model, calibration, bits=Bits(activations=4), learned=True, offsets=True)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(alive.eval()(*x), plain.eval()(*x))  # they start where the calibrated zero points are
    alive.train()
    offsets = {name: p for name, p in alive.named_parameters() if name.endswith(".offset")}
    signed = [q for q in alive.activation_quantizers() if q.clamp is None]
    assert len(offsets) == len(signed) > 0  # not those behind a ReLU
    before = {name: p.detach().clone() for name, p in offsets.items()}
    optimizer = torch.optim.Adam(alive.parameters(), lr=0.02)
    points = [int(q.zero_point) for q in signed]
    for _ in range(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(3 * alive(*image(16)), torch.arange(16) % 10).backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in offsets.items())
    alive.eval()
    with torch.no_grad():
        wanted = alive.converted()(*x)
        torch.testing.assert_close(wanted, alive(*x))
    assert [int(q.zero_point) for q in signed] != points
    alive.convert_()
    assert not [name for name, _ in alive.named_parameters() if name.endswith((".offset", ".ratio"))]
    path = ck.export_onnx(alive, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, alive, [image(64), image(1)]).passed
    ck.save(alive, tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(ck.load(networks.Residual(), tmp_path / "saved").eval()(*x), alive(*x))


def test_the_stage_trains_offsets() -> None:
    model, task = build(networks.Residual), images_task(ck)

    def outcome(**settings):
        torch.manual_seed(0)
        optimizer = partial(torch.optim.Adam, lr=0.1)
        return ck.QAT(epochs=2, learned=True, bits=Bits(activations=4), optimizer=optimizer, **settings)(model, task)

    x = image(8)
    assert not torch.equal(outcome()(*x), outcome(offsets=True)(*x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offsets": True}, r"QAT\(offsets=True\): zero points are learned together with scales; write learned=True, too"),
        ({"offsets": True, "learned": True, "target": TENSORRT}, r"QAT\(offsets=True\): TENSORRT knows no zero point but 0"),
    ],
)
def test_offsets_that_cannot_be_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        ck.QAT(epochs=1, **settings)
