"""Training with the rounding in place: live BatchNorm, learned steps, the default objective, ranks, masks, precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial

import networks
import onnx
import oracles
import pytest
import qat_ranks
import rank_pairs
import torch
from networks import NETWORKS, build, image, images_task
from safetensors.torch import load_file
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.quant import X86, Bits, Scheme, prepare_qat, quantize_static
from compresskit.quant.numerics.observers import OBSERVERS
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.numerics.scheme import affine, fake_quantize
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers
from compresskit.train.objective import Supervised

SCHEMES = [
    Scheme(),
    Scheme(signed=True),
    Scheme(signed=True, symmetric=True),
    Scheme(bits=4),
    Scheme(bits=2, signed=True, symmetric=True),
]


def test_a_prepared_model_computes_what_static_quantization_does(monkeypatch) -> None:
    """BatchNorm alive and settled: the same numbers as folded, bit for bit, in eval mode, before scales move off ties."""
    monkeypatch.setattr("compresskit.quant.static.nudge_scales_", lambda body: None)
    monkeypatch.setattr(
        "compresskit.quant.model.Quantized.balance_weights_", lambda self: None
    )  # training makes up for errors itself
    model, x = build(networks.Residual), image(8)
    static = quantize_static(model, [image(16)])
    torch.manual_seed(0)
    for kind in (networks.Residual, networks.Depthwise, networks.Concat, networks.Mobile):
        torch.manual_seed(0)
        model, calibration = build(kind), [image(16)]
        static, alive = quantize_static(model, calibration), prepare_qat(model, calibration).eval()
        alive.observe_(False)
        assert conv_bn_layers(alive.body)
        with torch.no_grad():
            assert torch.equal(static(*x), alive(*x))
            settled = alive.converted()
            assert torch.equal(static(*x), settled(*x))
        assert static.state_dict().keys() == settled.state_dict().keys()
        assert conv_bn_layers(alive.body)  # the copy was settled, not this one


def test_unfolded_batchnorm_computes_what_batchnorm_does() -> None:
    """With the rounding off, outputs, gradients and running statistics are those of the float model in train mode."""
    model, x = build(networks.Residual), image(16)
    alive, plain = prepare_qat(model, [x]), copy.deepcopy(model).train()
    alive.observe_(False)
    alive.enable_(False)
    got, wanted = alive(*x), plain(*x)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    got.square().sum().backward()
    wanted.square().sum().backward()
    mine = {n.removeprefix("body."): p for n, p in alive.named_parameters()}
    assert mine.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine[name].grad, parameter.grad, atol=1e-4, rtol=1e-3)
    for name, buffer in plain.named_buffers():
        if "running" in name:
            torch.testing.assert_close(alive.body.state_dict()[name], buffer, atol=1e-6, rtol=1e-4)


def test_weights_are_rounded_as_they_will_be_folded() -> None:
    """In train mode the convolution multiplies with grid points of W k, k from the running statistics."""
    model, x = build(networks.Chain), image(16)
    alive = prepare_qat(model, [x], target=replace(X86, saturates=False))
    seen = []
    layer = alive.body.get_submodule("a.1")
    operator = layer.operator
    layer.operator = lambda x, weight, *rest: seen.append(weight) or operator(x, weight, *rest)
    conv, norm = model.a[0], model.a[1]
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    alive(*x)
    folded = (conv.weight * factor.view(-1, 1, 1, 1)).detach()
    scale = folded.flatten(1).abs().amax(1) / 127
    steps = seen[0] / scale.view(-1, 1, 1, 1)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert (steps.round() - folded / scale.view(-1, 1, 1, 1)).abs().max() <= 0.501


def test_frozen_statistics_do_not_change() -> None:
    alive = prepare_qat(build(networks.Chain), [image(16)])
    before = {n: b.clone() for n, b in alive.named_buffers()}
    alive(*image(16))
    moved = [n for n, b in alive.named_buffers() if not torch.equal(b, before[n])]
    assert any("running_mean" in n for n in moved)
    assert any(n.endswith("scale") for n in moved)
    alive.freeze_statistics_()
    before = {n: b.clone() for n, b in alive.named_buffers()}
    y = alive(torch.randn(8, 3, 16, 16) * 9)
    assert all(torch.equal(b, before[n]) for n, b in alive.named_buffers())
    y.sum().backward()
    assert all(p.grad is not None for p in alive.parameters())
    alive.eval()
    with torch.no_grad():  # held still, train mode is eval mode
        x = image(8)
        evaluated = alive(*x)
        assert torch.equal(alive.train()(*x), evaluated)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("per_channel", [False, True])
def test_fake_quantization_equals_torchs(scheme, per_channel) -> None:
    x = torch.randn(5, 4, 40, requires_grad=True)
    bounds = x.detach().movedim(1, 0).flatten(1)
    low, high = (bounds.amin(1) * 0.3, bounds.amax(1) * 0.3) if per_channel else (bounds.min() * 0.3, bounds.max() * 0.3)
    scale, zero_point = affine(low, high, scheme)
    got = fake_quantize(x, scale, zero_point, scheme, 1)
    got.backward(torch.ones_like(got))
    mine, x.grad = x.grad, None
    if per_channel:
        wanted = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 1, scheme.low, scheme.high)
    else:
        wanted = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, scheme.low, scheme.high)
    wanted.backward(torch.ones_like(got))
    assert torch.equal(got, wanted)
    assert torch.equal(mine, x.grad)
    assert 0 < mine.mean() < 1


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.bits != 2], ids=repr)
def test_the_gradient_of_a_learned_scale(scheme) -> None:
    """Equation 3 of 1902.08153, one value at a time, and torch's own learnable kernel."""
    x, grad = torch.randn(300), torch.randn(300)
    scale, zero_point = affine(x.min() * 0.6, x.max() * 0.6, scheme)
    learned = scale.clone().requires_grad_()
    fake_quantize(x, learned, zero_point, scheme, gradient_scale=0.25).backward(grad)
    wanted, z = 0.0, int(zero_point)
    for value, g in zip((x / scale).tolist(), grad.tolist(), strict=True):
        low, high = scheme.low - z, scheme.high - z
        slope = low if value <= low - 0.5 else high if value >= high + 0.5 else round(value) - value
        wanted += 0.25 * g * slope
    assert learned.grad.item() == pytest.approx(wanted, rel=1e-3)
    if z:
        return  # torch's kernel adds a half to the zero point before it rounds it, to even
    s, zero = scale.reshape(1).requires_grad_(), zero_point.reshape(1).float()
    torch._fake_quantize_learnable_per_tensor_affine(x, s, zero, scheme.low, scheme.high, 0.25).backward(grad)
    assert learned.grad.item() == pytest.approx(s.grad.item(), rel=1e-3)


