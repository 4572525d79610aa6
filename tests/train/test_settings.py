"""Training by steps, measurements on the way, the best weights, an early end, param groups, and settings that there are not."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.errors import CompressError, SettingError, TrainingError
from compresskit.base.progress import Every, Progress
from compresskit.train.callbacks import StepReport
from compresskit.train.param_groups import no_decay_on_vectors
from compresskit.train.train import fit_

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)
BATCHES = [(DATA.tensors[0][i : i + 8], DATA.tensors[1][i : i + 8]) for i in range(0, 40, 8)]
TASK = ck.Task(train=BATCHES, val=BATCHES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


def bits(model: nn.Module) -> list[bytes]:
    return [value.numpy().tobytes() for value in model.state_dict().values()]


def test_steps_are_counted_through_epochs() -> None:
    seen: list[StepReport] = []
    train = ck.Train(steps=7, optimizer=SGD, schedule=ck.lr.Cosine(), on_step=seen.append)
    model = fit_(network(), TASK, train)
    assert [(report.step, report.steps, report.epoch) for report in seen] == [(i + 1, 7, 1 + i // 5) for i in range(7)]
    assert [report.learning_rates for report in seen] == [[0.1 * ck.lr.Cosine()(i / 7)] for i in range(7)]
    assert float(seen[0].losses["loss"]) == pytest.approx(1.5, abs=0.5)
    assert not seen[0].losses["loss"].requires_grad
    two_epochs = fit_(network(), TASK, ck.Train(epochs=2, optimizer=SGD))
    assert bits(fit_(network(), TASK, ck.Train(steps=10, optimizer=SGD))) == bits(two_epochs)
    assert bits(model) != bits(fit_(network(), TASK, ck.Train(steps=6, optimizer=SGD)))


def test_accumulated_steps() -> None:
    seen: list[StepReport] = []
    fit_(network(), TASK, ck.Train(steps=4, accumulate=2, optimizer=SGD, on_step=seen.append))
    assert [report.epoch for report in seen] == [1, 1, 1, 2]  # 5 batches make 3 steps


class Falling:
    """A metric that is best at its second measurement."""

    def __init__(self) -> None:
        self.values = [0.2, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]

    def __call__(self, predictions: Tensor, target: Tensor) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize("precision", [ck.mixed.FP32, ck.mixed.MASTER_BF16, ck.mixed.SPLIT_BF16], ids=str)
def test_the_best_weights_are_kept(precision) -> None:
    settings = {"steps": 6, "optimizer": SGD, "precision": precision, "schedule": ck.lr.Constant()}
    task = ck.Task(train=BATCHES, val=BATCHES, metric=Falling(), higher_is_better=True)
    best = fit_(network(), task, ck.Train(**settings, validate_every=1, keep_best=True))
    assert bits(best) == bits(fit_(network(), TASK, ck.Train(**{**settings, "steps": 2})))
    assert bits(best) != bits(fit_(network(), TASK, ck.Train(**settings)))
    task = ck.Task(train=BATCHES, val=BATCHES, metric=Falling(), higher_is_better=False)
    first = fit_(network(), task, ck.Train(**settings, validate_every=1, keep_best=True))
    assert bits(first) == bits(fit_(network(), TASK, ck.Train(**{**settings, "steps": 1})))


def test_measuring_leaves_the_training_as_it_is() -> None:
    shuffled = DataLoader(DATA, batch_size=8, shuffle=True)
    task = ck.Task(train=shuffled, val=DataLoader(DATA, batch_size=8, shuffle=True))
    seen: list[StepReport] = []
    torch.manual_seed(1)
    plain = fit_(network(), task, ck.Train(epochs=3, optimizer=SGD, validate_every=0))
    torch.manual_seed(1)
    assert bits(fit_(network(), task, ck.Train(epochs=3, optimizer=SGD, validate_every=2, on_step=seen.append))) == bits(plain)
    assert [report.step for report in seen if report.metric is not None] == [10, 15]


def test_patience_ends_a_training() -> None:
    seen: list[StepReport] = []
    task = ck.Task(train=BATCHES, val=BATCHES, metric=Falling(), higher_is_better=True)
    fit_(network(), task, ck.Train(epochs=8, optimizer=SGD, patience=2, on_step=seen.append))
    assert [report.metric for report in seen if report.metric is not None] == [0.2, 0.7, 0.6, 0.5]
    assert seen[-1].step == 20


@pytest.mark.parametrize("stop_at", [1, 6, 9, 10])
def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    class Stop(Exception): ...

    def interrupt(report: StepReport) -> None:
        if report.step == stop_at:
            raise Stop

    loader = DataLoader(DATA, batch_size=8, shuffle=True)

    def run(on_step, folder: Path) -> nn.Module:
        task = ck.Task(train=loader, val=BATCHES, progress=Progress(folder=folder, key="k", every=Every(seconds=None, steps=1)))
        settings = ck.Train(steps=13, optimizer=SGD, validate_every=2, keep_best=True, patience=3, on_step=on_step)
        torch.manual_seed(5)
        return fit_(network(), task, settings)

    whole = run(None, tmp_path / "whole")
    state = torch.get_rng_state()
    with pytest.raises(TrainingError, match="interrupt failed: Stop: Stop"):
        run(interrupt, tmp_path / "stopped")
    seen: list[StepReport] = []
    assert bits(run(seen.append, tmp_path / "stopped")) == bits(whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen or seen[0].step == stop_at  # the step before it was saved


def test_a_training_that_was_over_when_it_was_interrupted_ends_as_it_would_have(tmp_path: Path, monkeypatch) -> None:
    loader = DataLoader(DATA, batch_size=8, shuffle=True)

    def run(folder: Path) -> nn.Module:
        task = ck.Task(train=loader, val=BATCHES, progress=Progress(folder=folder, key="k", every=Every(seconds=None, steps=1)))
        torch.manual_seed(5)
        return fit_(network(), task, ck.Train(steps=7, optimizer=SGD))

    whole, state = run(tmp_path / "whole"), torch.get_rng_state()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("compresskit.train.train._check_finite", lambda model: (_ for _ in ()).throw(KeyboardInterrupt))
        run(tmp_path / "stopped")
    assert bits(run(tmp_path / "stopped")) == bits(whole)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_decay_on_vectors() -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(groups):
        made.append(torch.optim.AdamW(groups, weight_decay=0.5))
        return made[-1]

    fit_(model := network(), TASK, ck.Train(steps=1, optimizer=optimizer, param_groups=no_decay_on_vectors))
    assert [group["weight_decay"] for group in made[0].param_groups] == [0.5, 0.0]
    assert {id(p) for p in made[0].param_groups[0]["params"]} == {id(model[0].weight), id(model[4].weight)}


def by_layer(named):
    return [{"params": [p], "lr": 0.1 if name.startswith("4.") else 0.0} for name, p in named]


def test_layer_wise_rates_by_name() -> None:
    start = network()
    model = fit_(copy.deepcopy(start), TASK, ck.Train(steps=2, optimizer=SGD, param_groups=by_layer))
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[4].weight, start[4].weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda named: [{"params": [p for _, p in named[1:]]}], "0.weight is in 0 groups; each parameter with a gradient"),
        (lambda named: [{"params": [p for _, p in named]}, {"params": [named[0][1]]}], "0.weight is in 2 groups"),
        (lambda named: [{"params": [*(p for _, p in named), nn.Parameter(torch.zeros(1))]}], "tensors that it was not given"),
        (lambda named: named, "wanted a list of dicts with an entry 'params'"),
    ],
)
def test_param_groups_that_do_not_fit_are_refused(make, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fit_(network(), TASK, ck.Train(steps=1, param_groups=make))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"Train\(\): wanted epochs= or steps=, one of the two, got neither"),
        ({"epochs": 1, "steps": 1}, "got both"),
        ({"steps": 0}, r"Train\(steps=...\): wanted a whole number >= 1, got 0"),
        ({"steps": 1.5}, r"Train\(steps=...\): wanted a whole number >= 1, got 1.5"),
        ({"epochs": 1, "patience": 0}, r"Train\(patience=...\): wanted a whole number >= 1, got 0"),
        ({"epochs": 1, "validate_every": -1}, r"Train\(validate_every=...\): wanted a whole number >= 0, got -1"),
        ({"epochs": 1, "validate_every": 0, "keep_best": True}, r"Train\(validate_every=0\): keep_best= and patience= need meas"),
        ({"epochs": 1, "on_step": 3}, r"Train\(on_step=...\): wanted a function, or a list of functions, got int"),
        ({"epochs": 1, "on_epoch": [print, 3]}, r"Train\(on_epoch=...\): wanted a function, or a list of functions, got int"),
        ({"epochs": 1, "param_groups": 3}, r"Train\(param_groups=...\): wanted a function, got int"),
        ({"epochs": 1, "callbacks": []}, r"Train\(callbacks=...\): there is no such setting; write on_step="),
        ({"epochs": 1, "lr": 0.1}, r"write optimizer=partial\(torch.optim.AdamW, lr=...\)"),
        ({"epoch": 1}, r"Train\(epoch=...\): there is no such setting; write epochs="),
        ({"epochs": 1, "schedule": torch.optim.lr_scheduler.StepLR}, "wanted to know when StepLR steps"),
        ({"epochs": 1, "schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=2)}, r"lr.EachEpoch\(partial\(StepLR, ..."),
    ],
)
def test_settings_that_do_not_fit_are_one_message(settings, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ck.Train(**settings)


def test_settings_have_names() -> None:
    with pytest.raises(SettingError, match=r"Train\(3\): settings are given by name: epochs, steps, "):
        ck.Train(3)  # type: ignore[misc]
    with pytest.raises(SettingError, match=r"Prune\(budgets=...\): there is no such setting; write budget="):
        ck.Prune(budgets=ck.keep(macs=0.5))  # type: ignore[call-arg]


def test_which_metric_is_better_has_to_be_said() -> None:
    task = ck.Task(train=BATCHES, val=BATCHES, metric=lambda p, y: F.cross_entropy(p, y).item())
    with pytest.raises(SettingError, match=r"which of two metrics is better is not said; pass Task\(higher_is_better=False\)"):
        fit_(network(), task, ck.Train(epochs=1, keep_best=True))


def test_the_best_weights_of_a_training_that_masks_on_its_way_are_refused() -> None:
    gradual = ck.Sparsify(
        budget=ck.keep(weights=0.5), schedule=ck.prune.schedules.Cubic(), finetune=ck.Train(epochs=2, keep_best=True)
    )
    with pytest.raises(SettingError, match="sparsify changes masks on its way"):
        gradual(network(), TASK)


def test_a_training_alone_needs_no_validation_data(tmp_path: Path) -> None:
    task = ck.Task(train=BATCHES)
    fit_(network(), task, ck.Train(epochs=1, objective=ck.imitate(network().eval())))
    for use in (
        lambda: fit_(network(), task, ck.Train(epochs=1, keep_best=True)),
        lambda: ck.Recipe(ck.Train(epochs=1)).run(network(), task, tmp_path / "run"),
    ):
        with pytest.raises(CompressError, match=r"needs Task\(val=...\), which was not given; only training alone"):
            use()


def test_a_recipe_takes_the_settings(tmp_path: Path) -> None:
    recipe = ck.Recipe(ck.Train(steps=3, optimizer=SGD, validate_every=1, keep_best=True, param_groups=by_layer))
    recipe.run(network(), TASK, tmp_path / "run")
    assert [stage.action for stage in recipe.plan(network(), TASK, tmp_path / "run").stages] == ["reuse"]


def test_arguments_of_fit_that_are_of_another_kind_are_refused() -> None:
    model, batches = nn.Linear(8, 4), [(torch.randn(4, 8), torch.arange(4))]
    for settings in ({"epochs": 1}, 1, None):
        with pytest.raises(SettingError, match=r"fit_\(settings=...\): wanted those of a training, got .*; write ck\.Train"):
            fit_(model, ck.Task(train=batches), settings)
    with pytest.raises(SettingError, match="fit_: wanted a Task, got list"):
        fit_(model, batches, ck.Train(epochs=1))
