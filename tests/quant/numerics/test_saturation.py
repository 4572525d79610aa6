"""Weights whose pairs fit into int16: how they are chosen, in every form of quantization, and executed on this machine."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networks
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from networks import build, image
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import compresskit as ck
from compresskit.quant import ARM, X86, Scheme, adaround_, prepare_qat, quantize_dynamic, quantize_static, reconstruct_blocks_
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.saturation import FitPairs, PairPacking, can_overflow, conv_packing
from compresskit.quant.numerics.scheme import affine
from compresskit.quant.numerics.targets import X86_NO_VNNI

INT8 = Scheme(signed=True, symmetric=True, per_channel=True)
UNGUARDED = replace(X86, saturates=False)


def pairs_of(weight: np.ndarray) -> np.ndarray:
    """Sums of neighbours along (kernel position, input channel), as ONNX Runtime packs a convolution; (outputs, pairs)."""
    rows = np.moveaxis(weight.astype(int), 1, -1).reshape(len(weight), -1)
    return rows[:, : rows.shape[1] // 2 * 2].reshape(len(rows), -1, 2).sum(2)


def stored_weights(path) -> dict[str, np.ndarray]:
    """int8 constants of a file, outputs first, but for those of depthwise convolutions."""
    graph = onnx.load(path).graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    made = {out: node for node in graph.node for out in node.output}
    found = {}
    for node in graph.node:
        place = {"Conv": 1, "MatMul": 1, "Gemm": 1, "MatMulInteger": 1}.get(node.op_type)
        if place is None:
            continue
        name, turned = node.input[place], node.op_type in ("MatMul", "MatMulInteger")
        while name in made:
            turned ^= made[name].op_type == "Transpose"
            name = made[name].input[0]
        attributes = {a.name: a for a in node.attribute}
        groups = attributes["group"].i if "group" in attributes else 1
        depthwise = groups > 1 and values[name].shape[:2] == (groups, 1)
        if values[name].dtype == np.int8 and not depthwise:
            found[name] = values[name].T if turned else values[name]
    return found


def rounded(weight: torch.Tensor, packing: PairPacking | None, scheme: Scheme = INT8, axis: int = 0) -> torch.Tensor:
    quantizer = WeightQuantizer(scheme, axis, weight.shape[axis], packing)
    quantizer.enabled = True
    if packing is not None and scheme.symmetric:
        quantizer.pack_(None, weight)
        quantizer.balance_(weight)
    integers, (scale, zero_point) = quantizer.integers(weight), quantizer.qparams(weight)
    shape = [-1 if d == axis else 1 for d in range(weight.ndim)] if scale.ndim else []
    real = (integers.float() - zero_point.view(shape)) * scale.view(shape)
    assert torch.equal(quantizer(weight), real)  # the simulation is what is stored
    return integers


LAYERS = {  # shape of the weight, groups, stride
    "3x3": ((16, 8, 3, 3), 1, 1),
    "of an image": ((16, 3, 3, 3), 1, 1),
    "one channel": ((8, 1, 3, 3), 1, 1),
    "five channels": ((8, 5, 2, 2), 1, 1),
    "1x1": ((8, 6, 1, 1), 1, 1),
    "grouped": ((8, 3, 3, 3), 4, 1),
    "two filters for each channel": ((16, 1, 3, 3), 8, 1),
    "depthwise": ((16, 1, 3, 3), 16, 1),
    "stem": ((16, 3, 7, 7), 1, 2),
    "1d": ((8, 3, 5), 1, 1),
    "3d": ((8, 3, 2, 2, 2), 1, 1),
}


def qlinear_conv(weight: np.ndarray, x: np.ndarray, groups: int, stride: int, step: float) -> np.ndarray:
    rank, outputs = weight.ndim - 2, len(weight)
    constants = {
        "one": np.float32(1), "zero": np.uint8(0), "w": weight, "steps": np.ones(outputs, np.float32),
        "zeros": np.zeros(outputs, np.int8), "step": np.float32(step), "middle": np.uint8(128),
    }  # fmt: skip
    node = helper.make_node(
        "QLinearConv", "x one zero w steps zeros step middle".split(), ["y"], group=groups, strides=[stride] * rank
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, list(x.shape))],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, None)],
        [numpy_helper.from_array(v, name) for name, v in constants.items()],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return ort.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_pair_overflows_and_this_machine_computes_exact_sums(layer) -> None:
    """Uniform weights, of which a quarter of all pairs would overflow, on inputs of 255."""
    shape, groups, stride = LAYERS[layer]
    torch.manual_seed(0)
    weight = torch.rand(shape) * 2 - 1
    weight[0] = 1.0
    packing = conv_packing(shape, groups, (stride,) * (len(shape) - 2), (3,) * (len(shape) - 2))
    integers = rounded(weight, packing).numpy()
    if layer == "depthwise":  # its kernel widens before it adds
        assert packing is None
        assert integers.max() == 127
    else:
        assert np.abs(pairs_of(integers)).max() <= 128
        assert np.abs(pairs_of(rounded(weight, None).numpy())).max() > 128
        even = shape[1] // 2 * 2
        inside = integers[:, :even].reshape(shape[0], -1, 2, *shape[2:]).astype(int).sum(2)
        assert np.abs(inside).max(initial=0) <= 128  # in kernels that pad the channels to an even number
    x = np.full((1, shape[1] * groups, *[9] * (len(shape) - 2)), 255, np.uint8)
    x[..., 1::3] = 0
    sums = torch.nn.functional
    conv = (sums.conv1d, sums.conv2d, sums.conv3d)[len(shape) - 3]
    exact = conv(torch.from_numpy(x).double(), torch.from_numpy(integers).double(), stride=stride, groups=groups).numpy()
    step = np.abs(exact).max() / 120
    wanted = np.clip(np.rint(exact / step) + 128, 0, 255)
    assert np.abs(qlinear_conv(integers, x, groups, stride, step) - wanted).max() <= 1  # of rounding ties


def test_a_channel_whose_pairs_fit_keeps_its_integers() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 4, 3, 3)
    weight[::2, :2, 1, 1] = torch.tensor([20.0, -1.0])  # far larger than the others
    weight[1::2, :2, 1, 1] = 3
    guarded, plain = rounded(weight, PairPacking(9)), rounded(weight, None)
    assert torch.equal(guarded[::2], plain[::2])
    assert all(not torch.equal(a, b) for a, b in zip(guarded[1::2], plain[1::2], strict=True))


def test_the_scale_is_the_smallest_with_which_all_pairs_fit() -> None:
    weight = torch.tensor([[1.0, 0.9, -0.5, 0.2], [1.0, -1.0, 0.1, 0.0]])
    scale, _ = WeightQuantizer(INT8, 0, 2, PairPacking()).qparams(weight)
    torch.testing.assert_close(scale, torch.tensor([1.9 / 128, 1 / 127]))
    one = WeightQuantizer(replace(INT8, per_channel=False), 0, 2, PairPacking())
    torch.testing.assert_close(one.qparams(weight)[0], torch.tensor(1.9 / 128))


def test_errors_of_a_kernel_cancel_where_its_scale_is_larger() -> None:
    """Neighbouring inputs are alike, so what counts is the sum of the errors: it is at most half a step, and zeros stay zeros."""
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3)
    weight[:, :, 0], weight[:, :2, 2, 2] = 0, 3  # of two neighbours of 3 the pair does not fit
    quantizer = WeightQuantizer(INT8, 0, 6, PairPacking(9))
    quantizer.pack_(None, weight)
    quantizer.balance_(weight)
    scale = quantizer.qparams(weight)[0].view(-1, 1, 1, 1)
    integers = quantizer.integers(weight).float()
    assert (integers - weight / scale).sum((2, 3)).abs().max() <= 0.5 + 1e-4
    assert ((weight / scale).round() - weight / scale).sum((2, 3)).abs().max() > 0.7
    assert (integers - weight / scale).abs().max() < 1
    assert torch.equal(integers == 0, (weight / scale).round() == 0)
    rows = torch.randn(6, 64)
    rows[:, :2] = 3
    for nonnegative in (True, False):
        quantizer = WeightQuantizer(INT8, 0, 6, PairPacking(nonnegative=nonnegative))
        quantizer.pack_(None, rows)
        quantizer.balance_(rows)
        steps = rows / quantizer.qparams(rows)[0].view(-1, 1)
        assert bool(((quantizer.integers(rows) - steps).sum(1).abs() <= 0.5 + 1e-4).all()) is nonnegative


def test_a_pair_is_made_smaller_at_the_least_squared_error() -> None:
    torch.manual_seed(0)
    exact = torch.rand(40, 2) * 127 * torch.randint(0, 2, (40, 1)).mul(2).sub(1)
    got, changed = PairPacking().fit(exact.round(), exact)
    grid = [p for p in itertools.product(range(-127, 128), repeat=2) if abs(sum(p)) == 128]
    for row, values in zip(got.tolist(), exact.tolist(), strict=True):
        fits = abs(sum(round(v) for v in values)) <= 128
        best = min(grid, key=lambda p: sum((a - b) ** 2 for a, b in zip(p, values, strict=True)))
        least = sum((a - b) ** 2 for a, b in zip([round(v) for v in values] if fits else best, values, strict=True))
        assert abs(sum(row)) <= 128
        assert sum((a - b) ** 2 for a, b in zip(row, values, strict=True)) == pytest.approx(least, rel=1e-4)
    assert len(changed[0][0]) == int((exact.round().sum(1).abs() > 128).sum()) > 0


def test_the_gradient_pushes_no_pair_further_out() -> None:
    weight = torch.tensor([[100.0, 100.0, 5.0, 6.0]], requires_grad=True)
    moved, changed = PairPacking().fit(weight.detach(), weight.detach())
    for sign, wanted in ((-1.0, [1.0, -1.0, -1.0, -3.0]), (1.0, [1.0, 3.0, 1.0, 3.0])):
        (grad,) = torch.autograd.grad(
            FitPairs.apply(weight, moved, changed, 0), weight, sign * torch.tensor([[1.0, 3.0, 1.0, 3.0]])
        )
        assert grad.tolist() == [wanted]


@pytest.mark.parametrize("per_channel", [True, False])
def test_formats_with_a_zero_point_fit_too(per_channel) -> None:
    torch.manual_seed(0)
    scheme = Scheme(signed=True, per_channel=per_channel)
    weight = torch.rand(8, 31) * 2 - torch.linspace(0, 2, 8)[:, None]
    integers = rounded(weight, PairPacking(), scheme).int()
    assert (integers[:, :30].unflatten(1, (-1, 2)).sum(2)).abs().max() <= 128
    assert (rounded(weight, None, scheme).int()[:, :30].unflatten(1, (-1, 2)).sum(2)).abs().max() > 128
    scale, zero_point = WeightQuantizer(scheme, 0, 8, PairPacking()).qparams(weight)
    error = ((integers - zero_point.reshape(-1, 1)) * scale.reshape(-1, 1) - weight).abs() / scale.reshape(-1, 1)
    assert error[1:].max() <= 2  # the first row begins at 0, which has to lie on the grid


def test_only_products_of_unsigned_by_signed_numbers_can_overflow() -> None:
    unsigned, signed = Scheme(), Scheme(signed=True, symmetric=True, narrow=False)
    assert can_overflow(INT8, unsigned)
    assert not can_overflow(replace(INT8, bits=7), unsigned)
    assert not can_overflow(INT8, signed)
    assert not can_overflow(Scheme(per_channel=True), unsigned)
    model = build(networks.Chain)
    for target, guarded in ((ARM, True), (X86_NO_VNNI, False), (UNGUARDED, False)):
        quantized = quantize_static(model, [image(8)], target=target)
        packings = [q.packing for q in quantized.quantizers() if isinstance(q, WeightQuantizer)]
        assert [p is not None for p in packings] == [guarded] * len(packings)


class Uniform(nn.Module):
    """Layers of every packing, with weights of which a quarter of all pairs would overflow."""

    def __init__(self):
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, 9, 7, 2, 3), nn.Conv2d(9, 12, 3, groups=3)
        self.depthwise, self.head = nn.Conv2d(12, 12, 3, groups=12), nn.Linear(12, 7)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4)

    def forward(self, x):
        y = torch.relu(self.depthwise(torch.relu(self.a(torch.relu(self.stem(x))))))
        return self.head(y.mean((2, 3)))


def largest_pair(quantized) -> int:
    """The largest sum of a pair in the order of ONNX Runtime's kernels, of layers that are not depthwise."""
    found = [(q.integers(w), q.packing) for q, w in quantized.rounded_weights()]
    return max(int(np.abs(pairs_of(v.numpy())).max()) for v, packing in found if packing is not None or v.shape[1] > 1)


