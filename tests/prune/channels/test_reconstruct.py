"""Refitting layers by least squares after pruning."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.prune import apply_, plan_channels, reconstruct_
from compresskit.prune.channels import reconstruct
from compresskit.prune.channels.reconstruct import can_refit, rows_at


def cut(model, **settings):
    plan = plan_channels(model, image(2), **{"budget": ck.keep(macs=0.5), "round_to": 4, **settings})
    return plan, apply_(copy.deepcopy(model), plan)


def data(count=256, seed=0):
    """Images with channels and places that vary together, so that channels can stand in for one another."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 4, 4, generator=g).repeat(1, 3, 4, 4) + 0.3 * torch.randn(count, 3, 16, 16, generator=g) + 0.5
    return [(x[i : i + 64],) for i in range(0, count, 64)]


class Sums(nn.Module):
    """Channels 4..7 are exact mixtures of channels 0..3: whatever reads them can do without."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 6, 3, 1, 1), nn.Linear(6, 4)
        with torch.no_grad():
            mix = torch.rand(4, 4) + 0.5
            self.a.weight[4:] = torch.einsum("oi,ijkl->ojkl", mix, self.a.weight[:4])
            self.a.bias[4:] = mix @ self.a.bias[:4]

    def forward(self, x):
        return self.head(self.b(self.a(x)).mean((2, 3)))


def test_channels_that_others_can_replace_cost_nothing() -> None:
    """Where the lost channels are mixtures of the others, refitting gives the same function back."""
    torch.manual_seed(0)
    model = Sums().eval()
    plan, small = cut(
        model, budget=ck.remove(channels=0), ratios={"a": 0.5}, criterion=lambda s: torch.arange(len(s.weight)).flip(0).float()
    )
    (x,) = data(seed=1)[0]
    with torch.no_grad():
        wanted, before = model(x), small(x)
        lost = reconstruct_(small, model, plan, data(), damping=1e-9)
        after = small(x)
    assert (before - wanted).abs().max() > 0.05
    assert (after - wanted).abs().max() < 1e-3
    assert lost["b"] < 1e-6


@pytest.mark.parametrize("kind", [networks.Chain, networks.Residual, networks.Concat, networks.Flatten, networks.Depthwise])
def test_refitting_brings_the_outputs_closer(kind) -> None:
    model = build(kind)
    plan, small = cut(model, budget=ck.keep(macs=0.7))
    before = {k: v.shape for k, v in small.state_dict().items()}
    dense = copy.deepcopy(model.state_dict())
    (x,) = data(seed=1)[0]
    with torch.no_grad():
        wanted = model(x)
        far = (small(x) - wanted).square().mean()
        lost = reconstruct_(small, model, plan, data())
        assert (small(x) - wanted).square().mean() < far
    assert {k: v.shape for k, v in small.state_dict().items()} == before
    assert all(torch.equal(v, dense[k]) for k, v in model.state_dict().items())
    assert all(0 <= share <= 1 for share in lost.values())


def test_refit_is_least_squares() -> None:
    """Against numpy-style least squares on unfolded patches, with the mean in the BatchNorm that follows."""
    model = build(networks.Chain)
    plan, small = cut(model, budget=ck.remove(channels=0), ratios={"a.0": 0.5})
    batches = data(128)
    keep = plan.keep("b.0.weight")[1]
    with torch.no_grad():
        h = torch.cat([model.a(x) for (x,) in batches])
        reconstruct_(small, model, plan, batches, damping=1e-9)
        x = nn.functional.unfold(h, 3, padding=1).movedim(1, 2).reshape(-1, 16, 9).double()
        y = x.flatten(1) @ model.b[0].weight.double().flatten(1).T
        some = x[:, keep].flatten(1)
        with_one = torch.cat([some, torch.ones(len(some), 1)], 1)
        best = torch.linalg.lstsq(with_one, y, driver="gelsd").solution
        got = some @ small.b[0].weight.double().flatten(1).T
    shift = small.b[1].running_mean - model.b[1].running_mean
    error = (got - shift - y).square().mean()
    least = (with_one @ best - y).square().mean()
    assert least <= error <= 1.1 * least  # fitted at random places of the same images


def test_refitting_needs_data() -> None:
    model = build(networks.Chain)
    plan, small = cut(model)
    with pytest.raises(DataError, match="no batch of calibration data"):
        reconstruct_(small, model, plan, [])
    with pytest.raises(SettingError, match="wanted a positive number"):
        reconstruct_(small, model, plan, data(), damping=0)


def test_a_refit_that_does_not_help_is_taken_back(monkeypatch, caplog) -> None:
    model = build(networks.Chain)
    plan, small = cut(model)
    before = copy.deepcopy(small.state_dict())

    def spoil(pruned, *_):
        pruned.b[0].weight.mul_(100)
        return 0.0

    monkeypatch.setattr(reconstruct, "_refit_", spoil)
    assert reconstruct_(small, model, plan, data()) == {}
    assert all(torch.equal(v, before[k]) for k, v in small.state_dict().items())
    assert "brought the outputs of Chain no nearer" in caplog.text


class Masked(nn.Sequential):
    """Fills one class with minus infinity."""

    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(4) > 2, -float("inf"))


def test_outputs_that_are_filled_with_infinity_are_refitted() -> None:
    torch.manual_seed(0)
    model = Masked(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    plan, small = cut(model)
    assert reconstruct_(small, model, plan, data()).keys() == {"3"}


class OneByOne(nn.Module):
    """Calls its layers on one sample at a time, without a batch dimension."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Linear(16, 4)

    def one(self, x):
        return self.head(self.b(self.a(x).relu()).relu().mean((-2, -1)))

    def forward(self, x):
        return torch.stack([self.one(sample) for sample in x])


