"""Ranks are chosen by a budget, layers that cannot be factored are named, and the result is saved, exported and trained."""

from __future__ import annotations

import copy
import json
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from quick import make_quick
from residual import ResNet, Transformer
from row_networks import Frames, Graph, Masked, graph_inputs, masked_inputs
from torch import nn

import compresskit as ck
from compresskit.base.errors import CheckpointError, DataError, ModelError, SettingError
from compresskit.graph.replacements import Factored, replace_module_
from compresskit.graph.surgery import restructure_, structure
from compresskit.prune.channels.reconstruct import input_statistics
from compresskit.prune.low_rank import LowRank, RankPlan, plan_ranks
from compresskit.prune.low_rank.plan_ranks import _Option, _select

WIDE = {"round_to": 2}


@pytest.mark.parametrize("family", [networks.Chain, ResNet, Transformer])
@pytest.mark.parametrize("quantity", ["macs", "parameters"])
def test_budgets_are_met_as_counted(family, quantity) -> None:
    model, batches = build(family).eval(), [image(16)]
    plan = plan_ranks(model, image(2), ck.keep(**{quantity: 0.8}), batches=batches, **WIDE)
    small = plan.apply_(copy.deepcopy(model), batches)
    assert ck.count_macs(small, image(2)) == plan.macs
    after, before = (ck.count_macs(m, image(2)) if quantity == "macs" else ck.count_parameters(m) for m in (small, model))
    assert 0.5 < after / before <= (0.8 if quantity == "macs" else 0.83)  # factors of convolutions add no bias but the last
    assert all(line.macs < line.macs_before or quantity == "parameters" for line in plan.lines)
    assert type(small) is family
    for rows in (1, 7):
        assert small(*image(rows)).shape == (rows, 10)


