"""The special cases of structured pruning: each is cut and equals the zeroed model in float64, or is kept for a reason."""

from __future__ import annotations

import copy
import json
import re

import oracles
import pytest
import special_networks as special
import torch
from networks import trained_like
from torch import nn

from compresskit import count_macs, keep
from compresskit.prune import Plan, apply_, plan_channels
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
    special.ShuffleByHand: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.ShuffleModule: [("a.0.weight", 0), ("b.0.weight", 1)],
    special.Pixels: [("a.weight", 0), ("b.0.weight", 1)],
    special.Unpixels: [("stem.0.weight", 0), ("a.0.weight", 1)],
    special.OptionA: [("stem.0.weight", 0), ("inner.0.weight", 0)],
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
    special.Einsum: [("first", 1), ("second", 0)],
    special.Product: [("a.weight", 0), ("b.weight", 0)],
    special.WeightNorm: [("body.0.parametrizations.weight.original0", 0), ("body.0.parametrizations.weight.original1", 0)],
    special.Auxiliary: [("a.0.weight", 0), ("side.0.0.weight", 1)],
    special.DataDependent: [("a.0.weight", 0), ("b.0.weight", 1)],
}

#: network -> what the reason for keeping channels must say.
KEPT = {
    special.HardView: r"view in the model to sizes written in the code; a copy that was cut there did not run",
    special.Split: r"cut at fixed places by split_with_sizes in the model",
    special.Sliced: r"cut at fixed places by slice in the model",
    special.OptionA: r"cannot be cut, by add in the model",
    special.FusedAttention: r"one for each head of matmul in the model",
    special.SpectralNorm: r"(no rule for|computed in the forward pass)",
    special.Written: r"cannot be cut, by copy in the model",
}


def built(kind):
    model = kind()
    return (
        trained_like(model, special.example(kind))
        if any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
        else model.eval()
    )


def cut(kind, macs=0.55, **settings):
    """A model, its plan, and the pruned copy."""
    model = built(kind)
    plan = plan_channels(model, special.example(kind), budget=keep(macs=macs), round_to=1, **settings)
    return model, plan, apply_(copy.deepcopy(model), plan)


def assert_equals_zeroed(model, plan, inputs):
    wanted = oracles.zeroed_forward(model, inputs, plan.remove)
    pruned = apply_(copy.deepcopy(model).double().eval(), plan)
    with torch.no_grad():
        got = pruned(*(v.double() if v.is_floating_point() else v for v in inputs))
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (wanted, got)), strict=True):
        assert (a - b).abs().max() < 1e-9 * max(1, a.abs().max())
        assert a.std() > 1e-3, "an output that is nearly constant proves nothing"


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


def test_global_response_norm_takes_its_mean_over_what_stays() -> None:
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


@pytest.mark.parametrize("kind", [special.FusedAttention, special.Multihead, special.CrossAttention], ids=lambda k: k.__name__)
def test_whole_heads(kind) -> None:
    model, plan, pruned = cut(kind, macs=0.45, whole_heads=True)
    if kind is special.FusedAttention:
        assert pruned.heads == pruned.table.shape[1] < 4  # the table of relative positions loses that head's column
        assert pruned.qkv.out_features == 3 * 8 * pruned.heads
    else:
        assert pruned.attention.num_heads < 4
        assert pruned.attention.head_dim == 8
    assert_equals_zeroed(model, plan, special.example(kind))


def test_heads_stay_equally_wide() -> None:
    _, plan, pruned = cut(special.SeparateAttention)
    for name in ("q", "k", "v"):
        gone = torch.zeros(32, dtype=torch.bool)
        gone[list(plan.remove[f"{name}.weight"][0])] = True
        assert len(set(gone.view(4, 8).sum(1).tolist())) == 1
    assert plan.remove["q.weight"][0] == plan.remove["k.weight"][0]
    assert pruned.out.in_features == pruned.v.out_features


def test_queries_keep_their_scale() -> None:
    """The code divides by the root of a width that shrinks: the rows of the queries make up for it."""
    model, plan, pruned = cut(special.FusedAttention)
    width = pruned.qkv.out_features // 3 // 4
    factor, rows = plan.scales["qkv.weight"]
    assert factor == pytest.approx((width / 8) ** 0.5)
    assert set(rows) == set(range(32))
    kept = [i for i in range(32) if i not in plan.remove["qkv.weight"][0]]
    columns = [i for i in range(32) if i not in plan.remove["qkv.weight"][1]]
    assert torch.allclose(pruned.qkv.weight[: len(kept)], model.qkv.weight[kept][:, columns] * factor)


def test_numbers_of_the_users_own_follow() -> None:
    _, plan, pruned = cut(special.StoredAttention)
    assert plan.attributes == {"head_dim": (8, pruned.head_dim)}
    assert pruned.head_dim < 8
    assert not plan.scales  # the scale is stored, so it stays what it was


def test_attributes_of_torchs_own_layers_follow() -> None:
    _, _, lstm = cut(special.Recurrent)
    assert lstm.rnn.hidden_size == lstm.rnn.weight_hh_l0.shape[1] < 24
    assert lstm.rnn.input_size == lstm.embed.embedding_dim
    _, _, attention = cut(special.Multihead)
    assert attention.attention.embed_dim == attention.head.in_features == 4 * attention.attention.head_dim < 32
    _, _, norm = cut(special.BareInstanceNorm)
    assert norm.norm.num_features == norm.a.out_channels < 16
    _, _, wide = cut(special.WideLayerNorm)
    assert wide.norm.normalized_shape == (wide.a.out_channels, 8, 8)


def test_ties_survive() -> None:
    _, _, pruned = cut(special.TiedByModule)
    assert pruned.head.weight is pruned.embed.weight
    assert pruned.head.in_features == pruned.embed.embedding_dim < 32
    assert pruned.head.out_features == 50


def test_flags_survive() -> None:
    model, _, pruned = cut(special.Frozen)
    assert {n: p.requires_grad for n, p in pruned.named_parameters()} == {n: p.requires_grad for n, p in model.named_parameters()}


def test_auxiliary_heads_train_after_the_cut() -> None:
    _, plan, pruned = cut(special.Auxiliary)
    one, two = pruned.train()(torch.randn(4, 3, 8, 8))
    (one.sum() + two.sum()).backward()
    assert pruned.side[0][0].weight.grad is not None
    assert plan.locked["an output of the model"] == 20


def test_plans_of_attention_replay_from_json() -> None:
    model, plan, pruned = cut(special.FusedAttention)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    x = special.example(special.FusedAttention)
    with torch.no_grad():
        assert torch.equal(apply_(copy.deepcopy(model), again)(*x), pruned(*x))
