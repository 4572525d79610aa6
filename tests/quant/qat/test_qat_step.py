"""One step of quantization-aware training: what it computes without passes over memory that float training does not have."""

from __future__ import annotations

import copy
import itertools

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import image
from torch import nn
from torch.utils.checkpoint import checkpoint

from compresskit.quant import Bits, prepare_qat
from compresskit.quant.numerics.observers import MinMax, MovingAverage
from compresskit.quant.numerics.quantizers import ActivationQuantizer
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers


class ConvNorm(nn.Module):
    def __init__(self, bias, affine, linear) -> None:
        super().__init__()
        self.conv = nn.Linear(6, 5, bias=bias) if linear else nn.Conv2d(6, 5, 3, bias=bias)
        self.norm = (nn.BatchNorm1d if linear else nn.BatchNorm2d)(5, affine=affine, momentum=0.3, eps=0.1)
        if affine:
            nn.init.uniform_(self.norm.weight, -2, 2)
            nn.init.uniform_(self.norm.bias, -1, 1)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.1, 4)

    def forward(self, x):
        return self.norm(self.conv(x))


@pytest.mark.parametrize(("bias", "affine", "linear"), list(itertools.product([False, True], repeat=3)))
def test_batchnorm_of_the_unscaled_layer(bias, affine, linear) -> None:
    """As torch's BatchNorm of conv(x, W k) / k + b, in float64; eps is large here, and some k are negative."""
    torch.manual_seed(3)
    model = ConvNorm(bias, affine, linear).double()
    x = torch.randn(16, 6, dtype=torch.float64) if linear else torch.randn(8, 6, 7, 7, dtype=torch.float64)
    alive = prepare_qat(copy.deepcopy(model).float().eval(), [x.float()])
    alive.enable_(False)
    alive.observe_(False)
    layer = conv_bn_layers(alive.body)[0]
    inputs = x.float().requires_grad_()
    got = alive(inputs)
    model.train()
    x.requires_grad_()
    wanted = model(x)
    weigh = torch.linspace(-1, 2, got.numel()).view_as(got)
    (got * weigh).sum().backward()
    (wanted * weigh).sum().backward()
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(inputs.grad.double(), x.grad, atol=1e-4, rtol=1e-3)
    mine = {name.removeprefix("body."): parameter.grad for name, parameter in alive.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(mine[name].double(), parameter.grad, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(layer.running_mean.double(), model.norm.running_mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.running_var.double(), model.norm.running_var, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("affine", [False, True])
def test_batchnorm_under_autocast_takes_statistics_of_what_the_layer_gave(affine) -> None:
    """In fp32, of the bf16 values as they are: conv(x, W k) is not divided by k in bf16 first."""
    model = ConvNorm(False, affine, False)
    alive = prepare_qat(copy.deepcopy(model).eval(), [torch.randn(8, 6, 7, 7)])
    alive.enable_(False)
    alive.observe_(False)
    layer, inputs = conv_bn_layers(alive.body)[0], torch.randn(8, 6, 7, 7)
    factor = layer.factor().detach()
    with torch.autocast("cpu", torch.bfloat16):
        got = alive(inputs)
        given = F.conv2d(inputs, model.conv.weight * factor.view(-1, 1, 1, 1))
    assert got.dtype == given.dtype == torch.bfloat16
    wanted = model.norm.train()(given.float() / factor.view(1, -1, 1, 1))
    torch.testing.assert_close(layer.running_mean, model.norm.running_mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer.running_var, model.norm.running_var, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.float(), wanted, atol=1e-6, rtol=2**-8)
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in alive.parameters())


@pytest.mark.parametrize(("bias", "linear"), list(itertools.product([False, True], repeat=2)))
def test_frozen_statistics_leave_most_of_the_gradient_of_normalized_batches(bias, linear) -> None:
    """That of BatchNorm whose output is moved to where the frozen statistics have it by constants, and 0.3 of the plain one."""
    torch.manual_seed(3)
    model = ConvNorm(bias, True, linear)
    x = torch.randn(64, 6) if linear else torch.randn(8, 6, 7, 7)
    alive = prepare_qat(copy.deepcopy(model).eval(), [x])
    alive.enable_(False)
    alive.freeze_statistics_()
    got, wanted = alive(x), copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)

    model.double()
    y, norm = model.conv(x.double()), model.norm
    dims = (0,) if linear else (0, 2, 3)
    mean, variance = y.mean(dims, keepdim=True), y.var(dims, unbiased=False, keepdim=True)
    deviation = (variance + norm.eps).sqrt()
    y = 0.7 * ((y - mean) / deviation * deviation.detach() + mean.detach()) + 0.3 * y
    shape = mean.shape
    y = (y - norm.running_mean.view(shape)) / (norm.running_var.view(shape) + norm.eps).sqrt()
    reference = y * norm.weight.view(shape) + norm.bias.view(shape)
    weigh = torch.linspace(-1, 2, got.numel()).view_as(got)
    (got * weigh).sum().backward()
    (reference * weigh).sum().backward()
    mine = {name.removeprefix("body."): parameter.grad for name, parameter in alive.named_parameters()}
    for name in ("conv.weight", "norm.weight", "norm.bias"):
        torch.testing.assert_close(mine[name].double(), model.get_parameter(name).grad, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("why", ["few rows", "no weight", "fixed weight"])
def test_frozen_statistics_leave_a_plain_gradient_where_that_of_batches_says_too_little(why) -> None:
    """Of two values for a channel nothing is left of it, and without a trained weight only the layer can scale its output."""
    torch.manual_seed(3)
    model, x = ConvNorm(True, why != "no weight", True).eval(), torch.randn(2 if why == "few rows" else 64, 6)
    model.norm.requires_grad_(why != "fixed weight")
    alive = prepare_qat(copy.deepcopy(model), [x])
    alive.enable_(False)
    alive.freeze_statistics_()
    weigh = torch.linspace(-1, 2, 5 * len(x)).view(-1, 5)
    (alive(x) * weigh).sum().backward()
    (model(x) * weigh).sum().backward()
    mine = {name.removeprefix("body."): parameter.grad for name, parameter in alive.named_parameters()}
    assert float(model.conv.weight.grad.norm()) > 1
    for name in ("conv.weight", "conv.bias"):
        torch.testing.assert_close(mine[name], model.get_parameter(name).grad, atol=1e-4, rtol=1e-3)


def test_a_channel_with_a_weight_of_zero_and_frozen_statistics_has_finite_gradients() -> None:
    model = ConvNorm(True, True, False)
    with torch.no_grad():
        model.norm.weight[1] = 0
    alive = prepare_qat(model.eval(), [torch.randn(8, 6, 7, 7)])
    alive.freeze_statistics_()
    alive(torch.randn(8, 6, 7, 7)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in alive.parameters())


def test_one_value_for_a_channel_is_refused_as_by_torch() -> None:
    alive = prepare_qat(ConvNorm(False, True, True).eval(), [torch.randn(8, 6)])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        alive(torch.randn(1, 6))


def saved_bytes(model, x) -> int:
    """Bytes of the activations that the backward pass keeps; parameters and buffers do not count."""
    own = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    found = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # kept, so that no address is used twice
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = model(*x)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in found.values())


class Blocks(nn.Module):
    """Residual blocks as in the ResNets of CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, 1, 1, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(8))

    def forward(self, x):
        for i in range(0, 8, 2):
            inner = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(x + self.norms[i + 1](self.convs[i + 1](inner)))
        return x


@pytest.mark.parametrize("held", [False, True])
def test_memory_of_a_step(held) -> None:
    """The values before the rounding are computed again from the layer's output, not kept beside the rounded ones."""
    torch.manual_seed(0)
    model, x = Blocks().train(), (torch.randn(16, 16, 24, 24),)
    model(*x)  # statistics of this network
    alive = prepare_qat(copy.deepcopy(model).eval(), [x])
    if held:
        alive.freeze_statistics_()
    assert saved_bytes(alive, x) <= 1.3 * saved_bytes(model, x)


@pytest.mark.parametrize("held", [False, True])
def test_gradients_are_those_with_everything_kept(held, monkeypatch) -> None:
    model, x = networks.build(networks.Residual), image(16)
    again, kept = (prepare_qat(copy.deepcopy(model), [x]) for _ in range(2))
    if held:
        again.freeze_statistics_()
        kept.freeze_statistics_()
    again(*x).square().sum().backward()
    monkeypatch.setattr("compresskit.quant.numerics.scheme._cheap_source", lambda x: None)
    kept(*x).square().sum().backward()
    for (name, one), other in zip(again.named_parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_a_graph_is_walked_twice_and_under_checkpoints() -> None:
    x = image(16)
    alive = prepare_qat(networks.build(networks.Residual), [x])
    alive.observe_(False)
    loss = alive(*x).square().sum()
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in alive.named_parameters()}
    loss.backward()
    for name, p in alive.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])
    alive.zero_grad()
    checkpoint(alive, *x, use_reentrant=False).square().sum().backward()
    for name, p in alive.named_parameters():
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, once[name], atol=1e-3, rtol=1e-2)  # ... whose running statistics are two steps older