def test_scales_per_channel_are_learned_independently() -> None:
    scheme = Scheme(bits=4, signed=True, symmetric=True, per_channel=True)
    weight, grad = torch.randn(6, 3, 3, 3), torch.randn(6, 3, 3, 3)
    scale, zero_point = affine(weight.flatten(1).amin(1) * 0.5, weight.flatten(1).amax(1) * 0.5, scheme)
    learned = scale.clone().requires_grad_()
    fake_quantize(weight, learned, zero_point, scheme, gradient_scale=0.5).backward(grad)
    for c in range(6):
        alone = scale[c].clone().requires_grad_()
        fake_quantize(weight[c], alone, zero_point[c], scheme, gradient_scale=0.5).backward(grad[c])
        assert learned.grad[c].item() == pytest.approx(alone.grad.item(), rel=1e-4)


def test_learned_scales_are_parameters_until_converted() -> None:
    """They get the paper's gradient scale, move under training, never pass zero, and are plain buffers at the end."""
    alive = prepare_qat(build(networks.Residual), [image(16)], learned=True)
    learned = {n: p for n, p in alive.named_parameters() if n.endswith(".ratio")}
    assert len(learned) == len(alive.quantizers()) - 5  # all but the biases, which have none of their own
    first = alive.activation_quantizers()[0]
    x = torch.randn(4, 3, 16, 16)
    first(x).sum().backward()
    alone = first.scale.detach().clone().requires_grad_()
    fake_quantize(x, alone, first.zero_point, first.scheme, gradient_scale=1 / math.sqrt(3 * 16 * 16 * 255)).sum().backward()
    assert first.ratio.grad.item() == pytest.approx(16 * alone.grad.item(), rel=1e-5)  # the scale is smaller than 1 / 16
    before = {n: p.detach().clone() for n, p in learned.items()}
    optimizer = torch.optim.Adam(alive.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        alive(*image(16)).square().sum().backward()
        optimizer.step()
    assert all(not torch.equal(p, before[n]) for n, p in learned.items())
    with torch.no_grad():
        first.ratio.fill_(-1.0)
    assert torch.isfinite(alive(*image(4))).all()
    with torch.no_grad():
        first.ratio.copy_(before["body.quantizers.x.ratio"])
    alive.eval()
    settled = alive.converted()
    assert not [n for n, _ in settled.named_parameters() if n.endswith(".ratio")]
    y = image(8)
    with torch.no_grad():
        torch.testing.assert_close(settled(*y), alive(*y))


def test_a_step_of_adam_is_relative_to_a_learned_scale() -> None:
    """As large as its rate, it was as large as most scales of 8 bits."""
    alive = prepare_qat(build(networks.Residual), [image(16)], learned=True)

    def scales():
        with torch.no_grad():
            found = [q.effective_scale() for q in alive.activation_quantizers()]
            return torch.cat([v.flatten() for v in [*found, *(q.qparams(w)[0] for q, w in alive.rounded_weights())]])

    before = scales()
    alive(*image(16)).square().sum().backward()
    torch.optim.Adam([p for n, p in alive.named_parameters() if n.endswith(".ratio")], lr=1e-3).step()
    change = (scales() / before - 1).abs()
    assert 0.9e-3 < change.max() < 1.1e-3


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_step_of_gradient_descent_is_that_of_the_scale_itself(size) -> None:
    torch.manual_seed(0)
    x = size * torch.randn(64, 8)
    alive = prepare_qat(nn.Sequential(nn.Linear(8, 4)).eval(), [x], bits=Bits(activations=4), learned=True)
    first = alive.activation_quantizers()[0]
    before = first.scale.clone().requires_grad_()
    factor = 1 / math.sqrt(8 * first.scheme.high)
    fake_quantize(x, before, first.zero_point, first.scheme, gradient_scale=factor).square().mean().backward()
    first(x).square().mean().backward()
    torch.optim.SGD([first.ratio], lr=1e-3).step()
    torch.testing.assert_close(first.effective_scale().detach(), before.detach() - 1e-3 * before.grad)


def test_learned_scales_are_exported_and_saved(tmp_path) -> None:
    task = images_task(ck)
    coarse = replace(X86, name="COARSE", weights=replace(X86.weights, bits=3))
    quantized = ck.QAT(epochs=1, learned=True, target=coarse)(build(networks.Residual), task)
    follows = quantize_static(build(networks.Residual), [image(16)], target=coarse)
    mine = quantized.body.quantizers.weight_stem_0_weight
    assert (mine.scale > 0).all()
    assert (follows.body.quantizers.weight_stem_0_weight.scale == 0).all()
    path = ck.export_onnx(quantized, tmp_path / "q.onnx", task.example())
    assert ck.verify_onnx(path, quantized, [image(32)]).passed
    ck.save(quantized, tmp_path)
    again, x = ck.load(networks.Residual(), tmp_path), image(8)
    with torch.no_grad():
        assert torch.equal(again(*x), quantized(*x))


def test_a_model_in_training_is_exported_and_saved_converted(tmp_path) -> None:
    alive, x = prepare_qat(build(networks.Residual), [image(16)]), image(8)
    alive(*image(16)).sum().backward()
    assert ck.verify_onnx(ck.export_onnx(alive, tmp_path / "q.onnx", image(2)), alive.eval(), [image(32)]).passed
    ck.save(alive, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(networks.Residual(), tmp_path)(*x), alive(*x))


@pytest.mark.parametrize("training", [False, True])
def test_a_model_in_training_without_batchnorm_is_saved(training, tmp_path) -> None:
    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    x = torch.randn(16, 8)
    alive = prepare_qat(make(), [(x,)]).train(training)
    ck.save(alive, tmp_path)
    with torch.no_grad():
        assert torch.equal(ck.load(make(), tmp_path).eval()(x), alive.eval()(x))


def test_the_default_objective_matches_the_float_model(monkeypatch) -> None:
    model, task = build(networks.Residual), images_task(ck)
    objectives = []
    monkeypatch.setattr("compresskit.quant.qat.qat.fit_", lambda *a, objective, **k: objectives.append(objective))
    ck.QAT(epochs=1)(model, task)
    x, y = batch = next(iter(task.batches("train")))
    losses = objectives[0].bind(copy.deepcopy(model), task)(lambda x: model(x) * 1.5, batch)
    with torch.no_grad():
        predictions = model(x)
        cross = nn.functional.cross_entropy(predictions * 1.5, y).item()
    assert losses["task"].item() == pytest.approx(0.5 * cross, rel=1e-5)
    assert losses["imitate"].item() == pytest.approx(0.5 * oracles.soft_targets(predictions * 1.5, predictions, 1.0), rel=1e-4)


def test_one_bit_holds_no_zeros_of_pruning(tmp_path) -> None:
    model = build(networks.WideChain)
    kept = {"b": Bits(weights=1)}
    path = ck.export_onnx(converted(prepare_qat(model, [image(16)], bits=kept, learned=True)), tmp_path / "m.onnx", image(4))
    planes = [t for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.UINT8 and len(t.dims) == 3]
    assert [list(t.dims) for t in planes] == [[1, 64 * 32 * 9 // 8, 1]]  # a bit for each weight
    with torch.no_grad():
        model.b[0].weight[0, 0, 0] = 0
    with pytest.raises(ModelError, match=r"prepare_qat: b.0 has 3 weights that are zero, and one bit holds only -1 and 1 times"):
        prepare_qat(model, [image(16)], bits=kept, learned=True)


def converted(quantized):
    quantized.convert_()
    return quantized.eval()


def test_frozen_layers_stay_frozen_in_qat() -> None:
    quantized = prepare_qat(build(networks.Twice), [image(16)])
    assert not quantized.body.get_parameter("stem.0.weight").requires_grad
    assert quantized.body.get_parameter("head.weight").requires_grad


@pytest.mark.parametrize(("freeze", "moves"), [(0, 0), (0.5, 4), (1, 8)])
def test_statistics_freeze_at_the_given_fraction(freeze, moves, monkeypatch) -> None:
    seen = []
    real = ck.quant.observers.MovingAverage.update

    def counted(self, values):
        seen.append(1)
        real(self, values)

    monkeypatch.setattr(ck.quant.observers.MovingAverage, "update", counted)
    task = images_task(ck, samples=64, batch=8)
    model = build(networks.Chain)
    ck.QAT(epochs=1, freeze=freeze)(model, task)
    points = len(quantize_static(model, [image(16)]).activation_quantizers())
    assert len(seen) == points * (moves + 1)  # once to take over the range


@pytest.mark.parametrize(("weights", "share"), [({}, 0.25), ({"weight": 0.9, "task_weight": 0.1}, 1.0)])
def test_the_default_objective_withstands_wrong_labels(weights, share) -> None:
    """A quarter of them by default; all of them where imitation weighs nine tenths."""
    model, task = build(networks.Residual), images_task(ck, samples=192, classes=4)
    ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(model, task)
    wrong = replace(task, train=[(x, (y + (torch.arange(len(y)) < share * len(y))) % 4) for x, y in task.train])
    quantized = ck.QAT(epochs=3, objective=ck.imitate(model, temperature=1.0, **weights) if weights else None)(model, wrong)
    assert ck.evaluate(quantized, task) > ck.evaluate(model, task) - 0.05
    assert not conv_bn_layers(quantized.body)


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_ordinary_rates_do_not_diverge(rate) -> None:
    model, task = build(networks.Residual), images_task(ck, samples=192, classes=4)
    ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(model, task)
    trained = ck.QAT(epochs=4, optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9), clip=None)(model, task)
    assert ck.evaluate(trained, task) > ck.evaluate(model, task) - 0.05


@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)])
@pytest.mark.parametrize("policy", [ck.mixed.FP32, ck.mixed.MASTER_BF16], ids=lambda p: p.name)
def test_zeros_stay_zeros(optimizer, policy) -> None:
    """A pruned weight is zero before, while and after it is rounded, whatever the optimizer does."""
    model, task = build(networks.Residual), images_task(ck)
    zeros = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                zeros[name] = torch.rand_like(parameter) < 0.6
                parameter.masked_fill_(zeros[name], 0)
    quantized = ck.QAT(epochs=2, optimizer=optimizer, precision=policy)(model, task)
    for name, zero in zeros.items():
        weight = quantized.body.get_parameter(name)
        assert (weight[zero] == 0).all(), name
        assert (weight[~zero] != 0).float().mean() > 0.95
        quantizer = quantized.body.get_submodule("quantizers.weight_" + name.replace(".", "_"))
        assert (quantizer(weight)[zero] == 0).all()
        assert not torch.equal(weight, model.get_parameter(name))


