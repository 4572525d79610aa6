"""Objectives: the defaults of the base class, and functions in their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.errors import SettingError
from compresskit.base.objective import FunctionObjective, Wrapper, as_objective
from compresskit.train.objective import Supervised


def test_a_function_is_wrapped_and_an_objective_is_not() -> None:
    def squares(model, batch):
        return {"loss": model(batch).square().sum()}

    objective = as_objective(squares)
    assert isinstance(objective, FunctionObjective)
    assert objective(nn.Identity(), torch.tensor([1.0, 2.0])) == {"loss": torch.tensor(5.0)}
    assert as_objective(objective) is objective
    assert objective.resume_state() is None
    assert objective.bind(nn.Identity(), ck.Task(val=[1])) is objective


def test_methods_of_an_objective_without_its_base_are_refused() -> None:
    class Almost:
        def __call__(self, model, batch):
            return {}

        def close(self):
            pass

    with pytest.raises(SettingError, match="Almost has close but is no Objective; subclass ck.Objective"):
        as_objective(Almost())
    with pytest.raises(SettingError, match="wanted an Objective or a function"):
        as_objective("mse")


def test_the_training_loop_calls_every_method_of_an_objective() -> None:
    calls = []

    class Logged(ck.Objective):
        def bind(self, model, task):
            calls.append("bind")
            return self

        def advance(self, done):
            calls.append(done)

        def __call__(self, model, batch):
            return {"loss": model(batch[0]).square().mean()}

        def close(self):
            calls.append("close")

    batches = [(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))] * 2
    ck.Train(epochs=2, objective=Logged())(nn.Linear(2, 2), ck.Task(train=batches, val=batches))
    assert calls == ["bind", 0.0, 0.25, 0.5, 0.75, "close"]


MLP = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
OBJECTIVES = {
    "imitate": lambda: ck.imitate(nn.Linear(8, 4).eval()),
    "mutual": lambda: ck.distill.mutual(nn.Linear(8, 4)),
    "self_distill": lambda: ck.distill.self_distill("0"),
    "pseudo_label": lambda: ck.distill.pseudo_label(nn.Linear(8, 4).eval(), [torch.randn(4, 8)]),
    "supervised": Supervised,
    "group_lasso": lambda: ck.prune.group_lasso(Supervised()),
    "greg": lambda: ck.prune.greg(ck.prune.plan_channels(MLP, (torch.randn(4, 8),), budget=ck.keep(channels=0.5))),
}


@pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_objective_that_is_used_before_bind_says_so(make) -> None:
    objective = make()
    with pytest.raises(
        SettingError, match=rf"{type(objective).__name__}: it was called before bind; .*objective.bind\(model, task\)"
    ):
        objective(nn.Linear(8, 4), (torch.randn(4, 8), torch.arange(4)))


def test_a_wrapper_asks_the_objective_inside() -> None:
    class Inside(ck.Objective):
        reads_target = True

        def __init__(self):
            self.calls = []

        def __call__(self, model, batch):
            return {}

        def rehearse(self, model, predictions):
            self.calls.append(predictions)

        def advance(self, done):
            self.calls.append(done)

        def resume_state(self):
            return 3

        def resume_from_(self, state):
            self.calls.append(state)

        def close(self):
            self.calls.append("close")

    class Around(Wrapper):
        def __init__(self):
            self.objective = Inside()

        def __call__(self, model, batch):
            return {}

    around = Around()
    assert around.reads_target
    around.rehearse(nn.Identity(), "predictions")
    around.advance(0.5)
    around.resume_from_(around.resume_state())
    around.close()
    assert around.objective.calls == ["predictions", 0.5, 3, "close"]
