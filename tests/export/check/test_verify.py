"""Verifying ONNX files against their model."""

from __future__ import annotations

import re

import networks
import numpy as np
import onnx
import pytest
import torch
from matrix import some
from networks import build, image
from onnx import numpy_helper
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ExportError, ModelError, SettingError
from compresskit.export.check import agreement, executions, verify
from compresskit.quant import Bits, quantize_dynamic, quantize_static


def test_infinite_and_scalar_outputs_are_compared(tmp_path) -> None:
    class Masked(networks.Chain):
        def forward(self, x):
            y = super().forward(x)
            return y.masked_fill(torch.arange(10) == 3, float("-inf")), y.square().mean()

    model = build(Masked)
    proof = ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", image(2)), model, [image(8), image(8)])
    assert proof.passed, proof
    with pytest.raises(DataError, match="verification data: the model does not run on inputs of shape"):
        ck.verify_onnx(tmp_path / "f.onnx", model, [(torch.randn(2, 5, 8, 8),)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the fast path
@pytest.mark.parametrize("nested", [True, False])
def test_padded_positions_agree_whatever_path_attention_takes(nested, tmp_path) -> None:
    """In eval mode torch's fast path writes zeros there, which the file does not."""
    torch.manual_seed(0)
    model, example = networks.PaddedEncoder(nested).eval(), networks.padded_tokens()
    path = ck.export_onnx(model, tmp_path / "f.onnx", example, dynamic=(0, 1))
    batches = [example, networks.padded_tokens(3, 6, longest=6), networks.padded_tokens(4, 9, longest=7)]
    assert ck.verify_onnx(path, model, batches).passed
    run = ck.measure.session(path)
    for x, padded in batches:
        (got,) = run.run(None, {"x": x.numpy(), "padded": padded.numpy()})
        with torch.no_grad():
            wanted = model(x, padded)  # as users run it
        torch.testing.assert_close(torch.from_numpy(got)[~padded], wanted[~padded])


def test_one_wrong_output_among_many_is_refused(tmp_path) -> None:
    import onnx
    from onnx import numpy_helper

    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 50)).eval()
    quantized = quantize_static(model, [image(64)])
    file = onnx.load(ck.export_onnx(quantized, tmp_path / "q.onnx", image(2)))
    tensor = [t for t in file.graph.initializer if "bias" in t.name and t.data_type == onnx.TensorProto.INT32][-1]
    values = numpy_helper.to_array(tensor).copy()
    values[7] += values.max() * 100 + 10**6
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, tmp_path / "bad.onnx")
    assert not ck.verify_onnx(tmp_path / "bad.onnx", quantized, [image(64)]).passed


def damaged(path, out, name):
    """A copy of the file in which the rows of one initializer are turned around."""
    file = onnx.load(path)
    tensor = next(t for t in file.graph.initializer if name in t.name)
    values = numpy_helper.to_array(tensor)[::-1].copy()
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(file, out)
    return out


def test_a_wrong_float_file_is_refused_and_the_layer_named(tmp_path) -> None:
    model = build(networks.Residual)
    good = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    proof = ck.verify_onnx(damaged(good, tmp_path / "bad.onnx", "out.weight"), model, [image(16)])
    assert not proof.passed
    assert "the largest error is" in proof.reason
    assert "the first layer that differs is out " in proof.reason
    assert "DISAGREES" in str(proof)
    assert proof.to_json()["passed"] is False


def test_a_wrong_int8_file_is_refused(tmp_path) -> None:
    quantized = ck.quant.quantize_static(build(networks.Residual), [image(16)])
    good = ck.export_onnx(quantized, tmp_path / "q.onnx", image(2))
    proof = ck.verify_onnx(damaged(good, tmp_path / "bad.onnx", "inner_0_weight"), quantized, [image(32)])
    assert not proof.passed
    assert "inner" in proof.reason


def test_a_file_with_other_outputs_is_refused(tmp_path) -> None:
    path = ck.export_onnx(build(networks.Chain), tmp_path / "f.onnx", image(2))
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ExportError, match=r"output of shape \(4, 10\) where the model gives \(4, 7\)"):
        ck.verify_onnx(path, other, [image(4)])


def test_files_that_do_not_load_are_refused(tmp_path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"not a model")
    model = build(networks.Chain)
    with pytest.raises(ExportError, match=r"x\.onnx: ONNX Runtime cannot load it"):
        ck.verify_onnx(path, model, [image(2)])
    with pytest.raises(ExportError, match="cannot load it"):
        ck.audit(path)
    good = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    with pytest.raises(DataError, match="no batch was given"):
        ck.verify_onnx(good, model, [])


