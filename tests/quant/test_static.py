"""The quantized model: what it computes, what it exports, what runs in integers."""

from __future__ import annotations

import copy
import operator
from functools import partial

import networks
import numpy as np
import onnx
import oracles
import pytest
import torch
from networks import NETWORKS, build, image, images_task, trained_like
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.graph.capture import capture
from compresskit.graph.normalize import aten
from compresskit.measure import numpy_inputs, session
from compresskit.quant import X86, Quantized, Target, prepare_qat, quantize_static
from compresskit.quant.numerics.targets import Support
from compresskit.quant.passes.fold_batchnorm import fold_batchnorm_


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_exported_equals_simulated(kind, tmp_path) -> None:
    model = build(kind)
    quantized = quantize_static(model, [image(16) for _ in range(3)])
    x = image(64)
    ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    proof = ck.verify_onnx(tmp_path / "q.onnx", quantized, [x])
    assert proof.passed, proof
    assert proof.plain.largest <= 2.5
    with torch.no_grad():
        wanted, got = model(*x), quantized(*x)
    noise = oracles.sqnr(wanted, got)
    assert noise > 20, f"only {noise:.1f} dB"


@pytest.mark.parametrize(
    "kind", [networks.Chain, networks.Residual, networks.PaddedShortcut, networks.Depthwise, networks.Concat]
)
def test_everything_runs_in_integers(kind, tmp_path) -> None:
    quantized = quantize_static(build(kind), [image(16)])
    ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(tmp_path / "q.onnx")
    assert audit.share == 1.0
    assert audit.floating == ()
    assert all(done == every for done, every in audit.operators.values()), audit
    assert audit.conversions <= 2, audit
    float_audit = ck.audit(ck.export_onnx(build(kind), tmp_path / "f.onnx", image(2)))
    assert float_audit.share == 0
    assert float_audit.macs == audit.macs > 0


def test_weights_are_stored_as_integers(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)])
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    kinds = {}
    for tensor in file.graph.initializer:
        kinds.setdefault(onnx.TensorProto.DataType.Name(tensor.data_type), []).append(int(np.prod(tensor.dims)))
    weights = sum(p.numel() for n, p in quantized.named_parameters() if n.endswith("weight"))
    assert max(kinds["INT8"]) == 32 * 16 * 1 or sum(kinds["INT8"]) >= weights
    assert max(kinds["FLOAT"]) <= 32  # scales only: no dead float copies
    assert len(kinds["INT32"]) == 5  # a bias for each layer
    assert not file.graph.node[0].metadata_props


def test_the_model_is_left_alone() -> None:
    model = build(networks.Residual).train()
    before = copy.deepcopy(model.state_dict())
    quantized = quantize_static(model, [image(16)])
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {p.data_ptr() for p in quantized.parameters()}


