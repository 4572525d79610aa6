"""The stage Sparsify: masks are held under every policy, ratios are reached, settings matter."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from functools import partial

import networks
import pytest
import torch
from masked import ratio_is_reached
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import LotteryTicket, Sparsify, Train
from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.masks import attach_masks_
from compresskit.mixed.formats import policy as policies
from compresskit.prune import enforce_masks_, masks_of, plan_mask, rewind, rewind_, schedules
from compresskit.prune.allocations import erk_ratios
from compresskit.prune.criteria import movement, snip, wanda
from compresskit.prune.patterns import NM, Block

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* loses all of its weights"),  # the networks are tiny
    pytest.mark.filterwarnings("ignore:fp16 on a CPU"),
    pytest.mark.filterwarnings("ignore:PURE_.* has no masters"),
]


ADAM = partial(torch.optim.Adam, lr=3e-3)


ONE, FOUR = Train(epochs=1, optimizer=ADAM), Train(epochs=4, optimizer=ADAM)


POLICIES = [p for p in vars(policies).values() if isinstance(p, policies.Policy) and p.name not in ("TF32", "FP8")]  # of GPUs


@pytest.mark.matrix
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=0.05, momentum=0.9), partial(ADAM, eps=1e-4)], ids=["sgd", "adam"]
)
def test_masks_are_held_under_every_policy(policy, optimizer) -> None:
    model, task = build(networks.Chain), images_task(ck, samples=32)
    run = ck.mixed.prepare(model.train(), optimizer(model.parameters()), policy)

    def step() -> None:
        for x, y in task.train:
            run.backward(task.loss(run(x), y))
            run.step()

    step()  # dense: momentum of weights that are going to be removed
    masks = plan_mask(copy.deepcopy(model).float(), ck.remove(weights=0.9))
    attach_masks_(model, masks)
    release = enforce_masks_(model, run)
    before = {n: v.float().clone() for n, v in run.named_masters().items()}
    for _ in range(3):
        step()
        masters = run.named_masters()
        assert all(not masters[n][~m].any() for n, m in masks.masks.items())
    assert any(not torch.equal(masters[n].float() * m, before[n] * m) for n, m in masks.masks.items())  # the rest learns
    release()
    assert not run.after_update
    assert masks.violations(run.finish()) == {}


def test_removed_weights_do_not_count_in_the_norm() -> None:
    """Clipping sees the gradients of what is left."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8, bias=False), torch.randn(16, 8)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    run = ck.mixed.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), clip=1e-9)
    release = enforce_masks_(model, run)
    run.backward(model(x).square().mean())
    run.step()
    release()
    with torch.no_grad():
        gradient = 2 * (x @ model.weight.T).T @ x / 128
    kept = masks_of(model).masks["weight"]
    assert float(run.grad_norm) == pytest.approx(gradient[kept].norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": ck.remove(weights=0.9)},
        {"budget": ck.remove(weights=0.9), "schedule": schedules.Cubic()},
        {"budget": ck.remove(weights=0.8), "schedule": schedules.Constant(), "regrow": 0.3, "allocation": erk_ratios},
        {"budget": ck.remove(weights=0.8), "schedule": schedules.Cyclic()},
        {"budget": ck.remove(weights=0.9), "schedule": schedules.Linear(start=0.3), "until": 1.0, "updates": 100},
        {"budget": ck.remove(weights=0.9), "criterion": movement, "schedule": schedules.Cubic()},
        {"budget": ck.remove(weights=0.9), "criterion": snip},
        {"budget": ck.remove(weights=0.9), "criterion": wanda},
        {
            "budget": ck.remove(weights=0.75),
            "pattern": Block(outputs=1, inputs=2),
            "schedule": schedules.Cubic(),
            "protect": ("stem",),
        },
        {"pattern": NM(), "schedule": schedules.Linear(), "protect": ("stem",)},
        {"allocation": {"inner": 0.5, "out": 0.25}, "schedule": schedules.Cubic()},
    ],
    ids="-".join,  # of their names: functions print with their addresses
)
def test_the_ratio_is_reached_and_held(settings) -> None:
    ratio_is_reached(Sparsify(finetune=FOUR, **{"updates": 5, **settings}))


