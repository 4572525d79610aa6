"""Channel pruning: exact on every topology, or locked with a reason."""

from __future__ import annotations

import copy
import warnings

import networks
import oracles
import pytest
import special_networks as special
import torch
import torch.nn.utils.prune
from networks import NETWORKS, build, image, trained_like
from pruned import assert_untouched, planned, state
from torch import nn

import compresskit as ck
from compresskit import count_macs, keep
from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.graph.capture import capture
from compresskit.prune import apply_, plan_channels
from compresskit.prune.channels import candidates
from compresskit.prune.criteria import l2
from compresskit.prune.structure.plan import zero_


@pytest.fixture(scope="module", params=NETWORKS, ids=lambda k: k.__name__)
def network(request):
    """A network and its plan, for tests that change neither."""
    torch.manual_seed(0)
    model = build(request.param)
    return model, planned(model, macs=0.75 if request.param in (networks.Unknown, networks.Gate) else 0.6)


def test_pruned_equals_zeroed(network) -> None:
    model, plan = network
    assert plan.remove, "nothing was pruned"
    x = image(8)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        wide = copy.deepcopy(model).to(dtype)
        inputs = tuple(v.to(dtype) for v in x)
        with torch.no_grad():
            wanted = zero_(copy.deepcopy(wide), plan)(*inputs)
            got = apply_(copy.deepcopy(wide), plan)(*inputs)
        assert (wanted - got).abs().max() < tolerance


def test_pruned_equals_channels_masked_where_they_are_read() -> None:
    """Against a reference that shares no code: hooks that zero what the reading layers see."""
    model = build(networks.Residual).double()
    x = tuple(v.double() for v in image(8))
    plan = planned(model.float(), macs=0.6)
    model.double()
    readers = {name.removesuffix(".weight"): dims[1] for name, dims in plan.remove.items() if 1 in dims}
    assert readers
    wanted = oracles.masked_forward(model, x, {name: (1, list(gone)) for name, gone in readers.items()})
    with torch.no_grad():
        got = apply_(copy.deepcopy(model), plan)(*x)
    assert (wanted - got).abs().max() < 1e-10


def test_the_pruned_network_trains_has_the_planned_macs_and_can_be_captured(network) -> None:
    dense, plan = network
    before = count_macs(dense, image(2))
    flags = {n: p.requires_grad for n, p in dense.named_parameters()}
    model = apply_(copy.deepcopy(dense), plan)
    assert count_macs(model, image(2)) == plan.macs <= 0.75 * before
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    model.train()(*image(4)).sum().backward()
    capture(model, image(2))


def test_planning_is_pure() -> None:
    model = build(networks.Residual).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    planned(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_alignment() -> None:
    model = build(networks.Concat)
    plan = plan_channels(model, image(2), budget=keep(macs=0.6))
    apply_(model, plan)
    ragged = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.out_channels % 8]
    assert len(ragged) <= 1  # only the last cut may be finer, so that the target is met and not far exceeded
    assert 0.55 < plan.macs / plan.macs_before <= 0.6

    wide = trained_like(nn.Sequential(*(networks.conv(i, o) for i, o in ((3, 64), (64, 128), (128, 64)))), image(16))
    apply_(wide, plan_channels(wide, image(2), budget=keep(macs=0.475)))  # what 56 and 64 of the channels cost
    assert all(m.out_channels % 8 == 0 for m in wide.modules() if isinstance(m, nn.Conv2d))


def test_the_lowest_scores_go() -> None:
    model = build(networks.Chain)
    with torch.no_grad():
        model.a[0].weight[3:7] *= 1e-3
        model.b[0].weight[:, 3:7] *= 1e-3
    plan = planned(model, macs=0.9)
    gone, lowest = set(plan.remove["a.0.weight"][0]), {3, 4, 5, 6}
    assert gone <= lowest or gone >= lowest


def test_depthwise_transposed_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(32, 32, 4, 2, 1, groups=32), nn.ReLU(), nn.Conv2d(32, 4, 1)
    ).eval()
    ck.prune.apply_(model, plan_channels(model, image(2), budget=ck.keep(macs=0.6)))
    assert model[2].groups == model[2].in_channels == model[2].out_channels < 32


def test_a_model_that_takes_uint8_images_is_cut() -> None:
    class Bytes(networks.Chain):
        def forward(self, x):
            return super().forward(x.float() / 255)

    x = (torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8),)
    model = Bytes().eval()
    before = ck.count_macs(model, x)
    ck.prune.apply_(model, plan_channels(model, x, budget=ck.keep(macs=0.6)))
    assert ck.count_macs(model, x) <= 0.6 * before
    assert model(*x).shape == (2, 10)


@pytest.mark.parametrize("macs", [0, -0.5, 1.5, float("nan")])
def test_share_out_of_range(macs) -> None:
    with pytest.raises(SettingError, match="in \\(0, 1\\]"):
        planned(build(networks.Chain), macs=macs)


