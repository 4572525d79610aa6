"""What happens around the cut: refitting, sparse learning, steps, rewinding."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.prune import Prune, apply_, greg, group_lasso, plan_channels, reconstruct_, replayed, schedules
from compresskit.prune.channels import reconstruct
from compresskit.prune.criteria import l2
from compresskit.prune.rankings import uniform

ADAM = partial(torch.optim.Adam, lr=3e-3)


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


def channel_norms(model):
    return torch.cat([model.a[0].weight.flatten(1), model.b[0].weight.movedim(1, 0).flatten(1)], 1).norm(dim=1)


def test_group_lasso_is_the_sum_of_norms() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    goal = group_lasso(strength=0.01).bind(model, task)
    losses = goal(model, next(iter(task.train)))
    rows = [
        torch.cat([model.a[0].weight.flatten(1), model.a[1].weight[:, None], model.b[0].weight.movedim(1, 0).flatten(1)], 1),
        torch.cat([model.b[0].weight.flatten(1), model.b[1].weight[:, None], model.head.weight.T], 1),
    ]
    wanted = 0.01 * sum(r.shape[1] ** 0.5 * r.norm(dim=1).sum() for r in rows)
    torch.testing.assert_close(losses["group_lasso"], wanted)
    assert set(losses) == {"loss", "group_lasso"}


def test_group_lasso_empties_channels() -> None:
    spread = {}
    for strength in (1e-6, 3e-3):
        torch.manual_seed(0)
        model, task = build(networks.Chain), images_task(ck, samples=128, classes=4)
        ck.Train(epochs=30, optimizer=ADAM, objective=group_lasso(strength=strength))(model, task)
        norms = channel_norms(model)
        spread[strength] = (norms < 0.2 * norms.max()).sum()
    assert spread[3e-3] > spread[1e-6]


def test_greg_empties_the_channels_of_the_plan() -> None:
    model, task = build(networks.Chain), images_task(ck, samples=128, classes=4)
    plan = plan_channels(model, image(2), budget=ck.remove(channels=0), ratios={"a.0": 0.5})
    gone = list(plan.remove["a.0.weight"][0])
    stay = [c for c in range(16) if c not in gone]
    ck.Train(epochs=30, optimizer=ADAM, objective=greg(plan, growth=2e-3))(model, task)
    norms = channel_norms(model)
    assert norms[gone].mean() < 0.3 * norms[stay].mean()


@pytest.mark.parametrize(
    "around",
    [group_lasso, partial(greg, plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.9), round_to=4))],
)
def test_the_objective_inside_hears_how_much_is_done(around) -> None:
    class Inside(ck.Objective):
        heard, closed = [], False

        def bind(self, model, task):
            return self

        def __call__(self, model, batch):
            return {"loss": model(batch[0]).square().mean()}

        def advance(self, done: float) -> None:
            self.heard.append(done)

        def close(self) -> None:
            Inside.closed = True

    model, task = build(networks.Chain), images_task(ck, samples=32, classes=4)
    ck.Train(epochs=2, optimizer=ADAM, objective=around(Inside()))(model, task)
    assert Inside.heard == sorted(Inside.heard)
    assert len(set(Inside.heard)) > 1
    assert Inside.closed


def test_bad_strengths() -> None:
    with pytest.raises(SettingError, match=r"group_lasso\(strength=...\): wanted a positive number, got 0"):
        group_lasso(strength=0)
    with pytest.raises(SettingError, match=r"greg\(growth=...\): wanted a positive number, got -1"):
        greg(plan_channels(build(networks.Chain), image(2), budget=ck.keep(macs=0.9), round_to=4), growth=-1)


def stage(**settings):
    return Prune(**{"budget": ck.keep(macs=0.5), "round_to": 4, "samples": 128, **settings})


def trained():
    torch.manual_seed(0)
    model, task = build(networks.Residual), images_task(ck, samples=128, classes=4)
    early = copy.deepcopy(model)
    return ck.Train(epochs=12, optimizer=ADAM)(model, task), task, early


def test_steps_end_where_one_step_ends() -> None:
    model, task, _ = trained()
    before = ck.count_macs(model, image(2))
    between = ck.Train(epochs=1, optimizer=ADAM)
    seen = []

    def schedule(done, *, end):
        seen.append(done)
        return end * done

    small = stage(steps=3, between=between, schedule=schedules.Function(schedule))(copy.deepcopy(model), task)
    assert 0.4 <= ck.count_macs(small, image(2)) / before <= 0.5
    assert seen == pytest.approx([1 / 3, 2 / 3])  # what is left after the last step is the budget
    one = stage()(copy.deepcopy(model), task)
    assert ck.count_macs(one, image(2)) / before <= 0.5
    small = stage(budget=ck.keep(parameters=0.5), steps=2)(copy.deepcopy(model), task)
    assert 0.4 <= ck.count_parameters(small) / ck.count_parameters(model) <= 0.5


@pytest.mark.parametrize(
    "schedule",
    [schedules.Function(lambda done, *, end: 1 - done), schedules.Function(lambda done, *, end: 0.0), schedules.Constant()],
)
def test_no_schedule_removes_more_than_the_budget(schedule) -> None:
    model, task = build(networks.Residual), images_task(ck, samples=32, classes=4)
    small = stage(budget=ck.keep(macs=0.6), steps=3, schedule=schedule, samples=32)(copy.deepcopy(model), task)
    one = stage(budget=ck.keep(macs=0.6), samples=32)(copy.deepcopy(model), task)
    assert ck.count_macs(small, image(2)) == ck.count_macs(one, image(2))


def test_rewinding_puts_earlier_weights_into_the_chosen_channels() -> None:
    model, task, early = trained()
    plan = plan_channels(model, image(2), budget=ck.keep(macs=0.5), round_to=4)
    small = replayed(early, plan)
    kept = plan.keep("inner.0.weight")
    rows = kept.get(0, torch.arange(16))
    columns = kept.get(1, torch.arange(16))
    torch.testing.assert_close(small.inner[0].weight, early.inner[0].weight[rows][:, columns])
    assert ck.count_macs(small, image(2)) == plan.macs
    with pytest.raises(ModelError):
        replayed(build(networks.Chain), plan)
    tuned = stage(rewind=early, finetune=ck.Train(epochs=25, optimizer=ADAM))(copy.deepcopy(model), task)
    assert ck.evaluate(tuned, task) > 0.8
    assert ck.count_macs(tuned, image(2)) <= 0.5 * ck.count_macs(model, image(2))


def test_learning_sparsely_comes_before_the_cut() -> None:
    model, task, _ = trained()
    learn = ck.Train(epochs=2, optimizer=ADAM)
    plain, sparse = (stage(learn=how, criterion=l2)(copy.deepcopy(model), task) for how in (None, learn))
    assert not torch.equal(next(plain.parameters()), next(sparse.parameters()))


def test_stage_settings_matter() -> None:
    model, task, _ = trained()
    base = stage()(copy.deepcopy(model), task).state_dict()
    for change in (
        {"reconstruct": False},
        {"ranking": uniform},
        {"minimum": 12, "budget": ck.keep(macs=0.8)},
        {"ratios": {"inner.0": 0}},
    ):
        other = stage(**change)(copy.deepcopy(model), task).state_dict()
        assert any(
            a.shape != b.shape or not torch.allclose(a, b, atol=1e-3) for a, b in zip(base.values(), other.values(), strict=True)
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"Prune\(steps=...\): wanted a whole number >= 1, got 0"),
        ({"steps": 2, "ratios": {"a": 0.5}}, "more than one step wants a budget of macs"),
        ({"steps": 2, "budget": ck.keep(latency=0.5)}, "more than one step wants a budget of macs"),
        ({"between": ck.Train(epochs=1)}, "nothing between the cuts of one step"),
        ({"rewind": nn.Linear(1, 1)}, "rewound weights must be trained again; set finetune"),
    ],
)
def test_bad_stages(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        stage(**settings)
