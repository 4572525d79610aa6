"""Plans: print, serialize, apply, and refuse models that they were not made for."""

from __future__ import annotations

import copy
import json

import networks
import pytest
import special_networks as special
import torch
from networks import build, image, trained_like
from pruned import assert_untouched, cut, planned, state
from torch import nn

from compresskit import keep, remove
from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph.surgery import copy_model
from compresskit.prune import Plan, apply_, plan_channels, plan_mask
from compresskit.prune.structure.plan import PlanLine


def test_attributes_of_a_depthwise_layer_follow() -> None:
    model = build(networks.Depthwise)
    apply_(model, planned(model))
    depth = model.depth[0]
    assert depth.groups == depth.in_channels == depth.out_channels == depth.weight.shape[0] < 32
    assert model.depth[1].num_features == depth.out_channels == model.project.in_channels
    assert model.head.in_features == model.stem[0].out_channels
    again = nn.Conv2d(depth.in_channels, depth.out_channels, 3, 1, 1, groups=depth.groups, bias=False)
    again.load_state_dict(depth.state_dict())


def test_a_depthwise_layer_keeps_its_multiplier() -> None:
    model = trained_like(networks.Depthwise(multiplier=2), image(16))
    plan = planned(model)
    apply_(model, plan)
    depth = model.depth[0]
    assert depth.out_channels == 2 * depth.in_channels == 2 * depth.groups < 64


def test_two_layers_that_share_a_weight_still_do() -> None:
    model = build(networks.Tied)
    apply_(model, planned(model, macs=0.7))
    assert model.a.weight is model.b.weight
    assert model.a.weight.shape[0] == model.a.out_channels == model.b.out_channels < 16


def test_an_embedding_tied_to_the_head_still_is() -> None:
    _, _, pruned = cut(special.TiedByModule)
    assert pruned.head.weight is pruned.embed.weight
    assert pruned.head.in_features == pruned.embed.embedding_dim < 32
    assert pruned.head.out_features == 50


def test_requires_grad_survives() -> None:
    model, _, pruned = cut(special.Frozen)
    assert {n: p.requires_grad for n, p in pruned.named_parameters()} == {n: p.requires_grad for n, p in model.named_parameters()}


def test_a_plan_prints_and_applies_again_from_json() -> None:
    model = build(networks.Residual)
    plan = planned(model)
    assert "inner.0: keep" in str(plan)
    assert "of 16, with inner.1, out[in]" in str(plan)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    x = image(4)
    with torch.no_grad():
        assert torch.equal(apply_(copy.deepcopy(model), again)(*x), apply_(model, plan)(*x))


def test_a_plan_joins_names_that_differ_in_one_number() -> None:
    names = [f"blocks.{i}.norm{j}[in]" for i in range(12) for j in (1, 2)] + ["a.0.b", "a.3.b", "a.7.b", "c.1", "c.2", "head[in]"]
    line = PlanLine(layer="embed", size=8, keep=4, dependents=tuple(names))
    text = str(Plan(remove={}, sizes={}, lines=(line,), macs=1, macs_before=2))
    assert text.splitlines()[1] == (
        "  embed: keep 4 of 8, with blocks.{0-11}.norm1[in], blocks.{0-11}.norm2[in], a.{0,3,7}.b, c.1, c.2, head[in]"
    )


