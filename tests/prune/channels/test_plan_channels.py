"""Channel pruning: exact on every topology, or locked with a reason."""

from __future__ import annotations

import copy
import json

import networks
import oracles
import pytest
import torch
from networks import NETWORKS, build, image, trained_like
from torch import nn

from compresskit import capture, count_macs, keep
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune import Plan, apply_, plan_channels, prove
from compresskit.prune.criteria import l2
from compresskit.prune.structure.groups import find_groups
from compresskit.prune.structure.plan import zero_
from compresskit.prune.structure.propagate import Walk
from compresskit.prune.structure.trace import record


def planned(model, macs=0.6, **settings):
    return plan_channels(model, image(2), budget=keep(macs=macs), round_to=settings.pop("round_to", 4), **settings)


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_pruned_equals_zeroed(kind) -> None:
    model = build(kind)
    plan = planned(model, macs=0.75 if kind in (networks.Unknown, networks.Gate) else 0.6)
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


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_pruned_trains_and_counts(kind) -> None:
    model = build(kind)
    before = count_macs(model, image(2))
    plan = planned(model, macs=0.75 if kind in (networks.Unknown, networks.Gate) else 0.6)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    apply_(model, plan)
    assert count_macs(model, image(2)) == plan.macs <= 0.75 * before
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    model.train()(*image(4)).sum().backward()
    capture(model, image(2))


def test_attributes_follow() -> None:
    model = build(networks.Depthwise)
    apply_(model, planned(model))
    depth = model.depth[0]
    assert depth.groups == depth.in_channels == depth.out_channels == depth.weight.shape[0] < 32
    assert model.depth[1].num_features == depth.out_channels == model.project.in_channels
    assert model.head.in_features == model.stem[0].out_channels
    again = nn.Conv2d(depth.in_channels, depth.out_channels, 3, 1, 1, groups=depth.groups, bias=False)
    again.load_state_dict(depth.state_dict())


def test_depthwise_with_a_multiplier() -> None:
    model = trained_like(networks.Depthwise(multiplier=2), image(16))
    plan = planned(model)
    apply_(model, plan)
    depth = model.depth[0]
    assert depth.out_channels == 2 * depth.in_channels == 2 * depth.groups < 64


def test_the_number_of_classes_stays() -> None:
    model = build(networks.Chain)
    plan = planned(model, macs=0.2)
    assert "head.bias" not in plan.remove
    assert 0 not in plan.remove.get("head.weight", {})
    assert plan.locked["an output of the model"] == 10


def test_option_a_shortcut_is_cut_as_it_is() -> None:
    model = build(networks.PaddedShortcut)
    found = find_groups(Walk(record(model, image(2))), count_macs(model, image(2)))
    sizes = {g.layer: g.size for g in found.groups}
    assert sizes == {"stem.0": 16, "inner.0": 32}  # the stem's 16 tie the middle of out's 32 channels
    assert [n for reason, n in found.locked.items() if "cannot be cut" in reason] == [16]


def test_an_unknown_operator_locks_by_name() -> None:
    plan = planned(build(networks.Unknown), macs=0.75)
    assert any("sort in the model mixes the channels" in reason for reason in plan.locked)
    assert plan.remove["a.0.weight"]
    assert "b.0.bias" not in plan.remove


def test_sizes_written_in_the_code_are_kept() -> None:
    model = trained_like(networks.HardView(), image(16))
    plan = planned(model, macs=0.7)
    assert any("sizes written in the code" in reason for reason in plan.locked)
    apply_(model, plan)
    assert model.head.in_features == 256
    assert model.a[0].out_channels < 16


def test_ties_survive() -> None:
    model = build(networks.Tied)
    apply_(model, planned(model, macs=0.7))
    assert model.a.weight is model.b.weight
    assert model.a.weight.shape[0] == model.a.out_channels == model.b.out_channels < 16


