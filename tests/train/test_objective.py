"""The task's loss: a scalar, of predictions and targets that belong together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError, SettingError, TrainingError

BATCHES = [(torch.randn(16, 8), torch.arange(16) % 4)] * 2
COLUMN = [(torch.randn(16, 8), torch.arange(16.0))] * 2


def fit(loss, batches=BATCHES, outputs=4, **settings):
    return ck.fit_(nn.Linear(8, outputs), ck.Task(train=batches, val=batches, loss=loss), ck.Train(epochs=1, **settings))


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (partial(F.cross_entropy, reduction="none"), r"a tensor \(16,\)"),
        (lambda p, y: F.cross_entropy(p, y).item(), "float"),
        (lambda p, y: (F.cross_entropy(p, y), 0), "tuple"),
        (lambda p, y: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused_in_training_and_in_the_rehearsal(loss, got, tmp_path) -> None:
    with pytest.raises(DataError, match=rf"Task\(loss=...\): wanted a scalar tensor, got {got}"):
        fit(loss)
    with pytest.raises(DataError, match=rf"Task\(loss=...\): wanted a scalar tensor, got {got}"):
        ck.Recipe(ck.Train(epochs=1)).run(nn.Linear(8, 4), ck.Task(train=BATCHES, val=BATCHES, loss=loss), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("losses", "got"),
    [
        (lambda model, batch: {"a": model(batch[0])}, r"a = a tensor \(16, 4\)"),
        (lambda model, batch: {"a": 1.0}, "a = float"),
        (lambda model, batch: {}, "no loss"),
        (lambda model, batch: model(batch[0]).mean(), "Tensor"),
    ],
)
def test_an_objective_that_gives_no_scalars_is_refused(losses, got) -> None:
    with pytest.raises(TrainingError, match=f"the objective wants scalar tensors by name, got {got}"):
        fit(F.cross_entropy, objective=losses)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss, lambda p, y: (y - p).square().mean()])
def test_predictions_in_a_column_beside_targets_in_a_row_are_refused(loss) -> None:
    with pytest.raises(DataError, match=r"predictions \(16, 1\) and targets \(16,\) are broadcast to \(16, 16\)"):
        fit(loss, COLUMN, outputs=1)


class Row(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze(1)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss, lambda p, y: (y - p).square().mean()])
def test_predictions_in_a_row_beside_targets_in_a_column_are_refused(loss) -> None:
    task = ck.Task(train=[(x, y[:, None]) for x, y in COLUMN], loss=loss)
    with pytest.raises(
        DataError, match=r"predictions \(16,\) and targets \(16, 1\) are broadcast to \(16, 16\).* give targets \(16,\)"
    ):
        ck.fit_(Row(8, 1), task, ck.Train(epochs=1))


def test_a_column_of_columns_that_the_loss_squeezes_trains() -> None:
    """(N, T, 1) beside (N, T), which cannot be broadcast to one another."""
    task = ck.Task(train=[(torch.randn(6, 5, 8), torch.randn(6, 5))], loss=lambda p, y: F.mse_loss(p.squeeze(-1), y))
    ck.fit_(nn.Linear(8, 1), task, ck.Train(epochs=1))


def pairs(predictions, target):
    """A loss that compares all pairs on purpose."""
    return ((predictions - predictions.T) - (target[:, None] - target[None])).square().mean()


@pytest.mark.parametrize("loss", [lambda p, y: F.mse_loss(p.squeeze(1), y), lambda p, y: F.mse_loss(p, y[:, None]), pairs])
def test_losses_that_bring_them_into_one_shape_train(loss) -> None:
    fit(loss, COLUMN, outputs=1)


def test_training_is_silent_without_a_standard_error(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    fit(F.cross_entropy)


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss()])
def test_cross_entropy_of_one_channel_is_refused(loss) -> None:
    """It is 0 whatever the model gives: nothing would be trained, and gradients would score nothing."""
    x = torch.randn(8, 5)
    task = ck.Task(train=[(x, torch.randn(8, 1))], loss=loss)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(DataError, match=r"the model gives one channel, \(8, 1\), of which cross-entropy is 0 whatever it holds"):
        ck.fit_(model, task, ck.Train(epochs=1))
    with pytest.raises(DataError, match="one channel"):
        ck.prune.plan_channels(model, (x,), ck.keep(macs=0.5), criterion=ck.prune.criteria.taylor, task=task)


class Auxiliary(nn.Module):
    """A classifier that gives a second head's scores in training, as GoogLeNet does."""

    def __init__(self):
        super().__init__()
        self.body, self.side, self.head = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        x = self.body(x).relu()
        return (self.head(x), self.side(x)) if self.training else self.head(x)


