"""Rules: each special case is cut and equals the zeroed model in float64, or is kept for a reason."""

from __future__ import annotations

import re
from functools import partial

import networks
import pytest
import special_networks as special
import torch
from networks import build
from pruned import assert_equals_zeroed, built, cut, planned
from torch import nn
from torchvision.ops import DeformConv2d

from compresskit import count_macs, keep, remove
from compresskit.base.errors import ModelError
from compresskit.prune import apply_, plan_channels
from compresskit.prune.structure.rules.base import PROPAGATION_RULES, rule_for
from compresskit.prune.structure.trial import TrialRepair, trial_plan

#: network -> tensors of which channels must be gone along a dimension.
CUT = {
    special.Conv1d: [("body.0.weight", 0), ("body.3.weight", 0)],
    special.Conv3d: [("body.0.weight", 0), ("body.3.weight", 1)],
    special.TwoOutputs: [("a.0.weight", 0), ("other.weight", 1)],
    special.Maxout: [("a.weight", 0), ("head.weight", 1)],
    special.BroadcastAdd: [("a.0.weight", 0), ("b.weight", 0)],
    special.DenseConcat: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.SpaceToDepth: [("stem.0.weight", 0), ("a.0.weight", 1)],
    special.Multiplier: [("stem.0.weight", 0), ("depth.weight", 0), ("head.weight", 1)],
    special.Grouped: [("a.0.weight", 0), ("b.0.weight", 1), ("b.0.weight", 0)],
    special.Flat: [("a.0.weight", 0), ("head.weight", 1)],
    special.LinearToImage: [("up.weight", 0), ("a.0.weight", 0)],
    special.Gated: [("a.weight", 0), ("head.weight", 1)],
    special.Glu: [("a.weight", 0), ("head.weight", 1)],
    special.C2f: [("a.0.weight", 0), ("c.0.weight", 1)],
    special.HalvesByWidth: [("a.weight", 0), ("b.weight", 1), ("b.weight", 0), ("head.weight", 1)],
    special.ListedParts: [("a.weight", 0), ("head.weight", 1)],
    special.Rotary: [("q.weight", 0), ("k.weight", 0), ("frequencies", 0), ("v.weight", 0)],
    special.ShuffleByHand: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.ShuffleModule: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.Pixels: [("a.weight", 0), ("b.0.weight", 1)],
    special.Unpixels: [("stem.0.weight", 0), ("a.0.weight", 1)],
    special.OptionA: [("stem.0.weight", 0), ("inner.0.weight", 0)],
    special.Regions: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.Deformed: [("a.weight", 0), ("a.weight", 1), ("a.bias", 0), ("where.weight", 1), ("b.0.weight", 1)],
    special.Messages: [("a.weight", 0), ("b.weight", 0), ("c.weight", 0), ("head.weight", 1)],
    special.Slopes: [("a.weight", 0), ("act.weight", 0)],
    special.SqueezeByLinear: [("up.weight", 0), ("down.weight", 1)],
    special.Transposed: [("up.weight", 1), ("up.weight", 0)],
    special.TransposedGroups: [("up.weight", 1), ("up.weight", 0)],
    special.Norms: [("group.weight", 0), ("instance.weight", 0)],
    special.BareInstanceNorm: [("a.weight", 0)],
    special.WideLayerNorm: [("norm.weight", 0), ("a.weight", 0)],
    special.Frozen: [("norm.running_mean", 0), ("a.weight", 0), ("stem.0.weight", 0)],
    special.Vision: [("token", 2), ("position", 2), ("scale", 0), ("norm.weight", 0), ("up.weight", 0)],
    special.FusedAttention: [("qkv.weight", 0), ("qkv.weight", 1), ("out.weight", 1)],
    special.StoredAttention: [("qkv.weight", 0), ("out.weight", 1)],
    special.SeparateAttention: [("q.weight", 0), ("k.weight", 0), ("v.weight", 0), ("out.weight", 1)],
    special.Multihead: [("attention.in_proj_weight", 0), ("attention.out_proj.weight", 1), ("embed.weight", 0)],
    special.CrossAttention: [("attention.q_proj_weight", 0), ("attention.k_proj_weight", 1), ("memory.weight", 0)],
    special.Encoder: [("body.layers.0.self_attn.in_proj_weight", 1), ("body.layers.1.linear1.weight", 0)],
    special.Embedded: [("embed.weight", 1), ("up.weight", 0)],
    special.TiedByFunction: [("embed.weight", 1), ("up.weight", 0)],
    special.TiedByModule: [("embed.weight", 1), ("up.weight", 0)],
    special.Recurrent: [("rnn.weight_hh_l0", 0), ("rnn.weight_hh_l1_reverse", 1), ("embed.weight", 1), ("head.weight", 1)],
    special.Gru: [("rnn.weight_hh_l0", 0), ("rnn.weight_ih_l1", 1), ("embed.weight", 1)],
    special.Cells: [("cell.weight_hh", 0), ("cell.weight_hh", 1), ("embed.weight", 1)],
    special.Projection: [("rnn.weight_hr_l0", 0), ("rnn.weight_hr_l1", 1), ("rnn.weight_hh_l0", 1), ("head.weight", 1)],
    special.LearnedState: [("h", 2), ("c", 2), ("rnn.weight_hh_l0", 0)],
    special.Bilinear: [("a.weight", 0), ("pairs.weight", 0), ("pairs.weight", 1), ("pairs.weight", 2)],
    special.RowsByEinsum: [("up.weight", 0), ("weight", 0), ("weight", 2)],
    special.Similarities: [("a.weight", 0), ("b.weight", 0), ("prototypes", 1), ("centres", 2), ("prototypes", 0)],
    special.ChannelGroups: [("a.weight", 0), ("norm.weight", 0), ("b.weight", 0)],
    special.Einsum: [("first", 1), ("second", 0)],
    special.Product: [("a.weight", 0), ("b.weight", 0)],
    special.WeightNorm: [("body.0.parametrizations.weight.original0", 0), ("body.0.parametrizations.weight.original1", 0)],
    special.Standardized: [
        ("a.weight", 0),
        ("a.gain", 0),
        ("a.weight", 1),
        ("b.weight", 0),
        ("b.weight", 1),
        ("stem.0.weight", 0),
    ],
    special.StandardizedByHand: [("a.weight", 0), ("a.gain", 0), ("a.weight", 1), ("b.weight", 1)],
    special.StandardizedAtOnce: [("a.weight", 0), ("a.gain", 0), ("a.weight", 1), ("b.weight", 1)],
    special.CosineClassifier: [
        ("up.weight", 0),
        ("kept", 0),
        ("kept", 1),
        ("rate", 0),
        ("classes", 1),
        ("classes", 0),
        ("back", 1),
    ],
    special.JoinedBias: [("q_bias", 0), ("v_bias", 0), ("qkv.weight", 0)],
    special.Auxiliary: [("a.0.weight", 0), ("side.0.0.weight", 1)],
    special.SelectiveKernel: [("a.0.weight", 0), ("b.0.weight", 0), ("select.weight", 0), ("select.weight", 1)],
    special.SplitAttention: [("a.weight", 0), ("norm.weight", 0), ("select.weight", 0), ("head.weight", 1)],
    special.StateSpace: [("enter.weight", 0), ("rate.weight", 0), ("decay", 0), ("select.weight", 1), ("head.weight", 1)],
    special.DataDependent: [("a.0.weight", 0), ("b.0.weight", 1)],
}


