"""No result that a quantized layer can compute lies next to a tie, so that the simulation and both forms of the file agree."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from networks import image
from torch import nn

import compresskit as ck
from compresskit.quant import X86, adaround_, prepare_qat, quantize_static
from compresskit.quant.numerics.dynamic_quantizers import RowQuantizer
from compresskit.quant.numerics.observers import KnownRange, MinMax
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import Scheme, to_integers
from compresskit.quant.numerics.targets import X86_NO_VNNI
from compresskit.quant.passes import rounding_boundaries as boundaries

TARGET = X86_NO_VNNI  # 8-bit weights would overflow where the processor has no VNNI


class Deep(nn.Module):
    """Images to 10 classes through residual blocks, in which one value that falls to another side moves hundreds."""

    def __init__(self, blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x).relu()
        for first, second in zip(self.first, self.second, strict=True):
            x = (x + second(first(x).relu())).relu()
        return self.head(x.mean((2, 3)))


def integers(path, x: np.ndarray, level: onnxruntime.GraphOptimizationLevel) -> list[np.ndarray]:
    """What every QuantizeLinear of a file gives, run without or with the runtime's integer kernels."""
    file = onnx.load(str(path))
    names = [node.output[0] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    file.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UINT8, None) for n in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.intra_op_num_threads = level, 1
    runtime = onnxruntime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return runtime.run(names, {runtime.get_inputs()[0].name: x})


def unequal(quantized, tmp_path, x: torch.Tensor) -> tuple[int, float]:
    """How many integers differ between the file's two forms, and the share of outputs that are not as simulated, bit for bit."""
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", (x[:2],))
    levels = onnxruntime.GraphOptimizationLevel
    written, optimized = (integers(path, x.numpy(), level) for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL))
    assert len(written) > 8
    runtime = ck.measure.session(path, optimize=False)
    with torch.no_grad():
        simulated = quantized.eval()(x).numpy()
    executed = runtime.run(None, {runtime.get_inputs()[0].name: x.numpy()})[0]
    apart = sum(int((a != b).sum()) for a, b in zip(written, optimized, strict=True))
    return apart, float((np.abs(simulated - executed) > 1e-6 * np.abs(simulated).max()).mean())


def test_every_kernel_gives_the_same_integers(tmp_path, monkeypatch) -> None:
    model, x = Deep().eval(), torch.randn(96, 3, 32, 32)
    moved, off = unequal(quantize_static(model, [(x,)], target=TARGET), tmp_path, x)
    assert moved == 0
    assert off == 0
    monkeypatch.setattr("compresskit.quant.static.nudge_scales_", lambda body: None)
    moved, off = unequal(quantize_static(model, [(x,)], target=TARGET), tmp_path, x)
    assert moved > 20, "the network shows nothing"
    assert off > 0


