"""Planning masks: what is masked, how much is removed, what is refused."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import Net
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune import Masks, detach_masks_, mask_sensitivity, masks_of, plan_mask, shuffled
from compresskit.prune.allocations import erk_ratios, lamp_ratios, uniform_ratios
from compresskit.prune.criteria import grasp, random_scores, snip, taylor, wanda
from compresskit.prune.patterns import NM, Block, Pattern
from compresskit.prune.sensitivity import MaskSensitivity

pytestmark = pytest.mark.filterwarnings("ignore:.* loses all of its weights")  # which has a test of its own


QUICK = settings(max_examples=25, deadline=None)


WEIGHTS = {
    "attention.in_proj_weight", "attention.out_proj.weight", "conv.weight", "deep.weight", "linear.weight", "lstm.weight_hh_l0",
    "lstm.weight_hh_l1", "lstm.weight_ih_l0", "lstm.weight_ih_l1", "up.weight", "words.weight",
}  # fmt: skip


def test_what_is_masked() -> None:
    masks = plan_mask(Net(), ck.remove(weights=0.5))
    assert set(masks.masks) == WEIGHTS
    assert not masks.unmasked
    assert list(masks.masks) == sorted(masks.masks)
    assert set(plan_mask(Net(), ck.remove(weights=0.5), protect=("lstm", "conv.weight")).masks) == {
        n for n in WEIGHTS if not n.startswith("lstm") and n != "conv.weight"
    }


@given(ratio=st.floats(0, 0.999))
@QUICK
def test_a_global_ratio_is_exact_and_takes_the_smallest(ratio) -> None:
    model = Net()
    masks = plan_mask(model, ck.remove(weights=ratio))
    total = sum(dict(model.named_parameters())[n].numel() for n in WEIGHTS)
    assert (masks.total, masks.removed) == (total, round(ratio * total))
    kept, gone = [], []
    for name, mask in masks.masks.items():
        w = model.get_parameter(name).detach().abs()
        kept.append(w[mask])
        gone.append(w[~mask])
    kept, gone = torch.cat(kept), torch.cat(gone)
    assert len(gone) == 0 or gone.max() <= kept.min()
    for name, each in masks.ratios().items():
        assert each == pytest.approx(1 - masks.masks[name].double().mean().item())


def settings_of(name):
    task = images_task(ck, samples=32)
    budget = ck.remove(weights=0.8)
    return {
        "global": {"budget": budget}, "uniform": {"budget": budget, "allocation": uniform_ratios},
        "erk": {"budget": budget, "allocation": erk_ratios}, "lamp": {"budget": budget, "allocation": lamp_ratios},
        "2:4": {"pattern": NM()}, "4:8": {"pattern": NM(n=4, m=8)},
        "1x4": {"budget": budget, "pattern": Block()}, "snip": {"budget": budget, "criterion": snip, "task": task},
        "grasp": {"budget": budget, "criterion": grasp, "task": task},
        "taylor": {"budget": budget, "criterion": taylor, "task": task},
        "wanda": {"budget": budget, "criterion": wanda, "task": task},
    }[name]  # fmt: skip


ALL = ["global", "uniform", "erk", "lamp", "2:4", "4:8", "1x4", "snip", "grasp", "taylor", "wanda"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:.*left dense")
def test_planning_is_pure_and_twice_is_once(name) -> None:
    model = build(networks.Residual)
    before = copy.deepcopy(model.state_dict())
    masks = plan_mask(model, **settings_of(name))
    assert masks_of(model) is None
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    masks.apply_(model)
    once = copy.deepcopy(model.state_dict())
    if name not in ("snip", "grasp", "taylor", "wanda", "lamp"):  # data, or what is left, looks different once weights are gone
        plan_mask(model, **settings_of(name)).apply_(model)
    masks.apply_(model)
    assert all(torch.equal(v, once[k]) for k, v in model.state_dict().items())
    assert masks.violations(model) == {}
    carried = masks_of(model)
    assert all(torch.equal(mask, masks.masks[n]) for n, mask in carried.masks.items())
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("allocation", [None, uniform_ratios, erk_ratios, lamp_ratios])
def test_the_order_of_parameters_does_not_matter(allocation) -> None:
    one, other = Net(), Net(turned=True)
    other.load_state_dict(one.state_dict())
    with torch.no_grad():  # ties, which are where an order would show
        for net in (one, other):
            for p in net.parameters():
                p.copy_((p * 4).round() / 4)
    a, b = (plan_mask(net, ck.remove(weights=0.37), allocation=allocation) for net in (one, other))
    assert list(dict(one.named_parameters())) != list(dict(other.named_parameters()))
    assert all(torch.equal(a.masks[n], b.masks[n]) for n in WEIGHTS)


def test_sensitivity_measures_each_layer_alone() -> None:
    model, task = build(networks.Residual), images_task(ck, samples=64)
    before = copy.deepcopy(model.state_dict())
    found = mask_sensitivity(model, task, ratios=(0.5, 0.9), samples=64)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    one = copy.deepcopy(model)
    plan_mask(one, allocation={"inner.0": 0.9}).apply_(one)
    x, y = torch.cat([b[0] for b in task.train]), torch.cat([b[1] for b in task.train])
    with torch.no_grad():
        assert dict(found.points["inner.0.weight"])[0.9] == pytest.approx(F.cross_entropy(one(x), y).item(), rel=1e-4)
        assert found.dense == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-4)
    assert "inner.0.weight: 50% ->" in str(found)
    assert MaskSensitivity.from_json(json.loads(json.dumps(found.to_json()))) == found
    masks = plan_mask(model, ck.remove(weights=0.6), allocation=found.allocation())
    assert masks.removed == pytest.approx(0.6 * masks.total, abs=1)
    for bad in ((), (0.0,), (1.0,)):
        with pytest.raises(SettingError, match=r"mask_sensitivity\(ratios=...\)"):
            mask_sensitivity(model, task, ratios=bad)
    with pytest.raises(SettingError, match="there is no curve"):
        mask_sensitivity(model, task, pattern=NM())


def test_shuffled_keeps_the_ratio_of_every_layer() -> None:
    masks = plan_mask(Net(), ck.remove(weights=0.7))
    drawn = shuffled(masks)
    assert drawn.ratios() == masks.ratios()
    assert any(not torch.equal(drawn.masks[n], masks.masks[n]) for n in WEIGHTS)
    other = plan_mask(Net(), ck.remove(weights=0.7), criterion=random_scores)
    assert other.removed == masks.removed
    assert min(other.ratios().values()) > 0.4


def test_masks_travel_with_the_model() -> None:
    model = Net()
    plan_mask(model, ck.remove(weights=0.9)).apply_(model)
    twin = copy.deepcopy(model)
    assert torch.equal(masks_of(twin).masks["conv.weight"], masks_of(model).masks["conv.weight"])
    assert masks_of(twin).masks["conv.weight"] is not masks_of(model).masks["conv.weight"]
    assert masks_of(model.half()).masks["conv.weight"].dtype == torch.bool
    detach_masks_(model)
    assert masks_of(model) is None
    assert not list(model.named_buffers())


def test_state_packs_eight_weights_in_a_byte() -> None:
    model = Net()
    masks = plan_mask(model, ck.remove(weights=0.63))
    state = masks.state()
    assert sum(v.numel() for v in state.values()) == sum(math.ceil(m.numel() / 8) for m in masks.masks.values())
    again = Masks.from_state(state, model)
    assert all(torch.equal(again.masks[n], m) for n, m in masks.masks.items())
    with pytest.raises(CheckpointError, match="the mask of conv.weight has 288 bits, the tensor 36 values"):
        Masks.from_state({"conv.weight": state["conv.weight"]}, nn.ModuleDict({"conv": nn.Linear(6, 6)}))
    with pytest.raises(CheckpointError, match="it is of another model: attention.in_proj_weight: Linear has no"):
        Masks.from_state(state, nn.Linear(2, 2))


def test_tied_weights_have_one_mask() -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.words.weight

    model = Tied()
    masks = plan_mask(model, ck.remove(weights=0.5))
    assert masks.total == 160
    masks.apply_(model)
    assert int((model.head.weight == 0).sum()) == 80
    assert list(plan_mask(model, ck.remove(weights=0.5)).masks) == ["words.weight"]
    with pytest.raises(ModelError, match="has no weight that"):
        plan_mask(Tied(), ck.remove(weights=0.5), protect=("head",))


def test_a_second_plan_goes_on_from_the_first() -> None:
    model = Net()
    first = plan_mask(model, ck.remove(weights=0.5))
    first.apply_(model)
    second = plan_mask(model, ck.remove(weights=0.8), protect=("conv",))
    assert torch.equal(second.masks["conv.weight"], first.masks["conv.weight"])
    assert all(not (second.masks[n] & ~first.masks[n]).any() for n in WEIGHTS)
    rest = [n for n in WEIGHTS if n != "conv.weight"]
    total = sum(second.masks[n].numel() for n in rest)
    assert sum(int((~second.masks[n]).sum()) for n in rest) == round(0.8 * total)
    with pytest.raises(SettingError, match=r"the model's masks remove 50\.0% already, more than is asked for here; .*Densify"):
        plan_mask(model, ck.remove(weights=0.2))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (None, r"wanted a budget such as ck.remove\(weights=0.9\), got None"),
        (0.9, r"wanted a budget such as ck.remove\(weights=0.9\), got 0.9"),
        (ck.keep(macs=0.5), r"wanted a budget of weights, got keep\(macs=0.5\)"),
    ],
)
def test_other_things_are_no_budget_of_weights(budget, message) -> None:
    with pytest.raises(SettingError, match=r"plan_mask\(budget=...\): " + message):
        plan_mask(Net(), budget)
    with pytest.raises(SettingError, match=r"Sparsify\(budget=...\): " + message):
        ck.Sparsify(budget=budget)
    with pytest.raises(SettingError, match=r"LotteryTicket\(budget=...\): " + message):
        ck.LotteryTicket(budget=budget, train=ck.Train(epochs=1))


def test_a_ratio_as_a_keyword_is_told_what_to_write() -> None:
    for make in (partial(plan_mask, Net()), ck.Sparsify, partial(ck.LotteryTicket, train=ck.Train(epochs=1))):
        with pytest.raises(SettingError, match=r"\(ratio=...\): it is not a setting; write budget=.*ck.remove\(weights=...\)"):
            make(ratio=0.5)


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    model = Net()
    with pytest.raises(SettingError, match=r"removes 0\.5, got remove\(weights=0\.9\); leave the budget out"):
        plan_mask(model, ck.remove(weights=0.9), pattern=NM())
    with pytest.raises(SettingError, match="wanted 1 <= n < m, got n=4, m=4"):
        NM(n=4, m=4)
    with pytest.raises(SettingError, match="wanted whole numbers >= 1, got 0 x 4"):
        Block(outputs=0)
    with pytest.raises(SettingError, match="protect: Net has no module or parameter 'head'"):
        plan_mask(model, ck.remove(weights=0.5), protect=("head",))
    with pytest.raises(SettingError, match="Net has no layer 'norm' with maskable weights"):
        plan_mask(model, allocation={"norm": 0.5})
    with pytest.raises(SettingError, match=r"conv: wanted a ratio in \[0, 1\), got 1.0"):
        plan_mask(model, allocation={"conv": 1.0})
    with pytest.raises(SettingError, match="leaves no room for budget="):
        plan_mask(model, ck.remove(weights=0.5), allocation={"conv": 0.5})
    with pytest.raises(SettingError, match="reads gradients, which needs data; pass plan_mask"):
        plan_mask(model, ck.remove(weights=0.5), criterion=snip)
    with pytest.raises(SettingError, match="reads products with the Hessian"):
        plan_mask(model, ck.remove(weights=0.5), criterion=grasp)
    with pytest.raises(SettingError, match="reads activations"):
        plan_mask(model, ck.remove(weights=0.5), criterion=wanda)
    with pytest.raises(SettingError, match="this criterion is for masks"):
        ck.prune.plan_channels(build(networks.Chain), networks.image(2), budget=ck.keep(macs=0.5), criterion=wanda)
    with pytest.raises(ModelError, match=r"conv.weight: the criterion gave scores of shape \(1,\) for 288 units"):
        plan_mask(nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3)}), ck.remove(weights=0.5), criterion=lambda s: torch.ones(1))
    words = [(torch.zeros(2, dtype=torch.long), torch.zeros(2))]
    task = ck.Task(val=words, calibration=words)
    with pytest.raises(ModelError, match="the inputs of a Embedding cannot be seen; protect it"):
        plan_mask(nn.Sequential(nn.Embedding(4, 4)), ck.remove(weights=0.5), criterion=wanda, task=task)


def test_layers_that_are_or_become_zero_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40))
    nn.init.zeros_(model[0].weight)
    with pytest.warns(UserWarning, match="0\\.weight") as caught:
        plan_mask(model, ck.remove(weights=0.5))
    text = [str(w.message) for w in caught]
    assert "0.weight: all of its weights are zero already" in text[0]
    assert "0.weight loses all of its weights" in text[1]
    assert "allocation=erk_ratios" in text[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_mask(nn.Sequential(nn.Linear(4, 4)), ck.remove(weights=0.5))


def test_masks_for_other_shapes() -> None:
    masks = plan_mask(nn.Sequential(nn.Linear(4, 4)), ck.remove(weights=0.5))
    other = nn.Sequential(nn.Linear(4, 6))
    before = other[0].weight.detach().clone()
    for use in (masks.apply_, masks.zero_, masks.violations):
        with pytest.raises(ModelError, match=r"0\.weight: the mask is for shape \(4, 4\), this Sequential has \(6, 4\)"):
            use(other)
    assert torch.equal(other[0].weight, before)
    assert masks_of(other) is None
    with pytest.raises(ModelError, match=r"0\.weight: Linear has no module '0'"):
        masks.apply_(nn.Linear(4, 4))


def test_quantized_models_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"0\.weight is torch\.int8; sparsify the float model"):
        plan_mask(model, ck.remove(weights=0.5))


@dataclass(frozen=True)
class Rows(Pattern):
    """Whole rows: the units of two tensors have different sizes."""

    def fits(self, shape):
        return ""

    def rows(self, values):
        return values.reshape(len(values), -1)

    def spread(self, units, shape):
        return units.view(-1, *[1] * (len(shape) - 1)).expand(*shape)


@pytest.mark.parametrize("ratio", [0.0, 0.005, 0.02, 0.3, 0.5, 0.9])
def test_the_ratio_counts_weights_where_units_have_different_sizes(ratio) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 10))
    model[1].weight.data *= 10
    masks = plan_mask(model, ck.remove(weights=ratio), pattern=Rows())
    assert abs(masks.removed - ratio * 720) <= (4 if ratio < 0.3 else 20)  # half a unit
    assert [int(m.any(1).sum()) + int((~m).all(1).sum()) for m in masks.masks.values()] == [40, 10]


def test_a_block_of_which_something_is_left_is_ranked_by_that() -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[9.0, 9.0, 9.0, 0.1, 1.0, 1.0, 1.0, 1.0]]))
    plan_mask(model, ck.remove(weights=1 / 8)).apply_(model)
    assert model[0].weight[0, 3] == 0
    masks = plan_mask(model, ck.remove(weights=0.5), pattern=Block(inputs=4))
    assert masks.masks["0.weight"].int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