#: network -> what the reason for keeping channels must say.
KEPT = {
    special.HardView: r"view in the model to sizes written in the code; a copy that was cut there did not run",
    special.Split: r"cut at fixed places by split_with_sizes in the model",
    special.Sliced: r"cut at fixed places by slice in the model",
    special.OptionA: r"cannot be cut, by add in the model",
    special.FusedAttention: r"one for each head of matmul in the model",
    special.SpectralNorm: r"^mv in body.0.parametrizations.weight.0 multiplies .*: each .*remove_parametrizations makes",
    special.UnevenProjection: r"lstm in rnn projects 24 cells to 10, which is no divisor of their number",
    special.FixedBias: r"the bias of linear in the model is put together from pieces that cannot be cut",
    special.Written: r"cannot be cut, by copy in the model",
}


@pytest.mark.parametrize("kind", CUT, ids=lambda k: k.__name__)
def test_cut_equals_zeroed(kind) -> None:
    """A third of every group goes, so that every rule has to be right at once."""
    model, x = built(kind), special.example(kind)
    search = TrialRepair(model, x, inside=None, ignore=())
    plan = trial_plan(search.find_groups(count_macs(model, x)))
    for name, dim in CUT[kind]:
        assert plan.remove.get(name, {}).get(dim), f"{name} along {dim} was left whole"
    assert_equals_zeroed(model, plan, x)
    outputs = apply_(model, plan).train()(*(torch.cat([v, v]) for v in x))
    sum(v.sum() for v in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()


@pytest.mark.parametrize("kind", CUT, ids=lambda k: k.__name__)
def test_planned_macs_are_those_of_the_pruned_model(kind) -> None:
    model, plan, pruned = cut(kind, macs=0.6)
    assert count_macs(pruned, special.example(kind)) == plan.macs <= 0.6 * plan.macs_before
    assert_equals_zeroed(model, plan, special.example(kind))


@pytest.mark.parametrize("kind", KEPT, ids=lambda k: k.__name__)
def test_kept_for_a_reason(kind) -> None:
    model, plan, _ = cut(kind, macs=0.97)
    assert any(re.search(KEPT[kind], reason) for reason in plan.locked), plan.locked
    assert_equals_zeroed(model, plan, special.example(kind))


class Scattered(special.Images):
    """Channels that an index of their own moves, or that are moved along themselves, or written over by a parameter."""

    def __init__(self, body, *, stored=False):
        super().__init__()
        self.a, self.b, self.code = special.conv(16, 16), special.conv(16, 16), body
        self.stored = nn.Parameter(torch.randn(2, 16, 16, 16)) if stored else None

    def body(self, x):
        return self.b(self.code(self, self.a(x)))


class GroupsDeformed(special.Images):
    def __init__(self):
        super().__init__()
        self.where, self.a, self.b = (
            nn.Conv2d(16, 18, 3, padding=1),
            DeformConv2d(16, 16, 3, padding=1, groups=2),
            special.conv(16, 16),
        )

    def body(self, x):
        return self.b(self.a(x, self.where(x)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Scattered(lambda m, x: x.gather(2, x.argsort(2))), "read as positions by gather"),
        (
            Scattered(lambda m, x: x.gather(2, torch.arange(x.shape[1]).view(1, -1, 1, 1).expand_as(x))),
            "looked up at fixed places by gather",
        ),
        (
            Scattered(lambda m, x: x.scatter(1, torch.zeros(x.shape, dtype=torch.long), x)),
            "looked up at fixed places by scatter",
        ),
        (
            Scattered(lambda m, x: x.scatter(0, torch.zeros(x.shape, dtype=torch.long), m.stored), stored=True),
            "overwritten by scatter",
        ),
        (GroupsDeformed(), "deform_conv2d in a has groups"),
    ],
    ids=["order", "places", "along", "parameter", "groups"],
)
def test_channels_that_are_moved_in_other_ways_are_kept_and_named(model, reason) -> None:
    plan = planned(model.eval(), macs=0.9)
    assert any(reason in locked for locked in plan.locked), plan.locked


