"""Histograms of weights, activations and their gradients, against plain loops; the memory of each policy."""

from __future__ import annotations

import copy
import math
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import advise, histograms
from compresskit.mixed.histograms import ACTIVATION_GRADIENTS, ACTIVATIONS, KINDS, WEIGHT_GRADIENTS, WEIGHTS


def counted(values) -> tuple[int, int, dict[int, int], int, int, int]:
    """values, zeros, exponents, below, subnormal, above: one value at a time."""
    exponents: dict[int, int] = {}
    zeros = below = subnormal = above = 0
    for value in values.double().flatten().tolist():
        size = abs(value)
        if not size:
            zeros += 1
            continue
        exponent = math.floor(math.log2(size))
        exponents[exponent] = exponents.get(exponent, 0) + 1
        below, subnormal, above = below + (size < 2**-24), subnormal + (2**-24 <= size < 2**-14), above + (size > 65504)
    return values.numel(), zeros, exponents, below, subnormal, above


def as_tuple(counts):
    return counts.values, counts.zeros, counts.exponents, counts.below, counts.subnormal, counts.above


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_is_what_a_plain_pass_gives(size, dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        model[0].weight[0] *= 2.0**-26
        model[2].weight[0] *= 2.0**20
    x, y = torch.randn(size, 6, dtype=dtype), torch.randint(0, 3, (size,))
    found = histograms(model, [(x, y)] * 3, loss=F.cross_entropy, steps=1)
    first = model[0](x)
    second = first.clone().relu()
    last = model[2](second)
    loss = F.cross_entropy(last, y)
    wanted = {
        WEIGHTS: [torch.cat([p.flatten() for p in model[i].parameters()]) for i in (0, 2)],
        WEIGHT_GRADIENTS: [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model[i].parameters()), retain_graph=True)])
            for i in (0, 2)
        ],
        ACTIVATIONS: [first, second, last],
        ACTIVATION_GRADIENTS: torch.autograd.grad(loss, [first, second, last], retain_graph=True),
    }
    assert found.steps == 1
    for kind in KINDS:
        for counts, values in zip(found.counts[kind].values(), wanted[kind], strict=True):
            assert as_tuple(counts) == counted(values), kind
            assert counts.largest == pytest.approx(values.abs().max().item())
        assert found.of_kind(kind).values == sum(v.numel() for v in wanted[kind])
    assert list(found.counts[ACTIVATIONS]) == ["0", "1", "2"]
    assert found.of_kind(WEIGHTS).above > 0
    assert found.of_kind(WEIGHTS).below > 0


