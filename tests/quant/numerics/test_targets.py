"""Targets: their numbers and rules, exported and executed; what a target cannot express; saturation without VNNI."""

from __future__ import annotations

from dataclasses import replace

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import build, image
from torch import fx

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.graph.normalize import aten
from compresskit.quant import ARM, OPENVINO, X86, Scheme, Target, quantize_static
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.targets import TENSORRT, X86_NO_VNNI, Support, check_target, saturating_matmul

TARGETS = [X86, X86_NO_VNNI, ARM, TENSORRT, OPENVINO]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [networks.Residual, networks.Concat], ids=lambda k: k.__name__)
@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_target_exports_and_agrees(target, kind, tmp_path) -> None:
    model, x = build(kind), image(48)
    quantized = quantize_static(model, [image(16) for _ in range(3)], target=target)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2), opset=target.opset)
    proof = ck.verify_onnx(path, quantized, [x])
    assert proof.passed, proof
    assert proof.plain.largest <= 2.5
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 20
    file = onnx.load(path)
    assert file.opset_import[0].version == target.opset
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in file.graph.initializer}
    weights = [v for v in stored.values() if v.dtype == np.int8 and v.ndim >= 2]
    largest = max(np.abs(v.astype(int)).max() for v in weights)
    assert 2 ** (target.weights.bits - 2) <= largest <= 2 ** (target.weights.bits - 1) - 1
    rounding = [node for node in file.graph.node if node.op_type == "QuantizeLinear"]
    zero_points = [stored[node.input[2]] for node in rounding]
    assert {z.dtype for z in zero_points} == {np.dtype("int8" if target.activations.signed else "uint8")}
    if not target.zero_points:
        assert not any(z.any() for z in zero_points)


def quantizer_before(quantized, node: fx.Node, index: int) -> ActivationQuantizer | None:
    value = node.args[index]
    module = quantized.body.get_submodule(value.target) if value.op == "call_module" else None
    return module if isinstance(module, ActivationQuantizer) else None


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_a_sum_with_a_shortcut_is_quantized_as_the_target_fuses_it(target) -> None:
    """Only where a runtime adds inside the convolution's kernel does one operand arrive unrounded."""
    quantized = quantize_static(build(networks.Residual), [image(16)], target=target)
    add = next(n for n in quantized.body.graph.nodes if n.target is aten.add.Tensor)
    rounded = [quantizer_before(quantized, add, i) is not None for i in (0, 1)]
    assert rounded == ([False, True] if target in (TENSORRT, OPENVINO) else [True, True])
    kept = any(n.target is aten.relu.default for n in quantized.body.graph.nodes)
    assert kept == (target is TENSORRT)  # a symmetric grid does not end at 0, so Relu has work to do


def test_pooling_shares_its_scale_where_the_target_says_so() -> None:
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.pool, self.b = torch.nn.Conv2d(3, 8, 3), torch.nn.AvgPool2d(2), torch.nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return self.b(self.pool(self.a(x)))

    model = build(Pooled)
    for target, same in ((X86, False), (ARM, True)):
        quantized = quantize_static(model, [image(16)], target=target)
        pool = next(n for n in quantized.body.graph.nodes if n.target is aten.avg_pool2d.default)
        behind = next(iter(pool.users))
        assert (behind.target == pool.args[0].target) is same


