"""Losses of predictions: what each adds to the contract of all losses."""

from __future__ import annotations

import math
from functools import partial

import oracles
import pytest
import torch
from torch import nn

from compresskit import distill as kd
from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses
from compresskit.distill.losses import FEATURE_LOSSES, soft_targets


@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0, 20.0])
def test_soft_targets_equal_the_formula(temperature) -> None:
    student, teacher = torch.randn(2, 6, 10) * 3
    got = soft_targets(student, teacher, temperature=temperature).item()
    assert got == pytest.approx(oracles.soft_targets(student, teacher, temperature), rel=1e-5)


def test_soft_targets_average_over_positions() -> None:
    student, teacher = torch.randn(2, 2, 5, 3, 3)
    flat = [v.movedim(1, -1).reshape(-1, 5) for v in (student, teacher)]
    torch.testing.assert_close(soft_targets(student, teacher), soft_targets(*flat))


@pytest.mark.parametrize("settings", [(1.0, 8.0, 4.0), (0.5, 2.0, 1.0)])
def test_dkd_equals_its_formula_and_decomposes_kd(settings) -> None:
    student, teacher = torch.randn(2, 6, 10) * 2
    target = torch.randint(0, 10, (6,))
    alpha, beta, temperature = settings
    got = losses.dkd(student, teacher, target, alpha=alpha, beta=beta, temperature=temperature).item()
    assert got == pytest.approx(oracles.dkd(student, teacher, target, *settings), rel=1e-5)
    assert losses.dkd(student, student, target).item() == pytest.approx(0, abs=1e-6)
    # KL = TCKD + (1 - p_t,y) NCKD, one sample at a time.
    for i in range(6):
        s, t, y = student[i : i + 1], teacher[i : i + 1], target[i : i + 1]
        rest = 1 - (t / 2).softmax(1)[0, y].item()
        parts = losses.dkd(s, t, y, alpha=1, beta=rest, temperature=2.0)
        torch.testing.assert_close(parts, losses.soft_targets(s, t, temperature=2.0), rtol=1e-4, atol=1e-6)


def test_sums_with_labels_equal_their_formulas() -> None:
    student, teacher = torch.randn(2, 6, 10) * 2
    target = torch.randint(0, 10, (6,))
    kl, ce = oracles.soft_targets(student, teacher, 2.0), oracles.smoothed_ce(student, target, 0.0)
    for beta in (0.0, 0.3, 2.0):
        got = losses.kl_plus_ce(student, teacher, target, beta=beta, temperature=2.0).item()
        assert got == pytest.approx(kl + beta * ce, rel=1e-5)
    for smoothing in (0.0, 0.1, 0.9):
        got = losses.label_smoothing(student, target, smoothing=smoothing).item()
        assert got == pytest.approx(oracles.smoothed_ce(student, target, smoothing), rel=1e-5)
    plain = torch.nn.functional.cross_entropy(student, teacher.argmax(1))
    torch.testing.assert_close(losses.hard_targets(student, teacher), plain)


def test_ignored_labels_are_left_out() -> None:
    student, teacher = torch.randn(2, 4, 5)
    target = torch.tensor([1, -100, 2, -100])
    torch.testing.assert_close(losses.dkd(student, teacher, target), losses.dkd(student[::2], teacher[::2], target[::2]))
    torch.testing.assert_close(
        losses.label_smoothing(student, target, smoothing=0.0), torch.nn.functional.cross_entropy(student, target)
    )


def test_hard_targets_count_confident_predictions_only() -> None:
    student = torch.randn(4, 5)
    teacher = torch.zeros(4, 5)
    teacher[0, 1], teacher[2, 3] = 9.0, 9.0
    got = kd.losses.hard_targets(student, teacher, threshold=0.9)
    torch.testing.assert_close(got, nn.functional.cross_entropy(student[::2], torch.tensor([1, 3])))
    keep = torch.tensor([1, 1, 0, 1])
    got = kd.losses.hard_targets(student, teacher, threshold=0.9, weight=keep)
    torch.testing.assert_close(got, nn.functional.cross_entropy(student[:1], torch.tensor([1])))
    unsure = student.clone().requires_grad_()
    kd.losses.hard_targets(unsure, teacher * 0, threshold=0.9).backward()
    assert not unsure.grad.any()