def test_every_kernel_gives_the_same_integers_after_training(tmp_path) -> None:
    x = torch.randn(96, 3, 32, 32)
    quantized = prepare_qat(Deep(), [(x[:8],)], target=TARGET)
    optimizer = torch.optim.SGD(quantized.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        quantized(x[:8]).square().mean().backward()
        optimizer.step()
    quantized.freeze_statistics_()
    assert unequal(quantized, tmp_path, x)[0] > 20, "the network shows nothing"
    quantized.convert_()
    assert unequal(quantized, tmp_path, x) == (0, 0.0)


@pytest.mark.parametrize("ratio", [1 / 64, 3 / 1024, 0.00123, 0.5], ids=str)
def test_no_sum_is_close_to_a_boundary(ratio) -> None:
    """Checked in exact arithmetic over every whole number that lands on the grid."""
    grid = torch.arange(-128, 127, dtype=torch.float64) + 0.5
    (scale,) = boundaries._safest_factors(torch.tensor([1.0]), [(torch.tensor([ratio]).double(), grid)]).tolist()
    assert scale == float(np.float32(scale))
    assert 1 <= scale <= 1 + boundaries.TRIES * boundaries.NUDGE

    def nearest(scale: float) -> float:
        factor = Fraction(ratio) * Fraction(scale)
        sums = range(-int(20 / ratio), int(20 / ratio) + 1)  # results within 20 steps of zero, where most are
        return float(min(abs((k * factor - Fraction(1, 2)) - round(k * factor - Fraction(1, 2))) for k in sums))

    assert nearest(scale) > boundaries.DISTANCE / 2
    assert nearest(scale) >= nearest(1.0)


def grid(scale: float, zero_point: int = 0) -> ActivationQuantizer:
    quantizer = ActivationQuantizer(X86.activations, MinMax())
    quantizer.scale.fill_(scale)
    quantizer.zero_point.fill_(zero_point)
    return quantizer


@pytest.mark.parametrize(("kind", "scales"), [("add", (0.5, 1.5, 1.0)), ("add", (0.25, 1.0, 1.0)), ("mul", (0.5, 1.0, 1.0))])
def test_no_pair_is_close_to_a_boundary(kind, scales) -> None:
    a, b, out = grid(scales[0], 3), grid(scales[1], 128), grid(scales[2], 100)
    p, q = np.arange(256)[:, None] - 3.0, np.arange(256)[None] - 128.0

    def ties_of(scale: float) -> float:
        """The share of all pairs that are within 1e-6 steps of a tie on the grid of the output."""
        fa, fb = float(a.scale), float(b.scale)
        result = (p * fa + q * fb if kind == "add" else p * fa * q * fb) / scale
        result = result[np.abs(result) < 100]
        return float((np.abs(result - 0.5 - np.round(result - 0.5)) < 1e-6).mean())

    before = ties_of(float(out.scale))
    assert before > 0.1
    boundaries._move_scale_(out, [boundaries._pairs(kind, a, b, out)])
    assert ties_of(float(out.scale)) < 1e-4
    assert 1 < float(out.scale) / scales[2] <= 1 + boundaries.TRIES * boundaries.NUDGE


def test_no_hardsigmoid_that_is_an_addition_is_close_to_a_boundary() -> None:
    """The sixth of the scale of its input is 2.25 steps of the output, so that one integer in four gives a tie."""
    x, out = grid(6 * 2 / 511 * 2.25, 128), grid(2 / 511)
    out.observer = KnownRange(0.0, 510 / 511, fixed=True)
    p = np.arange(256) - 128.0

    def nearest(scale: float) -> float:
        """The smallest distance from a tie, in steps."""
        result = (p * float(x.scale) / 6 + 0.5) / scale
        result = result[(result > 0) & (result < 255)]
        return float(np.abs(result - 0.5 - np.round(result - 0.5)).min())

    assert nearest(float(out.scale)) < 1e-4
    boundaries._move_scale_(out, [boundaries._sixths(x, out)])
    assert nearest(float(out.scale)) > 2e-5
    assert 1 < float(out.scale) * 511 / 2 <= 1 + boundaries.TRIES * boundaries.NUDGE
    assert round(1 / float(out.scale)) == 255  # where it saturates


class Mean(nn.Module):
    def forward(self, x):
        return torch.ops.aten.mean.dim(x, [2, 3])


def test_no_mean_is_close_to_a_boundary() -> None:
    """Of four values, whose sum is half a step beside a whole number for one sum in four."""
    body = torch.export.export(Mean(), (torch.randn(1, 3, 2, 2),)).module(check_guards=False)
    (mean,) = [n for n in body.graph.nodes if n.target is torch.ops.aten.mean.dim]
    body.add_submodule("grid", grid(0.25, 0))
    with body.graph.inserting_before(mean):
        rounded = body.graph.call_module("grid", (mean.args[0],))
    rounded.meta = dict(mean.args[0].meta)
    mean.replace_input_with(mean.args[0], rounded)
    out = grid(0.25, 0)
    assert boundaries._values_averaged(mean, "mean") == 4  # of each of three channels
    boundaries._move_scale_(out, [boundaries._boundary_cost(body, mean, out)])
    results = np.arange(4 * 20) * 0.25 / 4 / float(out.scale)
    assert np.abs(results - 0.5 - np.round(results - 0.5)).min() > boundaries.DISTANCE / 2
    assert 1 < float(out.scale) / 0.25 <= 1 + boundaries.TRIES * boundaries.NUDGE


def test_results_below_zero_of_a_prelu_keep_away_from_boundaries_too() -> None:
    """They are rounded behind the slope of their channel, some of which are negative, or 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.PReLU(32), nn.Conv2d(32, 4, 3)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(-0.5, 0.8, 32))
        model[1].weight[3] = 0
    quantized = quantize_static(model, [(torch.randn(8, 3, 12, 12),)], target=TARGET)
    x, out = (float(q.scale) for q in quantized.activation_quantizers()[:2])
    (rounding, weight), *_ = quantized.rounded_weights()
    slopes = model[1].weight.detach().double().abs()

    def close(scales: torch.Tensor) -> float:
        """How many of the sums whose results are within 20 steps of 0 lie next to a boundary."""
        found = 0
        for factor in (scales * x / out * slopes)[slopes > 0].tolist():
            results = np.arange(int(20 / factor)) * factor
            found += int((np.abs(results - 0.5 - np.round(results - 0.5)) < boundaries.DISTANCE / 2).sum())
        return found

    scales = rounding.qparams(weight)[0].detach().double().flatten()
    assert close(scales) < 0.8 * close(scales / rounding.scale_factor.double().flatten())


def test_scales_follow_a_weight_that_is_trained_further() -> None:
    quantized = quantize_static(Deep(1).eval(), [image(8)], target=replace(X86, saturates=False))
    (rounding, weight), *_ = quantized.rounded_weights()
    assert isinstance(rounding, WeightQuantizer)
    moved, plain = rounding.qparams(weight)[0], weight.abs().amax((1, 2, 3)) / 127
    assert bool((moved >= plain * (1 - 1e-6)).all())
    assert bool((moved <= plain * (1 + boundaries.TRIES * boundaries.NUDGE + 1e-6)).all())
    assert bool((moved > plain * (1 + 1e-7)).any())
    torch.testing.assert_close(rounding.qparams(2 * weight)[0], 2 * moved)
    rounding.fix_scale_(plain)
    assert torch.equal(rounding.qparams(weight)[0], plain)


def test_scales_with_an_anchor_are_not_moved(monkeypatch) -> None:
    class Gate(nn.Module):
        """An anchored grid behind an addition: 3 must lie on it, for hardsigmoid."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            x = self.conv(x).relu()
            return x * nn.functional.hardsigmoid(x + self.gate(x))

    tried = []
    move = boundaries._move_scale_
    monkeypatch.setattr(boundaries, "_move_scale_", lambda out, costs: (tried.append(out), move(out, costs)))
    quantized = quantize_static(Gate().eval(), [image(8)])
    (anchored,) = [q for q in quantized.activation_quantizers() if q.anchor is not None]
    assert anchored not in tried
    body = quantized.body
    (made,) = [boundaries._maker(n) for n in body.graph.nodes if boundaries._module(body, n) is anchored]
    assert boundaries._boundary_cost(body, made, anchored) is not None  # it would have moved
    steps = 3.0 / float(anchored.scale)
    assert abs(steps - round(steps)) < 1e-4


def test_a_weight_that_two_layers_share_keeps_away_from_both_boundaries() -> None:
    class Shared(nn.Module):
        """One head on two sizes of map."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 32, 3)

        def forward(self, x):
            x = self.stem(x).relu()
            return self.head(x).relu().mean((2, 3)) + self.head(self.down(x).relu()).relu().mean((2, 3))

    quantized = quantize_static(Shared().eval(), [(torch.randn(4, 3, 24, 24),)])
    body, makers = quantized.body, {}
    for node in body.graph.nodes:
        if isinstance(quantizer := boundaries._module(body, node), ActivationQuantizer):
            makers.setdefault(quantizer, []).append(boundaries._maker(node))
    found = boundaries._weights(body, makers)
    ((rounding, (weight, uses)),) = [(r, pair) for r, pair in found.items() if len(pair[1]) == 2]
    assert float(rounding.scale_factor.max()) <= 1 + boundaries.TRIES * boundaries.NUDGE + 1e-6
    scales = rounding.qparams(weight)[0].double()
    plain = scales / rounding.scale_factor.double()
    costs = [[float(boundaries._closeness(each * ratio, at).sum()) for each in (scales, plain)] for ratio, at in uses]
    assert all(after < 0.9 * before for after, before in costs), costs  # at both sizes, not the last alone
    before = rounding.scale_factor.clone()
    boundaries.nudge_scales_(quantized.body)
    torch.testing.assert_close(rounding.scale_factor, before, atol=2 * boundaries.TRIES * boundaries.NUDGE, rtol=0)
    assert (
        float(rounding.scale_factor.max()) <= 1 + boundaries.TRIES * boundaries.NUDGE + 1e-6
    )  # a second look begins where the first did


def test_an_addition_with_one_quantizer_has_no_cost() -> None:
    """x + x' on the grid of both: a sum of integers, whatever the scale."""

    class Twice(nn.Module):
        def forward(self, x):
            return torch.ops.aten.add.Tensor(x.flip(1), x)

    body = torch.fx.symbolic_trace(Twice())
    body.add_submodule("grid", grid(0.1, 7))
    node = next(n for n in body.graph.nodes if n.op == "output").args[0]
    with body.graph.inserting_before(node):
        node.args = tuple(body.graph.call_module("grid", (value,)) for value in node.args)
    assert boundaries.quantizer_of(body, node.args[0]) is boundaries.quantizer_of(body, node.args[1]) is body.grid
    assert boundaries._boundary_cost(body, node, body.grid) is None


def test_calibrating_again_resets_the_scale_factors() -> None:
    x = [image(8)]
    quantized = quantize_static(Deep(1).eval(), x, target=TARGET)
    weights = [q for q, _ in quantized.rounded_weights()]
    assert any(float(q.scale_factor.max()) > 1 for q in weights)
    adaround_(quantized, x, steps=2)
    assert any(float(q.scale_factor.max()) > 1 for q in weights)  # off ties on its own scales, too
    quantized.calibrate_(x)
    assert all(bool((q.scale_factor == 1).all()) for q in weights)


def test_pooling_beyond_the_edge_is_left_alone() -> None:
    class Pool(nn.Module):
        def __init__(self, counted: bool) -> None:
            super().__init__()
            self.counted = counted

        def forward(self, x):
            return nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=self.counted)

    for counted, values in ((True, 9), (False, 0)):
        graph = torch.export.export(Pool(counted), (torch.randn(1, 2, 6, 6),)).graph
        (pool,) = [n for n in graph.nodes if n.op == "call_function"]
        assert boundaries._values_averaged(pool, "avg_pool") == values


def test_a_pooling_of_one_size_is_as_wide_as_it_is_high() -> None:
    class Pool(nn.Module):
        def forward(self, x):
            return torch.ops.aten.avg_pool2d.default(x, [3])

    graph = torch.export.export(Pool(), (torch.randn(1, 2, 6, 6),)).graph
    (pool,) = [n for n in graph.nodes if n.op == "call_function"]
    assert len(pool.args[1]) == 1
    assert boundaries._values_averaged(pool, "avg_pool") == 9


def test_looked_up_rows_are_rounded_as_their_table() -> None:
    """Of a tie the simulation and the stored integers fall to the same side: both divide by the scale."""
    halves = (torch.arange(-126, 126) + 0.5).view(-1, 4)
    rounding = RowQuantizer(Scheme(signed=True, symmetric=True))
    rounding.enabled = True
    for scale in torch.rand(200) * 0.02 + 0.005:
        table = halves * scale
        rounding.table.fix_scale_(scale)
        stored = to_integers(table, *rounding.table.qparams(table), rounding.table.scheme) * scale
        torch.testing.assert_close(rounding(table, table), stored, rtol=0, atol=float(scale) / 100)
