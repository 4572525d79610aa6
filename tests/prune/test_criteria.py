"""Every criterion: the contract, and the formula where there is one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import statistics
from functools import partial

import networks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import some
from networks import build, image, images_task, trained_like
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.prune import Prune, plan_channels
from compresskit.prune.channels.plan_channels import analyze_channels
from compresskit.prune.criteria import (
    CRITERIA,
    Slices,
    apoz,
    bn_scale,
    fisher,
    fpgm,
    grasp,
    group_l2,
    l1,
    l2,
    lamp,
    layer_max,
    layer_mean,
    layer_sum,
    mean_activation,
    needs,
    needs_of,
    obd,
    optimal_brain_surgeon,
    output_energy,
    over_layers,
    random_scores,
    shapley,
    taylor,
    taylor_samples,
    wanda,
)
from compresskit.prune.evidence import collect, sample_gradients
from compresskit.prune.normalizers import by_deviation, by_largest, by_mean, unscaled
from compresskit.train.objective import bind_objective

CHANNELS, VALUES, SAMPLES = 6, 10, 5


def slices(seed=0):
    """Random evidence of every kind; the loss is a function of which channels stay that treats them alike."""
    g = torch.Generator().manual_seed(seed)
    weight, grad = torch.randn(2, CHANNELS, VALUES, generator=g)
    worth = weight.abs().sum(1)
    return Slices(
        weight=weight,
        grad=grad,
        reads=torch.arange(VALUES) >= 5,
        layers=torch.arange(VALUES) // 5,
        scales=torch.rand(CHANNELS, 2, generator=g) + 0.1,
        sample_grad=torch.randn(SAMPLES, CHANNELS, VALUES, generator=g),
        activations=torch.randn(CHANNELS, 40, generator=g).relu(),
        loss=lambda keep: float((worth * ~keep).sum() ** 1.5),
    )


def reordered(s, order):
    return Slices(
        weight=s.weight[order],
        grad=s.grad[order],
        reads=s.reads,
        layers=s.layers,
        scales=s.scales[order],
        sample_grad=s.sample_grad[:, order],
        activations=s.activations[order],
        loss=lambda keep: s.loss(keep[order.argsort()]),
    )


def without(s, channel):
    """The same channels, one of which does nothing."""
    alive = torch.arange(CHANNELS) != channel
    return dataclasses.replace(
        s,
        weight=s.weight * alive[:, None],
        scales=s.scales * alive[:, None],
        activations=s.activations * alive[:, None],
        loss=lambda keep: s.loss(keep | ~alive),
    )


#: A useless channel is not one of zeros for these: what resembles the others goes first, or nothing in particular does.
OTHERWISE = (fpgm, random_scores)


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_contract(criterion, seed) -> None:
    s = slices(seed=seed)
    before = s.weight.clone()
    scores = criterion(s)
    assert scores.shape == (CHANNELS,)
    assert torch.isfinite(scores).all()
    assert (scores >= 0).all()
    assert torch.equal(criterion(s), scores)
    assert torch.equal(s.weight, before)
    order = torch.randperm(CHANNELS, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(criterion(reordered(s, order)), scores[order])
    if criterion not in OTHERWISE:
        assert criterion(without(s, 2)).argmin() == 2


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda c: c.__name__)
def test_rows_of_one_value(criterion) -> None:
    """A single weight is a row too: what sparsity masks rank."""
    g = torch.Generator().manual_seed(0)
    weight, grad = torch.randn(2, 50, 1, generator=g)
    s = Slices(weight=weight, grad=grad, reads=torch.zeros(1, dtype=torch.bool), sample_grad=torch.randn(3, 50, 1, generator=g))
    if criterion in (
        mean_activation,
        apoz,
        output_energy,
        optimal_brain_surgeon,
        shapley,
    ):  # a weight has neither activations nor a loss without it
        with pytest.raises(SettingError, match="reads (activations|losses without channels) and does not declare it"):
            criterion(s)
    else:
        assert criterion(s).shape == (50,)


def nested(values):
    return [row.tolist() for row in values]


def test_formulas() -> None:
    """Every criterion against loops over plain numbers."""
    s = slices(seed=3)
    w, used = nested(s.weight), s.reads.nonzero().flatten().tolist()
    g, e, a = nested(s.grad), [nested(x) for x in s.sample_grad], nested(s.activations)
    change = [[sum(w[c][k] * x[c][k] for k in used) for c in range(CHANNELS)] for x in e]
    energy = [sum(v * v for v in row) for row in w]
    wanted = {
        l1: [sum(abs(v) for v in row) for row in w],
        l2: [math.sqrt(v) for v in energy],
        group_l2: [math.sqrt(sum(sum(v * v for v in p) / 5 for p in (row[:5], row[5:])) / 2) for row in w],
        fpgm: [sum(math.dist(row, other) for other in w) for row in w],
        lamp: [v / sum(u for u in energy if u >= v) for v in energy],
        bn_scale: [sum(row) / 2 for row in nested(s.scales)],
        taylor: [sum(w[c][k] * g[c][k] for k in used) ** 2 for c in range(CHANNELS)],
        taylor_samples: [sum(abs(x[c]) for x in change) / SAMPLES for c in range(CHANNELS)],
        fisher: [sum(x[c] ** 2 for x in change) / SAMPLES / 2 for c in range(CHANNELS)],
        obd: [sum(w[c][k] ** 2 * sum(x[c][k] ** 2 for x in e) / SAMPLES for k in used) / 2 for c in range(CHANNELS)],
        mean_activation: [sum(abs(v) for v in row) / 40 for row in a],
        apoz: [sum(v != 0 for v in row) / 40 for row in a],
        output_energy: [statistics.pvariance(a[c]) * sum(w[c][k] ** 2 for k in used) for c in range(CHANNELS)],
    }
    assert set(CRITERIA) == set(wanted) | {random_scores, shapley, optimal_brain_surgeon}  # which have tests of their own
    for criterion, scores in wanted.items():
        assert criterion(s).tolist() == pytest.approx(scores, rel=1e-4), criterion.__name__


def test_optimal_brain_surgeon_is_what_least_squares_cannot_make_up() -> None:
    """Against refitting anew for every set of channels, one channel after another."""
    s = slices(seed=2)
    columns = s.weight[:, s.reads].double()
    a = s.activations.double() - s.activations.double().mean(1, keepdim=True)
    covariance = a @ a.T / a.shape[1]
    covariance += 1e-3 * covariance.diagonal().mean() * torch.eye(CHANNELS)

    def lost(keep):
        fit = torch.linalg.solve(covariance[keep][:, keep], covariance[keep]) if keep else torch.zeros(0, CHANNELS)
        rest = covariance - covariance[:, keep] @ fit.double()
        return float(torch.einsum("ck,cd,dk->", columns, rest, columns))

    keep, before, wanted = list(range(CHANNELS)), 0.0, [0.0] * CHANNELS
    while keep:
        errors = {c: lost([k for k in keep if k != c]) for c in keep}
        gone = min(errors, key=errors.__getitem__)
        wanted[gone], before = errors[gone] - before, errors[gone]
        keep.remove(gone)
    assert optimal_brain_surgeon(s).tolist() == pytest.approx(wanted, rel=1e-6)


def test_random_is_uniform_and_seeded() -> None:
    s = Slices(weight=torch.randn(20000, 3), reads=torch.zeros(3, dtype=torch.bool))
    scores = random_scores(s)
    assert torch.histc(scores, 10, 0, 1).sub(2000).abs().max() < 200
    assert not torch.equal(random_scores(s, seed=1), scores)
    assert abs(float(torch.corrcoef(torch.stack([scores, random_scores(s, seed=1)]))[0, 1])) < 0.05


def test_shapley_of_every_order() -> None:
    """Over many permutations the sampled value is the mean over all of them, and values sum to the loss of all channels."""
    s = slices(seed=1)
    worth = s.weight.abs().sum(1).tolist()
    exact = [0.0] * CHANNELS
    for order in itertools.permutations(range(CHANNELS)):
        gone = 0.0
        for c in order:
            exact[c] += ((gone + worth[c]) ** 1.5 - gone**1.5) / math.factorial(CHANNELS)
            gone += worth[c]
    scores = shapley(s, permutations=300)
    assert scores.tolist() == pytest.approx(exact, rel=0.15)
    assert float(scores.sum()) == pytest.approx(sum(exact))


def test_layers_of_a_group_are_combined() -> None:
    s = slices()
    first, second = l1(s.part(s.layers == 0)), l1(s.part(s.layers == 1))
    for combine, wanted in (
        (layer_sum, first + second),
        (layer_mean, (first + second) / 2),
        (layer_max, torch.maximum(first, second)),
    ):
        torch.testing.assert_close(over_layers(s, criterion=l1, combine=combine), wanted)


def test_normalisations() -> None:
    scores = torch.tensor([1.0, 2.0, 6.0])
    assert unscaled(scores) is scores
    assert by_mean(scores).tolist() == pytest.approx([1 / 3, 2 / 3, 2])
    assert by_largest(scores).tolist() == pytest.approx([1 / 6, 1 / 3, 1])
    assert by_deviation(scores).tolist() == pytest.approx([(v - 3) / math.sqrt(14 / 3) for v in (1, 2, 6)])


def evidence_of(model, task, *needs, samples=64):
    groups = analyze_channels(model, task.example(), where="plan_channels")[0].groups
    names = sorted({tensor for group in groups for tensor, _, _ in group.indices})
    each = collect(model, names, task, needs=needs, samples=samples)
    return groups, [(rows, [g.slices(model, "", e) for g in groups]) for rows, e in each]


def test_collected_gradients_of_samples() -> None:
    """The vectorized pass gives what a backward pass of each sample gives."""
    model, task = build(networks.Residual), images_task(ck, samples=32, classes=4)
    groups, batches = evidence_of(model, task, "sample_gradients", samples=8)
    rows, first = batches[0]
    x, y = next(iter(task.train))
    assert first[0].sample_grad.shape[0] == rows
    for n in (0, rows - 1):
        model.zero_grad()
        task.loss(model(x[n : n + 1]), y[n : n + 1]).backward()
        for group, s in zip(groups, first, strict=True):
            (name, dim, _), indices = next(iter(group.indices.items()))
            wanted = model.get_parameter(name).grad.movedim(dim, 0)[indices].reshape(group.size, -1)
            torch.testing.assert_close(s.sample_grad[n][:, : wanted.shape[1]], wanted, atol=1e-5, rtol=1e-4)
    model.zero_grad()


def test_sample_gradients_without_vmap() -> None:
    """A model that branches on values is run a sample at a time, to the same gradients."""

    class Branches(networks.Chain):
        def forward(self, x):
            return super().forward(x) if bool(x.sum() > -1e9) else x

    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    other = Branches().eval()
    other.load_state_dict(model.state_dict())
    batch, names = next(iter(task.train)), ["a.0.weight", "head.weight"]
    objective = bind_objective(None, model, task)
    quick, slow = (sample_gradients(m, objective, batch, names) for m in (model, other))
    for name in names:
        torch.testing.assert_close(quick[name], slow[name], atol=1e-5, rtol=1e-4)


def test_taylor_with_a_second_head_and_dead_channels() -> None:
    class Heads(networks.Chain):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(32, 3)

        def forward(self, x):
            z = self.b(self.a(x)).mean((2, 3))
            return self.head(z), self.extra(z)

    model = trained_like(Heads(), image(16))
    with torch.no_grad():
        model.a[1].weight.zero_()
        model.a[1].bias.fill_(-1)
    task = images_task(ck)
    before = ck.count_macs(model, task.example())
    pruned = ck.Prune(budget=ck.keep(macs=0.6), criterion=taylor, round_to=4)(model, task)
    assert ck.count_macs(pruned, task.example()) <= 0.6 * before
    assert pruned.a[0].out_channels < 16  # all of them are dead
    assert pruned.head.in_features == pruned.extra.in_features == pruned.b[0].out_channels
    assert all(torch.isfinite(output).all() for output in pruned(*task.example()))


def test_collected_activations() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    groups, batches = evidence_of(model, task, "activations", samples=8)
    group, s = next((g, s) for g, s in zip(groups, batches[0][1], strict=True) if g.layer == "a.0")
    x = task.split(next(iter(task.train)))[0][0]
    with torch.no_grad():
        wanted = model.a(x).movedim(1, 0).flatten(1)
    assert s.activations.shape[0] == 16
    assert set(s.activations[3].tolist()) <= set(wanted[3].tolist())
    torch.testing.assert_close(mean_activation(s), wanted.mean(1), rtol=0.1, atol=0.02)


def test_a_part_of_slices_has_the_same_columns_of_all_that_they_hold() -> None:
    columns = torch.tensor([True, False, True, True, False])
    held = {name: torch.randn(4, 5) for name in ("weight", "grad", "hessian", "norms")}
    held |= {"reads": columns, "layers": torch.arange(5), "sample_grad": torch.randn(3, 4, 5)}
    part = Slices(**held).part(columns)
    assert all(torch.equal(getattr(part, name), values[..., columns]) for name, values in held.items())


def test_collected_losses() -> None:
    """The loss without some channels is that of a model with exactly those weights zeroed, and the model is left as it was."""
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    before = copy.deepcopy(model.state_dict())
    groups, batches = evidence_of(model, task, "losses", samples=8)
    index = next(i for i, g in enumerate(groups) if g.layer == "a.0")
    keep = torch.arange(16) % 3 != 0
    got = batches[0][1][index].loss_of(keep)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    x, y = next(iter(task.train))
    with torch.no_grad():
        h = model.a(x) * keep.view(1, -1, 1, 1)
        wanted = task.loss(model.head(model.b(h).mean((2, 3))), y)
    assert got == pytest.approx(float(wanted), rel=1e-5)


def test_fisher_predicts_the_change_of_the_loss() -> None:
    """On a trained model, channels that matter by Fisher information are those whose removal costs most."""
    model, task = build(networks.Chain), images_task(ck, samples=128, classes=4)
    ck.Train(epochs=15, optimizer=partial(torch.optim.Adam, lr=3e-3))(model, task)
    groups, batches = evidence_of(model, task, "sample_gradients", "losses", samples=64)
    index = next(i for i, g in enumerate(groups) if g.layer == "b.0")
    s = batches[0][1][index]
    everything = torch.ones(groups[index].size, dtype=torch.bool)
    cost = torch.tensor([s.loss_of(everything.index_fill(0, torch.tensor(c), False)) for c in range(len(everything))])
    ranks = torch.stack([v.argsort().argsort().double() for v in (fisher(s), cost)])
    assert torch.corrcoef(ranks)[0, 1] > 0.5


def test_taylor_predicts_the_change_of_the_loss() -> None:
    """For a small channel the score is the squared change of the loss that removing it makes."""
    model = build(networks.Chain).double()
    x = networks.image(8)[0].double()
    with torch.no_grad():
        model.b[0].weight[:, 4] *= 1e-4  # what reads channel 4
    model(x).square().sum().backward()
    weight = model.b[0].weight
    rows = Slices(
        weight=weight.detach().movedim(1, 0).flatten(1),
        grad=weight.grad.movedim(1, 0).flatten(1),
        reads=torch.ones(32 * 9, dtype=torch.bool),
    )
    with torch.no_grad():
        before = model(x).square().sum()
        weight[:, 4] = 0
        change = model(x).square().sum() - before
    assert taylor(rows)[4].item() == pytest.approx(change.item() ** 2, rel=1e-2)


def test_taylor_without_gradients_says_so() -> None:
    with pytest.raises(SettingError, match=r"reads gradients, which needs data; pass plan_channels\(task=...\)"):
        plan_channels(build(networks.Chain), networks.image(2), budget=ck.keep(macs=0.5), criterion=taylor)


ADAM = partial(torch.optim.Adam, lr=3e-3)


@pytest.fixture(scope="module")
def trained():
    """A trained model and its task."""
    torch.manual_seed(0)
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    return ck.Train(epochs=15, optimizer=ADAM)(model, task), task


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("criterion", some(CRITERIA, 3), ids=lambda c: c.__name__)
def test_stage(criterion, trained) -> None:
    model, task = copy.deepcopy(trained[0]), trained[1]
    before = ck.count_macs(model, task.example())
    flags = [p.requires_grad for p in model.parameters()]
    tune = ck.Train(epochs=5, optimizer=ADAM, objective=ck.imitate())
    pruned = Prune(budget=ck.keep(macs=0.6), criterion=criterion, round_to=4, finetune=tune)(model, task)
    assert ck.count_macs(pruned, task.example()) <= 0.6 * before
    assert ck.evaluate(pruned, task) > 0.8
    assert [p.requires_grad for p in pruned.parameters()] == flags
    assert type(pruned) is networks.Residual


def test_batchnorm_is_reestimated() -> None:
    model, task = build(networks.Chain), images_task(ck)
    norm = model.a[1]
    norm.running_mean += 5
    count = ck.prune.reestimate_batchnorm_(model, (batch[:1] for batch in task.train))
    assert count == 2
    assert not model.training
    assert norm.momentum == 0.1
    with torch.no_grad():
        seen = torch.cat([model.a[0](x) for x, _ in task.train])
    torch.testing.assert_close(norm.running_mean, seen.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(norm.running_var, seen.var((0, 2, 3)), atol=0.1, rtol=0.1)


def test_settings_matter() -> None:
    """Every knob of the planner changes the plan."""
    model = build(networks.Concat)
    base = dict(budget=ck.keep(macs=0.65), round_to=4)
    plan = plan_channels(model, networks.image(2), **base)
    for change in ({"budget": ck.keep(macs=0.8)}, {"round_to": 1}, {"ignore": ("a",)}, {"criterion": lambda s: -l2(s) + 100}):
        assert plan_channels(model, networks.image(2), **(base | change)).remove != plan.remove


@pytest.mark.parametrize("settings", [{"budget": 2}, {"round_to": 0}, {"samples": 0}])
def test_settings_out_of_range(settings) -> None:
    with pytest.raises(SettingError, match=r"Prune\(.*wanted.*got"):
        Prune(**{"budget": ck.keep(macs=0.5), **settings})


# -- what a criterion needs is declared


def test_needs_are_declared_and_found_through_partials() -> None:
    assert needs_of(l2) == set()
    assert needs_of(taylor) == {"gradients"}
    assert needs_of(partial(shapley, permutations=2)) == {"losses"}
    assert needs_of(partial(over_layers, criterion=fisher)) == {"sample_gradients"}
    with pytest.raises(SettingError, match=r"needs\('gradient'\): wanted gradients, sample_gradients, activations"):
        needs("gradient")


def test_a_criterion_of_the_user() -> None:
    @needs("gradients", "activations")
    def both(s: Slices) -> torch.Tensor:
        return (s.weight * s.gradient).abs().sum(1) * s.values.abs().mean(1)

    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    settings = dict(budget=ck.keep(macs=0.6), task=task, samples=32, round_to=4)
    assert plan_channels(model, task.example(), criterion=both, **settings).remove
    with pytest.raises(SettingError, match=r"reads gradients and does not declare it; .*@prune.criteria.needs\('gradients'\)"):
        plan_channels(model, task.example(), criterion=lambda s: taylor(s), **settings)


def test_a_criterion_by_name_is_told_what_to_write() -> None:
    half, weights = ck.keep(macs=0.5), ck.remove(weights=0.5)
    for make in (
        lambda c: Prune(budget=half, criterion=c),
        lambda c: plan_channels(build(networks.Chain), networks.image(2), half, criterion=c),
        lambda c: ck.Sparsify(budget=weights, criterion=c),
        lambda c: ck.LotteryTicket(budget=weights, criterion=c, train=ck.Train(epochs=1)),
        lambda c: ck.prune.plan_mask(build(networks.Chain), weights, criterion=c),
    ):
        for name, example in (("taylor", "taylor"), ("magnitude", "l2")):
            with pytest.raises(SettingError, match=rf"wanted a function such as prune.criteria.{example}, got '{name}'"):
                make(name)


@pytest.mark.parametrize("criterion", [grasp, wanda])
def test_criteria_of_masks_do_not_score_channels(criterion) -> None:
    with pytest.raises(SettingError, match=r"Prune\(criterion=...\): this criterion is for masks \(plan_mask, Sparsify\)"):
        Prune(budget=ck.keep(macs=0.5), criterion=criterion)


@pytest.mark.parametrize("criterion", [fisher, mean_activation, shapley])
def test_criteria_of_channels_do_not_score_weights(criterion) -> None:
    with pytest.raises(SettingError, match=r"Sparsify\(criterion=...\): this criterion is for channels"):
        ck.Sparsify(budget=ck.remove(weights=0.5), criterion=criterion)


@pytest.mark.parametrize("criterion", [ck.prune.criteria.taylor, ck.prune.criteria.fisher, ck.prune.criteria.shapley])
def test_a_loss_that_does_not_fit_is_explained(criterion) -> None:
    x = torch.randn(7, 5)
    task = ck.Task(train=[(x, torch.randn(7))])
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))
    shapes = r"\(tensors of shape \[\(7, 5\), \(7,\)\]\)" if criterion is not ck.prune.criteria.fisher else r"\(tensors of"
    with pytest.raises(DataError, match=rf"Task\(loss=...\): the loss cannot be computed {shapes}.*: expected"):
        plan_channels(model, (x,), ck.keep(macs=0.7), criterion=criterion, task=task)
