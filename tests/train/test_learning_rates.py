"""Schedulers of torch in a training: the same rates as in a plain loop, also after an interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr

import compresskit as ck
from compresskit.base.errors import Interrupted, SettingError
from compresskit.base.progress import Every, Progress
from compresskit.train.train import fit_

BATCHES = [(torch.randn(8, 8), torch.arange(8) % 4) for _ in range(4)]
EPOCHS = 3
METRICS = [0.5, 0.4, 0.3]


def sequence(optimizer, total_steps):
    warm = torch_lr.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return torch_lr.SequentialLR(optimizer, [warm, torch_lr.PolynomialLR(optimizer, total_iters=total_steps - 3)], [3])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Falling:
    def __init__(self) -> None:
        self.values = list(METRICS)

    def __call__(self, predictions, target) -> float:
        return self.values.pop(0)


halved = partial(torch_lr.StepLR, step_size=1, gamma=0.5)
#: Schedule -> the scheduler of a plain loop, and whether it steps after every step.
CASES = {
    "StepLR": (ck.lr.EachEpoch(halved), halved, False),
    "MultiStepLR": (
        ck.lr.EachStep(partial(torch_lr.MultiStepLR, milestones=[2, 9])), partial(torch_lr.MultiStepLR, milestones=[2, 9]), True),
    "OneCycleLR": (partial(torch_lr.OneCycleLR, max_lr=0.3), partial(torch_lr.OneCycleLR, max_lr=0.3, total_steps=12), True),
    "CosineAnnealingLR": (
        ck.lr.EachEpoch(torch_lr.CosineAnnealingLR), partial(torch_lr.CosineAnnealingLR, T_max=EPOCHS), False),
    "CyclicLR": (partial(torch_lr.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
                 partial(torch_lr.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3), True),
    "LambdaLR": (ck.lr.EachStep(partial(torch_lr.LambdaLR, lr_lambda=lambda i: 0.9**i)),
                 partial(torch_lr.LambdaLR, lr_lambda=lambda i: 0.9**i), True),
    "SequentialLR": (ck.lr.EachStep(sequence), partial(sequence, total_steps=12), True),
}  # fmt: skip


def plain_rates(make, each_step: bool) -> list[float]:
    optimizer = sgd([torch.zeros(1, requires_grad=True)])
    scheduler, rates = make(optimizer), []
    for i in range(1, 4 * EPOCHS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if each_step or i % 4 == 0:
            scheduler.step()
    return rates


def trained(schedule, folder: Path | None = None, stop_after: int | None = None, on_epoch=None, **settings):
    """The model and the rates of each step of a training, or of what an interrupted one did."""
    torch.manual_seed(0)
    model, rates, progress = nn.Linear(8, 4), [], None
    if folder is not None:
        progress = Progress(folder=folder, key="k", every=Every(seconds=None))

    def note(report) -> None:
        rates.append(report.learning_rates[0])
        if report.step == stop_after:
            progress.stop.signal = "SIGTERM"

    task = ck.Task(train=BATCHES, val=BATCHES, progress=progress, **settings)
    try:
        fit_(model, task, ck.Train(epochs=EPOCHS, optimizer=sgd, schedule=schedule, on_step=note, on_epoch=on_epoch))
    except Interrupted:
        assert stop_after is not None
    return model.weight.detach(), rates


@pytest.mark.parametrize("case", CASES)
def test_rates_are_those_of_a_plain_loop_and_survive_an_interruption(case, tmp_path) -> None:
    schedule, make, each_step = CASES[case]
    weight, rates = trained(schedule)
    assert rates == pytest.approx(plain_rates(make, each_step))
    for stop in (3, 4):  # within an epoch, and at its end
        before = trained(schedule, tmp_path / str(stop), stop)[1]
        end, after = trained(schedule, tmp_path / str(stop))
        assert torch.equal(end, weight)
        assert before + after == rates


def test_an_epoch_that_ended_with_an_interruption_is_reported_with_its_rate(tmp_path) -> None:
    schedule, make, each_step = CASES["LambdaLR"]
    found = []
    for stop in (12, None):  # at the end of the training
        trained(schedule, tmp_path, stop, on_epoch=lambda report: found.append((report.epoch, report.learning_rates[0])))
    rates = plain_rates(make, each_step)
    assert found == [(epoch, pytest.approx(rates[4 * epoch - 1])) for epoch in (1, 2, 3)]


def test_a_plateau_waits_for_the_metric(tmp_path) -> None:
    schedule = ck.lr.EachEpoch(partial(torch_lr.ReduceLROnPlateau, mode="max", patience=0, factor=0.5))
    _, rates = trained(schedule, metric=Falling(), higher_is_better=True)
    assert rates == [0.1] * 8 + [0.05] * 4  # 0.4 is worse than 0.5
    metric = Falling()
    trained(schedule, tmp_path, 4, metric=metric, higher_is_better=True)
    assert trained(schedule, tmp_path, metric=metric, higher_is_better=True)[1] == rates[4:]


@pytest.mark.parametrize(
    ("schedule", "task", "message"),
    [
        (
            ck.lr.EachEpoch(torch_lr.ReduceLROnPlateau),
            {},
            r"ReduceLROnPlateau\(mode='min'\) waits for the wrong direction of the",
        ),
        (ck.lr.EachEpoch(torch_lr.ReduceLROnPlateau), {"val": None}, r"waits for the metric; pass Task\(val=...\)"),
        (ck.lr.EachStep(lambda optimizer: 3), {}, "wanted a scheduler of the optimizer that its function is given, got int"),
        (ck.lr.EachStep(lambda optimizer: torch_lr.ConstantLR(sgd([torch.zeros(1)]))), {}, "got ConstantLR of another optimizer"),
    ],
)
def test_schedulers_that_cannot_work_are_refused(schedule, task, message) -> None:
    with pytest.raises(SettingError, match=message):
        fit_(nn.Linear(8, 4), ck.Task(**{"train": BATCHES, "val": BATCHES, **task}), ck.Train(epochs=1, schedule=schedule))


def test_settings_of_schedulers_are_checked_before() -> None:
    made = torch_lr.ConstantLR(sgd([torch.zeros(1)]))
    with pytest.raises(SettingError, match="a scheduler that is made already is of another optimizer"):
        ck.Train(epochs=1, schedule=made)
    with pytest.raises(
        SettingError, match=r"lr.EachEpoch\(...\): wanted a function \(optimizer\) -> scheduler, such as .* got int"
    ):
        ck.lr.EachEpoch(3)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"LotteryTicket\(rewind=...\): wanted rewind\(to=...\), got 0.5"):
        ck.LotteryTicket(budget=ck.remove(weights=0.5), train=ck.Train(epochs=1), rewind=0.5)  # type: ignore[arg-type]
    step = ck.Train(epochs=1, schedule=ck.lr.EachEpoch(torch_lr.StepLR))
    for make in (
        lambda: ck.LotteryTicket(budget=ck.remove(weights=0.5), train=step),
        lambda: ck.Sparsify(budget=ck.remove(weights=0.5), rewind=ck.prune.rewind(to=0.5), finetune=step),
    ):
        with pytest.raises(SettingError, match="rewind: EachEpoch.* cannot begin in its middle; train with a schedule of the"):
            make()


def test_a_scheduler_is_a_setting_of_a_stage(tmp_path) -> None:
    def plan(gamma):
        schedule = ck.lr.EachEpoch(partial(torch_lr.StepLR, step_size=1, gamma=gamma))
        return ck.Recipe(ck.Train(epochs=1, schedule=schedule)), (
            nn.Linear(8, 4),
            ck.Task(train=BATCHES, val=BATCHES),
            tmp_path / "run",
        )

    torch.manual_seed(0)
    recipe, given = plan(0.5)
    recipe.run(*given)
    assert [stage.action for stage in recipe.plan(*given).stages] == ["reuse"]
    assert [stage.action for stage in plan(0.6)[0].plan(*given).stages] == ["run"]