def test_folding_equals_numpy() -> None:
    model = build(networks.Chain)
    graph = capture(copy.deepcopy(model), image(2)).module
    assert fold_batchnorm_(graph) == 2
    assert not any(n.target is aten.batch_norm.default for n in graph.graph.nodes)
    conv, norm = model.a[0], model.a[1]
    weight, bias = oracles.fold(conv.weight, None, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
    np.testing.assert_allclose(graph.get_parameter("a.0.weight").detach(), weight, rtol=1e-6)
    np.testing.assert_allclose(graph.get_parameter("a.0.bias").detach(), bias, rtol=1e-5, atol=1e-6)
    x = image(8)
    torch.testing.assert_close(graph(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_folding_a_layer_used_twice() -> None:
    model = build(networks.Twice)
    graph = capture(copy.deepcopy(model), image(2)).module
    fold_batchnorm_(graph)
    x = image(8)
    torch.testing.assert_close(graph(*x), model(*x), atol=1e-5, rtol=1e-4)


def test_placement_prints_and_explains() -> None:
    placement = quantize_static(build(networks.Unknown), [image(16)]).placement
    text = str(placement)
    assert "integer conv" in text
    assert "float: no rule for aten.sort" in text
    assert "a.0" in text


def test_skipped_modules_stay_float(tmp_path) -> None:
    quantized = quantize_static(build(networks.Residual), [image(16)], skip=("inner",))
    assert "skipped by the user" in quantized.placement.floating.values()
    audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    assert 0 < audit.share < 1
    assert len(audit.floating) == 1


def test_a_target_is_one_value() -> None:
    convs = Target(name="CONVS", operators={"conv": Support()})
    quantized = quantize_static(build(networks.Residual), [image(16)], target=convs)
    assert set(quantized.placement.integer.values()) == {"conv"}
    assert "CONVS runs no linear in integers" in quantized.placement.floating.values()
    nothing = Target(name="NOTHING", operators={})
    with pytest.raises(ModelError, match="NOTHING can run none"):
        quantize_static(build(networks.Residual), [image(16)], target=nothing)


def test_relu_is_done_by_the_grid() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    assert not any(n.target is aten.relu.default for n in quantized.body.graph.nodes)
    assert sum(q.clamp == (0.0, None) for q in quantized.activation_quantizers()) == 2
    assert all(q.zero_point == 0 for q in quantized.activation_quantizers() if q.clamp)


def test_hardsigmoid_needs_no_arithmetic(tmp_path) -> None:
    """Its result is the integers of its input, clipped and read with other numbers: a Clip on uint8, no HardSigmoid."""
    model = build(networks.Mobile)
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert "HardSigmoid" not in kinds
    assert "HardSwish" not in kinds
    assert kinds.count("Clip") == 2
    audit = ck.audit(path)
    assert audit.operators["Mul"] == (3, 3)
    assert audit.operators["Sigmoid"] == (1, 1)
    assert audit.conversions == 1
    anchors = [q for q in quantized.activation_quantizers() if q.anchor]
    assert len(anchors) == 2
    for q in anchors:
        steps = 3 / q.scale.item()
        assert steps == pytest.approx(round(steps), abs=1e-4)
        assert round(steps) <= q.zero_point.item() <= 255 - round(steps)
    x = torch.linspace(-5, 5, 101)
    rounded = anchors[0](x)
    from compresskit.quant.numerics.quantizers import DeployedHardSigmoid

    torch.testing.assert_close(DeployedHardSigmoid(anchors[0])(rounded), nn.functional.hardsigmoid(rounded))


def test_linear_layers_of_three_dimensions(tmp_path) -> None:
    model = build(networks.Tokens)
    quantized = quantize_static(model, [image(16)])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    audit = ck.audit(path)
    assert audit.operators["MatMul"] == (3, 3), audit
    assert audit.operators["Gemm"] == (0, 1)  # a last layer of next to no work stays float
    assert audit.floating == ("node_linear",)
    head = model.head.weight.numel()
    assert audit.macs - audit.macs_integer == head
    assert audit.operators["LayerNormalization"] == (0, 1)
    assert audit.operators["Add"][0] == 0  # a residual between float layers gains nothing
    floats = [t for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 2]
    assert [list(t.dims) for t in floats] == [list(model.head.weight.shape)]


def test_concat_shares_a_scale() -> None:
    quantized = quantize_static(build(networks.Concat), [image(16)])
    names = [n.target for n in quantized.body.graph.nodes if n.op == "call_module"]
    concat = next(n for n in quantized.body.graph.nodes if n.target is aten.cat.default)
    assert len({n.target for n in concat.args[0]}) == 1
    assert names.count(concat.args[0][0].target) == 3


def test_qat_learns_what_rounding_broke() -> None:
    """At 2 bits static quantization loses much; training with the rounding in place gets most of it back."""
    model, task = build(networks.Residual), images_task(ck, samples=192, classes=4)
    ck.Train(epochs=20, optimizer=partial(torch.optim.Adam, lr=3e-3))(model, task)
    assert ck.evaluate(model, task) > 0.95
    coarse = Target(
        name="COARSE", operators=X86.operators, weights=ck.quant.Scheme(bits=2, signed=True, symmetric=True, per_channel=True)
    )
    static = ck.StaticQuant(target=coarse)(model, task)
    trained = ck.QAT(epochs=12, target=coarse, optimizer=torch.optim.Adam, objective=ck.imitate())(model, task)
    assert ck.evaluate(trained, task) > max(0.8, ck.evaluate(static, task) + 0.1)


def test_qat_ranges_follow_and_then_hold() -> None:
    quantized = prepare_qat(build(networks.Chain), [image(16)])
    first = quantized.activation_quantizers()[0]
    before = first.scale.clone()
    for _ in range(5):
        quantized(torch.randn(8, 3, 16, 16) * 10)
    moved = first.scale.clone()
    assert moved > before * 1.2
    quantized.observe_(False)
    quantized(torch.randn(8, 3, 16, 16) * 100)
    assert torch.equal(first.scale, moved)


@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.AMP_BF16, ck.mixed.MASTER_BF16], ids=lambda p: p.name)
def test_qat_under_every_precision(policy, tmp_path) -> None:
    task = images_task(ck)
    model = build(networks.Residual)
    quantized = ck.QAT(epochs=1, precision=policy)(model, task)
    assert {v.dtype for v in quantized.state_dict().values()} == {torch.float32, torch.int32}
    ck.export_onnx(quantized, tmp_path / "q.onnx", task.example())
    assert ck.verify_onnx(tmp_path / "q.onnx", quantized, [image(32)]).passed


def test_two_inputs_and_a_dict(tmp_path) -> None:
    model = networks.TwoInputs().eval()
    for example in (
        (torch.randn(4, 3, 16, 16), torch.randn(4, 8)),
        {"numbers": torch.randn(4, 8), "image": torch.randn(4, 3, 16, 16)},
    ):
        quantized = quantize_static(model, [example])
        path = ck.export_onnx(quantized, tmp_path / "q.onnx", example)
        runtime = session(path)
        assert {i.name for i in runtime.get_inputs()} == {"image", "numbers"}
        assert [o.name for o in runtime.get_outputs()] == ["logits", "features"]
        assert runtime.get_inputs()[0].shape[0] == "batch"
        assert ck.verify_onnx(path, quantized, [example]).passed
        big = {"image": torch.randn(9, 3, 16, 16), "numbers": torch.randn(9, 8)}
        assert runtime.run(None, numpy_inputs(runtime, big))[0].shape == (9, 10)


def test_wrong_shape_is_one_clear_error() -> None:
    quantized = quantize_static(build(networks.Chain), [image(16)])
    with pytest.raises(ModelError, match=r"wanted inputs \[\('N', 3, 16, 16\)\], got \[\(2, 3, 8, 8\)\]"):
        quantized(torch.randn(2, 3, 8, 8))


def test_no_batches_and_twice() -> None:
    with pytest.raises(DataError, match="no calibration batch"):
        quantize_static(build(networks.Chain), [])
    quantized = quantize_static(build(networks.Chain), [image(16)])
    with pytest.raises(ModelError, match="quantized already"):
        quantize_static(quantized, [image(16)])


@pytest.mark.parametrize("settings", [{"samples": 0}])
def test_bad_settings(settings) -> None:
    with pytest.raises(SettingError, match=r"StaticQuant\("):
        ck.StaticQuant(**settings)
    with pytest.raises(SettingError, match=r"QAT\("):
        ck.QAT(epochs=1, **settings)
    with pytest.raises(SettingError, match="freeze"):
        ck.QAT(epochs=1, freeze=2)


def test_save_and_load(tmp_path) -> None:
    model = build(networks.Residual)
    quantized = quantize_static(model, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    assert isinstance(again, Quantized)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))
    assert operator.eq(str(again.placement), str(quantized.placement))


def test_pruned_then_quantized_loads(tmp_path) -> None:
    model = build(networks.Residual)
    pruned = copy.deepcopy(model)
    ck.prune.apply_(pruned, ck.prune.plan_channels(pruned, image(2), budget=ck.keep(macs=0.6), round_to=4))
    quantized = quantize_static(pruned, [image(16)])
    ck.save(quantized, tmp_path)
    again = ck.load(networks.Residual(), tmp_path)
    x = image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))


def test_global_pooling_written_by_hand(tmp_path) -> None:
    """x.mean((2, 3)) and adaptive pooling end as one integer kernel."""

    class Head(nn.Module):
        def __init__(self, keep):
            super().__init__()
            self.conv, self.keep, self.head = nn.Conv2d(3, 8, 3), keep, nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3), keepdim=self.keep).flatten(1))

    for keep in (True, False):
        quantized = quantize_static(trained_like(Head(keep), image(16)), [image(16)])
        audit = ck.audit(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
        assert audit.operators["GlobalAveragePool"] == (1, 1)
        assert audit.conversions == 1