def both_heads(outputs, target):
    """The loss of both in training, of the head alone in eval mode."""
    return sum(F.cross_entropy(scores, target) for scores in (outputs if isinstance(outputs, tuple) else (outputs,)))


def whole(output):
    return output


@pytest.mark.parametrize(
    "objective", [None, ck.imitate(task_weight=0.5), ck.distill.self_distill("body")], ids=["own", "imitate", "self"]
)
def test_a_loss_gets_all_that_predict_keeps_in_training(objective, tmp_path) -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    side = model.side.weight.detach().clone()
    task = ck.Task(train=BATCHES, val=BATCHES, loss=both_heads, predict=whole, reference=Auxiliary().eval())
    ck.fit_(model, task, ck.Train(epochs=1, objective=objective))
    assert not torch.equal(model.side.weight, side)
    ck.Recipe(ck.Train(epochs=1, objective=objective)).run(Auxiliary(), task, tmp_path / "run")


def test_several_predictions_in_eval_mode_are_refused(tmp_path) -> None:
    class Two(Auxiliary):
        def forward(self, x):
            return self.body(x), self.head(self.body(x))

    task = ck.Task(train=BATCHES, val=BATCHES, loss=both_heads, predict=whole)
    with pytest.raises(
        DataError, match=r"Task\(predict=...\): wanted a tensor of predictions in eval mode, got tuple; return the one"
    ):
        ck.evaluate(Two(), task)
    with pytest.raises(DataError, match=r"wanted a tensor of predictions in eval mode, got tuple"):
        ck.Recipe(ck.Train(epochs=1)).run(Two(), task, tmp_path / "run")


class Center(nn.Module):
    """A loss with parameters of its own, as center losses, ArcFace and learned weights of losses have them."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.eye(4))

    def forward(self, predictions, target):
        return F.cross_entropy(predictions @ self.centers, target)

    def of_batch(self, model, batch):
        return {"loss": self(model(batch[0]), batch[1])}


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: partial(loss), lambda loss: loss.forward])
def test_a_loss_with_parameters_that_no_training_moves_is_refused(wrap, tmp_path) -> None:
    loss = Center()
    message = (
        r"Task\(loss=...\): Center has parameters that require gradients \(centers, 1 in all\).*; make them part of the model"
    )
    with pytest.raises(SettingError, match=message):
        fit(wrap(loss))
    task = ck.Task(train=BATCHES, val=BATCHES, loss=wrap(loss))
    with pytest.raises(SettingError, match=message):
        ck.Recipe(ck.Train(epochs=1), ck.Prune(budget=ck.keep(macs=0.5))).run(nn.Linear(8, 4), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingError, match=r"Train\(objective=...\): Center has parameters"):
        fit(F.cross_entropy, objective=loss.of_batch)
    fit(wrap(loss.requires_grad_(False)))


def test_a_loss_that_is_not_minimised_may_have_parameters() -> None:
    teacher = nn.Linear(8, 4).eval()
    fit(Center(), objective=ck.imitate(teacher, task_weight=0))
    task = ck.Task(train=BATCHES, val=BATCHES, loss=Center())
    ck.Distill(epochs=1, teacher=teacher, task_weight=0)(nn.Linear(8, 4), task)


def test_a_loss_that_is_part_of_the_model_is_trained() -> None:
    model = nn.Linear(8, 4)
    model.center = Center()
    model.forward = partial(nn.Linear.forward, model)
    ck.fit_(model, ck.Task(train=BATCHES, loss=model.center), ck.Train(epochs=1))
    assert not torch.equal(model.center.centers, torch.eye(4))
