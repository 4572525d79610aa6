"""Plans of masks: exact counts, patterns, criteria and allocations against formulas of their own."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import dataclass
from functools import partial

import networks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, ModelError, SettingError
from compresskit.prune import Masks, detach_masks_, mask_sensitivity, masks_of, plan_mask, shuffled
from compresskit.prune.allocations import counts, erk_ratios, lamp_ratios, measured_ratios, uniform_ratios
from compresskit.prune.criteria import grasp, l2, movement, random_scores, snip, taylor, wanda
from compresskit.prune.patterns import NM, Block, Pattern, Unstructured
from compresskit.prune.scores import score_weights, weight_slices
from compresskit.prune.sensitivity import MaskSensitivity

pytestmark = pytest.mark.filterwarnings("ignore:.* loses all of its weights")  # which has a test of its own
QUICK = settings(max_examples=25, deadline=None)


class Net(nn.Module):
    """Layers of every kind that has weights, in an order that can be turned round."""

    def __init__(self, turned=False):
        super().__init__()
        torch.manual_seed(1)
        parts = {
            "conv": nn.Conv2d(4, 8, 3), "deep": nn.Conv2d(8, 8, 3, groups=4), "up": nn.ConvTranspose2d(8, 4, 2),
            "linear": nn.Linear(16, 12), "words": nn.Embedding(10, 8), "lstm": nn.LSTM(8, 8, num_layers=2),
            "attention": nn.MultiheadAttention(8, 2), "norm": nn.LayerNorm(8),
        }  # fmt: skip
        for name in reversed(parts) if turned else parts:
            setattr(self, name, parts[name])


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


@given(n=st.integers(1, 7), m=st.integers(2, 8), seed=st.integers(0, 99), axis=st.integers(0, 3))
@QUICK
def test_n_of_every_m(n, m, seed, axis) -> None:
    if n >= m:
        n = m - 1
    shape = [2, 3, 2, 3]
    shape[axis] = 3 * m
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(shape[1], shape[0], tuple(shape[2:])))
    masks = plan_mask(model, pattern=NM(n=n, m=m, axis=axis))
    mask = masks.masks["0.weight"].movedim(axis, -1).reshape(-1, m)
    assert (mask.sum(1) == n).all()
    w = model[0].weight.detach().abs().movedim(axis, -1).reshape(-1, m)
    best = np.sort(w.numpy(), axis=1)[:, m - n :]
    np.testing.assert_array_equal(np.sort(np.where(mask, w, 0), axis=1)[:, m - n :], best)
    assert masks.ratio == pytest.approx(1 - n / m)


@given(a=st.sampled_from([1, 2, 4]), b=st.sampled_from([1, 2, 4]), ratio=st.floats(0, 0.95), seed=st.integers(0, 99))
@QUICK
def test_blocks_live_and_die_together(a, b, ratio, seed) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Linear(4, 8))
    masks = plan_mask(model, ck.remove(weights=ratio), pattern=Block(outputs=a, inputs=b))
    scores, states = [], []
    for name, mask in masks.masks.items():
        w = model.get_parameter(name).detach()
        for o in range(0, w.shape[0], a):
            for i in range(0, w.shape[1], b):
                for k in np.ndindex(*w.shape[2:]):
                    block = (slice(o, o + a), slice(i, i + b), *k)
                    assert mask[block].all() or not mask[block].any()
                    scores.append(w[block].norm().item())
                    states.append(bool(mask[block].any()))
    gone = round(ratio * len(scores))
    assert states.count(False) == gone
    threshold = sorted(scores)[gone]
    assert all(kept == (s >= threshold - 1e-6) for s, kept in zip(scores, states, strict=True) if abs(s - threshold) > 1e-6)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(), Block()])
def test_rows_and_spread_are_inverse(pattern) -> None:
    x = torch.arange(4 * 8 * 3 * 3.0).view(4, 8, 3, 3)
    rows = pattern.rows(x)
    marks = torch.arange(len(rows))
    assert torch.equal(pattern.rows(pattern.spread(marks, x.shape)), marks[:, None].expand_as(rows))


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


@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 500)), min_size=1, max_size=8))
@QUICK
def test_counts_add_up(layers) -> None:
    ratios = {str(i): r for i, (r, _) in enumerate(layers)}
    sizes = {str(i): n for i, (_, n) in enumerate(layers)}
    found = counts(ratios, sizes)
    assert sum(found.values()) == pytest.approx(sum(r * n for r, n in layers), abs=0.5 + 1e-6)
    assert all(math.floor(ratios[k] * sizes[k] + 1e-9) <= c <= ratios[k] * sizes[k] + 1 for k, c in found.items())


def test_erk_is_its_formula() -> None:
    weights = {"a": torch.zeros(64, 64, 3, 3), "b": torch.zeros(64, 128, 3, 3), "c": torch.zeros(10, 64)}
    ratios = erk_ratios(weights, 0.8)
    density = {n: 1 - r for n, r in ratios.items()}
    assert density["c"] == 1  # its share would be above 1
    assert density["a"] / density["b"] == pytest.approx(((64 + 64 + 6) / (64 * 64 * 9)) / ((64 + 128 + 6) / (64 * 128 * 9)))
    total = sum(w.numel() for w in weights.values())
    assert sum(d * weights[n].numel() for n, d in density.items()) == pytest.approx(0.2 * total)


def test_lamp_is_its_formula() -> None:
    torch.manual_seed(0)
    weights = {"a": torch.randn(5, 4), "b": torch.randn(3, 4) * 5, "c": torch.randn(2, 2) * 0.1}
    scores = []
    for name, w in weights.items():
        flat = w.flatten().tolist()
        scores += [(u * u / sum(v * v for v in flat if v * v >= u * u), name) for u in flat]
    gone = [name for _, name in sorted(scores)[:18]]
    assert lamp_ratios(weights, 0.5) == {n: pytest.approx(gone.count(n) / w.numel()) for n, w in weights.items()}


def test_measured_allocation_takes_the_cheapest() -> None:
    weights = {"robust": torch.zeros(100), "touchy": torch.zeros(100)}
    curves = {"robust": {0.0: 1.0, 0.5: 1.0, 0.9: 1.1}, "touchy": {0.0: 1.0, 0.5: 3.0, 0.9: 9.0}}
    allocate = measured_ratios(curves)
    assert allocate(weights, 0.25) == {"robust": pytest.approx(0.5), "touchy": 0.0}
    assert allocate(weights, 0.45) == {"robust": pytest.approx(0.9), "touchy": 0.0}
    assert allocate(weights, 0.6) == {"robust": pytest.approx(0.9), "touchy": pytest.approx(0.3)}
    with pytest.raises(SettingError, match=r"the curves end at 90\.0% of all weights, wanted 95\.0%"):
        allocate(weights, 0.95)
    with pytest.raises(SettingError, match="no curve for other"):
        allocate({"other": torch.zeros(3)}, 0.5)
    with pytest.raises(SettingError, match="the curve of a wants the loss at ratio 0"):
        measured_ratios({"a": {0.5: 1.0}})


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


# -- criteria


def linear_problem():
    torch.manual_seed(0)
    x, y = torch.randn(16, 6), torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(6, 4))
    return model, ck.Task(train=[(x, y)], val=[(x, y)], loss=F.mse_loss, metric=lambda p, t: 0.0), x, y


def scored(criterion, model, task):
    weights = {"0.weight": model[0].weight}
    return score_weights(model, weights, Unstructured(), criterion, task, 16)["0.weight"].view(4, 6)


def test_criteria_are_their_formulas() -> None:
    model, task, x, y = linear_problem()
    w, b = (p.detach().double() for p in model[0].parameters())
    x, y = x.double(), y.double()
    error = x @ w.T + b - y
    g = 2 * error.T @ x / error.numel()  # of the mean of squares
    torch.testing.assert_close(scored(l2, model, task), w.abs(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scored(snip, model, task), (w * g).abs(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(movement, model, task), -(w * g), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(taylor, model, task), (w * g).square(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(wanda, model, task), w.abs() * x.norm(dim=0), atol=1e-3, rtol=1e-4)
    # The Hessian in (w, b) is the same block for every output.
    ones = torch.cat([x, torch.ones(16, 1, dtype=torch.double)], 1)
    hessian = 2 * ones.T @ ones / error.numel()
    flow = (torch.cat([g, 2 * error.mean(0)[:, None] * 16 / error.numel()], 1) @ hessian)[:, :6]
    only_w = g @ (2 * x.T @ x / error.numel())  # biases are not masked: the flow is that of the weights
    assert not torch.allclose(flow, only_w)
    torch.testing.assert_close(scored(grasp, model, task), w * only_w, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_wanda_knows_which_input_a_weight_reads(groups) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups, bias=False))
    x = torch.randn(5, 4, 6, 6) * torch.tensor([1.0, 5.0, 0.2, 3.0]).view(1, 4, 1, 1)
    task = ck.Task(val=[(x, x)], calibration=[(x, x)])
    found = score_weights(model, {"0.weight": model[0].weight}, Unstructured(), wanda, task, 5)["0.weight"].view_as(
        model[0].weight
    )
    norms = torch.linalg.vector_norm(x, dim=(0, 2, 3))
    for o in range(8):
        for i in range(4 // groups):
            channel = o // (8 // groups) * (4 // groups) + i
            torch.testing.assert_close(found[o, i].float(), model[0].weight[o, i].abs() * norms[channel], rtol=1e-4, atol=1e-5)


def test_scores_of_blocks_use_the_same_rows() -> None:
    w = nn.Parameter(torch.randn(4, 8))
    rows = weight_slices(w, Block(outputs=2, inputs=4))
    assert rows.weight.shape == (4, 8)
    torch.testing.assert_close(l2(rows)[0], w[:2, :4].detach().norm())


def test_shuffled_keeps_the_ratio_of_every_layer() -> None:
    masks = plan_mask(Net(), ck.remove(weights=0.7))
    drawn = shuffled(masks)
    assert drawn.ratios() == masks.ratios()
    assert any(not torch.equal(drawn.masks[n], masks.masks[n]) for n in WEIGHTS)
    other = plan_mask(Net(), ck.remove(weights=0.7), criterion=random_scores)
    assert other.removed == masks.removed
    assert min(other.ratios().values()) > 0.4


# -- masks themselves


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


# -- bad input


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


def test_bad_settings() -> None:
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


def test_layers_that_cannot_have_the_pattern_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.warns(UserWarning, match=r"0\.weight is left dense: its 3 values along axis 1 are no multiple of 4"):
        masks = plan_mask(model, pattern=NM())
    assert list(masks.masks) == ["1.weight"]
    assert "0.weight left dense" in str(masks)
    with pytest.warns(UserWarning, match="3 channels do not divide into blocks of 1 x 4"):
        plan_mask(model, ck.remove(weights=0.5), pattern=Block())
    with pytest.raises(ModelError, match="has no weight that NM"), pytest.warns(UserWarning, match="no axis 3"):
        plan_mask(nn.Sequential(nn.Linear(8, 8)), pattern=NM(axis=3))


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


# -- a pattern of the user


@dataclass(frozen=True)
class WholeRows(Pattern):
    """Rows of a matrix, all kernel positions included."""

    def fits(self, shape):
        return "" if len(shape) > 1 else "it has one dimension"

    def rows(self, values):
        return values.flatten(1)

    def spread(self, units, shape):
        return units.view(-1, *[1] * (len(shape) - 1)).expand(shape)


@dataclass(frozen=True)
class HalfOfEachTensor(Unstructured):
    """A pattern with a ratio of its own, which the base class reaches in every tensor."""

    @property
    def fixed(self):
        return 0.5


def test_a_pattern_of_the_user() -> None:
    model = networks.build(networks.Residual)
    masks = plan_mask(model, ck.remove(weights=0.5), pattern=WholeRows(), allocation=uniform_ratios)
    for name, mask in masks.masks.items():
        rows = mask.flatten(1)
        assert torch.equal(rows.any(1), rows.all(1))
        kept = dict(model.named_parameters())[name].detach().flatten(1).norm(dim=1)
        assert kept[rows[:, 0]].min() >= kept[~rows[:, 0]].max()
    masks = plan_mask(model, pattern=HalfOfEachTensor())
    assert set(masks.ratios().values()) == {0.5}
    assert ck.Sparsify(pattern=HalfOfEachTensor())(model, images_task(ck, samples=32)) is model


@pytest.mark.parametrize("pattern", ["2:4", NM, 0.5])
def test_other_things_are_no_pattern(pattern) -> None:
    with pytest.raises(SettingError, match=r"pattern=...\): wanted a pattern such as prune.patterns.NM\(n=2, m=4\), got"):
        plan_mask(Net(), ck.remove(weights=0.5), pattern=pattern)
