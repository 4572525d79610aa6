"""Complex values pass every operator that has a form of real ones: their files give what the model gives, at other sizes too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fft import fft, ifft, ifft2, irfft, irfft2, irfftn, rfft, rfft2

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.graph.capture import capture
from compresskit.measure import session


class Spectral1d(nn.Module):
    """The layer of a Fourier neural operator: a matrix for each of the lowest frequencies, the others are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 1)
        self.weight = nn.Parameter(torch.randn(3, 4, 6, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = rfft(self.layer(x))
        out = torch.zeros(x.shape[0], 4, x.shape[-1] // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, :6] = torch.einsum("bix,iox->box", spectrum[:, :, :6], self.weight)
        return irfft(out, n=x.shape[-1])


class Spectral2d(nn.Module):
    """The same over two dimensions, with weights that are stored as pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
        self.low, self.high = (nn.Parameter(torch.randn(3, 4, 4, 4, 2)) for _ in range(2))

    def forward(self, x):
        spectrum = rfft2(self.layer(x))
        out = torch.zeros(x.shape[0], 4, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
        for rows, weight in ((slice(4), self.low), (slice(-4, None), self.high)):
            out[:, :, rows, :4] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows, :4], torch.view_as_complex(weight))
        return irfft2(out, s=(x.size(-2), x.size(-1)))


def _compare(model, example, others, dynamic, path: Path) -> None:
    run = session(ck.export_onnx(model, path, example, dynamic=dynamic))
    for x in others:
        (got,) = run.run(None, {run.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("layer", "example", "others", "dynamic"),
    [
        (Spectral1d, (4, 3, 20), [(1, 3, 20), (7, 3, 20)], (0,)),
        (Spectral1d, (4, 3, 20), [(1, 3, 20), (7, 3, 31)], (0, 2)),
        (Spectral2d, (4, 3, 16, 12), [(1, 3, 16, 12), (7, 3, 16, 12)], (0,)),
        (Spectral2d, (4, 3, 16, 12), [(1, 3, 11, 12), (7, 3, 18, 19)], (0, 2, 3)),
    ],
    ids=["1d", "1d, length", "2d", "2d, sizes"],
)
def test_layers_of_fourier_neural_operators(layer, example, others, dynamic, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = layer().eval()
    _compare(model, torch.randn(example), [torch.randn(shape) for shape in others], dynamic, tmp_path / "f.onnx")


@pytest.mark.parametrize(("layer", "shape"), [(Spectral1d, (3, 20)), (Spectral2d, (3, 16, 12))])
def test_such_layers_are_quantized(layer, shape, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = layer().eval(), torch.randn(8, *shape)
    quantized = ck.quant.quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", x)
    assert ck.verify_onnx(path, quantized, [torch.randn(7, *shape)]).passed


class OfSpectrum(nn.Module):
    def __init__(self, *code) -> None:
        super().__init__()
        self.layer, self.code = nn.Linear(8, 8), code
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x):
        f = rfft(self.layer(x))
        values = [code(self, f) for code in self.code]
        return [torch.view_as_real(value.resolve_conj()) if value.is_complex() else value for value in values]


def _written(m, f):
    out = f.new_zeros(f.shape[0], 4, 5)
    out[..., :3] = f[..., 1:4]
    out[:, 0] = 1 + 2j
    out[:, 1] += f[:, 0]
    out[:, 2] -= f[:, 0].abs()
    out[..., 1:3] *= 2.0
    out[:, 3] *= f[0, 0].abs()
    out[:, 3, 3:] = f[:, 0, 3:].real
    out[:, 2, 4] = 0
    out[:, 1, 4] = 0.5
    return out


def _filled(m, f):
    return torch.ones_like(f) + torch.full_like(f, 2j) + torch.full((5,), 1j, dtype=torch.cfloat) + f * 0


MOVES = {
    "select": lambda m, f: f[:, 0],
    "last": lambda m, f: f.select(-1, 2),
    "unsqueeze": lambda m, f: f[:, :, None] * f[:, None],
    "at the end": lambda m, f: f.unsqueeze(-1) * m.w[0],
    "squeeze all": lambda m, f: f.sum(0, keepdim=True).squeeze(),
    "alias": lambda m, f: torch.swapaxes(f, 1, -1).contiguous(),
    "of integers": lambda m, f: torch.cat([f, (f.real > 0).long()], 1),
    "squeeze": lambda m, f: f[:, :1].squeeze(1),
    "pad": lambda m, f: F.pad(f, (1, 2, 0, 1)),
    "roll": lambda m, f: f.roll(1, -1),
    "shift": lambda m, f: torch.fft.ifftshift(f, dim=-1),
    "flip": lambda m, f: f.flip(-1),
    "unbind": lambda m, f: f.unbind(1)[1],
    "split": lambda m, f: f.split([2, 2], 1)[1] * f.split(2, 1)[0],
    "chunk": lambda m, f: f.chunk(2, -2)[1],
    "index": lambda m, f: f[:, [2, 0]],
    "index of the last": lambda m, f: f[..., [2, 0]],
    "index_put": lambda m, f: f.index_put((torch.tensor([0]),), f[:1] * 2),
    "index_add": lambda m, f: f.index_add(1, torch.tensor([0]), f[:, :1]),
    "masked_fill": lambda m, f: f.masked_fill(f.real > 0, 0),
    "masked_fill_": lambda m, f: f.clone().masked_fill_(f.real > 0, 0),
    "where": lambda m, f: torch.where(f.real > 0, f, f * 2),
    "where zero": lambda m, f: torch.where(f.real > 0, f, 0.0),
    "repeat": lambda m, f: f.repeat(1, 2, 1),
    "expand": lambda m, f: f[:, :1].expand(-1, 3, -1),
    "flatten": lambda m, f: f.flatten(1),
    "unflatten": lambda m, f: f.unflatten(1, (2, 2)),
    "reshape": lambda m, f: f.reshape(f.shape[0], -1),
    "permute": lambda m, f: f.permute(0, 2, 1),
    "movedim": lambda m, f: f.movedim(1, -1),
    "stack": lambda m, f: torch.stack([f, f * 2], -1),
    "cat of both": lambda m, f: torch.cat([f, f.abs()], -1),
    "narrow": lambda m, f: f.narrow(-1, 1, 2),
    "cumsum": lambda m, f: f.cumsum(-2),
    "written": _written,
    "filled": _filled,
    "real": lambda m, f: torch.zeros_like(f, dtype=torch.float32) + f.new_ones(5, dtype=torch.float32) + f.real,
}
PRODUCTS = {
    "matmul": lambda m, f: f.mT @ m.w,
    "bmm": lambda m, f: torch.bmm(f.mT, f),
    "mv": lambda m, f: torch.mv(m.w, f[0, :, 0]),
    "outer": lambda m, f: torch.outer(f[0, 0], f[0, 1]),
    "adjoint": lambda m, f: f.mH @ f,
    "linear": lambda m, f: F.linear(f.mT, m.w, m.w[0]),
    "tensordot": lambda m, f: torch.tensordot(f, m.w, dims=([1], [0])),
    "einsum of one": lambda m, f: torch.einsum("bij->bj", f),
    "einsum of three": lambda m, f: torch.einsum("bij,ik,kl->blj", f, m.w, m.w),
    "einsum with dots": lambda m, f: torch.einsum("...ij,ik->...kj", f, m.w),
    "square": lambda m, f: f**2 + f.square(),
    "exponential": lambda m, f: f.exp(),
    "logarithm": lambda m, f: (f * 0 + m.w[0, 0] + f.abs().unsqueeze(-1)[..., 0]).log(),
    "angle of conj": lambda m, f: torch.polar(f.abs(), f.conj().angle()),
    "transposed": lambda m, f: f.conj().mT.unsqueeze(1),
    "norm": lambda m, f: torch.linalg.vector_norm(f, dim=1),
    "conj": lambda m, f: f.conj()[:, 0] * f[:, 1],
}
TRANSFORMS = {
    "low pass": lambda m, f: irfft(f[..., :2], n=8),
    "of conj": lambda m, f: irfft(f.conj()[..., :3], n=8),
    "cut": lambda m, f: irfft(f, n=5),
    "longer": lambda m, f: ifft(f, n=9),
    "other dimension": lambda m, f: fft(f, n=7, dim=1),
    "two": lambda m, f: ifft2(f, s=(6, 4)),
    "two real": lambda m, f: irfft2(f, s=(6, 14)),
    "many": lambda m, f: irfftn(f[:, :, :3], s=(4, 8)),
}


@pytest.mark.parametrize("codes", [MOVES, PRODUCTS, TRANSFORMS], ids=["moves", "products", "transforms"])
def test_operators_of_complex_values(codes, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = OfSpectrum(*codes.values()).eval()
    run = session(ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(3, 4, 8)))
    for rows in (1, 7):
        x = torch.randn(rows, 4, 8)
        for name, got, wanted in zip(codes, run.run(None, {"x": x.numpy()}), model(x), strict=True):
            torch.testing.assert_close(
                torch.from_numpy(got), wanted, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )


class Phases(nn.Module):
    """Real values times a complex number, as phases are written."""

    def forward(self, x):
        return torch.view_as_real(torch.exp(1j * x) * 2) + (x * (2 - 3j)).abs().unsqueeze(-1)


def test_real_values_times_a_complex_number(tmp_path: Path) -> None:
    _compare(Phases().eval(), torch.randn(3, 5), [torch.randn(1, 5), torch.randn(7, 9)], (0, 1), tmp_path / "f.onnx")


@pytest.mark.parametrize("size", [9, 4])
def test_complex_transforms_of_a_length_that_varies(size: int, tmp_path: Path) -> None:
    class Resized(nn.Module):
        def forward(self, x):
            f = rfft(x, dim=1)
            return torch.view_as_real(ifft(f, n=size, dim=1))

    torch.manual_seed(0)
    others = [torch.randn(shape) for shape in ((1, 8, 2), (7, 5, 2), (2, 20, 2))]
    _compare(Resized().eval(), torch.randn(3, 12, 2), others, (0, 1), tmp_path / "f.onnx")


@pytest.mark.parametrize(
    ("code", "operator"),
    [
        (lambda m, f: f.tanh(), "tanh"),
        (lambda m, f: f.sqrt(), "sqrt"),
        (lambda m, f: F.pad(f, (1, 2), mode="reflect"), "pad"),
        (lambda m, f: f.var(1), "var"),
        (lambda m, f: torch.baddbmm(f[..., :4], m.w.expand(f.shape[0], 4, 4), f[..., :4]), "baddbmm"),
    ],
)
def test_operators_without_a_complex_form_are_refused_with_their_line(code, operator: str) -> None:
    model = OfSpectrum(code).eval()
    with pytest.raises(ModelError, match=rf"aten\.{operator}\..* of complex values \(at .*test_complex_.*view_as_real"):
        capture(model, torch.randn(3, 4, 8))


def test_what_is_computed_of_weights_alone_is_not_refused(tmp_path: Path) -> None:
    model = OfSpectrum(lambda m, f: f.mT @ m.w.tanh()).eval()
    path = ck.export_onnx(model, tmp_path / "f.onnx", torch.randn(3, 4, 8))
    assert ck.verify_onnx(path, model, [torch.randn(7, 4, 8)]).passed
