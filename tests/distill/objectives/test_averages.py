"""What an ensemble is the mean of follows from the loss that compares the student with it."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.distill import Teacher
from compresskit.distill.losses import LOGIT_LOSSES
from compresskit.distill.objectives.averages import reads_more_than_softmax

SOFT = {
    **{loss.__name__: loss for loss in LOGIT_LOSSES},
    **{f"at temperature {t}": partial(kd.losses.soft_targets, temperature=t) for t in (0.2, 20, 1000)},
    "squared error of probabilities": lambda s, t: F.mse_loss(s.softmax(1), t.softmax(1)),
    "the student's own words": lambda s, t: -(t.softmax(1) * s.log_softmax(1)).sum(1).mean(),
    "with labels": lambda s, t, target: F.mse_loss(s, t),
}
OTHERS = {
    **{loss.__name__: loss for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy)},
    "a module": nn.MSELoss(),
    "tiny": lambda s, t: 1e-9 * F.mse_loss(s, t),
    "by sigmoid": lambda s, t: F.binary_cross_entropy_with_logits(s, t.sigmoid()),
    "with noise": lambda s, t: F.mse_loss(F.dropout(s, 0.5), t),
}


@pytest.mark.parametrize("shape", [(4, 4), (8, 1000), (2, 3, 6, 6)])
@pytest.mark.parametrize("name", [*SOFT, *OTHERS])
def test_losses_of_a_softmax_are_told_from_others(name, shape) -> None:
    state = torch.random.get_rng_state()
    with torch.no_grad():
        assert reads_more_than_softmax((SOFT | OTHERS)[name], torch.zeros(shape)) is (name in OTHERS)
    assert torch.equal(state, torch.random.get_rng_state())


def test_random_numbers_of_a_loss_do_not_look_like_an_answer() -> None:
    assert not reads_more_than_softmax(lambda s, t: kd.losses.soft_targets(F.dropout(s, 0.5), t), torch.zeros(16, 8))
    assert not reads_more_than_softmax(F.mse_loss, torch.zeros(4, 1))
    assert not reads_more_than_softmax(F.mse_loss, torch.zeros(4))


@pytest.mark.parametrize(
    ("average", "loss", "wanted"),
    [
        (None, F.mse_loss, "outputs"),
        (None, kd.losses.soft_targets, "probabilities"),
        ("probabilities", F.mse_loss, "probabilities"),
        ("outputs", kd.losses.soft_targets, "outputs"),
    ],
)
def test_imitate_takes_the_mean_that_its_loss_asks_for(average, loss, wanted) -> None:
    models, student, task = (
        [build(kind) for kind in (networks.Residual, networks.Depthwise)],
        build(networks.Chain),
        images_task(ck),
    )
    inputs, _ = task.split(task.val[0])
    each = torch.stack([m(*inputs) for m in models]).detach()
    mean = each.mean(0) if wanted == "outputs" else each.softmax(2).mean(0).log()
    teacher = Teacher(*models, average=average)
    goal = ck.imitate(teacher, loss=loss, weight=1, task_weight=0).bind(student, task)
    torch.testing.assert_close(goal(student, task.val[0])["imitate"], loss(student(*inputs), mean))
    unlabelled = [task.val[0][0]]
    goal = kd.pseudo_label(teacher, unlabelled, loss=loss, weight=1, task_weight=0).bind(student, task)
    torch.testing.assert_close(goal(student, task.val[0])["pseudo"], loss(student(*inputs), mean))
    assert teacher.average == average


def test_predictions_on_disk_are_no_numbers(tmp_path) -> None:
    """They are relative to the largest of each row: those of one channel are all 0."""
    task, teacher = images_task(ck), build(networks.Chain)
    stored = kd.cache(teacher, task, tmp_path / "classes", dtype=torch.float32)
    with pytest.raises(ck.ModelError, match="on disk are logits relative to the largest of each row, and this loss compares"):
        ck.imitate(stored, loss=F.mse_loss).bind(build(networks.Chain), task)
    ck.imitate(stored).bind(build(networks.Chain), task)
    x = torch.randn(8, 3)
    numbers = ck.Task(train=[(x, torch.randn(8, 1))], loss=F.mse_loss)
    column = kd.cache(nn.Linear(3, 1).eval(), numbers, tmp_path / "numbers", dtype=torch.float32)
    with pytest.raises(ck.ModelError, match="on disk are logits relative"):
        ck.imitate(column, loss=F.mse_loss, task_weight=0.0).bind(nn.Linear(3, 1), numbers)
