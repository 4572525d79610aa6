"""Rewinding weights to an earlier point of the training, and lottery tickets."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch
from networks import build, images_task

import compresskit as ck
from compresskit import LotteryTicket, Sparsify, Train
from compresskit.prune import masks_of, plan_mask, rewind, rewind_, shuffled

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* loses all of its weights"),  # the networks are tiny
    pytest.mark.filterwarnings("ignore:fp16 on a CPU"),
    pytest.mark.filterwarnings("ignore:PURE_.* has no masters"),
]


ADAM = partial(torch.optim.Adam, lr=3e-3)


ONE, FOUR = Train(epochs=1, optimizer=ADAM), Train(epochs=4, optimizer=ADAM)


def nothing_moved(model, masks) -> None:
    assert masks.violations(model) == {}
    assert sum(int((model.get_parameter(n) == 0).sum()) for n in masks.masks) == masks.removed  # and no other weight is zero


def test_snapshots_are_the_weights_of_that_moment() -> None:
    task = images_task(ck, samples=96)  # 3 steps an epoch

    def trained(epochs, precision=ck.mixed.FP32, snapshots=None):
        torch.manual_seed(0)
        how = Train(epochs=epochs, optimizer=ADAM, schedule=ck.lr.Constant(), precision=precision)
        model = networks.Residual()
        model.register_buffer("positions", torch.arange(16), persistent=False)
        return how(model, replace(task, snapshots=snapshots))

    for precision in (ck.mixed.FP32, ck.mixed.SPLIT_BF16, ck.mixed.MASTER_BF16):
        torch.manual_seed(0)
        start = networks.Residual().state_dict()
        snapshots = {0.0: {}, 0.25: {}}
        model = trained(4, precision, snapshots)
        early = trained(1, precision)
        assert snapshots[0.25].keys() == model.state_dict().keys()
        assert all(torch.equal(v, snapshots[0.0][k]) for k, v in start.items())
        assert all(torch.equal(v, snapshots[0.25][k]) for k, v in early.state_dict().items())
        rewind_(model, snapshots[0.25])
        assert all(torch.equal(v, early.state_dict()[k]) for k, v in model.state_dict().items())


def test_rewinding_gives_survivors_their_early_weights() -> None:
    task = replace(images_task(ck, samples=96), snapshots={0.5: {}})
    model = FOUR(build(networks.Residual), task)
    planned = plan_mask(model, ck.remove(weights=0.8))
    rates = []

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    how = Train(epochs=1, optimizer=partial(Slow, lr=1e-12), schedule=ck.lr.Cosine())
    model = Sparsify(budget=ck.remove(weights=0.8), rewind=rewind(to=0.5), finetune=how)(model, task)
    for name, mask in planned.masks.items():  # masks from the end of the training, values from its middle
        assert torch.equal(masks_of(model).masks[name], mask)
        torch.testing.assert_close(model.get_parameter(name).detach(), task.snapshots[0.5][name] * mask)
    assert rates[0] == pytest.approx(0.5e-12)  # the schedule from there on: half of a cosine is left
    assert rates == sorted(rates, reverse=True)


def test_lottery_tickets_start_from_the_beginning() -> None:
    task = images_task(ck, samples=96)
    model = build(networks.Residual)
    start = copy.deepcopy(model.state_dict())
    still = Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=0.0))
    ticket = LotteryTicket(budget=ck.remove(weights=0.784), rounds=3, train=still)(model, task)
    masks = masks_of(ticket)
    assert masks.removed == round(0.784 * masks.total)
    for name, mask in masks.masks.items():
        assert torch.equal(ticket.get_parameter(name), start[name] * mask)
    torch.manual_seed(1)
    control = LotteryTicket(budget=ck.remove(weights=0.784), rounds=3, train=still, control=shuffled)(
        copy.deepcopy(build(networks.Residual)), task
    )
    assert masks_of(control).removed == masks.removed
    learned = LotteryTicket(budget=ck.remove(weights=0.5), rounds=2, train=FOUR, rewind=rewind(to=0.25))(
        build(networks.Residual), task
    )
    nothing_moved(learned, masks_of(learned))