def test_every_setting_matters() -> None:
    task = images_task(ck, samples=96)
    base = Sparsify(
        budget=ck.remove(weights=0.8), schedule=schedules.Cubic(), until=0.5, updates=3, criterion=snip, regrow=0.2, finetune=FOUR
    )
    other = {
        "budget": ck.remove(weights=0.5), "pattern": Block(outputs=2, inputs=1), "criterion": movement, "allocation": erk_ratios,
        "protect": ("stem",), "finetune": ONE, "schedule": schedules.Linear(), "until": 1.0, "updates": 9, "regrow": 0.7,
        "memory": 0.0,
    }  # fmt: skip

    def weights(stage):
        torch.manual_seed(0)
        return torch.cat([p.flatten() for p in stage(build(networks.Residual), task).parameters()])

    plain = weights(base)
    assert torch.equal(plain, weights(base))
    assert set(other) == {f.name for f in fields(Sparsify)} - {
        "rewind",
        "samples",
        "include",
    }  # the last three: tests of their own
    for name, value in other.items():
        assert not torch.equal(plain, weights(replace(base, **{name: value}))), name


def test_settings_that_contradict_are_refused() -> None:
    cases = [
        (dict(budget=ck.remove(weights=0.5), allocation={"head": 0.5}), "leaves no room for budget="),
        (
            dict(budget=ck.remove(weights=0.5), criterion=3),
            r"Sparsify\(criterion=...\): wanted a function such as prune.criteria.l2, got 3",
        ),
        (
            dict(budget=ck.remove(weights=0.5), schedule=0.5, finetune=ONE),
            r"Sparsify\(schedule=...\): wanted a ratio schedule such as .*, got 0.5",
        ),
        (
            dict(budget=ck.remove(weights=0.5), schedule=schedules.Cubic()),
            r"Sparsify\(schedule=...\): it is part of a training; pass finetune=",
        ),
        (dict(budget=ck.remove(weights=0.5), rewind=rewind()), r"Sparsify\(rewind=...\): it is part of a training"),
        (dict(budget=ck.remove(weights=0.5), rewind=0.3, finetune=ONE), r"wanted rewind\(to=...\) and no schedule, got 0.3"),
        (
            dict(budget=ck.remove(weights=0.5), rewind=rewind(), schedule=schedules.Cubic(), finetune=ONE),
            r"wanted rewind\(to=...\) and no schedule",
        ),
        (dict(budget=ck.remove(weights=0.5), until=0.0), r"until=...\): wanted a fraction of the training in \(0, 1\], got 0.0"),
        (dict(budget=ck.remove(weights=0.5), updates=0), "wanted at least 1, got 0 and 1024"),
        (dict(budget=ck.remove(weights=0.5), memory=2.0), r"wanted regrow in \[0, 1\), memory in \[0, 1\], got 0.0, 2.0"),
        (dict(budget=ck.remove(weights=0.5), regrow=0.2), "growing needs a schedule, such as schedules.Constant"),
    ]
    for settings, message in cases:
        with pytest.raises(SettingError, match=message):
            Sparsify(**settings)
    for settings, message in [
        (dict(budget=ck.remove(weights=0.5), train=3), r"LotteryTicket\(train=...\): wanted Train\(...\), got int"),
        (dict(budget=ck.remove(weights=0.5), train=ONE, rounds=0), r"rounds=...\): wanted a whole number >= 1, got 0"),
        (dict(pattern=NM(), train=ONE), "is reached in one round, got 5"),
        (dict(budget=ck.remove(weights=0.5), allocation={"a": 0.5}, train=ONE), "cannot be reached in several rounds"),
    ]:
        with pytest.raises(SettingError, match=message):
            LotteryTicket(**settings)
    with pytest.raises(SettingError, match=r"rewind\(to=...\): wanted a share of the training, in \[0, 1\), got 1.0"):
        rewind(to=1.0)
    task, model = images_task(ck, samples=32), build(networks.Chain)
    with pytest.raises(SettingError, match=r"no weights were kept there; .* Task\(snapshots=\{0.33: \{\}\}\)"):
        Sparsify(budget=ck.remove(weights=0.5), rewind=rewind(), finetune=ONE)(model, task)
    with pytest.raises(SettingError, match=r"Task\(snapshots=...\): wanted fractions of a training in \[0, 1\), got 1.5"):
        ONE(model, replace(task, snapshots={1.5: {}}))
    with pytest.raises(SettingError, match="a schedule cannot follow a criterion that reads activations"):
        Sparsify(budget=ck.remove(weights=0.5), criterion=wanda, schedule=schedules.Cubic(), finetune=ONE)(model, task)
    with pytest.raises(ModelError, match=r"rewind: a.0.weight was \(16, 3, 3, 3\), this Chain has \(8, 3, 3, 3\)"):
        state = {n: v.clone() for n, v in model.state_dict().items()}
        model.a[0] = nn.Conv2d(3, 8, 3, bias=False)
        rewind_(model, state)
    with pytest.raises(ModelError, match="rewind: .* is only in one of model and snapshot"):
        rewind_(networks.Residual(), state)


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1), torch.optim.AdamW])
def test_a_plain_optimizer_holds_masks(kind) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    plan_mask(model, ck.remove(weights=0.9)).apply_(model)
    optimizer = kind(model.parameters(), lr=0.1)

    def step():
        model(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        return masks_of(model).violations(model)

    release = enforce_masks_(model, optimizer)
    before = model.weight.detach().clone()
    assert [step(), step()] == [{}, {}]
    assert not torch.equal(before, model.weight)
    release()
    assert step()
    assert not model.weight._backward_hooks


def test_an_optimizer_of_other_parameters_cannot_hold_masks() -> None:
    model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    plan_mask(model, ck.remove(weights=0.5)).apply_(model)
    with pytest.raises(ModelError, match="enforce_masks_: the SGD does not update weight; pass the one that does, or the Run of"):
        enforce_masks_(model, torch.optim.SGD(other.parameters(), lr=0.1))
    assert not model.weight._backward_hooks


def test_several_optimizers_hold_masks_together() -> None:
    """As where Muon has the matrices and AdamW the rest, or backbone and head have one each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizers = [torch.optim.SGD([model[0].weight], lr=0.1, momentum=0.9)]
    optimizers.append(torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=0.1))

    def steps():
        model(torch.randn(32, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    steps()  # dense: momentum of weights that are going to be removed
    masks = plan_mask(model, ck.remove(weights=0.5))
    masks.apply_(model)
    wanted = r"the SGD does not update 2.weight; .*several optimizers train it, pass all of them: enforce_masks_\(model, a, b\)"
    with pytest.raises(ModelError, match=wanted):
        enforce_masks_(model, optimizers[0])
    strangers = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(ModelError, match="the SGD and the SGD do not update 0.weight"):
        enforce_masks_(model, *strangers)
    release, before = enforce_masks_(model, *optimizers), copy.deepcopy(model)
    steps()
    assert masks.violations(model) == {}
    assert not any(torch.equal(model[layer].weight, before[layer].weight) for layer in (0, 2))
    release()
    steps()
    assert set(masks.violations(model)) == {"0.weight", "2.weight"}
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in optimizers)
    assert not model[0].weight._backward_hooks


class Wrapper(nn.Module):
    """A wrapper of the user's own, with a parameter of its own."""

    def __init__(self, net) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones(())), net

    def forward(self, x):
        return self.net(x) * self.scale