@pytest.mark.matrix(every=2)
@pytest.mark.filterwarnings("ignore:fp16 on a CPU", "ignore:PURE_BF16 has no masters")  # what they say is not what is tested
@pytest.mark.parametrize(
    "policy",
    [getattr(ck.mixed, n) for n in "AMP_FP16 MASTER_FP16 SPLIT_BF16 KAHAN_BF16 SR_BF16 PURE_BF16".split()],
    ids=lambda p: p.name,
)
def test_every_policy_trains(policy) -> None:
    model, task = build(networks.Residual), images_task(ck)
    quantized = ck.QAT(epochs=1, precision=policy, learned=policy is ck.mixed.SR_BF16)(model, task)
    assert {v.dtype for v in quantized.state_dict().values()} == {torch.float32, torch.int32, torch.int8}
    before = quantize_static(model, [image(16)])
    assert not torch.equal(quantized.body.get_parameter("out.weight"), before.body.get_parameter("out.weight"))
    x = image(16)
    with torch.no_grad():
        assert (quantized(*x) - before(*x)).square().mean() < 0.2 * before(*x).square().mean()


def test_two_ranks_agree_on_ranges_and_weights(tmp_path) -> None:
    """Ranges are those of all values together, and DistributedDataParallel leaves every rank with one model."""
    rank_pairs.start(qat_ranks.main, tmp_path)
    first, second = (load_file(tmp_path / f"observed{rank}.safetensors") for rank in (0, 1))
    torch.manual_seed(1)
    values = torch.randn(2, 2, 4, 500) * torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    for kind in OBSERVERS:
        name = kind.__name__
        assert torch.equal(first[name], second[name])
        alone = kind()
        for i in range(4):
            alone.update(torch.cat([values[0, :, i], values[1, :, i]], 1))
        wanted = torch.stack(alone.range())
        if name == "MovingAverage":  # the mean of the ranks' averages
            parts = []
            for rank in (0, 1):
                one = kind()
                for i in range(4):
                    one.update(values[rank, :, i])
                parts.append(torch.stack(one.range()))
            wanted = (parts[0] + parts[1]) / 2
        assert (first[name] - wanted).abs().max() < 0.06 * wanted.abs().max(), name
    assert torch.equal(first["MinMax"], torch.stack([values.amin((0, 2, 3)), values.amax((0, 2, 3))]))
    models = [load_file(tmp_path / f"trained{rank}.safetensors") for rank in (0, 1)]
    own = [name for name in models[0] if "running" in name]  # BatchNorm's statistics are a rank's own until rank 0 sends its
    assert not own
    differ = [n for n in models[0] if not torch.equal(models[0][n], models[1][n])]
    assert not differ