def test_a_kind_without_axis_has_one_scale_per_weight() -> None:
    per_tensor = replace(X86, name="MINE", operators={**X86.operators, "linear": Support(output=False, axis=None)})
    quantized = quantize_static(build(networks.Residual), [image(16)], target=per_tensor)
    shapes = {name: q.scale.ndim for name, q in quantized.body.quantizers.named_children() if isinstance(q, WeightQuantizer)}
    assert shapes["weight_head_weight"] == 0
    assert shapes["weight_out_weight"] == 1


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("fbgemm", r"write target=quant\.targets\.X86"),
        ("x86", r"write target=quant\.targets\.X86"),
        ("QNNPACK", r"write target=quant\.targets\.ARM"),
        ("openvino", r"write target=quant\.targets\.OPENVINO"),
        (
            "tpu",
            r"the targets are quant\.targets\.X86, quant\.targets\.X86_NO_VNNI, .* quant\.targets\.OPENVINO",
        ),
        (
            "CoreML",
            "'CoreML' is no target of this library: Core ML reads no ONNX file .* convert the float model with coremltools",
        ),
        ("tflite", "'tflite' is no target of this library: TFLite reads no ONNX file"),
        (None, "wanted a quant.Target, got None"),
    ],
)
def test_what_is_no_target_is_refused(given, hint) -> None:
    for refused in (
        lambda: check_target(given, "here"),
        lambda: quantize_static(build(networks.Chain), [image(4)], target=given),
        lambda: ck.quant.prepare_qat(build(networks.Chain), [image(4)], target=given),
        lambda: ck.quant.quantize_dynamic(build(networks.Chain), [image(4)], target=given),
        lambda: ck.quant.quantize_to_accuracy(build(networks.Chain), [image(4)], target=given, sqnr=30),
        lambda: ck.StaticQuant(target=given),
        lambda: ck.DynamicQuant(target=given),
        lambda: ck.QAT(epochs=1, target=given),
    ):
        with pytest.raises(SettingError, match=rf"\(target=\.\.\.\): .*{hint}"):
            refused()


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (TENSORRT, {"activations": replace(TENSORRT.activations, bits=4)}, r"TENSORRT: activations.bits must be 8, got 4"),
        (X86, {"weights": replace(X86.weights, bits=9)}, r"X86: weights.bits must be 2..8, got 9"),
        (X86, {"activations": Scheme(per_channel=True)}, r"activations.per_channel must be False, got True"),
        (X86, {"activations": Scheme(signed=True, symmetric=True)}, r"activations.narrow must be False"),
        (X86, {"weights": Scheme(signed=True)}, r"weights.symmetric must be True, got False"),
        (TENSORRT, {"activations": Scheme()}, r"TENSORRT: activations.symmetric must be True, got False"),
    ],
)
def test_formats_that_a_target_cannot_express_are_refused(base, fields, message) -> None:
    with pytest.raises(SettingError, match=message):
        replace(base, **fields)


def test_a_target_of_the_users_is_saved_and_loaded(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)], target=TENSORRT)
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))
    assert again.target == TENSORRT
    assert isinstance(again.target, Target)


def by_hand(x, weight):
    """vpmaddubsw and vpaddd on python integers."""
    total = 0
    for k in range(0, len(x), 2):
        pair = sum(int(a) * int(b) for a, b in zip(x[k : k + 2], weight[k : k + 2], strict=True))
        total += max(-(2**15), min(2**15 - 1, pair))
    return total


@pytest.mark.parametrize("size", [8, 9])
def test_saturating_matmul_saturates_pairs_of_products(size) -> None:
    x = torch.randint(0, 256, (5, size), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (4, size), dtype=torch.int8)
    x[0], weight[0], weight[1] = 255, 127, -127
    got = saturating_matmul(x, weight)
    assert got.tolist() == [[by_hand(row, column) for column in weight.tolist()] for row in x.tolist()]
    exact = x.long() @ weight.long().T
    assert got[0, 0] < exact[0, 0]
    assert got[0, 1] > exact[0, 1]
    seven = weight.clamp(-63, 63)
    assert torch.equal(saturating_matmul(x, seven).long(), x.long() @ seven.long().T)
    with pytest.raises(DataError, match="wanted uint8"):
        saturating_matmul(x.int(), weight)


class Gated(torch.nn.Module):
    """A convolution whose result is read at two places, both of which compute in float."""

    def __init__(self, gate):
        super().__init__()
        self.a, self.b, self.gate = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.Conv2d(8, 4, 1), gate

    def forward(self, x):
        return self.b(self.gate(self.a(x)))


GATES = {
    "hardswish": torch.nn.functional.hardswish,
    "silu": torch.nn.functional.silu,
    "square": lambda a: a * a,
    "tanh": lambda a: 2 * a * torch.tanh(2 * a),
    "moved": lambda a: (lambda rows: rows * torch.tanh(rows))(a.flatten(2)).unflatten(2, (14, 14)),
    "scaled": lambda a: torch.add(a, torch.sigmoid(a), alpha=2.5) + 0.5 * a,
}


@pytest.mark.parametrize("gate", GATES)
def test_a_convolution_that_is_read_twice_is_rounded_for_openvino(gate, tmp_path) -> None:
    """OpenVINO gives one of the readers sums without their scale where the convolution has no bias."""
    model, x = build(lambda: Gated(GATES[gate])), image(4)
    quantized = quantize_static(model, [x], target=OPENVINO)
    conv = next(n for n in quantized.body.graph.nodes if n.target is aten.conv2d.default)
    (reader,) = conv.users
    assert isinstance(quantized.body.get_submodule(reader.target), ActivationQuantizer)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    try:
        import openvino
    except ImportError:
        return
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    wanted = quantized(*x).detach().numpy()
    assert np.abs(compiled([v.numpy() for v in x])[0] - wanted).max() <= 2 * np.ptp(wanted) / 255


def test_an_opset_that_cannot_be_exported_is_refused() -> None:
    with pytest.raises(SettingError, match=r"X86: opset must be 13\.\.25, got 12"):
        replace(X86, opset=12)
