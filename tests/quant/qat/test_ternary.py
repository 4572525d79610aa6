"""Trained ternary weights: values, gradients of the paper, training, and two bits for each weight in the file."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.quant import quantize_weights
from compresskit.quant.qat import Ternarize, bake_ternary_, binarize_, ternarize_, ternary_formats
from compresskit.quant.weight_only import Palette


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16), nn.Linear(16, 4)
    ).eval()  # fmt: skip


X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_values_and_gradients_are_those_of_the_paper() -> None:
    layer = nn.Linear(6, 1, bias=False)
    weight = torch.tensor([[-1.0, -0.5, -0.01, 0.02, 0.4, 0.8]])
    with torch.no_grad():
        layer.weight.copy_(weight)
    model = nn.Sequential(nn.Linear(2, 6), layer, nn.Linear(1, 1))
    ternarize_(model, torch.randn(2, 2))
    ternary = layer.parametrizations.weight[0]
    assert (ternary.negative.item(), ternary.positive.item()) == pytest.approx((0.75, 0.6))
    np.testing.assert_allclose(layer.weight.detach(), [[-0.75, -0.75, 0, 0, 0.6, 0.6]], rtol=1e-6)
    with torch.no_grad():
        ternary.positive.fill_(2.0)
        ternary.negative.fill_(3.0)
    upstream = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    (layer.weight * upstream).sum().backward()
    np.testing.assert_allclose(layer.parametrizations.weight.original.grad, [[3, 6, 3, 4, 10, 12]])
    assert ternary.positive.grad.item() == 11
    assert ternary.negative.grad.item() == -3
    with torch.no_grad():
        values = layer.weight.clone()
    bake_ternary_(model)
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, values)


def test_the_file_has_two_bits_for_each_weight(tmp_path) -> None:
    model = ternarize_(network(), X)
    formats = ternary_formats(model)
    assert formats == {"2.weight": Palette(bits=2), "5.weight": Palette(bits=2)}
    with torch.no_grad():
        model[5].parametrizations.weight[0].positive.mul_(1.7)
    bake_ternary_(model)
    assert ternary_formats(model) == formats
    packed = quantize_weights(model, X[:2], overrides=formats | {"6.weight": None})
    rows = {row.name: row for row in packed.plan.rows}
    assert rows["5.weight"].bytes <= 512 * 16 / 4 + 32
    with torch.no_grad():
        for x in (X[:1], X[:7]):
            assert torch.equal(packed(x), model(x))
    path = ck.export_onnx(packed, tmp_path / "ternary.onnx", (X[:2],))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    np.testing.assert_allclose(found, model(X).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_batchnorm_is_folded_into_palettes_of_channels() -> None:
    norm = nn.BatchNorm2d(32)
    nn.init.uniform_(norm.weight, -1, 2)
    norm.running_var.uniform_(0.5, 2.0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 32, 3), norm, nn.Flatten(), nn.Linear(512, 4)).eval()
    bake_ternary_(ternarize_(model, X))
    formats = ternary_formats(model)
    assert formats == {"1.weight": Palette(bits=2, group_size=1)}
    packed = quantize_weights(model, X[:2], overrides=formats, skip=("4",))
    assert {row.name: row for row in packed.plan.rows}["1.weight"].sqnr > 150
    torch.testing.assert_close(packed(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_recipe_trains_it(tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = (x[:, :8].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    task = ck.Task(train=[(x, y)], val=[(x, y)])
    trained = ck.Train(epochs=40, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    result = ck.Recipe(trained, Ternarize(finetune=trained), export="last").run(model, task, tmp_path)
    assert type(result.model[2]) is nn.Linear
    assert len(result.model[2].weight.unique()) == 3
    assert len(result.model[0].weight.unique()) > 3
    assert result.rows[-1].metric > 0.9
    assert list(ternary_formats(result.model)) == ["2.weight"]


def test_bad_input() -> None:
    model = network()
    with pytest.raises(SettingError, match=r"ternarize_\(threshold=...\): wanted a fraction in \[0, 1\), got 1"):
        ternarize_(model, X, threshold=1.0)
    with pytest.raises(SettingError, match=r"Ternarize\(threshold=...\)"):
        Ternarize(finetune=None, threshold=-0.1)
    with pytest.raises(SettingError, match=r"Ternarize\(samples=...\): wanted a whole number >= 1, got 0"):
        Ternarize(finetune=None, samples=0)
    with pytest.raises(SettingError, match=r"ternarize_\(skip=\['x'\]\): Sequential has no module of that name"):
        ternarize_(model, X, skip=("x",))
    with pytest.raises(ModelError, match="no linear layer or convolution is left"):
        ternarize_(model, X, skip=("2", "5"))
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    shared[2].weight = shared[1].weight
    with pytest.raises(ModelError, match="1: other layers share its weight"):
        ternarize_(shared, torch.randn(2, 4))
    ternarize_(model, X)
    with pytest.raises(ModelError, match="2: its weight is computed from other parameters already"):
        ternarize_(model, X)
    with pytest.raises(ModelError, match="its weight is computed from other parameters already"):
        ternarize_(binarize_(network(), X), X)
    masked = network()
    ck.prune.plan_mask(masked, ck.remove(weights=0.5)).apply_(masked)
    with pytest.raises(ModelError, match="has masks, which ternary weights would not keep"):
        ternarize_(masked, X)


def test_batchnorm_statistics_are_those_of_the_ternary_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 4)
    ).eval()  # fmt: skip
    x = torch.randn(32, 3, 8, 8)
    task = ck.Task(train=[(x, torch.arange(32) % 4)], val=[(x, torch.arange(32) % 4)])
    made = Ternarize(finetune=None, samples=32)(model, task)
    values = made[1](made[0](x))
    torch.testing.assert_close(made[2].running_mean, values.mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(made[2].running_var, values.var((0, 2, 3)), rtol=1e-3, atol=1e-4)