def test_no_batch_and_bad_settings_are_refused() -> None:
    with pytest.raises(DataError, match="prepare_qat: no calibration batch"):
        prepare_qat(build(networks.Chain), [])
    with pytest.raises(SettingError, match="freeze"):
        ck.QAT(epochs=1, freeze=-0.1)


class Branching(nn.Module):
    """Cannot be captured: its code looks at values."""

    def __init__(self):
        super().__init__()
        self.body = build(networks.Residual)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.body(x)
        return y * self.scale if y.mean() > 1e6 else y


def test_a_part_is_trained_inside_the_whole(tmp_path) -> None:
    torch.manual_seed(0)
    task = images_task(ck, samples=128, classes=4)
    model = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(Branching().train(), task)
    with pytest.raises(ck.ModelError, match="inside="):
        ck.QAT(epochs=1)(model, task)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = ck.QAT(epochs=1, inside="body", dynamic=(0, 2, 3))(model, task)
    assert isinstance(trained, Branching)
    assert isinstance(trained.body, ck.quant.Quantized)
    assert not conv_bn_layers(trained.body.body)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert ck.evaluate(trained, task) >= ck.evaluate(model, task) - 0.05
    path = ck.export_onnx(trained, tmp_path / "body.onnx", image(4), inside="body")
    assert ck.verify_onnx(path, trained, [image(8), (torch.randn(2, 3, 24, 24),)], inside="body").passed
    ck.save(trained, tmp_path / "saved")
    again, x = ck.load(Branching(), tmp_path / "saved").eval(), image(4)
    assert torch.equal(again(*x), trained.eval()(*x))


def test_every_setting_changes_the_result() -> None:
    model, task = build(networks.Residual), images_task(ck)

    def outcome(**settings):
        torch.manual_seed(0)
        return ck.QAT(epochs=1, **settings)(model, task)(*image_fixed).detach()

    image_fixed = image(8)
    usual = outcome()
    assert torch.equal(usual, outcome())
    for settings in (
        {"learned": True},
        {"freeze": 0.0},
        {"observer": partial(ck.quant.observers.MovingAverage, momentum=0.9)},
        {"objective": Supervised()},
        {"skip": ("out",)},
        {"samples": 16},
    ):
        assert not torch.equal(usual, outcome(**settings)), settings


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_every_network_trains_and_converts(kind) -> None:
    alive = prepare_qat(build(kind), [image(16)])
    alive(*image(16)).square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in alive.parameters() if p.requires_grad)
    alive.convert_()
    assert all(isinstance(q.scale, torch.Tensor) for q in alive.quantizers() if isinstance(q, ActivationQuantizer))
    assert torch.isfinite(alive.eval()(*image(4))).all()