def narrow_convolutions() -> nn.Module:
    parts = [networks.conv(3, 16), networks.conv(16, 32, s=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(*parts).eval()


def test_narrow_layers_lose_not_clearly_more_than_was_asked() -> None:
    torch.manual_seed(0)
    model, x, before = narrow_convolutions(), torch.randn(32, 3, 16, 16), 0.0
    for kept in (0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        plan = plan_ranks(model, x, ck.keep(macs=kept), batches=[x])
        assert kept - 0.08 < plan.macs / plan.macs_before <= kept
        lost = sum(line.lost for line in plan.lines)
        assert lost >= before
        before = lost


@pytest.mark.parametrize("seed", [0, 5, 8, 23, 24])
def test_no_layer_is_factored_needlessly(seed) -> None:
    torch.manual_seed(seed)
    widths = torch.randint(2, 9, (5,)).mul(8).tolist()[:4]
    layers = [nn.Linear(i, o) for i, o in zip([16, *widths], [*widths, 8], strict=True)]
    model, x = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1]).eval(), torch.randn(512, 16)
    for kept in (0.95, 0.9, 0.8):
        plan = plan_ranks(model, x, ck.keep(macs=kept), batches=[x])
        assert all(plan.macs + line.macs_before - line.macs > kept * plan.macs_before for line in plan.lines)


def test_a_plan_prints_serializes_and_applies_again() -> None:
    model = build(ResNet)
    plan = plan_ranks(model, image(2), ck.keep(macs=0.8), **WIDE)
    assert RankPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert f"  {plan.lines[0].layer}: rank {plan.lines[0].ranks[0]}" in str(plan)
    other = plan.apply_(build(ResNet))
    with pytest.raises(ModelError, match="the plan was made for a layer with weights .* has no such layer; apply"):
        plan.apply_(other)
    with pytest.raises(CheckpointError, match="not a plan of ranks"):
        RankPlan.from_json({"lines": 3})
    with pytest.raises(CheckpointError, match=r"the plan of ranks was changed after it was made, .*; plan again"):
        RankPlan.from_json(plan.to_json() | {"lines": []})
    with pytest.raises(DataError, match="no batch of calibration data was given"):
        plan.apply_(build(ResNet), [])


class Product(nn.Module):
    """A linear layer by another name, as GPT-2 has them."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(48, 48) / 7), nn.Parameter(torch.zeros(48))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Odd(nn.Module):
    """Layers that cannot be factored, each for a reason of its own."""

    def __init__(self):
        super().__init__()
        self.plain, self.tied, self.twin = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.twin.weight = self.tied.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(48, 48))
        self.read, self.hooked, self.asked = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.hooked.register_forward_hook(lambda module, args, output: None)
        self.depth, self.head = nn.Conv2d(48, 48, 3, 1, 1, groups=48), nn.Linear(48, 1)
        self.product = Product()

    def forward(self, x):
        x = self.product(self.normed(self.twin(self.tied(torch.relu(self.plain(x))))))
        x = self.hooked(nn.functional.linear(x, self.read.weight)) + self.asked.weight.sum()
        return self.head(self.depth(self.asked(x)[:, :, None, None]).flatten(1))


def test_what_cannot_be_factored_is_named() -> None:
    model = Odd().eval()
    plan = plan_ranks(model, torch.randn(4, 48), ck.keep(macs=0.95))
    assert [line.layer for line in plan.lines] == ["plain"]
    assert plan.locked["tied"] == plan.locked["twin"] == "its weights are tied to another layer's"
    assert plan.locked["normed"].startswith("it is a ParametrizedLinear")
    assert plan.locked["read"] == "its weights are read without calling it, or not at all"
    assert plan.locked["hooked"] == "it has hooks of its own"
    assert plan.locked["depth"] == "48 groups"
    assert plan.locked["product"] == "Product is not factored"
    assert plan.locked["asked"].startswith("the model does not run without it: AttributeError")
    assert plan.locked["head"] == "no rank saves anything"
    with pytest.raises(ModelError, match=r"Odd: wanted 10.0% of the macs, only .*% can be reached by low rank; whole layers: "):
        plan_ranks(model, torch.randn(4, 48), ck.keep(macs=0.1))


def test_a_stage_is_saved_loaded_pruned_and_exported(tmp_path) -> None:
    make_quick()
    torch.manual_seed(0)
    task, model = images_task(ck, samples=64, classes=4), build(ResNet)
    tuned = ck.Train(epochs=2, optimizer=partial(torch.optim.Adam, lr=3e-3), objective=ck.imitate())
    small = LowRank(budget=ck.keep(macs=0.8), round_to=2, samples=64, finetune=tuned)(model, task)
    assert any(isinstance(m, Factored) for m in small.modules())
    ck.prune.apply_(small, ck.prune.plan_channels(small, image(2), ck.keep(macs=0.9), round_to=2))
    ck.save(small, tmp_path)
    loaded, inputs = ck.load(build(ResNet), tmp_path), image(3)
    torch.testing.assert_close(loaded(*inputs), small(*inputs))
    assert ck.verify_onnx(ck.export_onnx(small, tmp_path / "m.onnx", image(2)), small, [image(1), image(7)])


@pytest.mark.parametrize(
    ("family", "inputs"),
    [(Masked, masked_inputs), (Graph, graph_inputs), (Frames, lambda: (torch.randn(8, 6),))],
    ids=["mask", "graph", "frames"],
)
def test_inputs_that_are_not_cut_to_two_rows(family, inputs) -> None:
    plan = plan_ranks(family().eval(), inputs(), ck.keep(macs=0.8), **WIDE)
    assert plan.lines
    assert not [reason for reason in plan.locked.values() if "does not run" in reason]


@pytest.mark.slow
def test_a_recipe_of_low_rank_and_bits(tmp_path) -> None:
    task, model = images_task(ck, samples=64, classes=4), build(ResNet)
    recipe = ck.Recipe(LowRank(budget=ck.keep(macs=0.8), round_to=2, samples=64), ck.QAT(epochs=1, samples=32), export="last")
    result, inputs = recipe.run(model, task, out=tmp_path), image(3)
    folder = sorted(path for path in tmp_path.iterdir() if path.name[:1].isdigit())[-1]
    torch.testing.assert_close(ck.load(build(ResNet), folder)(*inputs), result.model(*inputs))


def test_a_damaged_record_is_refused() -> None:
    record = structure(nn.Sequential(nn.Linear(8, 4)))
    for ranks in ([5], [0], [True], [2, 2], "2", None):
        with pytest.raises(CheckpointError, match=r"0: wanted a rank up to each of \(4,\), got"):
            restructure_(nn.Sequential(nn.Linear(8, 4)), record | {"replaced": {"0": {"kind": "factored", "ranks": ranks}}})
    with pytest.raises(CheckpointError, match="the record says a layer of low rank, the model has ReLU"):
        restructure_(nn.Sequential(nn.ReLU()), record | {"replaced": {"0": {"kind": "factored", "ranks": [2]}}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": ck.keep(latency=0.5)}, r"LowRank\(budget=...\): wanted a budget of macs or parameters"),
        ({"budget": ck.keep(macs=0.5), "round_to": 0}, r"LowRank\(round_to=...\): wanted a whole number >= 1, got 0"),
        ({"budget": ck.keep(macs=0.5), "samples": -1}, r"LowRank\(samples=...\): wanted a whole number >= 0, got -1"),
    ],
)
def test_bad_settings(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        LowRank(**settings)


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(16, 32), (4, 16)), (nn.Conv2d(8, 16, 3), (4, 8, 6, 6))], ids=repr)
def test_a_layer_that_is_the_whole_model_stays(layer, shape) -> None:
    with pytest.raises(ModelError, match="whole layers: (Linear|Conv2d): it is the whole model, in which it cannot be replaced"):
        plan_ranks(layer, torch.randn(shape), ck.keep(macs=0.9))
    plan = plan_ranks(layer, torch.randn(shape), ck.keep(macs=1.0))
    assert (plan.lines, list(plan.locked)) == ((), [type(layer).__name__])
    with pytest.raises(ModelError, match="is the whole model, which cannot be replaced inside itself; put it into a model"):
        replace_module_(layer, "", nn.Identity())


class Penalised(nn.Sequential):
    """Returns the size of a weight beside its outputs, in train mode only."""

    def forward(self, x):
        y = super().forward(x)
        return (y, self[1].weight.square().sum()) if self.training else y


def test_a_layer_that_training_reads_stays_whole() -> None:
    model, x = Penalised(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 5)).eval(), torch.randn(4, 32)
    plan = plan_ranks(model, x, ck.keep(macs=0.9))
    assert plan.locked["1"].startswith("the model does not train without it: AttributeError")
    plan.apply_(model).train()(x)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("method", "side"), [("tucker", None), ("tucker", 24), ("tucker", 8), ("auto", 24)], ids=["weights", "data", "few", "cp"]
)
def test_torchs_default_dtype_and_device_change_no_plan(method, side) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)).eval(), torch.randn(2, 16, 24, 24)
    settings = {"method": method, "batches": None if side is None else [x[:, :, :side, :side]]}
    wanted = plan_ranks(model, x, ck.keep(macs=0.5), **settings)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        found = plan_ranks(model, x, ck.keep(macs=0.5), **settings)
        small = found.apply_(copy.deepcopy(model), settings["batches"])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found == wanted
    torch.testing.assert_close(small(x), wanted.apply_(model, settings["batches"])(x))


class Conditional(nn.Module):
    """Calls a higher-order operator on what a layer gives."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.a(x)
        return self.b(torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (y,)))