def test_match_predictions_is_soft_targets_for_classes_and_a_relative_error_otherwise() -> None:
    student, teacher = torch.randn(2, 16, 5)
    for temperature in (1.0, 4.0):
        got = losses.match_predictions(student, teacher, temperature=temperature)
        assert got.item() == pytest.approx(oracles.soft_targets(student, teacher, temperature), rel=1e-5)
    assert losses.match_predictions(student, student).item() == pytest.approx(0, abs=1e-6)
    for shape in ((16, 1), (16,)):
        value = torch.randn(shape)
        assert losses.match_predictions(value * 1.1, value).item() == pytest.approx(0.01, rel=1e-4)


def test_logit_losses_refuse_shapes_and_settings_that_do_not_fit() -> None:
    a, b, y = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    for loss in (
        losses.soft_targets,
        losses.reverse_kl,
        losses.jsd,
        losses.dist,
        losses.hard_targets,
        losses.chunked_soft_targets,
        *FEATURE_LOSSES[:1],
    ):
        with pytest.raises(DataError, match=rf"{loss.__name__}: student and teacher must have one shape, got \(2, 3\)"):
            loss(a, b)
    for loss in (losses.soft_targets, losses.reverse_kl, losses.jsd, losses.dist, losses.chunked_soft_targets):
        with pytest.raises(SettingError, match=rf"{loss.__name__}\(temperature=\.\.\.\): wanted a positive number, got 0"):
            loss(a, a, temperature=0)
    with pytest.raises(DataError, match=r"soft_targets: wanted logits of at least 2 dimensions"):
        losses.soft_targets(a[0], a[0])
    with pytest.raises(SettingError, match=r"jsd\(beta=\.\.\.\): wanted a number between 0 and 1, got 1"):
        losses.jsd(a, a, beta=1)
    with pytest.raises(SettingError, match=r"dkd\(alpha=\.\.\.\): wanted a number >= 0, got -1"):
        losses.dkd(a, a, y, alpha=-1)
    with pytest.raises(DataError, match=r"dkd: wanted class indices of shape \(2,\), got torch.float32 \(2,\)"):
        losses.dkd(a, a, y.float())
    with pytest.raises(DataError, match="dkd: the model has 3 classes, so labels must be 0..2, got 7"):
        losses.dkd(a, a, y + 7)
    with pytest.raises(DataError, match="dkd: wanted at least 2 classes"):
        losses.dkd(a[:, :1], a[:, :1], y)
    with pytest.raises(DataError, match=r"dkd\(weight=\.\.\.\): wanted shape \(2,\)"):
        losses.dkd(a, a, y, weight=torch.ones(3))
    with pytest.raises(SettingError, match=r"kl_plus_ce\(beta=\.\.\.\): wanted a number >= 0, got -1"):
        losses.kl_plus_ce(a, a, y, beta=-1)
    with pytest.raises(SettingError, match=r"smoothing=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        losses.label_smoothing(a, y, smoothing=1)


def test_a_threshold_of_one_is_refused() -> None:
    with pytest.raises(SettingError, match=r"threshold=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        kd.losses.hard_targets(torch.zeros(1, 2), torch.zeros(1, 2), threshold=1)


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(SettingError, match="wanted a positive number"):
        soft_targets(torch.zeros(1, 2), torch.zeros(1, 2), temperature=-1)


IGNORED = torch.full((2, 4), -100)
NONE = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "loss",
    [
        partial(losses.soft_targets, weight=NONE),
        partial(losses.reverse_kl, weight=NONE, temperature=4.0),
        partial(losses.jsd, weight=NONE, temperature=4.0),
        partial(losses.standardized_soft_targets, weight=NONE),
        partial(losses.chunked_soft_targets, weight=NONE),
        partial(losses.dkd, target=IGNORED),
        lambda s, t: losses.label_smoothing(s, IGNORED),
        lambda s, t: losses.hard_targets(s, t * 0, threshold=0.9),
        lambda s, t: losses.hint(s, t, weight=torch.zeros(2)),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 100.0, 65536.0])
def test_a_batch_in_which_nothing_counts_gives_zero_and_a_gradient_of_zero(loss, scale) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 4, requires_grad=True), torch.randn(2, 5, 4)
    value = scale * loss(student, teacher)
    assert value.item() == 0
    assert torch.equal(torch.autograd.grad(value, student)[0], torch.zeros(2, 5, 4))