def test_errors_are_counted_in_steps() -> None:
    from compresskit.export.check.agreement import compare

    wanted = np.linspace(0, 255, 256, dtype=np.float32).reshape(-1, 1)
    level = compare([wanted], [wanted + np.where(np.arange(256) % 4 == 0, 1.5, 0.5).reshape(-1, 1)])
    assert level.agreement is None
    assert level.within_one == 0.75
    assert level.within_two == 1.0
    assert level.largest == pytest.approx(1.5)
    assert compare([wanted], [wanted * np.nan]).largest == np.inf


def test_values_that_are_not_finite_agree_at_the_same_places() -> None:
    wanted = np.array([[1.0, np.nan], [np.inf, -np.inf]], np.float32)
    level = agreement.compare([wanted], [wanted.copy()])
    assert (level.largest, level.within_one, level.not_finite) == (0, 1, 0.75)
    for other in (np.nan, -np.inf, np.inf, 2.0):
        if other != wanted[1, 0]:
            moved = wanted.copy()
            moved[1, 0] = other
            assert agreement.compare([wanted], [moved]).largest == np.inf
    moved = wanted.copy()
    moved[0, 0] = np.nan
    assert agreement.compare([wanted], [moved]).largest == np.inf
    half = np.array([[-60000.0], [60000.0]], np.float16)  # its range is no number of that precision
    assert agreement.compare([half], [np.flip(half, 0)]).largest == pytest.approx(255)


def test_a_model_without_a_finite_output_is_no_proof(tmp_path) -> None:
    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)

    path, x = ck.export_onnx(Log(), tmp_path / "f.onnx", (torch.ones(2, 8),)), torch.ones(2, 8)
    proof = ck.verify_onnx(path, Log(), [torch.cat([x, -x])])
    assert proof.passed
    assert "  not finite: 50.00% of the values are NaN or infinite, at the same places in both" in str(proof).splitlines()
    proof = ck.verify_onnx(path, Log(), [-x])
    assert proof.reason == "as written: no output value is finite, so nothing was compared"
    assert str(proof).startswith("cannot be compared with its model on 2 samples as written: no output value is finite")
    assert "same class" not in str(proof)
    assert "differs" not in proof.reason


class Share(nn.Module):
    """Each row by its sum, with a small number or without; may be a model that takes no zeros."""

    def __init__(self, small: float, positive: bool = False) -> None:
        super().__init__()
        self.small, self.positive = small, positive

    def forward(self, x):
        if self.positive and not torch.compiler.is_exporting() and bool((x == 0).all()):
            raise ValueError("nothing to share")
        return x / (x.sum(1, keepdim=True) + self.small)


def test_a_file_that_fails_on_zeros_alone_is_refused(tmp_path) -> None:
    x = torch.rand(4, 3) + 1
    path = ck.export_onnx(Share(0.0), tmp_path / "f.onnx", (x,))
    found = ck.verify_onnx(path, Share(1e-8), [(x,)])
    assert found.reason == "as written: on inputs of zeros, output 0 is NaN or infinite where the model gives a number"
    assert found.plain.largest < 0.1
    assert ck.verify_onnx(path, Share(0.0), [(x,)]).passed
    assert ck.verify_onnx(path, Share(1e-8, positive=True), [(x,)]).passed