def test_static_files_have_no_pair_that_overflows(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Uniform().eval(), (torch.randn(4, 3, 32, 32),)
    assert largest_pair(quantize_static(model, x, target=UNGUARDED)) > 128
    quantized = quantize_static(model, x)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    stored = stored_weights(path)  # of the stem, for 2 x 2 pixels at once
    assert sorted(w.shape[1] for w in stored.values()) == [3, 12, 12]
    assert max(np.abs(pairs_of(w)).max() for w in stored.values()) <= 128
    proof = ck.verify_onnx(path, quantized, [x])
    assert proof.passed
    assert proof.optimized.largest <= 1


@pytest.mark.parametrize("learned", [False, True])
def test_training_keeps_pairs_that_fit(learned) -> None:
    torch.manual_seed(0)
    model, x = Uniform().eval(), (torch.randn(4, 3, 16, 16),)
    quantized = prepare_qat(model, x, learned=learned)
    optimizer = torch.optim.SGD(quantized.parameters(), lr=0.02 if learned else 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        quantized(*x).square().mean().neg().backward()
        optimizer.step()
    assert largest_pair(quantized) <= 128
    quantized.convert_()
    assert largest_pair(quantized) <= 128


@pytest.mark.parametrize("learn_", [adaround_, reconstruct_blocks_])
def test_learned_rounding_keeps_pairs_that_fit(learn_) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 16, 16),)
    quantized = quantize_static(Uniform().eval(), x)
    learn_(quantized, x, steps=3, rate=1.0)
    assert largest_pair(quantized) <= 128


