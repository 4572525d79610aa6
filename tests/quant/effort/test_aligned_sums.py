"""Sums whose operands and result have one scale round nothing, in PyTorch and in the file; they are made where that pays."""

from __future__ import annotations

import oracles
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.graph.interpreter import run_graph
from compresskit.quant import X86, quantize_static
from compresskit.quant.build import build_quantized
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.effort.aligned_sums import align_sums_, exact_sums, quantizers_in_exact_sums
from compresskit.quant.effort.ranges import narrow_ranges_
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.effort.tuning import minimise_error_


class Blocks(nn.Module):
    """Ten residual blocks whose branches are about as large as the shortcut, ReLU behind each sum but the last."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(10)
        )
        with torch.no_grad():
            for branch in self.branches:
                branch[2].weight.mul_(3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for branch in self.branches[:-1]:
            x = torch.relu(x + branch(x))
        return self.head(x - self.branches[-1](x))


def quantized_of(model, x):
    quantized = build_quantized(model, x, X86, None)
    quantized.calibrate_([x])
    return quantized


def noise_on(x):
    return lambda quantized: rounding_noise(quantized, x, exact=exact_sums(quantized.body))


def test_aligned_sums_round_nothing_and_the_file_agrees(tmp_path) -> None:
    model, x = build(Blocks), image(32)
    quantized = quantized_of(model, x)
    assert not exact_sums(quantized.body)
    with torch.no_grad():
        before = oracles.sqnr(model(*x), quantized(*x))
        assert align_sums_(quantized, noise_on(x)) >= 4
        assert oracles.sqnr(model(*x), quantized(*x)) > before + 0.1
        exact, seen = exact_sums(quantized.body), dict[str, torch.Tensor]()
        run_graph(quantized.body, x, lambda node, value: seen.update({node.name: value}))
        for node in exact:
            quantizer = quantized.body.get_submodule(node.target)
            whole = quantizer.clipped(quantizer.unrounded(seen[node.args[0].name])) / quantizer.scale
            assert float((whole - whole.round()).abs().max()) < 1e-2
    predicted = noise_on(x)(quantized)
    assert all(predicted[node] < 1e-3 * max(predicted.values()) for node in exact)
    assert ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "m.onnx", x), quantized, [image(7)]).passed


def test_a_sum_of_very_different_ranges_stays() -> None:
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.quiet, self.loud, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 4, 1)
            self.read = nn.Conv2d(8, 8, 1)
            with torch.no_grad():
                self.loud.weight.mul_(100)

        def forward(self, x):
            quiet = torch.relu(self.quiet(x))
            return self.head(torch.cat([self.read(quiet), torch.relu(quiet + self.loud(x)) / 100], 1))

    model, x = build(Loud), image(16)
    quantized = quantized_of(model, x)
    scales = [float(q.scale) for q in quantized.activation_quantizers()]
    assert align_sums_(quantized, noise_on(x)) == 0
    assert scales == [float(q.scale) for q in quantized.activation_quantizers()]


def test_a_model_without_sums_is_not_measured() -> None:
    quantized = quantized_of(build(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))), image(8))
    assert align_sums_(quantized, lambda _: 1 / 0) == 0


def test_tuning_leaves_sums_aligned() -> None:
    model, x = build(Blocks), image(32)
    quantized = quantized_of(model, x)
    align_sums_(quantized, noise_on(x))
    exact, kept = exact_sums(quantized.body), quantizers_in_exact_sums(quantized.body)
    before = {q: float(q.scale) for q in quantized.activation_quantizers()}
    minimise_error_(quantized, OutputError(model, [x], 16), steps=5, batch=16)
    assert exact_sums(quantized.body) == exact
    moved = [q for q, scale in before.items() if float(q.scale) != scale]
    assert moved
    assert not kept.intersection(moved)


def test_many_ranges_are_narrowed_by_one_factor_and_inputs_stay() -> None:
    model, x = build(Blocks), image(32)
    with torch.no_grad():
        x[0][0, :, :4, :4] *= 6  # one corner of one image is loud
    quantized = quantized_of(model, x)
    align_sums_(quantized, noise_on(x))
    exact, before = exact_sums(quantized.body), [float(q.scale) for q in quantized.activation_quantizers()]
    error = OutputError(model, [tuple(v[1:] for v in x)], 16)
    first = error.decibels(quantized)
    sums, others = narrow_ranges_(quantized, error)
    assert sums < 1
    assert error.decibels(quantized) > first + 0.5
    ratios = {round(float(q.scale) / scale, 3) for q, scale in zip(quantized.activation_quantizers(), before, strict=True)}
    assert ratios == {1.0, round(sums, 3), round(others, 3)}
    assert float(quantized.activation_quantizers()[0].scale) == before[0]
    assert exact_sums(quantized.body) == exact


def test_an_effort_level_tries_both_and_says_what_they_bought() -> None:
    model, x = build(Blocks), image(64)
    quantized = quantize_static(model, [x], effort="balanced", float_macs=0.0, choose="rules")
    names = [remedy.name for remedy in quantized.origin.remedies]
    assert names.index("align sums") < names.index("narrow ranges")
    assert any(remedy.kept and remedy.name == "align sums" for remedy in quantized.origin.remedies)
    assert exact_sums(quantized.body)


def test_a_widened_range_begins_where_it_did() -> None:
    def beginnings() -> list[float]:
        return [float((q.scheme.low - q.zero_point) * q.scale) for q in quantized.activation_quantizers()]

    model, x = build(Blocks), image(32)
    quantized = quantized_of(model, x)
    scales, before = [float(q.scale) for q in quantized.activation_quantizers()], beginnings()
    align_sums_(quantized, noise_on(x))
    widened = [float(q.scale) for q in quantized.activation_quantizers()]
    assert any(b > 1.1 * a for a, b in zip(scales, widened, strict=True))
    for a, b, scale in zip(before, beginnings(), widened, strict=True):
        assert abs(a - b) <= 0.51 * scale
