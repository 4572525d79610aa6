"""Files of models that compute what ONNX has no operator for of their weights alone."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import compresskit as ck
from compresskit.base.errors import ExportError
from compresskit.export.computed_weights import with_stored_results
from compresskit.graph.capture import trace


class StateSpace(nn.Module):
    """A convolution over the whole sequence, whose kernel is made of complex powers (S4D)."""

    def __init__(self, channels: int = 4, states: int = 3) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(channels, states, 2))
        self.real = nn.Parameter(torch.rand(channels, states))
        self.imaginary = nn.Parameter(torch.arange(states).repeat(channels, 1).float())

    def forward(self, x):
        powers = (1j * self.imaginary - self.real.exp()).unsqueeze(-1) * torch.arange(x.shape[-1])
        kernel = torch.einsum("cs,csl->cl", torch.view_as_complex(self.c), powers.exp()).real
        steps = 2 * x.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(x, n=steps) * torch.fft.rfft(kernel, n=steps), n=steps)[..., : x.shape[-1]]


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3) + 2 * torch.eye(3))

    def forward(self, x):
        return nn.functional.conv2d(x, torch.inverse(self.weight)[:, :, None, None])


class InverseProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) + 4 * torch.eye(8))

    def forward(self, x):
        return x @ torch.inverse(self.weight)


class Share(nn.Module):
    """Rows times the share that is left after so many losses, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = nn.Parameter(torch.linspace(0.01, 0.1, 8))

    def forward(self, x, ids):
        return {"y": x * torch.cumprod(1 - self.lost, 0)[ids][:, None], "count": 8}


MODELS = {
    "complex powers": (StateSpace, (torch.randn(2, 4, 8),)),
    "inverse of a matrix": (Inverse, (torch.randn(2, 3, 4, 4),)),
    "product along a dimension": (Share, (torch.randn(2, 3), torch.tensor([1, 7]))),
    "matrix exponential": (lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4))), (torch.randn(2, 4),)),
    "Cayley map": (
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley")),
        (torch.randn(2, 4),),
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_results_of_weights_are_stored_where_onnx_cannot_compute_them(case, tmp_path) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[case]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = ck.export_onnx(model, tmp_path / "f.onnx", inputs)
    more = tuple(torch.cat([value, value.flip(0), value[:1]]) for value in inputs)
    assert ck.verify_onnx(path, model, [inputs, more]).passed
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_quantized_file_keeps_its_integers_beside_stored_results(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), InverseProduct(), nn.Linear(8, 4)).eval()
    x = torch.randn(32, 8)
    quantized = ck.quant.quantize_static(model, [(x,)], skip=["0"])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(x,)]).passed
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.INT8 in stored.values()


def test_random_numbers_are_not_stored() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x + torch.randn_like(self.scale) * self.scale

    inputs = (torch.zeros(2, 4),)
    program, example = trace(Noisy().eval(), inputs, (0,))
    assert with_stored_results(program, example, (0,)) is None


def test_repeated_weights_are_stored_once() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1))

        def forward(self, x):
            return x * self.scale.exp().expand(4, 1000)

    inputs = (torch.zeros(2, 4, 1000),)
    program, example = trace(Wide().eval(), inputs, (0,))
    stored = with_stored_results(program, example, (0,))
    assert stored is not None
    assert [tuple(value.shape) for name, value in stored.state_dict.items() if "stored" in name] == [(4, 1)]


def test_what_depends_on_the_input_is_still_refused(tmp_path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return torch.inverse(x) @ torch.inverse(self.weight)

    with pytest.raises(ExportError, match=r"the ONNX exporter failed: .*linalg_inv"):
        ck.export_onnx(Both(), tmp_path / "f.onnx", (torch.eye(3).repeat(2, 1, 1),))
    assert not list(tmp_path.iterdir())