class Together(OneByOne):
    """The same with a batch dimension."""

    def forward(self, x):
        return self.one(x)


def test_layers_without_a_batch_dimension_are_refitted_as_with_one() -> None:
    torch.manual_seed(0)
    names, read = ["a.weight", "b.weight", "head.weight"], {}
    model = OneByOne().eval()
    for kind in (OneByOne, Together):
        twin = kind().eval()
        twin.load_state_dict(model.state_dict())
        read[kind] = reconstruct.input_statistics(twin, names, [(x[:8],) for (x,) in data(64)])
    for name in names:
        alone, together = (read[kind][name] for kind in (OneByOne, Together))
        if name == "head.weight":  # the others read positions at random
            torch.testing.assert_close(alone.products, together.products)
        torch.testing.assert_close(alone.total / alone.rows, together.total / together.rows, rtol=0.1, atol=0.1)
    plan, small = cut(model)
    assert reconstruct_(small, model, plan, data(64)).keys() == {"b", "head"}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (2, 3, 9, 8)),
        (nn.Conv2d(3, 5, 3, stride=2, padding=2, padding_mode="reflect"), (2, 3, 7, 7)),
        (nn.Conv2d(3, 5, 3, padding="same", padding_mode="circular"), (2, 3, 7, 7)),
        (nn.Conv1d(3, 5, 4, stride=3, padding=1), (2, 3, 11)),
        (nn.Conv3d(3, 5, 2, padding=1, dilation=2), (2, 3, 4, 5, 6)),
        (nn.Conv2d(3, 5, 3), (3, 7, 7)),
        (nn.Linear(6, 5), (2, 4, 6)),
    ],
)
def test_the_rows_of_a_layer_times_its_weights_are_its_output(layer, shape) -> None:
    x = torch.randn(shape)
    out = layer(x)
    wanted = out if isinstance(layer, nn.Linear) else out.movedim(-1 - len(layer.kernel_size), -1)
    rows = rows_at(layer, x, torch.arange(wanted.numel() // 5))
    torch.testing.assert_close(rows @ layer.weight.flatten(1).T + layer.bias, wanted.reshape(-1, 5))


class Normalized(nn.Module):
    """Two layers without bias. One has a norm that reads nothing else unless `readers`, of the other, use it, too."""

    def __init__(self, readers):
        super().__init__()
        self.readers, self.a = readers, nn.Conv2d(3, 16, 3, 1, 1)
        self.b, self.c = nn.Conv2d(16, 8, 3, 1, 1, bias=False), nn.Conv2d(16, 8, 3, 1, 1, bias=False)
        self.norm, self.other, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.plain = nn.BatchNorm2d(8, affine=False)

    def forward(self, x):
        x = torch.relu(self.a(x))
        value, *outputs = self.readers(self, x)
        return self.head((value + self.other(self.c(x))).relu().mean((2, 3))), *outputs


@pytest.mark.parametrize(
    ("readers", "wanted"),
    [
        (lambda net, x: [net.norm(net.b(x))], {"norm", "other"}),
        (lambda net, x: [net.norm(net.b(x)) + net.norm(net.b(x.flip(2)))], {"norm", "other"}),
        (lambda net, x: [net.norm(y := net.b(x)) + y], {"other"}),
        (lambda net, x: [net.norm(y := net.b(x)), y], {"other"}),
        (lambda net, x: [net.norm(net.b(x)) + net.b(x.flip(2))], {"other"}),
        (lambda net, x: [net.norm(net.norm(net.b(x)))], {"other"}),
        (lambda net, x: [net.norm(net.b(x).relu_())], {"other"}),
        (lambda net, x: [net.norm(y := net.b(x)) + net.norm(y.relu())], {"other"}),  # as many calls as readers
        (lambda net, x: [net.norm(y := net.b(x)) + net.plain(y)], {"other"}),
        (lambda net, x: [net.norm(y := net.b(x)) + net.other(y)], set()),
        (lambda net, x: [net.norm(net.b(x)) + net.norm(net.c(x))], set()),
    ],
)
def test_a_constant_goes_into_a_norm_that_alone_reads_a_layer_and_nothing_else(readers, wanted) -> None:
    torch.manual_seed(0)
    model = Normalized(readers).eval()
    plan, small = cut(model, budget=ck.remove(channels=0), ratios={"a": 0.5})
    means = {name: small.get_submodule(name).running_mean.clone() for name in ("norm", "other", "plain")}
    assert {"b", "c"} <= reconstruct_(small, model, plan, data(64)).keys()
    assert {name for name, mean in means.items() if not torch.equal(small.get_submodule(name).running_mean, mean)} == wanted


def test_tied_weights_are_not_fitted_to_one_of_their_layers() -> None:
    model = build(networks.Tied)
    assert not can_refit(model, "a.weight")
    model.b.weight = nn.Parameter(model.b.weight.detach().clone())
    assert can_refit(model, "a.weight")


@pytest.mark.parametrize(("inputs", "rows"), [(16, 512), (256, 1152)])
def test_a_layer_is_read_at_half_as_many_places_as_it_has_inputs(inputs, rows) -> None:
    model = nn.Sequential(nn.Conv2d(3, inputs, 1), nn.Conv2d(inputs, 4, 3, padding=1))
    found = reconstruct.input_statistics(model, ["1.weight"], data(64))
    assert found["1.weight"].rows == rows


@torch.no_grad()
def test_a_layer_with_a_bias_is_fitted_with_a_constant() -> None:
    """Exactly the least squares with a column of ones, since all rows of a linear layer are read."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(256, 6)
    model[0].bias += 2.0
    plan = plan_channels(model, x, ck.remove(channels=0), ratios={"0": 0.5}, round_to=1)
    small = apply_(copy.deepcopy(model), plan)
    reconstruct_(small, model, plan, [(x,)], damping=1e-9)
    read, wanted = model[:2](x)[:, plan.keep("2.weight")[1]].double(), model(x).double()
    read = torch.cat([read, torch.ones(256, 1)], 1)
    least = (read @ torch.linalg.lstsq(read, wanted).solution - wanted).square().mean()
    assert (small(x) - wanted).square().mean() <= 1.001 * least