@pytest.mark.filterwarnings("ignore:prepare. the optimizer does not have:UserWarning")
def test_masks_are_held_by_the_runs_of_one_model_and_by_none_of_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    runs = [ck.mixed.prepare(model, torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)) for part in model]

    def steps():
        runs[0].backward(runs[0](torch.randn(32, 8)).square().mean())
        for run in runs:
            run.step()

    steps()
    masks = plan_mask(model, ck.remove(weights=0.5))
    masks.apply_(model)
    other = nn.Linear(8, 16)
    plan_mask(other, ck.remove(weights=0.5)).apply_(other)
    for given, place in ((model[1], r"1\.weight"), (other, "not")):
        with pytest.raises(ModelError, match=f"weight has a mask and is {place} in the model of the Run; give the model that"):
            enforce_masks_(given, runs[0])
    runs[0].model = torch.compile(model, backend="eager")
    with pytest.raises(ModelError, match=r"_orig_mod.0.weight has a mask and is 0\.weight in the model of the Run; give the"):
        enforce_masks_(runs[0].model, *runs)
    runs[1].model = Wrapper(model)
    release = enforce_masks_(model, *runs)
    runs[0].model = model
    steps()
    release()
    assert masks.violations(model) == {}
    assert not any(run.after_update for run in runs)