class Neighbours(nn.Module):
    """Messages along the edges of a graph, written into a tensor as large as that of its nodes, beside which it is read."""

    def __init__(self, write):
        super().__init__()
        self.enter, self.message, self.leave, self.write = nn.Linear(6, 16), nn.Linear(32, 16), nn.Linear(32, 3), write

    def forward(self, x, edges):
        h = self.enter(x).relu()
        message = self.message(torch.cat([h[edges[0]], h[edges[1]]], 1)).relu()
        return self.leave(torch.cat([h, self.write(torch.zeros_like(h), edges[1], message)], 1))


@pytest.mark.parametrize(
    "write",
    [
        lambda zeros, to, y: zeros.index_add(0, to, y),
        lambda zeros, to, y: zeros.index_put((to,), y, accumulate=True),
        lambda zeros, to, y: zeros.index_copy(0, torch.arange(len(zeros)), y[: len(zeros)]),
        lambda zeros, to, y: zeros.slice_scatter(y[:4], 0, 1, 5),
        lambda zeros, to, y: zeros.select_scatter(y[3], 0, 1),
        lambda zeros, to, y: zeros.copy_(y[: len(zeros)]),
    ],
    ids=["add", "put", "copy rows", "slice", "row", "copy"],
)
def test_what_is_written_into_zeros_like_another_value_goes_with_its_channels(write) -> None:
    inputs = (torch.randn(9, 6), torch.randint(0, 9, (2, 20)))
    model = Neighbours(write).eval()
    plan = plan_channels(model, inputs, keep(macs=0.6), round_to=4)
    assert plan.macs <= 0.6 * plan.macs_before
    assert_equals_zeroed(model, plan, inputs)