def test_planning_is_pure() -> None:
    model = build(networks.Residual).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    planned(model)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_plan_prints_and_replays_from_json() -> None:
    model = build(networks.Residual)
    plan = planned(model)
    assert "inner.0: keep" in str(plan)
    assert "of 16, with inner.1, out[in]" in str(plan)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    x = image(4)
    with torch.no_grad():
        assert torch.equal(apply_(copy.deepcopy(model), again)(*x), apply_(model, plan)(*x))


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


def test_ignored_modules_stay() -> None:
    plan = planned(build(networks.Concat), macs=0.8, ignore=("a",))
    assert not any(name.startswith("a.") for name in plan.remove if 0 in plan.remove[name])
    assert "ignored by the user" in plan.locked


def test_inside_prunes_a_submodule() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = networks.Residual()

        def forward(self, x):
            y = self.net(x * 2)
            return y if float(y.detach().sum()) > 0 else -y  # cannot be captured, only recorded

    model = Outer().eval()
    assert all(name.startswith("net.") for name in planned(model).remove)
    plan = planned(model, inside="net")
    assert all(name.startswith("net.") for name in plan.remove)
    apply_(model, plan)(*image(2))


def test_the_lowest_scores_go() -> None:
    model = build(networks.Chain)
    with torch.no_grad():
        model.a[0].weight[3:7] *= 1e-3
        model.b[0].weight[:, 3:7] *= 1e-3
    plan = planned(model, macs=0.9)
    gone, lowest = set(plan.remove["a.0.weight"][0]), {3, 4, 5, 6}
    assert gone <= lowest or gone >= lowest


@pytest.mark.parametrize("macs", [0, -0.5, 1.5, float("nan")])
def test_share_out_of_range(macs) -> None:
    with pytest.raises(SettingError, match="in \\(0, 1\\]"):
        planned(build(networks.Chain), macs=macs)


def test_unreachable_share_says_what_can_be_reached() -> None:
    model = build(networks.Unknown)
    with pytest.raises(ModelError, match=r"wanted 1\.0% of the MACs, only \d+\.\d% can be reached; locked: .*sort"):
        planned(model, macs=0.01)


def test_plan_of_another_model() -> None:
    plan = planned(build(networks.Residual))
    other = build(networks.Chain)
    with pytest.raises(ModelError, match="no module|no parameter"):
        apply_(other, plan)
    wider = build(networks.Residual)
    wider.inner[0] = nn.Conv2d(16, 24, 3, 1, 1, bias=False)
    before = wider.inner[0].weight
    with pytest.raises(ModelError, match=r"made for shape \(16, 16, 3, 3\)"):
        apply_(wider, plan)
    assert wider.inner[0].weight is before


def test_half_models_are_refused() -> None:
    with pytest.raises(ModelError, match=r"is torch\.bfloat16; prune the fp32 model"):
        planned(build(networks.Chain).bfloat16())


def test_damaged_plan() -> None:
    with pytest.raises(CheckpointError, match="not a pruning plan"):
        Plan.from_json({"remove": []})


def test_proof_catches_a_wrong_plan() -> None:
    """The proof is no formality: a plan that cuts one channel here and another there is refused."""
    model = build(networks.Chain)
    plan = planned(model)
    gone = plan.remove["b.0.weight"][1]
    other = tuple(sorted(set(range(16)) - set(gone)))[: len(gone)]
    wrong = dict(plan.remove) | {"b.0.weight": {**plan.remove["b.0.weight"], 1: other}}
    bad = Plan(remove=wrong, sizes=plan.sizes, lines=(), macs=1, macs_before=2)
    assert prove(model, plan, image(2)) is None
    # Zeroing the same wrong places on both sides agrees only where nothing else depends on them.
    del bad.remove["a.0.weight"]
    assert "does not run" in prove(model, bad, image(2))


def test_scores_that_are_not_scores() -> None:
    with pytest.raises(ModelError, match="the criterion gave scores of shape"):
        planned(build(networks.Chain), criterion=lambda slices: l2(slices)[:-1])
