"""Where the noise comes from, and what runs in integers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import networks
import oracles
import pytest
import torch
from networks import build, image
from torch import nn

from compresskit.base.errors import DataError
from compresskit.quant import X86, diagnose, quantize_static
from compresskit.quant.numerics.quantizers import BiasQuantizer, WeightQuantizer
from compresskit.quant.numerics.targets import X86_NO_VNNI


def test_noise_equals_that_of_switching_quantizers() -> None:
    """The first layer's two parts and the whole output, by turning quantizers on and off on the model itself."""
    model, x = build(networks.Chain), image(32)
    quantized = quantize_static(model, [image(16)], target=replace(X86, saturates=False))
    found = diagnose(quantized, [tuple(v[:16] for v in x), tuple(v[16:] for v in x)])
    assert found.samples == 32
    with torch.no_grad():
        assert found.sqnr == pytest.approx(oracles.sqnr(model(*x), quantized(*x)), abs=0.05)
        conv = next(n for n in quantized.body.graph.nodes if n.name == found.rows[0].name)
        first, norm = model.a[0], model.a[1]
        k = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        weight, bias = first.weight * k.view(-1, 1, 1, 1), norm.bias - norm.running_mean * k
        clean = nn.functional.conv2d(x[0], weight, bias, padding=1)
        scale = weight.flatten(1).abs().amax(1).view(-1, 1, 1, 1) / 127
        rounded = (weight / scale).round() * scale
        source = quantized.body.get_submodule(conv.args[0].target)
        step = float(source.scale) * scale.flatten()
        only_weights = nn.functional.conv2d(x[0], rounded, (bias / step).round() * step, padding=1)
        only_input = nn.functional.conv2d(source(x[0]), weight, bias, padding=1)
    assert found.rows[0].weights == pytest.approx(oracles.sqnr(clean, only_weights), abs=0.1)
    assert found.rows[0].activations == pytest.approx(oracles.sqnr(clean, only_input), abs=0.1)
    assert found.rows[0].sqnr < min(found.rows[0].weights, found.rows[0].activations)


def test_the_noisiest_operator_stands_out() -> None:
    """A layer with one huge weight of the same channel has noisy weights; clean layers do not."""
    model = build(networks.Residual)
    with torch.no_grad():
        model.out.weight[:, 0, 0, 0] = 30.0
    quantized = quantize_static(model, [image(16)], target=replace(X86, saturates=False))
    rows = {row.layer: row for row in diagnose(quantized, [image(32)]).rows if row.weights is not None}
    assert min(rows, key=lambda name: rows[name].weights) == "out"


def test_the_float_model_is_the_reference() -> None:
    model = build(networks.Residual)
    quantized = quantize_static(model, [image(16)])
    x = image(16)
    assert diagnose(quantized, [x], model=model).sqnr == pytest.approx(diagnose(quantized, [x]).sqnr, abs=1e-3)
    with torch.no_grad():
        quantized.body.get_parameter("out.weight").mul_(1.5)  # as training might
    assert diagnose(quantized, [x], model=model).sqnr < diagnose(quantized, [x]).sqnr - 5


def test_saturation_is_reported_where_weights_do_not_prevent_it() -> None:
    model = build(networks.Residual)
    with torch.no_grad():
        model.out.weight.abs_()  # large sums of one sign
    for target, threatened in ((replace(X86, saturates=False), True), (X86_NO_VNNI, False), (X86, False)):
        rows = diagnose(quantize_static(model, [image(16)], target=target), [image(8)]).rows
        found = [row.saturated for row in rows if row.saturated is not None]
        assert bool(found) is threatened
        assert not found or 0 < max(found) <= 1


def test_it_prints_and_serializes() -> None:
    quantized = quantize_static(build(networks.Tokens), [image(16)], smooth=False)  # all four layers in integers
    found = diagnose(quantized, [image(8)])
    lines = str(found).splitlines()
    assert lines[0].startswith("output ")
    assert any("float: no rule for aten.layer_norm" in line for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("operator"))
    column = lines[start].index("runs")
    assert all(line[column - 1] == " " for line in lines[start:])
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert record["coverage"]["layers"] == [4, 4]
    assert len(record["rows"]) == len(found.rows)
    with pytest.raises(DataError, match="diagnose: no calibration batch"):
        diagnose(quantized, [])


def test_sqnr_without_noise_is_infinite() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    for quantizer in quantized.quantizers():
        quantizer.enabled = isinstance(quantizer, BiasQuantizer | WeightQuantizer) and False
    found = diagnose(quantized, [image(4)])
    assert math.isinf(found.sqnr)
    assert found.to_json()["sqnr"] is None


class Head(nn.Module):
    def __init__(self, outputs) -> None:
        super().__init__()
        self.layer, self.outputs = nn.Linear(8, 3), outputs

    def forward(self, x):
        return self.outputs(self.layer(x))


@pytest.mark.parametrize(
    "outputs",
    [lambda y: (y, None), lambda y: {"logits": y, "loss": None}, lambda y: (y, 3, "name"), lambda y: (y, y.argmax(1))],
    ids=["none", "dict", "number and text", "classes"],
)
def test_outputs_that_are_no_numbers_are_left_out(outputs) -> None:
    """A model of Hugging Face gives None for a loss that nobody asked for."""
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8),) for _ in range(2)]
    plain = Head(lambda y: y).eval()
    (model := Head(outputs).eval()).layer.load_state_dict(plain.layer.state_dict())
    found, wanted = (diagnose(quantize_static(m, batches), batches) for m in (model, plain))
    assert found.sqnr == pytest.approx(wanted.sqnr)


def test_a_model_that_gives_classes_alone_is_diagnosed() -> None:
    batches = [(torch.randn(16, 8),) for _ in range(2)]
    model = Head(lambda y: y.argmax(1)).eval()
    assert diagnose(quantize_static(model, batches), batches).sqnr > 10