class Detector(nn.Module):
    """Boxes of some hundred pixels, and scores between 0 and 1: two outputs, or one."""

    def __init__(self, joined: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.joined, self.scale = joined, scale
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        y = self.body(x)
        boxes, scores = self.boxes(y) * 100 + 320, self.scores(y).sigmoid() * self.scale
        return torch.cat([boxes, scores], 1).flatten(2) if self.joined else (boxes, scores)


@pytest.mark.parametrize("joined", [False, True])
def test_small_outputs_beside_large_ones_are_compared_in_a_float_file(joined, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 16, 16)
    models = [Detector(joined), Detector(joined, scale=0.8)]
    models[1].load_state_dict(models[0].state_dict())
    path = ck.export_onnx(models[0], tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, models[0], [(x,)]).passed
    found = ck.verify_onnx(path, models[1], [(x,)])
    where = "as written: entry [456] of dimension 1" if joined else "as written, output 1"
    assert re.match(f"{where}: the largest error is", found.reason)
    assert found.plain.within_one == 1 or not joined


@pytest.mark.parametrize("joined", [False, True])
def test_small_outputs_beside_large_ones_are_compared_in_a_quantized_file(joined, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 3, 16, 16)
    quantized = ck.quant.quantize_static(Detector(joined).eval(), [(x,)])
    path = ck.export_onnx(quantized, tmp_path / "f.onnx", (x,))
    assert ck.verify_onnx(path, quantized, [(x,)]).passed
    proto = onnx.load(path)
    graph, at = proto.graph, next(i for i, node in enumerate(proto.graph.node) if node.op_type == "Sigmoid")
    sigmoid = graph.node[at]
    name, sigmoid.output[0] = sigmoid.output[0], "right"
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.7), "factor"))
    graph.node.insert(at + 1, onnx.helper.make_node("Mul", ["right", "factor"], [name]))
    onnx.save(proto, path)
    found = ck.verify_onnx(path, quantized, [(x,)])
    where = "as written: entry [456] of dimension 1 is .* times as far" if joined else "as written, output 1: "
    assert re.match(where, found.reason)


class Filled(networks.Chain):
    """Writes a large number over the outputs of one class, and over some of one image."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, x):
        masked = (torch.arange(10) == 3) | ((torch.arange(10) > 6) & (x[:, :1, 0, 0] > 0))
        return super().forward(x).masked_fill(masked, self.fill)


@pytest.mark.parametrize("fill", some([-1e4, -1e9, -float("inf"), torch.finfo(torch.float32).min]))
def test_numbers_that_are_filled_in_hide_nothing(fill, tmp_path) -> None:
    torch.manual_seed(0)
    model, other, x = Filled(fill).eval(), Filled(fill).eval(), image(32)
    path = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    assert ck.verify_onnx(path, model, [x]).passed
    proof = ck.verify_onnx(path, other, [x])
    assert not proof.passed
    assert proof.optimized.within_two < 0.5
    quantized, near = quantize_static(model, [x]), quantize_static(other, [x])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert not ck.verify_onnx(path, near, [x]).passed


def test_only_a_few_equal_numbers_far_from_all_others_are_fills() -> None:
    fills = agreement.fills_as_infinity
    a = np.array([0.5, -2.0, -1e9, -1e30, 3.0, np.nan])
    np.testing.assert_array_equal(fills(a, a)[0], [0.5, -2, -np.inf, -np.inf, 3, np.nan])
    b = a.copy()
    b[2] = -1.1e9
    np.testing.assert_array_equal(fills(a, b)[1], [0.5, -2, -1.1e9, -np.inf, 3, np.nan])  # not the same in both
    for values in (np.full(4, 5000.0), np.array([1e6, 1e5, 1.0]), np.array([500.0, 0.1]), 1e6 + np.arange(20.0), np.zeros(0)):
        assert fills(values, values)[0] is values
    numbers = np.array([1_000_000, 3])
    assert fills(numbers, numbers)[0] is numbers


def test_only_numbers_are_compared() -> None:
    yes = np.array([[True, False]])
    assert agreement.compare([yes], [yes]).largest == 0
    assert agreement.compare([yes], [~yes]).within_two == 0
    with pytest.raises(ExportError, match="an output holds object; only numbers and truth values are compared"):
        agreement.compare([np.array(["a"], object)], [np.array(["a"], object)])
    with pytest.raises(
        DataError, match=r"the outputs hold no values to compare, got shapes \[\(0, 4\)\]; give inputs with at least"
    ):
        agreement.compare([np.zeros((0, 4))], [np.zeros((0, 4))])


def test_coarse_weights_hide_no_lost_channel(tmp_path) -> None:
    """The rounding of 4-bit weights is the same in every right execution, and excuses nothing."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)).eval(), torch.randn(64, 3, 12, 12)
    quantized = quantize_static(model, [x], bits=Bits(weights=4))
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    file = onnx.load(path)
    weights = [t for t in file.graph.initializer if len(t.dims) == 4 and t.dims[1] == 16]
    values = numpy_helper.to_array(weights[0]).copy()
    values[3] = 0
    weights[0].CopyFrom(numpy_helper.from_array(values, weights[0].name))
    onnx.save(file, tmp_path / "lost.onnx")
    lost = ck.verify_onnx(tmp_path / "lost.onnx", quantized, [x])
    assert not lost.passed, lost