class Unpooled(nn.Module):
    """An encoder whose pooling says to the decoder where the largest values were, as in SegNet (1511.00561)."""

    def __init__(self, dims=2):
        super().__init__()
        layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.pool, self.unpool = ((getattr(nn.functional, f"max_{n}pool{dims}d")) for n in ("", "un"))
        self.a, self.b, self.c, self.head = (layer(i, o, 3, padding=1) for i, o in ((3, 16), (16, 24), (24, 16), (16, 5)))

    def forward(self, x):
        x = self.a(x)
        y, where = self.pool(x, 2, return_indices=True)
        return self.head(self.unpool(self.c(self.b(y).relu()), where, 2, output_size=x.shape))


class Windows(special.Images):
    """Layers that read windows and make windows, which are added up."""

    def __init__(self):
        super().__init__(24)
        self.a, self.across = special.conv(16, 16), nn.Conv1d(16 * 9, 24 * 9, 1)

    def body(self, x):
        y = nn.functional.unfold(self.a(x), 3, padding=1)
        return nn.functional.fold(self.across(y).relu(), x.shape[2:], 3, padding=1)


class GlobalFilter(special.Tokens):
    """Tokens are mixed by learned factors of their frequencies (2107.00645)."""

    def __init__(self):
        super().__init__()
        self.norm, self.factors = nn.LayerNorm(32), nn.Parameter(torch.randn(2, 2, 32, 2))

    def body(self, x):
        grid = torch.fft.rfft2(self.norm(x).unflatten(1, (2, 3)), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.factors)
        return x + torch.fft.irfft2(grid, s=(2, 3), dim=(1, 2), norm="ortho").flatten(1, 2)


class Frequencies(special.Tokens):
    def __init__(self, dim=1):
        super().__init__()
        self.dim, self.a = dim, nn.Linear(32, 32)

    def body(self, x):
        y = torch.view_as_real(torch.fft.fftshift(torch.fft.fft(self.a(x), dim=self.dim), dim=1))
        y = torch.complex(y[..., 0], y[..., 1])
        return torch.fft.ifft(y.conj() * y.abs(), dim=self.dim).real + y.imag


