"""Masks that change during training: schedules, regrowth, summed scores."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import networks
import pytest
import torch
from masked import ratio_is_reached
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import Sparsify, Train
from compresskit.prune import Masks, masks_of, plan_mask, schedules
from compresskit.prune.criteria import movement
from compresskit.prune.masks.gradual import GradualMasks
from compresskit.prune.patterns import UNSTRUCTURED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* loses all of its weights"),  # the networks are tiny
    pytest.mark.filterwarnings("ignore:fp16 on a CPU"),
    pytest.mark.filterwarnings("ignore:PURE_.* has no masters"),
]


ADAM = partial(torch.optim.Adam, lr=3e-3)


ONE, FOUR = Train(epochs=1, optimizer=ADAM), Train(epochs=4, optimizer=ADAM)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", [ck.mixed.SPLIT_BF16, ck.mixed.MASTER_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("criterion", [ck.prune.criteria.l2, movement])
def test_schedules_see_the_fp32_weights(precision, criterion) -> None:
    """Transient masters, and steps that are skipped while a loss scale is found."""
    how = replace(FOUR, precision=precision, clip=1.0)
    ratio_is_reached(
        Sparsify(
            budget=ck.remove(weights=0.8),
            schedule=schedules.Cubic(),
            criterion=criterion,
            regrow=0.2,
            until=1.0,
            updates=5,
            finetune=how,
        )
    )


def test_a_schedule_goes_through_its_ratios(monkeypatch) -> None:
    """The masks after every step are those of the formula, and removed weights stay removed."""
    seen = []
    model, task = build(networks.Residual), images_task(ck, samples=96)  # 3 steps an epoch
    stage = Sparsify(budget=ck.remove(weights=0.9), schedule=schedules.Cubic(), until=0.5, updates=100, finetune=FOUR)
    real = stage._gradual

    def watched(model):
        gradual = real(model)
        count = gradual.count

        def look(step, steps):
            seen.append(Masks({n: m.clone() for n, m in masks_of(model).masks.items()}))
            count(step, steps)

        gradual.count = look
        return gradual

    object.__setattr__(stage, "_gradual", watched)
    stage(model, task)
    total = seen[0].total
    expected = [round((0.9 - 0.9 * (1 - min(1, s / 6)) ** 3) * total) for s in range(1, 13)]
    assert [m.removed for m in seen] == expected
    for early, late in itertools.pairwise(seen):
        assert all(not (late.masks[n] & ~early.masks[n]).any() for n in late.masks)


def test_a_second_stage_goes_on_from_the_first() -> None:
    task = images_task(ck, samples=96)
    model = Sparsify(budget=ck.remove(weights=0.5), protect=("head",))(build(networks.Residual), task)
    first = {n: m.clone() for n, m in masks_of(model).masks.items()}
    model = Sparsify(budget=ck.remove(weights=0.8), schedule=schedules.Cubic(), updates=4, finetune=FOUR)(model, task)
    second = masks_of(model)
    assert second.removed == round(0.8 * second.total)
    assert "head.weight" in second.masks
    assert all(not (second.masks[n] & ~m).any() for n, m in first.items())


def test_regrowth_changes_the_mask_and_keeps_the_ratio() -> None:
    task = images_task(ck, samples=96)
    torch.manual_seed(0)
    model = build(networks.Residual)
    first = plan_mask(model, ck.remove(weights=0.8)).masks
    masks = masks_of(
        Sparsify(budget=ck.remove(weights=0.8), schedule=schedules.Constant(), regrow=0.5, until=0.6, updates=4, finetune=FOUR)(
            model, task
        )
    )
    grown = sum(int((mask & ~first[n]).sum()) for n, mask in masks.masks.items())
    assert grown > 0.02 * masks.total
    assert masks.removed == round(0.8 * masks.total)


def test_growing_takes_the_largest_gradients() -> None:
    """One step by hand: of four inputs the two useless ones are dropped or never grow, the useful one that is masked does."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[3.0, 0.0, 2.0, 0.0]]).T
    task = ck.Task(train=[(x, y)] * 8, val=[(x, y)], loss=nn.functional.mse_loss, metric=lambda p, t: 0.0)
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.1, 1.0, 0.05, 0.9]]))
    how = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.05), schedule=ck.lr.Constant())
    stage = Sparsify(
        budget=ck.remove(weights=0.5), schedule=schedules.Constant(), regrow=0.99, until=1.0, updates=8, finetune=how
    )
    assert masks_of(stage(model, task)).masks["0.weight"].tolist() == [[True, False, True, False]]