def test_a_model_whose_quantizers_are_off_is_not_compared(tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(64, 8)
    quantized = quantize_static(model, [x])
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", x)
    quantized.enable_(False)
    with pytest.raises(ModelError, match=r"verify_onnx: quantized Sequential: \d of its \d quantizers are switched off.*enable_"):
        ck.verify_onnx(path, quantized, [x])
    with pytest.raises(ModelError, match="export: quantized Sequential: .* quantizers are switched off"):
        ck.export_onnx(quantized, tmp_path / "off.onnx", x)
    assert not (tmp_path / "off.onnx").exists()


def test_a_file_that_draws_other_random_numbers_is_refused(tmp_path) -> None:
    """It is as far from the unrounded model as the simulation is, and that is no proof."""

    class Noise(nn.Module):
        def forward(self, x):
            return x * torch.bernoulli(torch.full_like(x, 0.5))

    x = torch.randn(64, 8)
    quantized = quantize_static(nn.Sequential(nn.Linear(8, 8), Noise()).eval(), [(x,)])
    proof = ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)), quantized, [(x,)])
    assert "the model draws random numbers" in proof.reason


def test_closeness_to_the_unrounded_model_is_no_proof_where_rounding_destroys_the_outputs() -> None:
    from compresskit.export.check.agreement import usable_reference

    exact = [np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)]
    assert usable_reference([exact[0] + 0.1], exact) is exact
    assert usable_reference([exact[0][::-1]], exact) is None
    assert usable_reference([exact[0][:7]], exact) is None


def test_an_output_whose_length_rounding_changes_is_verified(tmp_path) -> None:
    class Positive(nn.Module):
        def forward(self, x):
            return x[x > 0]

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    quantized = quantize_static(nn.Sequential(nn.Linear(8, 8), Positive()).eval(), [(x,)])
    path, wanted = ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)), len(quantized(x))
    quantized.enable_(False)
    assert len(quantized(x)) != wanted
    quantized.enable_(True)
    assert ck.verify_onnx(path, quantized, [(x,)]).passed


def test_ties_between_classes_do_not_refuse_a_weight_only_file(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 3).eval()
    torch.manual_seed(1)
    x = torch.randn(5, 5, 16)
    scheme = ck.quant.BlockScheme(bits=4, block_size=16)
    quantized = ck.quant.quantize_weights(model, (x,), scheme=scheme)
    proof = ck.verify_onnx(ck.export_onnx(quantized, tmp_path / "q.onnx", (x,)), quantized, [(x,)])
    assert proof.passed, proof
    assert proof.optimized.noise is None


@pytest.mark.parametrize(("noise", "exact", "passes"), [(0.045, True, True), (0.1, True, False), (0.045, False, False)])
def test_kernels_that_round_activations_may_be_as_far_as_rounding_is(noise, exact, passes) -> None:
    """Of a file with rounded weights alone, which as it is written has to be exact."""
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=(500, 1))
    rounded = wanted + noise * rng.normal(size=wanted.shape)
    found = executions.Comparison(quantized=True, weight_only=True, most_of_floats=0.1, most_of_integers=16)
    executed = {"as written": [wanted if exact else rounded], "optimized": [rounded]}
    found.add([wanted], executed, unrounded=None, samples=500)
    assert found.levels()["optimized"].within_two < 0.9
    assert (not found.reason) is passes, found.reason


def test_classes_within_two_steps_are_ties() -> None:
    from compresskit.export.check.agreement import compare

    wanted = np.array([[0, 255, 254], [0, 255, 200], [0, 10, 5]], dtype=np.float32)
    got = np.array([[0, 254, 255], [0, 200, 255], [0, 10, 5]], dtype=np.float32)
    level = compare([wanted], [got])
    assert level.agreement == pytest.approx(1 / 3)
    assert level.flips == pytest.approx(1 / 3)
    steps = compare([np.stack([wanted, wanted])], [np.stack([got, wanted])])
    assert steps.agreement == pytest.approx(4 / 6)  # of a sequence, the classes are the last dimension


