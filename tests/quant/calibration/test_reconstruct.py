"""Block-wise reconstruction: outputs closer than by rounding layer by layer, everything on its grid, whatever the network."""

from __future__ import annotations

import copy
import gc
import logging
from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.graph.masks import masks_of
from compresskit.prune import plan_mask
from compresskit.quant import X86, adaround_, quantize_static, reconstruct_blocks_
from compresskit.quant.calibration import find_graph_blocks


def bits(count: int):
    return replace(X86, name=f"W{count}", weights=replace(X86.weights, bits=count))


def sqnr(model: nn.Module, quantized: nn.Module, x: tuple[Tensor, ...]) -> float:
    with torch.no_grad():
        return oracles.sqnr(model(*x), quantized(*x))


def test_outputs_come_closer_and_everything_is_on_its_grid() -> None:
    torch.manual_seed(0)
    model, batches = build(networks.Residual), [image(64)]
    nearest = quantize_static(model, batches, target=bits(3))
    learned = copy.deepcopy(nearest)
    assert reconstruct_blocks_(learned, batches, steps=40, rate=0.15) == 5
    fresh = image(64)
    assert sqnr(model, learned, fresh) > sqnr(model, nearest, fresh) + 4
    for quantizer, weight in learned.rounded_weights():
        assert torch.equal(quantizer(weight), weight)
        assert not any(True for _ in quantizer.parameters())
    assert not any(True for activation in learned.activation_quantizers() for _ in activation.parameters())


def test_only_the_choices_change_in_adaround() -> None:
    quantized = quantize_static(build(networks.Residual), [image(32)], target=bits(4))
    before = [float(activation.scale) for activation in quantized.activation_quantizers()]
    biases = [p.detach().clone() for name, p in quantized.body.named_parameters() if p.ndim == 1]
    adaround_(quantized, [image(32)], steps=3)
    torch.testing.assert_close([float(a.scale) for a in quantized.activation_quantizers()], before, rtol=6e-4, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(biases, (p for p in quantized.body.parameters() if p.ndim == 1), strict=True))
    reconstruct_blocks_(quantized, [image(32)], steps=20)
    after = [float(activation.scale) for activation in quantized.activation_quantizers()]
    assert sum(abs(a / b - 1) > 1e-3 for a, b in zip(after, before, strict=True)) >= 3


def test_the_seed_decides() -> None:
    torch.manual_seed(0)
    start, x = quantize_static(build(networks.Chain), [image(16)], target=bits(3)), image(16)
    weights = []
    for seed in (0, 0, 1):
        quantized = copy.deepcopy(start)
        torch.manual_seed(seed + 7)  # the global generator does not
        reconstruct_blocks_(quantized, [x], steps=15, rate=0.2, batch_size=8, seed=seed)
        weights.append(torch.cat([weight.flatten() for _, weight in quantized.rounded_weights()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("settings", [{"drop": 0.0}, {"steps": 3}, {"rate": 0.01}, {"batch_size": 4}], ids=str)
def test_every_setting_matters(settings) -> None:
    torch.manual_seed(0)
    start, x = quantize_static(build(networks.Chain), [image(16)], target=bits(3)), image(16)
    results = []
    for more in ({}, settings):
        quantized = copy.deepcopy(start)
        reconstruct_blocks_(quantized, [x], **{"steps": 10, "rate": 0.3, "batch_size": 16} | more)
        results.append(torch.cat([weight.flatten() for _, weight in quantized.rounded_weights()]))
    assert not torch.equal(*results)


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", [networks.Gate, networks.Tied, networks.Twice, networks.Preactivation, networks.Tokens])
def test_other_networks(kind, rows) -> None:
    model = build(kind)
    x = image(rows)
    quantized = quantize_static(model, [x], target=bits(4))
    wanted = len(quantized.rounded_weights())
    assert reconstruct_blocks_(quantized, [x, image(1)], steps=2, batch_size=4) == wanted
    with torch.no_grad():
        assert bool(torch.isfinite(quantized(*image(7))).all())


def test_a_model_in_train_mode_with_several_inputs_by_keyword() -> None:
    x = {"image": torch.randn(8, 3, 16, 16), "numbers": torch.randn(8, 8)}
    model = networks.TwoInputs().eval()
    quantized = quantize_static(model, [x], target=bits(2)).train()
    nearest = copy.deepcopy(quantized).eval()
    assert reconstruct_blocks_(quantized, [x], steps=40, rate=0.1) == 4
    assert quantized.training
    quantized.eval()
    with torch.no_grad():
        wanted, before, after = (m(**x)["logits"] for m in (model, nearest, quantized))
    assert oracles.sqnr(wanted, after) > oracles.sqnr(wanted, before) + 1


def test_masked_zeros_stay_and_no_others_appear() -> None:
    torch.manual_seed(0)
    model = build(networks.Chain)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    quantized = quantize_static(model, [image(16)], target=bits(4))
    masks = masks_of(quantized.body)
    assert masks is not None
    reconstruct_blocks_(quantized, [image(16)], steps=10, rate=0.3)
    assert masks.removed > 1000
    for name, mask in masks.masks.items():
        weight = quantized.body.get_parameter(name)
        assert torch.equal(weight != 0, mask), name
        rounding = next(q for q, w in quantized.rounded_weights() if w.data_ptr() == weight.data_ptr())
        assert torch.equal(rounding.integers(weight) != 0, mask), name


def test_export_and_load(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)], target=bits(4))
    reconstruct_blocks_(quantized, [image(16)], steps=5)
    x = image(16)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)), quantized, [x]).passed
    ck.save(quantized, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(networks.Residual(), tmp_path)(*x), quantized(*x))