def test_a_correction_is_saved_with_the_model(tmp_path) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 3, 16, 16),)
    quantized = quantize_static(Uniform().eval(), x)
    assert any(bool(q.correction.any()) for q, _ in quantized.rounded_weights() if q.correction is not None)
    ck.save(quantized, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(Uniform(), tmp_path)(*x), quantized(*x))
        quantized.calibrate_([x])  # new scales, for which it was not chosen
    assert not any(bool(q.correction.any()) for q, _ in quantized.rounded_weights() if q.correction is not None)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.lstm = nn.Embedding(40, 9), nn.Linear(9, 9), nn.LSTM(9, 8, batch_first=True)
        self.out, self.head = nn.Linear(8, 9), nn.Linear(9, 40, bias=False)
        nn.init.uniform_(self.table.weight, -1, 1)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.out(self.lstm(self.inner(self.table(ids)))[0]))


@pytest.mark.parametrize("weights", [None, Scheme(signed=True), Scheme(signed=True, per_channel=True)])
def test_dynamic_files_have_no_pair_that_overflows(weights, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # each thread of an LSTM finds ranges of its own
    model, ids = Tied().eval(), (torch.randint(0, 40, (3, 5)),)
    quantized = quantize_dynamic(model, ids, weights=weights)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", ids)
    proof = ck.verify_onnx(path, quantized, [ids])
    assert proof.passed
    assert proof.optimized.largest < 0.1
    stored = stored_weights(path)
    assert len(stored) == 3
    assert max(np.abs(pairs_of(w)).max() for w in stored.values()) <= 128
    file = onnx.load(path).graph
    (lstm,) = [node for node in file.node if node.op_type == "DynamicQuantizeLSTM"]
    values = {t.name: numpy_helper.to_array(t) for t in file.initializer}
    for name in lstm.input[1:3]:  # (directions, inputs, 4 * size)
        assert np.abs(pairs_of(values[name][0].T)).max() <= 128


@pytest.mark.parametrize("step", [-1, 1])
def test_a_single_correction_counts(step) -> None:
    """Of one sign alone, and of one weight among many."""
    quantizer = WeightQuantizer(INT8, 0, 4)
    weight = torch.randn(4, 8)
    quantizer.pack_(PairPacking(), weight)
    quantizer.enabled = True
    plain, before = quantizer.integers(weight), quantizer(weight)
    place = divmod(int(plain.abs().argmin()), 8)
    quantizer.correction[place] = step
    changed = quantizer.integers(weight).int() - plain.int()
    assert (changed[place].item(), int(changed.abs().sum())) == (step, 1)
    assert torch.equal((quantizer(weight) != before).nonzero().squeeze(), torch.tensor(place))


def everything_but_values(path) -> tuple[bytes, dict[str, bytes]]:
    """A file without the contents of its weights, biases and scales; and those contents."""
    file = onnx.load(path)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    for tensor in file.graph.initializer:
        zeros = numpy_helper.from_array(np.zeros_like(values[tensor.name]), tensor.name)
        tensor.CopyFrom(zeros)
    return file.SerializeToString(deterministic=True), {name: value.tobytes() for name, value in values.items()}


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_fit_change_nothing_of_a_file_but_values(dynamic, tmp_path) -> None:
    """The same operators, attributes, shapes and types in the same order, as written and as ONNX Runtime fuses them: integer
    kernels do not branch on values, so a file is as fast as one whose weights may overflow."""
    torch.manual_seed(0)
    model = (Tied() if dynamic else Uniform()).eval()
    x = (torch.randint(0, 40, (3, 5)),) if dynamic else (torch.randn(4, 3, 32, 32),)
    quantize = quantize_dynamic if dynamic else quantize_static
    files: dict[str, list[tuple[bytes, dict[str, bytes]]]] = {"as written": [], "fused": []}
    for target in (X86, UNGUARDED):
        path = ck.export_onnx(quantize(model, x, target=target), tmp_path / "q.onnx", x)
        options = ort.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "fused.onnx"), 4
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        files["as written"].append(everything_but_values(path))
        files["fused"].append(everything_but_values(tmp_path / "fused.onnx"))
    for guarded, plain in files.values():
        assert guarded[0] == plain[0]
        differ = {name for name, value in guarded[1].items() if value != plain[1][name]}
        assert differ
        assert differ < set(guarded[1])


def test_a_widened_range_makes_pairs_fit_wherever_the_zero_point_lies() -> None:
    """Both weights of a pair are moved by the zero point: a pair of 0.5 in [-1, 0.5] would be 127 + 127."""
    scheme, packing = Scheme(signed=True, per_channel=True), PairPacking()
    drawn = torch.rand(200, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows = torch.cat([torch.tensor([[0.5, 0.5, -1.0, 0.5]]), drawn])
    ends = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)

    def sums(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        scale, zero = affine(low, high, scheme)
        return packing.sums((rows / scale[:, None]).round() + zero[:, None])[0].abs()

    assert sums(*packing.widen(rows, *ends, scheme)).max() <= 128 + 2  # of two roundings, and that of the zero point
    assert sums(*ends)[0].max() == 254


def test_a_weight_that_also_reads_signed_values_is_balanced_as_of_those() -> None:
    both = PairPacking(nonnegative=True)
    assert both.joined(None).nonnegative
    assert both.joined(both).nonnegative
    assert not both.joined(PairPacking()).nonnegative
