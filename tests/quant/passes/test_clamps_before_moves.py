"""A clamp behind operators that only move integers is the range of the quantizer before the move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from networks import image
from torch import nn

import compresskit as ck
from compresskit.quant import quantize_static


class Moved(nn.Module):
    """Two convolutions, what the code does with their result, and a third convolution."""

    def __init__(self, code, channels: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.code = code
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(channels, 4, 1)

    def forward(self, x):
        return self.code(self.b(self.a(x).relu()), self.c)


def shuffled(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def pooled(x):
    return F.max_pool2d(x, 3, 2, 1)


def padded_slice(x):
    return F.pad(x[:, :, 1:, ::2], (1, 0, 0, 1))


def enlarged(x):
    return F.interpolate(x, scale_factor=2)


def spread(x):
    return F.pixel_shuffle(x, 2)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("move", "clamp", "dynamic"),
    [
        (spread, F.relu, (0,)),
        (shuffled, F.relu, (0, 2, 3)),
        (pooled, F.relu, (0, 2, 3)),
        (padded_slice, F.relu6, (0,)),
        (enlarged, lambda x: x.clamp(min=0), (0, 2, 3)),
        (pooled, lambda x: x.clamp(-0.1, 0.3), (0,)),
        (lambda x: pooled(shuffled(x)), F.hardtanh, (0,)),
    ],
)
def test_it_is_the_same_as_the_clamp_before_the_move(move, clamp, dynamic) -> None:
    channels = move(torch.zeros(1, 16, 8, 8)).shape[1]
    behind = quantize_static(Moved(lambda x, c: c(clamp(move(x))), channels).eval(), [image(8)], dynamic=dynamic)
    before = quantize_static(Moved(lambda x, c: c(move(clamp(x))), channels).eval(), [image(8)], dynamic=dynamic)
    assert not behind.placement.floating
    for x in image(1), image(5), (torch.randn(2, 3, 20, 14),) if 2 in dynamic else image(2):
        assert torch.equal(behind(*x), before(*x))


@pytest.mark.parametrize("up", [nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.ConvTranspose2d(16, 16, (3, 2), (2, 3), 1)])
def test_a_relu_of_a_transposed_convolution(up: nn.Module, tmp_path: Path) -> None:
    model = Moved(None)
    model.up = up
    model.code = lambda x, c: c(model.up(x).relu())
    quantized = quantize_static(model.eval(), [image(8)], dynamic=(0, 2, 3))
    assert not quantized.placement.floating
    assert [point.clamp for point in quantized.placement.points].count((0.0, None)) == 2
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, quantized, [image(1), image(7), (torch.randn(2, 3, 20, 14),)]).plain.within_one == 1.0
    assert ck.audit(path).conversions == 2


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "code",
    [
        lambda x, c: (c(pooled(x).relu()), x),
        lambda x, c: (lambda y: (c(y.relu()), y))(pooled(x)),
        lambda x, c: (lambda y: (c(y.relu()), c(F.hardtanh(y))))(pooled(x)),
        lambda x, c: (lambda y: (c(y), y))(pooled(x).relu()),
        lambda x, c: tuple(c(torch.cat([part.relu(), part], 1)) for part in x.chunk(2, 1)),
        lambda x, c: (c(F.pad(x, (1, 1, 1, 1), value=-1.0).relu()),),
        lambda x, c: (c(pooled(torch.cat([x[:, 8:], x[:, :8]], 1)).relu()),),
        lambda x, c: (pooled(x).clamp(0, 1),),
    ],
    ids=["what is moved", "what was moved", "two clamps", "the clamp", "parts", "padded", "joined", "bounds that are relied on"],
)
def test_other_readers_see_what_they_did(code) -> None:
    model = Moved(code).eval()
    quantized = quantize_static(model, [image(8)], dynamic=(0, 2, 3))
    for x in image(4), (torch.randn(1, 3, 20, 14),):
        wanted, got = model(*x), quantized(*x)
        for a, b in zip(wanted, got, strict=True):
            assert ck.metrics.decibels(a.pow(2).sum().item(), (a - b).pow(2).sum().item()) > 28
        quantized.enable_(False)
        torch.testing.assert_close(quantized(*x), wanted, atol=1e-5, rtol=1e-4)
        quantized.enable_(True)


def test_it_trains_and_is_stored(tmp_path: Path) -> None:
    class Decoder(nn.Module):
        """A transposed convolution with BatchNorm and ReLU6, and one with a pool between it and its ReLU."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.up, self.norm = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), nn.BatchNorm2d(6)
            self.b, self.c = nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            return self.c(F.max_pool2d(self.b(F.relu6(self.norm(self.up(self.a(x))))), 2).relu())

    x = image(8)
    batches = [(x[0], torch.zeros(8, 4, 13, 13))]
    task = ck.Task(train=batches, val=batches, loss=F.mse_loss, metric=F.mse_loss)
    trained = ck.QAT(epochs=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05))(Decoder().eval(), task)
    assert not trained.placement.floating
    path = ck.export_onnx(trained, tmp_path / "q.onnx", image(2))
    assert ck.verify_onnx(path, trained, [image(1), image(7)]).passed
    ck.save(trained, tmp_path / "saved")
    assert torch.equal(ck.load(Decoder(), tmp_path / "saved")(*x), trained(*x))