def _without_last(loss, student, teacher):
    return loss(student[:, :-1], teacher[:, :-1])


KLS = [losses.soft_targets, losses.reverse_kl, losses.jsd, losses.standardized_soft_targets, losses.chunked_soft_targets,
       partial(losses.dkd, target=torch.tensor([0, 1]))]  # fmt: skip


@pytest.mark.parametrize("loss", KLS)
def test_a_class_masked_in_both_networks_does_not_count(loss) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4), torch.randn(2, 4)
    student[:, 3] = teacher[:, 3] = -math.inf
    student.requires_grad_()
    value, wanted = loss(student, teacher), _without_last(loss, student, teacher)
    assert value.item() == pytest.approx(wanted.item(), rel=1e-5)
    (gradient,), (other,) = torch.autograd.grad(value, student), torch.autograd.grad(wanted, student)
    torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("loss", [KLS[0], KLS[2], KLS[4], KLS[5]])
def test_a_class_masked_in_the_teacher_alone_counts_as_its_limit(loss) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    values = []
    for logit in (-math.inf, -500.0):
        teacher[:, 3] = logit
        values.append(loss(student, teacher))
    gradients = [torch.autograd.grad(value, student)[0] for value in values]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_match_predictions_sends_no_gradient_to_the_teacher(channels) -> None:
    student, teacher = (torch.randn(4, channels, requires_grad=True) for _ in range(2))
    losses.match_predictions(student, teacher).backward()
    assert student.grad.any()
    assert teacher.grad is None


@pytest.mark.parametrize("loss", ["label_smoothing", "dkd", "kl_plus_ce"])
def test_ignored_labels_stay_ignored_beside_a_weight(loss) -> None:
    student, teacher, weight = torch.randn(6, 5), torch.randn(6, 5), torch.rand(6) + 0.5
    target = torch.tensor([1, -100, 2, -100, 4, 0])
    kept = target != -100

    def value(rows):
        s, t, y, w = student[rows], teacher[rows], target[rows], weight[rows]
        if loss == "kl_plus_ce":  # there they count for the divergence
            return losses.kl_plus_ce(s, t, y, weight=w) - losses.kl_plus_ce(s, t, y, weight=w, beta=0.0)
        return losses.dkd(s, t, y, weight=w) if loss == "dkd" else losses.label_smoothing(s, y, weight=w)

    torch.testing.assert_close(value(torch.ones(6, dtype=torch.bool)), value(kept))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_masked_classes_have_no_part_in_the_labels(smoothing) -> None:
    """Also where an ignored label counts as class 0 on the way, and this one is masked."""
    student, teacher = torch.randn(5, 6), torch.randn(5, 6)
    student[:, 0] = teacher[:, 0] = -math.inf
    student.requires_grad_()
    target = torch.tensor([1, 2, 5, 3, -100])
    shifted = torch.where(target == -100, target, target - 1)
    value = losses.label_smoothing(student, target, smoothing=smoothing)
    wanted = nn.functional.cross_entropy(student[:, 1:], shifted, label_smoothing=smoothing)
    torch.testing.assert_close(value, wanted)
    (gradient,), (other,) = (torch.autograd.grad(each, student, retain_graph=True) for each in (value, wanted))
    torch.testing.assert_close(gradient, other)
    both = losses.kl_plus_ce(student, teacher, target)
    torch.testing.assert_close(both, losses.kl_plus_ce(student[:, 1:], teacher[:, 1:], shifted))
    assert torch.autograd.grad(both, student)[0].isfinite().all()
