"""Channels and bits of weights that are no plain `weight` of a layer: computed from others, of attention, of the model itself."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from matrix import some
from torch import nn
from torch.nn.utils import parametrizations

import compresskit as ck
from compresskit.prune.channels.plan_channels import analyze_channels
from compresskit.quant.accuracy_target.layer_sensitivity import layers_by_name
from compresskit.search.joint import JointPlan, choose_channels_and_bits
from compresskit.search.joint.file_size import Side, StoredWeight, stored_weights
from compresskit.search.joint.sensitivities import gptq_rounded

X = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))
BATCHES = [X[:16], X[16:]]
TOKENS = torch.randn(32, 6, 7, generator=torch.Generator().manual_seed(2))
NORMS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "weight norm by a hook": torch.nn.utils.weight_norm,
}


def conv_net(norm=lambda layer: layer) -> nn.Sequential:
    torch.manual_seed(0)
    body = [norm(nn.Conv2d(3, 12, 3)), nn.ReLU(), norm(nn.Conv2d(12, 16, 3)), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("kind", some(NORMS, 3))
def test_the_rounding_of_computed_weights_is_measured_as_that_of_plain_ones(kind: str) -> None:
    normed, plain = conv_net(NORMS[kind]).eval(), conv_net().eval()
    with torch.no_grad():
        wanted = normed(X)
        for place in (0, 2, 6):
            plain[place].weight.copy_(normed[place].weight)
            plain[place].bias.copy_(normed[place].bias)
        assert torch.allclose(plain(X), wanted, atol=1e-5)
    plans = [
        choose_channels_and_bits(model, BATCHES, 4400, widths=(3, 6, 8), ratios=(), check=False) for model in (normed, plain)
    ]
    for of_normed, of_plain in zip(*(plan.sensitivities.layers for plan in plans), strict=True):
        assert of_normed.loss == pytest.approx(of_plain.loss, rel=1e-2)
        assert of_normed.weights == of_plain.weights
    assert plans[0].bits == plans[1].bits
    assert plans[0].file_bytes == pytest.approx(plans[1].file_bytes, abs=32)
    assert plans[0].predicted > 1e-5
    real = []
    for model, plan in zip((normed, plain), plans, strict=True):
        quantized = ck.quant.quantize_static(plan.pruned(model, BATCHES), BATCHES, bits=plan.bits)
        with torch.no_grad():
            real.append(decibels(wanted, quantized(X)))
    assert real[0] == pytest.approx(real[1], abs=1)


def test_sizes_count_computed_weights_with_their_channels_and_bits() -> None:
    model = conv_net(parametrizations.weight_norm).eval()
    analysis, _, _ = analyze_channels(model, (X,), where="plan_channels")
    stored = {f"{place}.weight": model[place].weight.detach() for place in (0, 2, 6)}
    assert stored_weights(model, analysis, stored, {"0.weight": 0, "2.weight": 1}) == [
        StoredWeight(layer=0, outputs=Side(fixed=0, groups={0: 1}), inputs=Side(fixed=3, groups={}), rest=9),
        StoredWeight(layer=1, outputs=Side(fixed=0, groups={1: 1}), inputs=Side(fixed=0, groups={0: 1}), rest=9),
        StoredWeight(layer=None, outputs=Side(fixed=4, groups={}), inputs=Side(fixed=0, groups={1: 1}), rest=1),
    ]


class ReadTwice(nn.Module):
    """A layer that reads the same channels at two places, and others that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(19, 4, 1)

    def forward(self, x):
        made = self.first(x).relu()
        return self.last(torch.cat([made, x, -made], 1))


def test_sizes_of_a_layer_that_reads_channels_twice_count_both() -> None:
    model = ReadTwice().eval()
    analysis, _, _ = analyze_channels(model, (X,), where="plan_channels")
    found = stored_weights(model, analysis, {"last.weight": model.last.weight.detach()}, {"last.weight": 0})
    sides = {"outputs": Side(fixed=4, groups={}), "inputs": Side(fixed=3, groups={0: 2})}
    assert found == [StoredWeight(layer=0, rest=1, **sides)]