class RotaryByComplex(special.SeparateAttention):
    """Queries and keys are turned by their positions, in pairs that are complex numbers, as LLaMA has them (2302.13971)."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(6.0), 100 ** -torch.arange(0, 1, 2 / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def body(self, x):
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "shape", "tensors"),
    [
        (partial(Unpooled, 1), (2, 3, 8), [("a.weight", 0), ("c.weight", 0), ("head.weight", 1)]),
        (Unpooled, (2, 3, 8, 8), [("a.weight", 0), ("c.weight", 0), ("head.weight", 1)]),
        (partial(Unpooled, 3), (2, 3, 4, 4, 4), [("a.weight", 0), ("c.weight", 0), ("head.weight", 1)]),
        (Windows, (2, 3, 8, 8), [("a.0.weight", 0), ("across.weight", 0), ("across.weight", 1), ("head.weight", 1)]),
        (GlobalFilter, (2, 6, 8), [("factors", 2), ("norm.weight", 0), ("embed.weight", 0)]),
        (Frequencies, (2, 6, 8), [("a.weight", 0), ("a.weight", 1)]),
        (RotaryByComplex, (2, 6, 8), [("q.weight", 0), ("k.weight", 0), ("turns", 1)]),
    ],
    ids=["indices1d", "indices2d", "indices3d", "windows", "filter", "frequencies", "rotary"],
)
def test_a_channel_stays_a_channel(kind, shape, tensors) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), (torch.randn(shape),)
    search = TrialRepair(model, x, inside=None, ignore=())
    groups = search.find_groups(count_macs(model, x))
    plan = trial_plan(groups)
    assert all(plan.remove[name][dim] for name, dim in tensors)
    assert groups.locked.keys() == {"an output of the model"}
    assert_equals_zeroed(model, plan, x)
    assert search.prove(plan, groups) is None


def test_channels_that_a_transform_mixes_are_kept_and_named() -> None:
    plan = plan_channels(Frequencies(dim=2).eval(), torch.randn(2, 6, 8), remove(channels=0.3), round_to=1)
    assert plan.locked["fft_fft in the model mixes the channels"] == 32


def test_a_norm_by_a_hook_has_the_advice_that_takes_it_away() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.utils.spectral_norm(nn.Linear(16, 16)), nn.Linear(16, 4)).eval()
    advice = r"mv in 1 multiplies parameters.*; torch\.nn\.utils\.remove_spectral_norm makes them plain weights"
    with pytest.raises(ModelError, match=advice):
        plan_channels(model, torch.randn(2, 8), remove(channels=0.5))
    nn.utils.remove_spectral_norm(model[1])
    assert plan_channels(model, torch.randn(2, 8), remove(channels=0.5), round_to=1).remove["1.weight"]


def test_an_unknown_operator_locks_its_channels_and_is_named() -> None:
    plan = planned(build(networks.Unknown), macs=0.75)
    assert any("sort in the model mixes the channels" in reason for reason in plan.locked)
    assert plan.remove["a.0.weight"]
    assert "b.0.bias" not in plan.remove


def test_global_response_norm_takes_its_mean_over_the_channels_that_stay() -> None:
    model, plan, pruned = cut(special.Grn)
    gone = plan.remove["up.weight"][0]
    assert plan.remove["gamma"][0] == plan.remove["beta"][0] == gone
    stays = [i for i in range(64) if i not in gone]
    x = special.example(special.Grn)[0].double()
    model.double()
    with torch.no_grad():
        y = nn.functional.gelu(nn.functional.linear(model.a(x), model.up.weight[stays], model.up.bias[stays]))
        response = y.square().sum(1, keepdim=True).sqrt()
        y = model.gamma[stays] * (y * (response / (response.sum(-1, keepdim=True) / len(stays) + 1e-6))) + model.beta[stays] + y
        wanted = (model.a(x) + nn.functional.linear(y, model.down.weight[:, stays], model.down.bias)).mean(1)
        assert plan.remove.keys() == {"up.weight", "up.bias", "gamma", "beta", "down.weight"}
        assert (model.head(wanted) - pruned.double()(x)).abs().max() < 1e-9


@torch.library.custom_op("compresskit_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """An operator that no rule of the package knows."""
    return x * factor


class Custom(special.Images):
    def __init__(self):
        super().__init__()
        self.a, self.b = special.conv(16, 16), special.conv(16, 16)

    def body(self, x):
        return self.b(scaled(self.a(x), 2.0))


def test_one_function_makes_an_unknown_operator_known(monkeypatch) -> None:
    model, x = built(Custom), special.example(Custom)
    plan = plan_channels(model, x, budget=keep(macs=0.8), round_to=1)
    assert plan.locked["no rule for compresskit_tests.scaled.default (the model)"] == 16
    assert 0 not in plan.remove.get("a.0.weight", {})
    operator = torch.ops.compresskit_tests.scaled.default
    monkeypatch.setitem(PROPAGATION_RULES, operator, None)  # taken out again after the test
    rule_for(operator)(lambda call: call.args[0])
    plan = plan_channels(model, x, budget=keep(macs=0.6), round_to=1)
    assert plan.remove["a.0.weight"][0]
    assert_equals_zeroed(model, plan, x)


def test_a_norm_over_channels_by_hand_and_by_torch_are_cut_alike() -> None:
    class Unit(nn.Sequential):
        def forward(self, x):
            return self[1](nn.functional.normalize(self[0](x), dim=1))

    torch.manual_seed(0)
    model, x = Unit(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 5, 3)), (torch.randn(4, 3, 8, 8),)
    plan = plan_channels(model, x, budget=keep(macs=0.5))
    assert len(plan.remove["0.weight"][0]) == 16
    assert_equals_zeroed(model, plan, x)


def test_a_tensor_that_is_moved_to_its_own_device_is_followed() -> None:
    class Moved(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x).relu().to(x.device))

    plan = plan_channels(Moved(nn.Linear(12, 32), nn.Linear(32, 5)), (torch.randn(4, 12),), budget=keep(macs=0.5))
    assert len(plan.remove["0.weight"][0]) == 16


def test_a_weight_that_depends_on_data_is_named() -> None:
    class Dynamic(nn.Sequential):
        def forward(self, x):
            return self[1](nn.functional.linear(x, self[0].weight * x.repeat(8, 1).sigmoid(), self[0].bias).relu())

    plan = plan_channels(
        nn.Sequential(Dynamic(nn.Linear(12, 32), nn.Linear(32, 16)), nn.Linear(16, 8), nn.Linear(8, 5)),
        (torch.randn(4, 12),),
        budget=keep(macs=0.9),
        round_to=1,
    )
    assert plan.locked["the weight of linear in 0 is computed in the forward pass"] == 32
    assert plan.remove


def test_a_weight_that_data_scale_is_cut() -> None:
    class Dynamic(nn.Sequential):
        def forward(self, x):
            return self[1](nn.functional.linear(x, self[0].weight * x.mean().sigmoid(), self[0].bias).relu())

    model, x = Dynamic(nn.Linear(12, 32), nn.Linear(32, 5)).eval(), torch.randn(4, 12)
    plan = plan_channels(model, (x,), budget=keep(macs=0.5), round_to=1)
    assert plan.remove.keys() == {"0.weight", "0.bias", "1.weight"}
    assert_equals_zeroed(model, plan, (x,))


def test_vectors_side_by_side_are_not_followed() -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(32, 4)

        def forward(self, x):
            means = self.first(x).mean(0)
            return self.last(torch.hstack([means, -means]))

    with pytest.raises(ModelError, match=r"no rule for aten.hstack.default of vectors"):
        plan_channels(Vectors().eval(), (torch.randn(4, 8),), budget=keep(macs=0.5))


class NormByAttribute(nn.Module):
    """Gives the width to `F.layer_norm`, and the number of groups to `F.conv1d`."""

    def __init__(self):
        super().__init__()
        self.dim = self.groups = 16
        self.enter, self.head = nn.Linear(12, 16), nn.Linear(16, 5)
        self.gain, self.shift = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.register_buffer("blur", torch.rand(16, 1, 3))

    def forward(self, x):
        y = nn.functional.layer_norm(self.enter(x), (self.dim,), self.gain, self.shift)
        return self.head(nn.functional.conv1d(y.transpose(1, 2), self.blur, groups=self.groups).transpose(1, 2))


class ConvLSTM(nn.Module):
    """Begins with states of zeros, which are put beside its inputs."""

    def __init__(self):
        super().__init__()
        self.hidden = 16
        self.gates, self.head = nn.Conv2d(19, 64, 3, 1, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), self.hidden, *x.shape[3:])
        for t in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


@pytest.mark.parametrize(
    ("kind", "shape", "names"), [(NormByAttribute, (4, 6, 12), {"dim", "groups"}), (ConvLSTM, (2, 3, 3, 8, 8), {"hidden"})]
)
def test_widths_that_the_code_takes_from_attributes_follow(kind, shape, names) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    plan = plan_channels(model, x, keep(macs=0.6), round_to=1)
    assert plan.attributes.keys() == names
    if kind is ConvLSTM:  # of the other, the statistics are over the channels that stay
        assert_equals_zeroed(model, plan, (x,))
    wanted = model(x).shape
    assert apply_(model, plan)(x).shape == wanted
