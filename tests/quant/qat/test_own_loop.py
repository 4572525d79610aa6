"""A network of `prepare_qat` in a loop of the user's own: averages, states that are loaded, what is frozen, what is left out."""

from __future__ import annotations

import copy

import onnx
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compresskit as ck
from compresskit.quant import prepare_qat

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    for _ in range(20):
        model.train()(X)
    return model.eval()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"use_buffers": True}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}], ids=["plain", "buffers", "ema"]
)
def test_an_average_of_one_model_is_that_model(learned, options) -> None:
    """torch pairs the tensors of a model and of its deep copy by their order."""
    quantized = prepare_qat(network(), [X], learned=learned)
    for _ in range(3):
        quantized(X)
    average = AveragedModel(quantized, **options)
    for _ in range(3):
        average.update_parameters(quantized)
    names = [[name for name, _ in of.named_buffers()] for of in (quantized, copy.deepcopy(quantized), average.module)]
    assert names[0] == names[1] == names[2]
    with torch.no_grad():
        torch.testing.assert_close(average.eval()(X), quantized.eval()(X))


def test_the_order_of_buffers_outlives_learning() -> None:
    quantized = prepare_qat(network(), [X], learned=True)
    quantized.eval()
    quantized.convert_()
    assert [n for n, _ in quantized.named_buffers()] == [n for n, _ in copy.deepcopy(quantized).named_buffers()]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_loaded_state_goes_on_as_the_saved_one(learned, frozen, tmp_path) -> None:
    saved = prepare_qat(network(), [X], learned=learned)
    with torch.no_grad():
        for _ in range(30):
            saved(4 * X)
    if frozen:
        saved.freeze_statistics_()
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    loaded = prepare_qat(network(), [X], learned=learned)
    assert not any(loaded.load_state_dict(torch.load(tmp_path / "state.pt")))
    with torch.no_grad():
        for model in (saved, loaded):
            for scale in (2, 8):
                model.train()(scale * X)
    before, after = saved.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_state_of_the_training_is_none_of_the_finished_model() -> None:
    quantized = prepare_qat(network(), [X])
    assert "qat_observing" in quantized.state_dict()
    wrapped = nn.Sequential(copy.deepcopy(quantized))
    wrapped.load_state_dict({f"0.{name}": value for name, value in quantized.state_dict().items()})
    quantized.eval()
    quantized.convert_()
    assert not any(name.startswith("qat_") for name in quantized.state_dict())


@pytest.mark.parametrize("frozen", ["0", "1", "4", "0.bias", "1.weight"])
def test_each_parameter_stays_frozen_or_not(frozen) -> None:
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name == frozen or name.startswith(f"{frozen}.")))
    quantized = prepare_qat(model, [X])
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name.removeprefix("body."): p.requires_grad for name, p in quantized.named_parameters()} == wanted


class Twice(nn.Module):
    """One convolution in two calls, with one BatchNorm or with two."""

    def __init__(self, norms: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 3, 3, padding=1, bias=bias), nn.ModuleList(nn.BatchNorm2d(3) for _ in range(norms))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in range(2):
            x = self.norms[call % len(self.norms)](self.conv(x)).relu()
        return x


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_runs_twice_is_trained_as_one(bias, tmp_path) -> None:
    """With its BatchNorm, whose statistics follow both calls as in the float model."""
    torch.manual_seed(0)
    model = Twice(bias=bias)
    for _ in range(50):
        model(X)
    quantized = prepare_qat(model.eval(), [X])
    assert {n.removeprefix("body.") for n, _ in quantized.named_parameters()} == {n for n, _ in model.named_parameters()}
    model.train()
    with torch.no_grad():
        for _ in range(50):
            model(X + 1)
            quantized(X + 1)
    norms = quantized.body.norms.get_submodule("0"), model.norms[0]
    torch.testing.assert_close(norms[0].running_mean, norms[1].running_mean, atol=0.02, rtol=0.02)
    torch.testing.assert_close(norms[0].running_var, norms[1].running_var, atol=0.02, rtol=0.05)
    optimizer = torch.optim.SGD(quantized.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        quantized(X).square().mean().backward()
        optimizer.step()
    quantized.eval()
    with torch.no_grad():
        before = quantized(X)
        quantized.convert_()
        step = max(float(q.scale) for q in quantized.activation_quantizers())
        assert (quantized(X) - before).abs().max() <= 2 * step
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", X)
    assert ck.verify_onnx(path, quantized, [X]).passed
    assert sum(1 for _ in quantized.parameters()) == 2  # one weight, one bias
    graph = onnx.load(path).graph
    assert sum(node.op_type == "Conv" for node in graph.node) == 2
    assert sum(len(stored.dims) == 4 for stored in graph.initializer) == 1


def test_what_the_training_leaves_out_is_said(caplog) -> None:
    dropped = nn.Sequential(*network(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.0)).eval()
    prepare_qat(dropped, [X])
    assert "prepare_qat: the training is without the dropout of '5', since the graph is that of the deployed model" in caplog.text
    caplog.clear()
    prepare_qat(Twice(norms=2).eval(), [X])
    assert "prepare_qat: 'conv' runs several times, with another BatchNorm behind each: every call is trained" in caplog.text
    caplog.clear()
    prepare_qat(network(), [X])
    prepare_qat(Twice().eval(), [X])
    assert "prepare_qat" not in caplog.text


def test_dropout_of_recurrent_layers_is_said(caplog) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(8, 8, 2, batch_first=True, dropout=0.5), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x)[0][:, -1])

    ck.quant.prepare_qat(Reads().eval(), [torch.randn(4, 5, 8)])
    assert "without the dropout of 'cells'" in caplog.text


@pytest.mark.parametrize("bits", [8, 2])
def test_learned_scales_come_back_from_below_zero(bits, caplog, tmp_path) -> None:
    """A step of an optimizer may be larger than a scale, which then had no gradient any more, and left a bias no room."""
    quantized = prepare_qat(network(), [X], learned=True, bits=ck.quant.Bits(weights=bits, activations=bits))
    quantizers = [*quantized.activation_quantizers(), *(q for q, _ in quantized.rounded_weights())]
    first, scales = [q.scale.clone() for q in quantizers], [q.ratio for q in quantizers]
    with torch.no_grad():
        for scale in scales:
            scale.fill_(-1e-3)
    used = [q.effective_scale() for q in quantized.activation_quantizers()]
    used += [q.qparams(w)[0] for q, w in quantized.rounded_weights()]
    for now, before in zip(used, first, strict=True):
        torch.testing.assert_close(now.detach(), before / 64)
    wanted = network()(X).detach()
    optimizer = torch.optim.SGD(scales, lr=1e-6)
    (quantized(X) - wanted).square().sum().backward()
    optimizer.step()
    assert any((scale > -1e-3).any() for scale in scales)
    assert all((scale >= -1e-3).all() for scale in scales)  # it gets no gradient that would let it fall further
    quantized.freeze_statistics_()
    quantized.convert_()
    assert "learned scales fell below 0.015625 of their first values" in caplog.text
    quantized.eval()
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (X,))
    assert ck.verify_onnx(path, quantized, [X]).passed