def test_the_model_is_not_changed_and_an_optimizer_trains_a_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.LazyLinear(2))
    batches = [(torch.randn(4, 1, 5, 5), torch.randint(0, 2, (4,))) for _ in range(5)]
    model(batches[0][0])
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    still = histograms(model, batches, loss=F.cross_entropy, steps=3)
    moved = histograms(model, batches, loss=F.cross_entropy, steps=3, optimizer=lambda p: torch.optim.SGD(p, lr=100.0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert still.steps == moved.steps == 3
    assert still.of_kind(WEIGHTS).values * 3 == moved.of_kind(WEIGHTS).values  # once, as they stay the same
    assert moved.of_kind(WEIGHTS).largest > 2 * still.of_kind(WEIGHTS).largest
    assert still.of_kind(ACTIVATIONS).values == moved.of_kind(ACTIVATIONS).values


class TwoInputs(nn.Module):
    """Keyword inputs, a tied weight, a parameter of its own, several outputs, one of them not floating."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, *, ids, bias):
        x = self.head(self.embed(ids) * self.scale + bias)
        return {"logits": x, "best": x.argmax(-1), "loss": x.square().mean()}


def test_keyword_batches_tied_weights_and_several_outputs() -> None:
    batch = {"ids": torch.arange(6).view(2, 3), "bias": torch.zeros(4)}
    found = histograms(TwoInputs(), [batch], loss=lambda output, target: output["loss"] + target["bias"].sum())
    assert {name: counts.values for name, counts in found.counts[WEIGHTS].items()} == {"": 4, "embed": 40}
    assert list(found.counts[ACTIVATIONS]) == ["", "embed", "head"]
    assert found.counts[ACTIVATIONS][""].values == 61
    assert "(the model)" in found.table()


def test_the_table_names_layers_that_fp16_would_lose() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight.fill_(1e-9)
        model[0].weight.zero_()
    found = histograms(model, [torch.ones(2, 4)])
    text = str(found)
    rows = [line.split() for line in text.splitlines()]
    assert text.startswith("1 steps; fp16 holds 2^-24 (with all bits: 2^-14) to 65504")
    weights = next(row for row in rows if row[0] == "weights")
    assert weights[1:4] == ["40", "40.00%", "40.00%"]  # 16 of 40 are 0, 16 are 1e-9
    assert next(row for row in rows if row[:2] == ["1", "20"])[1:4] == ["20", "0.00%", "80.00%"]
    assert "2^-30 .." in text
    assert "\n  0 " not in text.partition("weight gradients")[0]  # it loses nothing
    assert "\n  0 " in found.table().partition("weight gradients")[0]


def test_what_is_not_finite_is_counted_apart() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = math.inf
    found = histograms(model, [torch.ones(1, 2)], loss=None)
    assert found.of_kind(WEIGHTS).not_finite == 1
    assert sum(found.of_kind(WEIGHTS).exponents.values()) == 5
    assert "1 not finite" in str(found)


def test_the_picture_has_a_row_for_each_layer_and_the_limits_of_fp16() -> None:
    class Odd(nn.Sequential):
        def __init__(self):
            super().__init__()
            self.add_module("a<b", nn.Linear(3, 3))

    root = ET.fromstring(histograms(Odd(), [torch.randn(2, 3)]).svg())
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in KINDS] == list(KINDS)
    assert texts.count("a<b") == 4
    assert texts.count("2^-24") == texts.count("2^16") == 4
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "a<b, zeros: 0.00%" in titles


def test_bad_input_is_one_message() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=r"histograms\(steps=...\): wanted a whole number >= 1, got 0"):
        histograms(model, [], steps=0)
    with pytest.raises(SettingError, match=r"histograms\(batches=...\): there is no batch in it"):
        histograms(model, [])
    with pytest.raises(SettingError, match=r"batches: with a loss, wanted \(inputs..., target\) or a mapping, got Tensor"):
        histograms(model, [torch.ones(1, 2)], loss=F.cross_entropy)
    with pytest.raises(ModelError, match="histograms: Linear does not run on the example: .*mat1 and mat2"):
        histograms(model, [torch.ones(1, 3)])
    with pytest.raises(ModelError, match="histograms: no output depends on a parameter with requires_grad"):
        histograms(nn.ReLU(), [torch.ones(1, 3)])
    with pytest.raises(SettingError, match="histograms: loss fails on the model's output: .*"):
        histograms(model, [(torch.ones(1, 2), "label")], loss=F.cross_entropy)
    with pytest.raises(SettingError, match=r"of_kind\('grads'\): wanted one of 'weights', 'weight gradients'"):
        histograms(model, [torch.ones(1, 2)]).of_kind("grads")


def test_advice_looks_at_activations_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e5)
        model[1].weight.fill_(1e-3)
    advice = advise(model, torch.ones(2, 4), loss=lambda out: out.sum() * 1e-9)
    assert "weights of 0 exceed 65504: fp16 overflows there and no loss scale helps" in str(advice)
    assert "activations of 0 exceed 65504" in str(advice)
    assert "activation gradients: 0.00% are 0, 100.00% more would be in fp16 without a scale" in str(advice)
    small = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        small[0].weight.fill_(1.0)
        small[1].weight.fill_(2.0**-10)
    advice = advise(small, torch.ones(2, 4), loss=lambda out: out.sum() * 2.0**-20)
    assert min(advice.exponents) == -27  # of the first weights: 2 samples, 4 outputs, 2^-10 and 2^-20
    assert advice.histograms.of_kind(ACTIVATION_GRADIENTS).below == 8
    assert advice.scale == 2.0**4  # those of the weights alone would do with 2^3; the activations' are at 2^-28


def test_advice_for_a_64_bit_model_is_fp32_and_says_why() -> None:
    advice = advise(nn.Linear(8, 8).double(), torch.randn(8, 8).double())
    assert advice.policy.name == "FP32"
    assert "the model is float64, which no half policy casts" in advice.why