def test_the_unrounded_model_runs_on_as_many_samples_as_its_error_needs(tmp_path, monkeypatch) -> None:
    model, x = build(networks.Residual), image(32)
    quantized = quantize_static(model, [x])
    path, rows, unrounded = ck.export_onnx(quantized, tmp_path / "q.onnx", x), [], verify._unrounded
    monkeypatch.setattr(verify, "_unrounded", lambda q, inputs: (rows.append(len(inputs[0])), unrounded(q, inputs))[1])
    monkeypatch.setattr(executions, "UNROUNDED_SAMPLES", 10)
    batches = [image(8) for _ in range(4)]
    some, few = (ck.verify_onnx(path, quantized, part) for part in (batches, batches[:2]))
    assert rows == [8, 8, 8, 8]  # two batches of each
    assert (some.samples, few.samples) == (32, 16)
    assert some.optimized.noise == few.optimized.noise is not None
    assert some.optimized.excess == few.optimized.excess


class Shifted(networks.Chain):
    """Gives something else for bright images."""

    def forward(self, x):
        return super().forward(x) + (x.mean((1, 2, 3)) - 50).relu()[:, None]


@pytest.mark.parametrize("quantized", [False, True])
def test_outputs_of_a_large_set_are_judged_in_pieces(quantized, tmp_path, monkeypatch) -> None:
    """So that they need not be held; what is only in the last of them is seen."""
    model, batches = build(networks.Chain), [image(8) for _ in range(5)]
    model = quantize_static(model, batches) if quantized else model
    path = ck.export_onnx(model, tmp_path / "f.onnx", image(2))
    whole = ck.verify_onnx(path, model, batches)
    held, judged = [], executions.Execution
    monkeypatch.setattr(executions, "HELD", 160)
    monkeypatch.setattr(executions, "Execution", lambda **known: (held.append(len(known["got"][0][0])), judged(**known))[1])
    pieces = ck.verify_onnx(path, model, batches)
    assert held == [16, 16, 16, 16, 8, 8]
    assert pieces.passed
    assert pieces.samples == whole.samples == 40
    assert pieces.optimized.agreement == whole.optimized.agreement
    assert pieces.optimized.within_one == pytest.approx(whole.optimized.within_one, abs=0.05)
    assert (pieces.optimized.noise is None) is (not quantized)
    if not quantized:
        other = Shifted()
        other.load_state_dict(model.state_dict())
        bright = (batches[-1][0] + 100,)
        assert ck.verify_onnx(path, other.eval(), batches).passed
        assert not ck.verify_onnx(path, other.eval(), [*batches[:-1], bright]).passed


def test_files_run_on_as_many_threads_as_torch(tmp_path, monkeypatch) -> None:
    model, threads, session = build(networks.Chain), [], verify.session
    monkeypatch.setattr(
        verify, "session", lambda *args, **settings: (threads.append(settings["threads"]), session(*args, **settings))[1]
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert ck.verify_onnx(ck.export_onnx(model, tmp_path / "f.onnx", image(2)), model, [image(4)]).passed
    assert threads == [3, 3]


def test_a_quantized_lstm_is_compared_on_one_thread_too(tmp_path, monkeypatch) -> None:
    """Since each thread of ONNX Runtime finds the ranges of its own part of a batch."""
    model, inputs = nn.Sequential(nn.Embedding(40, 16), nn.LSTM(16, 24, batch_first=True)), torch.randint(0, 40, (7, 5))
    quantized = quantize_dynamic(model, inputs)
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", inputs)
    for count in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        proof = ck.verify_onnx(path, quantized, [inputs])
        assert proof.passed
        assert proof.plain.largest < 1e-3
        assert proof.optimized.largest < (1e-3 if count == 1 else 4)


def test_arguments_of_another_kind_are_refused(tmp_path) -> None:
    model, x = nn.Linear(8, 4).eval(), torch.randn(4, 8)
    path = ck.export_onnx(model, tmp_path / "f.onnx", x)
    with pytest.raises(SettingError, match=r"verify_onnx\(path=...\): wanted a path, got Linear; write verify_onnx\(path, mod"):
        ck.verify_onnx(model, path, [x])
    with pytest.raises(ModelError, match=r"verify_onnx: wanted a torch\.nn\.Module as the model, got str"):
        ck.verify_onnx(path, "model", [x])
    with pytest.raises(SettingError, match=r"verify_onnx\(executed=...\): wanted a function of the outputs, got 'a'"):
        ck.verify_onnx(path, model, [x], executed="a")
    with pytest.raises(DataError, match=r"the first batch: wanted one row at least, got inputs of shape \[\(0, 8\)\]; leave"):
        ck.verify_onnx(path, model, [x[:0], x])
    assert ck.verify_onnx(path, model, [x, x[:0]]).passed