@pytest.mark.parametrize("clamp", [None, (0.0, None), (0.0, 6.0)])
@pytest.mark.parametrize("observer", [MinMax, MovingAverage])
def test_ranges_follow_the_ends_of_the_values(clamp, observer) -> None:
    """The same as with an observer that is shown every value; one that is derived from ours still is."""

    class Watching(observer):
        def update(self, values):
            seen.append(values.shape)
            super().update(values)

    seen = []
    plain, derived = (ActivationQuantizer(Scheme(), kind(), clamp) for kind in (observer, Watching))
    for quantizer in (plain, derived):
        quantizer.observing = quantizer.enabled = True
    for size in (1.0, 9.0, 0.1):
        x = torch.randn(4, 3, 5, 5) * size
        assert torch.equal(plain(x), derived(x))
    assert torch.equal(plain.scale, derived.scale)
    assert torch.equal(plain.zero_point, derived.zero_point)
    assert seen == [(1, 300)] * 3


def test_a_channel_that_rounds_to_zero_does_not_explode() -> None:
    """Divided by sqrt(eps), the gradient of BatchNorm of a constant channel was 300 times that of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(16, 3, 8, 8)
    with torch.no_grad():
        model[1].running_var.copy_(model[0](x).var((0, 2, 3)))
    quantized = prepare_qat(model, [x], bits=Bits(weights=2), learned=True)
    scale = next(quantizer for quantizer, _ in quantized.rounded_weights()).scale
    with torch.no_grad():
        scale[1] *= 100
    quantized(x).square().sum().backward()
    sizes = quantized.body.get_parameter("0.weight").grad.flatten(1).norm(dim=1)
    assert 0 < sizes[1] < 10 * sizes[[0, 2, 3]].max()


def test_learned_scales_of_few_bits_start_from_the_range_of_least_error() -> None:
    """From the extremes, two bits round most values to zero."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), torch.randn(32, 3, 12, 12)
    bits = {"": Bits(activations=2), "0": Bits(activations=8)}
    quantized = prepare_qat(model, [x], bits=bits, learned=True)
    first, hidden = quantized.activation_quantizers()[:2]
    with torch.no_grad():
        values = model[:2](x)
    assert float(first.scale.detach()) == pytest.approx(float((x.max() - x.min()) / 255), rel=1e-4)
    errors = {
        steps: float((torch.round(values / (values.max() / steps)).clamp(0, 3) * (values.max() / steps) - values).square().sum())
        for steps in range(3, 40)
    }
    assert float(values.max() / hidden.scale.detach()) == pytest.approx(min(errors, key=lambda steps: errors[steps]), rel=0.2)