class OwnParameters(nn.Module):
    """Parameters of the model itself, in front of a layer and behind one."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 16), nn.Linear(16, 4)
        self.gain, self.middle = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return self.c((self.a(x) * self.gain).relu() @ self.middle)


def test_a_plan_names_the_model_whose_own_parameters_change() -> None:
    torch.manual_seed(0)
    plan = plan_channels(OwnParameters(), torch.randn(4, 6), keep(macs=0.5), round_to=1)
    text = str(plan)
    assert "of 16, with the model, the model[in]\n" in text
    assert "\n  the model: keep" in text
    assert " , " not in text


def test_a_plan_with_attributes_and_scales_applies_again_from_json() -> None:
    model, plan, pruned = cut(special.FusedAttention)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    x = special.example(special.FusedAttention)
    with torch.no_grad():
        assert torch.equal(apply_(copy.deepcopy(model), again)(*x), pruned(*x))


def test_a_record_that_is_no_plan_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a pruning plan"):
        Plan.from_json({"remove": []})
    with pytest.raises(CheckpointError, match="not a pruning plan: got list"):
        Plan.from_json([])


def test_a_model_of_other_layers_or_sizes_is_refused_untouched() -> None:
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


def test_a_model_with_another_attribute_is_refused_untouched() -> None:
    plan = plan_channels(
        special.StoredAttention().eval(), special.example(special.StoredAttention), budget=keep(macs=0.6), round_to=1
    )
    other = special.StoredAttention().eval()
    other.head_dim = 4
    before = state(other)
    with pytest.raises(
        ModelError, match=r"head_dim: the plan was made for 8, this StoredAttention has 4; replay a plan on a fresh"
    ):
        apply_(other, plan)
    assert_untouched(other, before)
    with pytest.raises(ModelError, match="no module|no parameter"):
        apply_(networks.build(networks.Chain), plan)


def test_a_plan_cannot_be_applied_twice() -> None:
    model = networks.build(networks.Chain)
    plan = plan_channels(model, networks.image(2), budget=keep(macs=0.5))
    apply_(model, plan)
    before = state(model)
    with pytest.raises(ModelError, match="the plan was made for shape"):
        apply_(model, plan)
    assert_untouched(model, before)


def norm_of_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 3))


def test_a_plan_that_was_edited_is_refused() -> None:
    record = plan_channels(norm_of_convolution(), image(2), budget=keep(macs=0.5)).to_json()
    assert Plan.from_json(json.loads(json.dumps(record))).to_json() == record
    record["remove"]["1.weight"]["0"].pop()
    with pytest.raises(CheckpointError, match="the pruning plan was changed after it was made, .*; plan again, with ratios="):
        Plan.from_json(record)


@pytest.mark.parametrize("indices", [(0, 500), (0, 0), (-1,), tuple(range(32))], ids=["beyond", "twice", "negative", "all"])
def test_indices_that_a_tensor_has_not_are_refused_and_leave_the_model_as_it_was(indices) -> None:
    model = norm_of_convolution()
    before = state(model)
    plan = Plan(remove={"1.weight": {0: indices}}, sizes={"1.weight": (32,)}, lines=(), macs=1, macs_before=2)
    with pytest.raises(
        ModelError, match=r"1\.weight: the plan removes indices of dimension 0 that a tensor of shape \(32,\) has not"
    ):
        apply_(model, plan)
    assert_untouched(model, before)


def test_a_masked_model_is_refused_with_the_legal_order() -> None:
    model = norm_of_convolution()
    plan = plan_channels(model, image(2), budget=keep(macs=0.5))
    plan_mask(model, remove(weights=0.5)).apply_(model)
    for refused in (lambda: plan_channels(model, image(2), budget=keep(macs=0.5)), lambda: apply_(model, plan)):
        with pytest.raises(ModelError, match="has masks, which are for its present shapes; prune channels first, then Sparsify"):
            refused()


class Gain(nn.Module):
    """A weight as a product, named as the factors of weight norm are."""

    def __init__(self):
        super().__init__()
        self.weight_g, self.weight_v = nn.Parameter(torch.rand(8, 1, 1, 1) + 0.5), nn.Parameter(torch.randn(8, 8, 3, 3) / 10)

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight_g * self.weight_v, padding=1)


class Product(nn.Module):
    """A parametrization of two tensors that is none of torch's."""

    def forward(self, g, v):
        return g * v

    def right_inverse(self, weight):
        return torch.rand(8, 1, 1, 1) + 0.5, weight


def with_product():
    conv = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
    nn.utils.parametrize.register_parametrization(conv, "weight", Product(), unsafe=True)
    return conv


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, 1, 1, bias=False))


def normed_by_a_hook():
    return nn.utils.weight_norm(nn.Conv2d(8, 8, 3, 1, 1, bias=False))


@pytest.mark.parametrize("layer", [Gain, with_product, normed, normed_by_a_hook])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weights_that_stay_are_what_they_were_whether_normed_or_not(layer) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), layer()).eval(), torch.randn(2, 3, 8, 8)
    plan = plan_channels(model, x, keep(macs=0.6), round_to=1)
    small, gone = apply_(copy_model(model), plan), torch.tensor(plan.remove["0.weight"][0])
    model[1].register_forward_hook(lambda module, args, output: output.index_fill(1, gone, 0))
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-6)