def test_movement_removes_what_moves_to_zero() -> None:
    """Magnitude would keep the large weight; its target is zero, and it is on its way there."""
    torch.manual_seed(0)
    x = torch.randn(64, 2)
    y = x @ torch.tensor([[0.0, 1.0]]).T
    task = ck.Task(train=[(x, y)] * 6, val=[(x, y)], loss=nn.functional.mse_loss, metric=lambda p, t: 0.0)

    def kept(criterion, memory=1.0):
        model = nn.Sequential(nn.Linear(2, 1, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[2.0, 0.3]]))
        how = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.02), schedule=ck.lr.Constant())
        stage = Sparsify(
            budget=ck.remove(weights=0.5),
            criterion=criterion,
            schedule=schedules.Linear(),
            until=1.0,
            updates=1,
            memory=memory,
            finetune=how,
        )
        return masks_of(stage(model, task)).masks["0.weight"].tolist()

    assert kept(ck.prune.criteria.l2) == [[True, False]]
    assert kept(movement) == [[False, True]]


def test_a_second_schedule_lets_nothing_grow_that_was_removed_before() -> None:
    task, seen = images_task(ck, samples=96), []
    model = Sparsify(budget=ck.remove(weights=0.5))(build(networks.Residual), task)
    first = masks_of(model).removed
    how = replace(ONE, on_step=lambda _: seen.append(masks_of(model).removed))
    Sparsify(budget=ck.remove(weights=0.8), schedule=schedules.Linear(), until=1.0, updates=3, finetune=how)(model, task)
    assert len(seen) == 3
    assert min(seen) >= first


def gradual(**settings):
    """Masks of four weights of which none is removed yet, at their last update."""
    made = {
        "model": nn.Identity(), "pattern": UNSTRUCTURED, "criterion": movement, "schedule": schedules.Constant(), "ratio": 0.5,
        "ratios": None, "allocation": None, "until": 1.0, "updates": 1, "swap": 0.5, "memory": 1.0, "names": ("w",),
    }  # fmt: skip
    found = GradualMasks(**made | settings)
    found.floor, found.floors, found.due, found.last, found.reads = 0.0, {"w": 0.0}, {5}, 5, True
    found.masks = {"w": torch.ones(4, dtype=torch.bool)}
    return found


def chosen(found, scores, gradients, done=1.0):
    """Which of the four weights stay after an update."""
    weights = {"w": torch.ones(4)}
    kept = found._choose(done, {"w": torch.tensor(scores, dtype=torch.float64)}, weights, {"w": torch.tensor(gradients)})
    return kept["w"].int().tolist()


def test_fewer_and_fewer_are_swapped() -> None:
    scores, gradients = [4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 8.0, 9.0]
    assert chosen(gradual(), scores, gradients, done=0.0) == [1, 0, 0, 1]
    assert chosen(gradual(), scores, gradients, done=1.0) == [1, 1, 0, 0]


def test_what_was_removed_comes_back_by_its_gradient_alone() -> None:
    removed = -float("inf")
    assert chosen(gradual(swap=0.0), [1.0, removed, removed, removed], [0.0, 9.0, 0.0, 0.0]) == [1, 1, 0, 0]


def test_scores_of_gradients_are_of_unscaled_ones_of_all_passes_of_a_step() -> None:
    found, weight = gradual(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        found._add_gradient("w", torch.full((4,), 512.0))
    found._update(SimpleNamespace(named_masters=lambda: {"w": weight}, scaler=SimpleNamespace(scale=512.0)))
    assert found.sums["w"].tolist() == [-2.0, -4.0, -6.0, -8.0]


def test_no_layer_falls_below_what_was_removed_of_it_where_an_allocation_wants_less() -> None:
    found = gradual(allocation=lambda weights, ratio: dict.fromkeys(weights, 0.1))
    found.floors = {"w": 0.8}
    assert found._ratios_at(1.0, {"w": torch.ones(4)}) == (0.5, {"w": pytest.approx(0.8)})