def test_unreachable_share_says_what_can_be_reached() -> None:
    model = build(networks.Unknown)
    with pytest.raises(ModelError, match=r"wanted 1\.0% of the MACs, only \d+\.\d% can be reached; locked: .*sort"):
        planned(model, macs=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_models_are_refused(dtype) -> None:
    model = build(networks.Chain).to(dtype)
    with pytest.raises(ModelError, match=rf"a\.0\.weight is {dtype}; prune the fp32 model"):
        plan_channels(model, (torch.randn(2, 3, 16, 16).to(dtype),), budget=keep(macs=0.5))


def test_a_budget_below_what_the_locks_allow_is_refused_and_leaves_the_model_as_it_was() -> None:
    model = special.Split().eval()
    before = state(model)
    with pytest.raises(ModelError, match=r"only \d+\.\d% can be reached; locked: .*32 channels: cut at fixed places by split"):
        plan_channels(model, special.example(special.Split), budget=keep(macs=0.02))
    assert_untouched(model, before)


def test_scores_that_are_not_scores() -> None:
    with pytest.raises(ModelError, match="the criterion gave scores of shape"):
        planned(build(networks.Chain), criterion=lambda slices: l2(slices)[:-1])


def linear_pair(**settings) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 32, **settings), nn.ReLU(), nn.Linear(32, 4, **settings))


def with_nan() -> nn.Module:
    model = linear_pair()
    model[0].weight.data[3, 1] = float("nan")
    return model


def with_foreign_mask() -> nn.Module:
    model = linear_pair()
    torch.nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.5)
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls scripting deprecated
        return torch.jit.script(linear_pair())


X = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("make", "x", "message"),
    [
        (nn.ReLU, X, "ReLU has no parameters"),
        (linear_pair, X[:0], r"wanted an example of at least one sample, got a tensor of shape \(0, 3\)"),
        (lambda: abs, X, r"wanted a torch\.nn\.Module, not scripted, got builtin_function_or_method"),
        (scripted, X, "not scripted, got RecursiveScriptModule"),
        (lambda: nn.Sequential(nn.LazyLinear(32)), X, r"0\.weight has no shape yet; run the model once"),
        (lambda: linear_pair(device="meta"), X, r"0\.weight is on the meta device"),
        (lambda: linear_pair(dtype=torch.cfloat), X, r"0\.weight is torch\.complex64; .* torch\.view_as_complex\(self\.weight\)"),
        (with_nan, X, r"0\.weight has 1 values that are not finite"),
        (with_foreign_mask, X, r"masks of torch\.nn\.utils\.prune, in 0; take them over with .* make them permanent"),
    ],
    ids=["no parameters", "no rows", "function", "scripted", "lazy", "meta", "complex", "nan", "torch prune"],
)
def test_what_cannot_be_pruned_is_one_error(make, x, message) -> None:
    with pytest.raises(CompressError, match=message):
        plan_channels(make(), (x,), budget=keep(macs=0.5))


def test_a_ratio_where_nothing_can_be_cut_is_refused() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 16, 3)), nn.ReLU(), nn.Conv2d(16, 2, 3))
    with pytest.raises(ModelError, match=r"wanted 50\.0% of the channels, but no channel can be removed; locked: "):
        plan_channels(model, image(2), budget=ck.remove(channels=0.5), round_to=1)


def test_ignore_is_not_one_name() -> None:
    with pytest.raises(SettingError, match=r"ignore=\.\.\.: wanted dotted names of modules, such as \('head',\), got 'head'"):
        planned(build(networks.Chain), ignore="head")


class Encoder(nn.Module):
    """Torch's encoder in the layout that is its default, (positions, samples, width); also of (positions, width)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.enter, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.head(self.layers(self.enter(x)).mean(0))


class Towers(nn.Module):
    """The scores of users beside all items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, users, items):
        return self.users(users) @ self.items(items).T


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(Encoder, [(90, 3, 8)]), (Encoder, [(90, 8)]), (Towers, [(20, 8), (30, 8)]), (Towers, [(5, 8), (4, 8)])],
    ids=["time first", "unbatched", "towers", "small towers"],
)
def test_macs_are_those_of_the_example(kind, shapes) -> None:
    """Two rows of the first dimension would be another workload."""
    torch.manual_seed(0)
    model, example = kind().eval(), tuple(torch.randn(shape) for shape in shapes)
    plan = plan_channels(model, example, keep(macs=0.7), round_to=2)
    small = apply_(copy.deepcopy(model), plan)
    assert plan.macs_before == count_macs(model, example)
    assert plan.macs == pytest.approx(count_macs(small, example), abs=1)
    assert count_macs(small, example) <= 0.7 * count_macs(model, example)


@pytest.mark.parametrize(("inputs", "rows", "said"), [((90, 3, 8), 90, "the example"), ((3, 90, 8), 3, "the example")])
def test_milliseconds_are_those_of_the_example(inputs, rows, said, monkeypatch) -> None:
    timed = []

    def noted(files, inputs, **settings):
        timed.append(len(inputs[0]))
        return [1.0, 0.69]

    monkeypatch.setattr(candidates, "latency", noted)
    plan = plan_channels(Encoder().eval(), torch.randn(inputs), keep(latency=0.7))
    assert {*timed} == {rows}
    assert said in plan.note


@pytest.mark.parametrize("quantize", [ck.quant.quantize_static, ck.quant.quantize_dynamic, ck.quant.quantize_weights])
def test_a_quantized_model_is_refused(quantize) -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(16, 8)
    quantized = quantize(model, [(x,)] if quantize is ck.quant.quantize_static else (x,))
    with pytest.raises(ModelError, match="plan_channels: Sequential is quantized already, .*; prune the float model"):
        ck.prune.plan_channels(quantized, (x,), ck.keep(macs=0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": [0.5]}, r"plan_channels\(ratios=...\): wanted the ratio of each layer, such as {'conv1': 0.5}, got \[0.5\]"),
        ({"whole_heads": "no"}, r"plan_channels\(whole_heads=...\): wanted True or False, got 'no'"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        plan_channels(linear_pair(), (X,), budget=keep(macs=0.5), **settings)