@pytest.mark.parametrize("width", [16, 24])
def test_sizes_of_a_matrix_that_is_stored_transposed_follow_its_channels(width: int) -> None:
    model = OwnMatrix(transposed=False, width=width).eval()
    analysis, _, _ = analyze_channels(model, (TOKENS,), where="plan_channels")
    groups = {group.layer: number for number, group in enumerate(analysis.groups)}
    found = stored_weights(model, analysis, {"own": model.own.detach().t().contiguous()}, {"own": 0})
    outputs, inputs = Side(fixed=0, groups={groups[""]: 1}), Side(fixed=0, groups={groups["first"]: 1})
    assert found == [StoredWeight(layer=0, outputs=outputs, inputs=inputs, rest=1)]


def test_the_model_is_not_changed() -> None:
    model = conv_net(parametrizations.spectral_norm).train()
    model[6].eval()
    before, modes = state(model), [module.training for module in model.modules()]
    plan = choose_channels_and_bits(model, BATCHES, 5000, widths=(4, 8), ratios=(0.5,), check=False)
    plan.pruned(model, BATCHES)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert [module.training for module in model.modules()] == modes


class OwnMatrix(nn.Module):
    """A layer, a product by a matrix of the model's own, and a head."""

    def __init__(self, *, transposed: bool, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed = transposed
        self.first, self.head = nn.Linear(7, 16), nn.Linear(width, 3)
        self.own = nn.Parameter(torch.randn(width, 16) / 4 if transposed else torch.randn(16, width) / 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((x @ self.own.t() if self.transposed else x @ self.own).relu().mean(1))


class Attending(nn.Module):
    """Attention with its packed projections, between two layers, and a functional layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.attention = nn.Linear(7, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.own, self.head = nn.Parameter(torch.randn(24, 16) / 4), nn.Linear(24, 3)

    def forward(self, x):
        x = self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(F.linear(x, self.own).relu().mean(1))


MODELS = {
    "attention": (Attending, 7000, {"first", "attention", "", "head"}),
    "own, transposed": (functools.partial(OwnMatrix, transposed=True), 3300, {"first", "", "head"}),
    "own": (functools.partial(OwnMatrix, transposed=False), 3300, {"first", "", "head"}),
}


@functools.cache
def planned(kind: str) -> tuple[nn.Module, JointPlan]:
    make, size, _ = MODELS[kind]
    model = make().eval()
    batches = [TOKENS[:16], TOKENS[16:]]
    return model, choose_channels_and_bits(model, batches, size, widths=(2, 4, 8), ratios=(0.5,), check=False)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_any_name_are_chosen_and_the_plan_applies(kind: str, tmp_path: Path) -> None:
    model, plan = planned(kind)
    _, size, layers = MODELS[kind]
    assert set(plan.bits) == layers
    assert "the model itself: " in str(plan)
    quantized = ck.quant.quantize_static(plan.pruned(model, [TOKENS]), [TOKENS], bits=plan.bits)
    for name, parts in layers_by_name(quantized).items():
        assert {part.quantizer.scheme.bits for part in parts} == {plan.bits[name].weights}
    written = ck.export_onnx(quantized, tmp_path / "model.onnx", (TOKENS[:2],)).stat().st_size
    assert written == pytest.approx(plan.file_bytes, abs=32)
    assert plan.file_bytes <= size


@pytest.mark.parametrize(
    ("kind", "layer", "weights"),
    [
        ("attention", "attention", ("attention.in_proj_weight", "attention.out_proj.weight")),
        ("attention", "", ("own",)),
        ("own, transposed", "", ("own",)),
        ("own", "", ("own",)),
    ],
)
def test_all_weights_of_a_layer_are_rounded_together(kind: str, layer: str, weights: tuple[str, ...]) -> None:
    model, plan = planned(kind)
    measured = next(each.loss for each in plan.sensitivities.layers if each.layer == layer)
    with torch.no_grad():
        wanted = model(TOKENS[24:])
        for bits in (2, 4):
            rounded = copy.deepcopy(model)
            for name in weights:
                weight = rounded.get_parameter(name)
                nearest = gptq_rounded(weight.t() if kind == "own" else weight, bits, None)
                weight.copy_(nearest.t() if kind == "own" else nearest)
            error = (rounded(TOKENS[24:]) - wanted).square().sum() / wanted.square().sum()
            assert measured[bits] == pytest.approx(float(error), rel=1e-3)