class Stepped(nn.Module):
    """An operator that has no derivative between two layers, and class ids as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).abs() + 1
        return (self.b(torch.igamma(y, torch.ones_like(y))) + self.b.bias).argmax(1)


def test_a_block_without_derivative_is_rounded_to_nearest(caplog) -> None:
    x = (torch.randn(8, 8),)
    quantized = quantize_static(Stepped().eval(), [x], target=bits(4))
    blocks = find_graph_blocks(quantized)
    with caplog.at_level(logging.WARNING):
        trained = reconstruct_blocks_(quantized, [x], steps=2)
    warned = [record.getMessage() for record in caplog.records if "is rounded to nearest: " in record.getMessage()]
    assert trained == sum(len(block.layers) for block in blocks) - len(warned)
    with torch.no_grad():
        quantized(*x)


class Words(nn.Module):
    """A table that is looked up in float and, tied, multiplied in integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(self.inner(self.table(tokens))), self.table.weight)


def test_a_weight_that_is_read_in_float_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Words().eval(), (torch.randint(0, 32, (8, 6)),)
    quantized = quantize_static(model, [x], target=bits(4))
    assert reconstruct_blocks_(quantized, [x], steps=3, rate=1.0) == 1
    assert torch.equal(quantized.body.get_parameter("table.weight"), model.table.weight)


def test_a_given_block_alone_is_trained() -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)], target=bits(4))
    before = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}
    blocks = find_graph_blocks(quantized)
    chosen = [replace(block, layers=block.layers if i == 1 else ()) for i, block in enumerate(blocks)]
    assert reconstruct_blocks_(quantized, [image(16)], blocks=chosen, steps=3) == 2
    changed = {name for name, value in quantized.body.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for layer in blocks[1].layers for name in (layer.weight, layer.bias)}


def test_no_batch_and_bad_settings_are_refused() -> None:
    quantized = quantize_static(build(networks.Chain), [image(4)])
    for change in (reconstruct_blocks_, adaround_):
        with pytest.raises(DataError, match=f"{change.__name__}: no calibration batch"):
            change(quantized, [])
        for settings in ({"steps": 0}, {"batch_size": 0}, {"rate": 0.0}):
            name = next(iter(settings))
            with pytest.raises(SettingError, match=rf"{change.__name__}\({name}=...\): wanted"):
                change(quantized, [image(4)], **settings)
    for drop in (-0.1, 1.0):
        with pytest.raises(SettingError, match=r"reconstruct_blocks_\(drop=...\): wanted a probability, 0 <= drop < 1"):
            reconstruct_blocks_(quantized, [image(4)], drop=drop)


def test_what_is_inside_a_block_is_freed_at_once() -> None:
    """Not when Python next looks for cycles: a ResNet-18 at 224 pixels took four times the memory."""
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Conv2d(7, 5, 3), nn.ReLU()).eval()
    quantized = quantize_static(model, [image(32)], target=bits(4))
    gc.collect()
    gc.disable()
    try:
        reconstruct_blocks_(quantized, [image(32)], steps=3, batch_size=8)
        inside = [o for o in gc.get_objects() if type(o) is Tensor and o.ndim == 4 and o.shape[1] == 7 and o.shape[2] > 3]
    finally:
        gc.enable()
    assert not inside
