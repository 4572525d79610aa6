"""Weights that are rounded in turn: smaller errors of the outputs, pairs that fit, zeros that stay."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build
from torch import Tensor, nn

import compresskit as ck
from compresskit import remove
from compresskit.graph.surgery import get_tensor
from compresskit.prune import plan_mask
from compresskit.quant import quantize_static
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.effort.weights_in_turn import MOST_INPUTS, round_weights_in_turn_
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.error_feedback import rounded_in_turn
from compresskit.quant.numerics.saturation import PAIR_LIMIT
from compresskit.quant.numerics.targets import ARM, X86


class Layers(nn.Module):
    """Convolutions with groups, stride, dilation and one dimension, and linear layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(16, 16, 3, groups=4, padding=2, dilation=2)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, padding=1)
        self.line = nn.Conv1d(16, 8, 5, padding=2)
        self.tokens = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.grouped(self.first(x).relu()).relu()).relu()
        return self.tokens(self.line(x.flatten(2)).relu().transpose(1, 2))


def smooth(count: int, size: int = 16) -> tuple[Tensor]:
    """Images whose neighbouring values are alike, as those of photographs."""
    torch.manual_seed(1)
    x = torch.nn.functional.interpolate(torch.randn(count, 3, 4, 4), (size, size), mode="bilinear")
    return (x + 0.05 * torch.randn_like(x),)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


def errors(quantized: Quantized, x: tuple[Tensor], model: nn.Module) -> dict[str, float]:
    """Squared error of each layer's outputs by the rounding of its weights alone, with the float model's inputs."""
    inputs: dict[str, Tensor] = {}
    hooks = [m.register_forward_pre_hook(lambda m, a, n=n: inputs.update({n: a[0]})) for n, m in model.named_children()]
    model(*x)
    for hook in hooks:
        hook.remove()
    found = {}
    for layer in integer_layers(quantized):
        name = layer.weight.split(".")[0]
        module = model.get_submodule(name)
        change = layer.quantizer(get_tensor(quantized.body, layer.weight)) - module.weight
        with torch.no_grad():
            call = type(module)._conv_forward if isinstance(module, nn.Conv1d | nn.Conv2d) else None
            out = call(module, inputs[name], change, None) if call else inputs[name] @ change.T
        found[name] = float(out.square().mean())
    return found


@pytest.mark.parametrize("target", [X86, ARM])
def test_the_errors_of_a_layers_weights_make_up_for_each_other(target) -> None:
    model, x = layers(), smooth(64)
    quantized = quantize_static(model, [x], target=target)
    before = errors(quantized, x, model)
    assert round_weights_in_turn_(quantized, [tuple(v[:40] for v in x), tuple(v[40:] for v in x)]) == len(before) == 5
    after = errors(quantized, x, model)
    assert max(after[name] / before[name] for name in before) < 0.9
    assert sum(after[name] / before[name] for name in before) < 0.6 * len(before)


def test_pairs_fit_and_what_is_stored_is_what_runs(tmp_path) -> None:
    model, x = layers(), smooth(64)
    quantized = quantize_static(model, [x])
    round_weights_in_turn_(quantized, [x])
    paired = 0
    for layer in integer_layers(quantized):
        weight = get_tensor(quantized.body, layer.weight)
        torch.testing.assert_close(layer.quantizer(weight), weight, rtol=0, atol=1e-6)
        if layer.quantizer.packing is not None:
            rows = layer.quantizer.integers(weight).float().flatten(1)
            assert max(float(s.abs().max()) for s in layer.quantizer.packing.sums(rows)) <= PAIR_LIMIT
            paired += 1
    assert paired >= 3
    path = ck.export_onnx(quantized, tmp_path / "model.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed


def test_zeros_of_masks_stay() -> None:
    model, x = build(networks.Chain), smooth(32)
    plan_mask(model, remove(weights=0.5)).apply_(model)
    quantized = quantize_static(model, [x])
    zeros = [weight == 0 for _, weight in quantized.rounded_weights()]
    assert round_weights_in_turn_(quantized, [x])
    for zero, (_, weight) in zip(zeros, quantized.rounded_weights(), strict=True):
        assert zero.float().mean() > 0.2
        assert (weight[zero] == 0).all()


def test_layers_that_read_too_little_stay_as_they_are(monkeypatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(48, 10)).eval(), (torch.randn(64, 3, 4, 4),)
    quantized = quantize_static(model, [x])
    assert round_weights_in_turn_(quantized, [x]) == 0  # 64 rows say little about 48 directions
    assert round_weights_in_turn_(quantized, [x, x]) == 1
    monkeypatch.setattr("compresskit.quant.effort.weights_in_turn.MOST_INPUTS", 47)
    assert round_weights_in_turn_(quantize_static(model, [x]), [x, x]) == 0
    assert MOST_INPUTS >= 9 * 256


def nearest(index: int, ahead) -> Tensor:
    return ahead(1)[..., 0].round()


def test_inputs_that_have_nothing_in_common_are_rounded_to_nearest() -> None:
    torch.manual_seed(0)
    weight = 3 * torch.randn(2, 5, 7, dtype=torch.float64)
    moment = torch.diag_embed(torch.rand(2, 7, dtype=torch.float64) + 0.1)
    assert torch.equal(rounded_in_turn(weight, moment, nearest), weight.round())


@pytest.mark.parametrize("columns", [1, 3, 128])
def test_rounding_in_turn_loses_less_whatever_the_blocks_and_order(columns) -> None:
    torch.manual_seed(0)
    weight, x = 3 * torch.randn(5, 12, dtype=torch.float64), torch.randn(40, 3) @ torch.randn(3, 12) + 0.1 * torch.randn(40, 12)
    moment = x.double().T @ x.double() / 40
    order = torch.argsort(moment.diagonal(), descending=True)
    found = rounded_in_turn(weight, moment, nearest, order=order, columns=columns)
    torch.testing.assert_close(found, rounded_in_turn(weight[None], moment[None], nearest, order=order)[0])
    assert torch.equal(found, found.round())

    def lost(rounded: Tensor) -> float:
        return float(((rounded - weight) @ moment * (rounded - weight)).sum())

    assert lost(found) < 0.3 * lost(weight.round())


class Tied(nn.Module):
    """Ids (N, T) to a score of each word, by the table that they are looked up in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids)))


@pytest.mark.parametrize("skip", [(), ("words",)])
def test_a_table_that_lookups_read_stays(skip) -> None:
    """Its rows are read elsewhere, too, where these errors make up for nothing."""
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.randint(20, (64, 5))
    quantized = quantize_static(model, [ids], skip=skip)
    assert round_weights_in_turn_(quantized, [(ids,)]) == 0
    assert torch.equal(get_tensor(quantized.body, "head.weight"), model.words.weight)