def test_a_model_with_a_condition_is_factored() -> None:
    torch.manual_seed(0)
    model, x = Conditional().eval(), torch.randn(64, 32)
    plan = plan_ranks(model, x, ck.keep(macs=0.8), batches=[x])
    with torch.no_grad():
        assert plan.apply_(copy.deepcopy(model), [x])(x).shape == (64, 32)
    assert input_statistics(model, ["a.weight"], [(x,)], norms=True)["a.weight"].rows == 64  # as for refitting


def test_of_what_became_needless_as_much_as_possible_is_taken_back() -> None:
    """`a` is factored in two steps, then `b`, which alone saves enough."""
    a = [_Option(ranks=(2,), lost=0.1, saved=1.0), _Option(ranks=(1,), lost=0.3, saved=2.0)]
    b = _Option(ranks=(1,), lost=2.0, saved=10.0)
    assert _select({"a": a, "b": [b]}, total=20.0, kept=0.5) == ({"b": b}, 10.0)


def test_savings_beyond_the_budget_are_worth_nothing() -> None:
    """`b` is cheaper for all that it saves, of which a fifth is wanted."""
    a, b = _Option(ranks=(1,), lost=0.3, saved=2.0), _Option(ranks=(1,), lost=1.0, saved=10.0)
    assert _select({"a": [a], "b": [b]}, total=20.0, kept=0.9) == ({"a": a}, 18.0)


class Twice(nn.Module):
    """One layer at two places, as in a Siamese network."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.shared(torch.relu(self.shared(x))))


def test_a_layer_that_is_called_twice_saves_twice() -> None:
    """The MACs of the plan are those of the factored model."""
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(2, 32)
    plan = plan_ranks(model, x, ck.keep(macs=0.6), round_to=1)
    assert plan.macs == ck.count_macs(plan.apply_(model), x) <= 0.6 * plan.macs_before
    assert plan.macs > 0.5 * plan.macs_before


def test_ignore_names_modules_and_no_beginnings_of_names() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(11)], nn.Linear(32, 4)).eval()
    locked = plan_ranks(model, torch.randn(4, 32), ck.keep(macs=0.8), ignore=("1",)).locked
    assert [name for name, reason in locked.items() if reason == "ignore="] == ["1"]


def test_a_layer_that_has_two_names_stays() -> None:
    """It could be replaced at one of its places only."""
    torch.manual_seed(0)
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(32, 32)).eval()
    plan = plan_ranks(model, torch.randn(4, 32), ck.keep(macs=0.9), round_to=1)
    assert plan.locked["0"] == "its weights are tied to another layer's"
    assert [line.layer for line in plan.lines] == ["4"]


def test_a_plan_is_for_layers_of_its_sizes_without_masks() -> None:
    def made(width: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 4)).eval()

    plan = plan_ranks(made(32), torch.randn(4, 16), ck.keep(macs=0.8))
    with pytest.raises(ModelError, match=r"a layer with weights \(32, 32\), this Sequential has \(48, 48\); apply the plan"):
        plan.apply_(made(48))
    masked = made(32)
    ck.prune.plan_mask(masked, ck.remove(weights=0.5)).apply_(masked)
    with pytest.raises(ModelError, match="Sequential has masks, which are for whole layers; factor layers first, then Sparsify"):
        plan.apply_(masked)
    with pytest.raises(CheckpointError, match="the plan of ranks was changed after it was made"):
        RankPlan.from_json(plan.to_json() | {"sizes": {}})


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_a_layer_with_a_hook_of_the_users_stays_whole(hook) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    getattr(model[0], hook)(lambda *_: None)
    plan = plan_ranks(model, torch.randn(4, 32), ck.keep(macs=0.9), round_to=1)
    assert plan.locked == {"0": "it has hooks of its own"}
