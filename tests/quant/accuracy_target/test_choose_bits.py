"""Bits chosen under a budget: the best of all choices by sensitivity, and, measured, never worse than uniform bits."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.task import Task
from compresskit.quant import Bits, choose_bits, quantize_static
from compresskit.quant.accuracy_target.bit_plan import stored_bytes
from compresskit.quant.numerics.quantizers import WeightQuantizer

WIDTHS = (2, 3, 4, 8)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    ).eval()  # fmt: skip


X = torch.randn(24, 3, 10, 10, generator=torch.Generator().manual_seed(1))
TASK = Task(val=[(X, net()(X).argmax(1))], train=[(X[:12], torch.arange(12) % 5), (X[12:], torch.arange(12) % 5)])


def rounded(model: nn.Module, widths: dict[str, int]) -> nn.Module:
    """The weights of each output channel to the nearest of the steps -(2^(b-1) - 1) ... 2^(b-1) - 1."""
    for name, bits in widths.items():
        weight = model.get_submodule(name).weight.data
        top = 2 ** (bits - 1) - 1
        scale = weight.abs().flatten(1).amax(1).view(-1, *[1] * (weight.ndim - 1)) / top
        weight.copy_((weight / scale).round().clamp(-top, top) * scale)
    return model


@pytest.mark.parametrize("weighting", ["weights", "macs"])
def test_the_choice_is_the_best_of_all_within_the_budget(weighting) -> None:
    plan = choose_bits(net(), [X], average=3.7, widths=WIDTHS, weighting=weighting, check=False)
    sizes = [getattr(layer, weighting) for layer in plan.layers]
    least = min(
        (sum(layer.noise[bits] for layer, bits in zip(plan.layers, choice, strict=True)), choice)
        for choice in itertools.product(WIDTHS, repeat=len(sizes))
        if sum(b * n for b, n in zip(choice, sizes, strict=True)) <= 3.7 * sum(sizes)
    )
    assert plan.widths == least[1]
    assert plan.predicted == pytest.approx(least[0])
    assert plan.cost <= 3.7
    assert plan.cost == pytest.approx(sum(b * n for b, n in zip(plan.widths, sizes, strict=True)) / sum(sizes))
    assert [cost for cost, _ in plan.frontier] == sorted({cost for cost, _ in plan.frontier})
    assert all(a[1] >= b[1] for a, b in itertools.pairwise(plan.frontier)), "more bits lose less"
    assert plan.measured == ()


def test_sensitivities_are_the_errors_of_one_rounded_layer() -> None:
    model = net()
    plan = choose_bits(model, [X], average=8, widths=(3, 8), samples=24)
    layer = next(layer for layer in plan.layers if layer.layer == "2")
    with torch.no_grad():
        wanted, got = model(X), rounded(net(), {"2": 3})(X)
    assert layer.noise[3] == pytest.approx(float((got - wanted).square().sum() / wanted.square().sum()), rel=1e-3)
    assert (layer.weights, layer.macs) == (16 * 8 * 9, 16 * 8 * 9 * 36)


def test_a_metric_is_measured_with_one_layer_rounded() -> None:
    model = net()
    plan = choose_bits(model, [X], average=8, widths=(2, 8), samples=24, sensitivity="metric", task=TASK)
    labels = model(X).argmax(1)
    for layer in plan.layers:
        with torch.no_grad():
            wanted, got = model(X), rounded(net(), {layer.layer: 2})(X)
        lost = 100 * (1 - float((got.argmax(1) == labels).double().mean()))
        error = float((got - wanted).square().sum() / wanted.square().sum())
        assert layer.noise[2] == pytest.approx(lost + min(1, error), abs=1e-2)
    assert "% predicted" in str(plan)


def test_fisher_sensitivities_are_squared_gradients_times_squared_errors() -> None:
    model = net()
    plan = choose_bits(model, [X], average=8, widths=(3, 8), samples=24, sensitivity="fisher", task=TASK)
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, labels in TASK.train:
        for i in range(len(x)):
            loss = F.cross_entropy(model(x[i : i + 1]), labels[i : i + 1])
            for name, gradient in zip(squares, torch.autograd.grad(loss, list(model.parameters())), strict=True):
                squares[name] += gradient.square() / 24
    for layer in plan.layers:
        name = f"{layer.layer}.weight"
        error = (rounded(net(), {layer.layer: 3}).get_parameter(name) - model.get_parameter(name)).detach()
        assert layer.noise[3] == pytest.approx(float((squares[name] * error.square()).sum()) / 2, rel=1e-3)
    assert all(not p.grad_fn and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("model", [net(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()])
def test_without_labels_they_are_drawn_from_the_models_own_predictions(model) -> None:
    plans = [choose_bits(model, X[:n], average=8, widths=(3, 8), samples=n, sensitivity="fisher") for n in (23, 24)]
    for a, b in zip(plans[0].layers, plans[1].layers, strict=True):
        assert 0 < a.noise[8] < a.noise[3]
        assert a.noise[3] == pytest.approx(b.noise[3], rel=0.5)
    again = choose_bits(model, X[:23], average=8, widths=(3, 8), samples=23, sensitivity="fisher")
    assert again.layers == plans[0].layers


def test_the_choice_is_measured_and_never_worse_than_uniform_bits() -> None:
    torch.manual_seed(0)
    for average in (3.0, 4.0):
        plan = choose_bits(net(), [X, torch.randn(40, 3, 10, 10)], average=average, widths=WIDTHS, samples=16)
        lost = {choice.name: choice.lost for choice in plan.measured}
        assert plan.measured[0].widths == plan.widths
        assert plan.measured[0].lost == min(lost.values())
        assert any(len(set(choice.widths)) == 1 for choice in plan.measured)
        assert all(choice.cost <= average + 1e-9 for choice in plan.measured)
        assert "48 samples" in plan.judge
        assert "measured: outputs, of classes, 48 samples" in str(plan)
    plan = choose_bits(net(), [X], average=4, widths=WIDTHS, task=TASK)
    assert plan.judge == "accuracy, 24 samples"
    assert "the same that showed" in choose_bits(net(), [X], average=4, widths=WIDTHS).judge


def test_the_measured_loss_is_that_of_all_layers_rounded_at_once() -> None:
    model = net()
    plan = choose_bits(model, [X], average=3, widths=(2, 3, 8), task=TASK)
    labels = model(X).argmax(1)
    for choice in plan.measured:
        other = rounded(net(), dict(zip([layer.layer for layer in plan.layers], choice.widths, strict=True)))
        assert choice.lost == pytest.approx(100 * (1 - float((other(X).argmax(1) == labels).double().mean())), abs=5)


def test_a_budget_in_bytes_counts_what_the_file_stores() -> None:
    plan = choose_bits(net(), [X], weight_bytes=700, widths=WIDTHS)
    bits = [(layer.weights, plan.bits[layer.layer].weights) for layer in plan.layers]
    assert plan.weight_bytes == plan.cost == sum(-(-count * width // 8) for count, width in bits) <= 700
    assert "bytes of weights" in str(plan)
    assert "frontier: 3" in str(plan)


def test_a_table_of_costs_is_the_budget() -> None:
    table = {"0": {4: 1.0, 8: 2.0}, "2": {3: 1.0, 8: 5.0}, "6": {8: 0.5}}
    plan = choose_bits(net(), [X], cost=table, limit=4.0, check=False)
    assert {name: bits.weights for name, bits in plan.bits.items()} == {"0": 8, "2": 3, "6": 8}
    assert plan.cost == 3.5
    assert "3.5 cost" in str(plan)
    with pytest.raises(SettingError, match=r"choose_bits\(limit=...\): the least that these widths allow is 2.5, got 2"):
        choose_bits(net(), [X], cost=table, limit=2.0)


def test_the_frontier_is_drawn(tmp_path) -> None:
    plan = choose_bits(net(), [X], average=4, widths=WIDTHS)
    root = ET.parse(plan.plot(tmp_path / "frontier.svg")).getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "bits a weight" in texts
    assert "predicted SQNR of the outputs, dB" in texts
    marks = [node for node in root.iter("{http://www.w3.org/2000/svg}circle") if len(node)]
    assert len(marks) == len(plan.frontier) + 1


def test_the_plan_is_what_quantization_takes() -> None:
    plan = choose_bits(net(), [X], average=4)
    quantized = quantize_static(net(), [X], bits=plan.bits)
    widths = [q.scheme.bits for q in quantized.quantizers() if isinstance(q, WeightQuantizer)]
    assert widths == [bits.weights for bits in plan.bits.values()]
    assert plan.bits["0"] == Bits(weights=widths[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"wanted average=, weight_bytes= or cost=, one of them, got none"),
        ({"average": 3, "weight_bytes": 9}, r"one of them, got average, weight_bytes"),
        ({"average": 1.5}, r"choose_bits\(average=...\): the least that these widths allow is 2, got 1.5"),
        ({"weight_bytes": 10}, r"choose_bits\(weight_bytes=...\): the least that these widths allow is \d+, got 10"),
        ({"average": 4, "widths": (1, 2)}, r"choose_bits\(widths=...\): wanted whole numbers of 2..8, got \(1, 2\)"),
        ({"average": 4, "weighting": "layers"}, r"choose_bits\(weighting=...\): wanted \"weights\" or \"macs\", got 'layers'"),
        ({"weight_bytes": 9, "weighting": "macs"}, r"choose_bits\(weighting=\"macs\"\): it says what the mean bits"),
        ({"average": 4, "samples": 0}, r"choose_bits\(samples=...\): wanted a whole number >= 1, got 0"),
        ({"average": 4, "sensitivity": "hessian"}, r"wanted \"outputs\", \"fisher\" or \"metric\", got 'hessian'"),
        ({"average": 4, "sensitivity": "metric"}, r"it needs data and a metric; write task=Task"),
        ({"cost": {"0": {4: 1.0}}}, r"cost= is a table and limit= its largest sum; give both or none"),
        ({"cost": {"0": {4: 1.0}}, "limit": 1}, r"at bits of \[2, 3, 4, 5, 6, 8\], got none for \['2', '6'\]"),
        (
            {"cost": {name: {4: 1.0} for name in ("0", "2", "6", "9")}, "limit": 9},
            r"choose_bits\(cost=...\): no layers \['9'\]; they are \['0', '2', '6'\]",
        ),
        (
            {"average": 4, "task": Task(val=[(X, X)], metric=lambda a, b: 1.0)},
            r"choose_bits\(task=...\): whether more of metric is better is not said",
        ),
    ],
)
def test_bad_budgets_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        choose_bits(net(), [X], **settings)


def test_a_model_without_gradients_has_no_fisher_information() -> None:
    class Hard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            return self.layer(x).argmax(1)

    with pytest.raises((ModelError, DataError), match="no gradient reaches the weights"):
        choose_bits(Hard().eval(), [torch.randn(16, 6)], average=4, sensitivity="fisher")


def test_weights_of_seven_bits_are_stored_in_eight() -> None:
    assert [stored_bytes(10, bits) for bits in (2, 3, 4, 7, 8)] == [3, 4, 5, 10, 10]
