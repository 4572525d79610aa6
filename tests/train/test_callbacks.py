"""Functions that a training and a run call on their way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError, TrainingError
from compresskit.base.fingerprint import describe
from compresskit.train.callbacks import call_back
from compresskit.train.train import fit_

BATCHES = [(torch.randn(8, 8), torch.arange(8) % 4) for _ in range(3)]
TASK = ck.Task(train=BATCHES, val=BATCHES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def test_several_functions_are_called_in_their_order() -> None:
    told: list = []
    first, second = (lambda report, name=name: told.append((name, report.step)) for name in "ab")
    fit_(network(), TASK, ck.Train(epochs=2, on_step=[first, second], on_epoch=first))
    assert told == [pair for step in range(1, 7) for pair in [("a", step), ("b", step), *[("a", step)] * (step % 3 == 0)]]


def test_a_training_is_the_same_with_callbacks_that_draw_numbers() -> None:
    def draw(report) -> None:
        torch.randn(3)

    plain = fit_(network(), TASK, ck.Train(epochs=2))
    called = fit_(network(), TASK, ck.Train(epochs=2, on_step=draw, on_epoch=draw))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), called.parameters(), strict=True))


class Writer:
    def __call__(self, report) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("setting", "where"), [("on_step", "epoch 1, batch 1: Train(on_step=...)"), ("on_epoch", "epoch 1: Train(on_epoch=...)")]
)
def test_an_error_names_the_callback(setting: str, where: str) -> None:
    def broken(report) -> None:
        raise KeyError("rate")

    with pytest.raises(TrainingError) as caught:
        fit_(network(), TASK, ck.Train(epochs=1, **{setting: broken}))
    assert str(caught.value) == (
        f"{where}: the callback test_an_error_names_the_callback.<locals>.broken failed: KeyError: 'rate'; mend it or leave it"
        " out, then run the same command again"
    )
    with pytest.raises(TrainingError, match="the callback Writer failed: OSError: no space left on device"):
        fit_(network(), TASK, ck.Train(epochs=1, **{setting: Writer()}))


def test_a_callback_that_draws_and_fails_leaves_the_generators_as_they_were() -> None:
    def broken(report) -> None:
        torch.randn(3)
        raise KeyError("rate")

    before = torch.get_rng_state()
    with pytest.raises(TrainingError, match="KeyError: 'rate'"):
        call_back([broken], None, "here")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_tells_of_all_its_trainings_and_stages(tmp_path) -> None:
    epochs, steps, stages, own = [], [], [], []
    recipe = ck.Recipe(
        ck.Train(epochs=2, on_epoch=own.append),
        ck.Prune(budget=ck.keep(channels=0.5), finetune=ck.Train(epochs=1)),
        export="last",
        on_epoch=epochs.append,
        on_step=steps.append,
        on_stage=stages.append,
    )
    result = recipe.run(network(), TASK, tmp_path / "run")
    assert own == epochs[:2]
    assert [(r.stage, r.training, r.epoch) for r in epochs] == [
        ("1-train", "train", 1),
        ("1-train", "train", 2),
        ("2-prune", "fine-tune", 1),
    ]
    assert [r.step for r in steps] == [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert [(row.stage, row.metric) for row in stages] == [(row.stage, row.metric) for row in result.rows]
    recipe.run(network(), TASK, tmp_path / "run")
    assert len(stages) == 2  # nothing ran again


def test_callbacks_are_no_part_of_what_a_stage_is_recognized_by(tmp_path) -> None:
    def recipe(**callbacks) -> ck.Recipe:
        return ck.Recipe(ck.Train(epochs=1, **callbacks), export="last")

    file = (tmp_path / "log").open("w")  # cannot be described
    recipe(on_step=lambda report: file.write("x")).run(network(), TASK, tmp_path / "run")
    file.close()
    for callbacks in ({}, {"on_epoch": print}, {"on_step": [].append}):
        (stage,) = recipe(**callbacks).plan(network(), TASK, tmp_path / "run").stages
        assert stage.action == "reuse"
    assert "on_step" not in describe(ck.Train(epochs=1, on_step=print))


def test_a_callback_that_fails_leaves_a_run_that_goes_on(tmp_path) -> None:
    def run(out, **callbacks):
        return ck.Recipe(ck.Train(epochs=4), save=ck.Every(seconds=None, steps=2), export="last", **callbacks).run(
            network(), TASK, out
        )

    def broken(report) -> None:
        if report.step == 5:
            raise ValueError("full")

    told: list = []
    with pytest.raises(TrainingError, match="broken failed: ValueError: full"):
        run(tmp_path / "stopped", on_step=broken)
    resumed, whole = run(tmp_path / "stopped", on_step=told.append), run(tmp_path / "whole")
    assert [report.step for report in told] == list(range(5, 13))  # those after the last checkpoint
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))
    with pytest.raises(TrainingError, match=r"1-train: Recipe\(on_stage=...\): the callback .* failed: ValueError: stage"):
        run(tmp_path / "third", on_stage=partial(fail, "stage"))
    assert run(tmp_path / "third").rows[0].metric == whole.rows[0].metric


def fail(text, report) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("name", ["on_step", "on_epoch", "on_stage"])
def test_callbacks_of_a_recipe_are_functions(name: str) -> None:
    with pytest.raises(SettingError, match=rf"Recipe\({name}=...\): wanted a function, or a list of functions, got str"):
        ck.Recipe(ck.Train(epochs=1), **{name: "log"})


def test_what_callbacks_are_told_of_learning_rates_is_their_own() -> None:
    told = []
    fit_(network(), TASK, ck.Train(epochs=2, on_step=lambda r: r.learning_rates.append(7.0), on_epoch=told.append))
    assert [len(report.learning_rates) for report in told] == [1, 1]


def test_a_layer_that_is_unfrozen_on_the_way_is_named_once(caplog) -> None:
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    fit_(model, TASK, ck.Train(epochs=3, on_epoch=lambda report: model[0].requires_grad_(True)))
    (record,) = [r for r in caplog.records if "unfrozen" in r.getMessage()]
    assert "train: 0.weight (2 in all) was unfrozen on the way, and is not trained" in record.getMessage()
    assert torch.equal(model[0].weight, before)
    caplog.clear()
    fit_(model, TASK, ck.Train(epochs=2, on_epoch=lambda report: model[0].requires_grad_(report.epoch == 2)))
    assert not [r for r in caplog.records if "unfrozen" in r.getMessage()], "the optimizer has what a callback froze meanwhile"
    assert not torch.equal(model[0].weight, before)
