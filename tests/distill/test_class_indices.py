"""Whole numbers beside predictions: indices of classes, or transcripts, weak labels and counts of the same shape by chance."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compresskit as ck
from compresskit.base.errors import ModelError
from compresskit.distill.class_dim import ClassDim, class_dim
from compresskit.distill.losses import soft_targets

N, T, C = 4, 10, 6
LABELS = torch.arange(N * T).reshape(N, T) % C


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def of_transcripts(predictions: Tensor, target: Tensor) -> Tensor:
    """CTC of scores (N, T, C), and transcripts that end with -1."""
    frames = torch.full((len(target),), predictions.shape[1])
    return F.ctc_loss(predictions.log_softmax(-1).transpose(0, 1), target.clamp(min=0), frames, (target >= 0).sum(1))


def of_penalized_transcripts(predictions: Tensor, target: Tensor) -> Tensor:
    return of_transcripts(predictions, target) + 0.2 * predictions.square().mean()


def of_channels(predictions: Tensor, target: Tensor) -> Tensor:
    """CTC of scores (N, C, T)."""
    return of_transcripts(predictions.transpose(1, 2), target)


def of_clips(predictions: Tensor, target: Tensor) -> Tensor:
    """Of scores (N, T, C), and a yes or no for each class of a whole clip."""
    return F.binary_cross_entropy_with_logits(predictions.amax(1), target.float())


def of_counts(predictions: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(predictions.sum(1), target.float())


def of_ranks(predictions: Tensor, target: Tensor) -> Tensor:
    """Ordinal: a yes or no for each rank that is passed."""
    return F.binary_cross_entropy_with_logits(predictions, (target[:, None] > torch.arange(predictions.shape[1])).float())


def of_penalized_tags(predictions: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(predictions.transpose(1, 2), target, ignore_index=255) + 0.2 * predictions.square().mean()


def of_noisy_tags(predictions: Tensor, target: Tensor) -> Tensor:
    return of_penalized_tags(predictions + torch.rand_like(predictions), target)


def of_next_focal(predictions: Tensor, target: Tensor) -> Tensor:
    """Sigmoid focal loss of the next tag, without a softmax."""
    wanted = F.one_hot(target[:, 1:], predictions.shape[-1])
    p = (predictions[:, :-1] * (2 * wanted - 1)).sigmoid()
    return -((0.75 - 0.5 * wanted) * (1 - p).square() * p.log()).mean()


def of_weighted_sigmoids(predictions: Tensor, target: Tensor) -> Tensor:
    weights = torch.logspace(0, 1, predictions.shape[1])[:, None]
    wanted = F.one_hot(target, predictions.shape[1]).movedim(-1, 1).float()
    return F.binary_cross_entropy_with_logits(predictions, wanted, pos_weight=weights)


def transcripts(places: int) -> Tensor:
    """Three letters, and -1 up to so many places."""
    return F.pad(torch.tensor([[1, 2, 3], [2, 1, 5], [5, 4, 1], [3, 2, 4]]), (0, places - 3), value=-1)


@pytest.mark.parametrize(
    ("loss", "predictions", "target", "wanted"),
    [
        (of_transcripts, normal(N, T, C), transcripts(C), ClassDim(-1)),  # the shape says the time
        (of_transcripts, normal(N, T, C), transcripts(T), ClassDim(-1)),
        (of_transcripts, normal(N, T, C), transcripts(C - 1), ClassDim(-1)),
        (of_penalized_transcripts, normal(N, T, C), transcripts(C), ClassDim(-1)),
        (of_channels, normal(N, C, T), transcripts(C), ClassDim(1)),
        (of_clips, normal(N, T, C), (LABELS[:, :C] > 3).long(), ClassDim(None, known=False)),
        (of_clips, normal(N, T, C), LABELS[:, :C] > 3, ClassDim(None, known=False)),
        (of_clips, normal(N, T, C), torch.zeros(N, C, dtype=torch.long), ClassDim(None, known=False)),
        (of_clips, normal(N, T, 2), LABELS[:, :2] > 1, ClassDim(None, known=False)),
        (of_counts, normal(N, T, C), LABELS[:, :C], ClassDim(None, known=False)),
        (of_ranks, normal(8, 5), torch.arange(8) % C, ClassDim(1, known=False)),
        (lambda p, y: (p - p.roll(1, 0)).square().mean(), normal(8, 5), 99 * torch.arange(8), ClassDim(1, known=False)),
        (lambda p, y: p["x"], normal(N, T, C), LABELS[:, :C] > 3, ClassDim(None, known=False)),
    ],
)
def test_whole_numbers_that_have_the_shape_of_labels_by_chance(loss, predictions, target, wanted) -> None:
    """The loss says that they are no indices along the dimension that their shape lacks."""
    assert class_dim(ck.Task(train=[(predictions, target)], loss=loss), nn.Identity(), predictions) == wanted


@pytest.mark.parametrize(
    ("loss", "predictions", "target", "wanted"),
    [
        (of_penalized_tags, normal(N, T, C), LABELS.where(LABELS < 5, 255), ClassDim(-1)),
        (of_penalized_tags, normal(N, 60, C), torch.arange(N * 60).view(N, 60) % C, ClassDim(-1)),  # as many of each in a row
        (of_noisy_tags, normal(N, T, C), LABELS, ClassDim(-1)),
        (of_next_focal, normal(N, T, C), LABELS, ClassDim(-1)),
        (of_next_focal, normal(N, T, C), LABELS % 2, ClassDim(-1)),  # two of the classes alone
        (of_next_focal, normal(N, T, C), 0 * LABELS, ClassDim(-1)),
        (of_next_focal, normal(N, T, T), LABELS, ClassDim(-1)),
        (of_weighted_sigmoids, normal(N, C, T), LABELS, ClassDim(1)),
        (lambda p, y: F.cross_entropy(p, y.long()), normal(N, 2, 8, 8), torch.eye(8).bool().repeat(N, 1, 1), ClassDim(1)),
        (lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], y.float()), normal(8, 1), torch.arange(8) % 2, ClassDim(1)),
        (lambda p, y: p["x"], normal(N, T, C), LABELS, ClassDim(-1)),  # a loss that cannot be asked
    ],
)
def test_labels_that_are_indices_count_where_the_loss_is_not_blind(loss, predictions, target, wanted) -> None:
    assert class_dim(ck.Task(train=[(predictions, target)], loss=loss), nn.Identity(), predictions) == wanted


def test_a_loss_of_large_predictions_is_asked_of_few_rows() -> None:
    rows: list[int] = []

    def loss(predictions: Tensor, target: Tensor) -> Tensor:
        rows.append(len(predictions))
        assert len(predictions) == len(target)
        return F.cross_entropy(predictions.transpose(1, 2), target)

    words = torch.zeros(()).expand(64, 8, 2**14)
    data = [(words, torch.arange(64 * 8).view(64, 8))]
    assert class_dim(ck.Task(train=data, loss=loss), nn.Identity(), words) == ClassDim(-1)
    assert rows == [32]


def test_readers_of_lines_and_weak_labels_are_not_imitated_over_the_time() -> None:
    torch.manual_seed(0)
    student, teacher, x = nn.Linear(3, C), nn.Linear(3, C).eval(), normal(N, T, 3)
    lines = ck.Task(train=[(x, transcripts(C))], loss=of_transcripts)
    goal = ck.imitate(teacher, weight=1, task_weight=0).bind(student, lines)
    wanted = soft_targets(student(x), teacher(x), dim=-1)
    torch.testing.assert_close(goal(student, lines.train[0])["imitate"], wanted)
    for labels in (LABELS[:, :C] > 3, (LABELS[:, :C] > 3).long(), (LABELS[:, :C] > 3).float()):
        clips = ck.Task(train=[(x, labels)], loss=of_clips)
        with pytest.raises(ModelError, match=r"^imitate\(\): Linear gives predictions \(4, 10, 6\), and neither the task's loss"):
            ck.imitate(teacher).bind(student, clips)


@pytest.mark.parametrize("shape", [(N, T, 2), (32, 2)], ids=str)
def test_labels_of_a_rare_class_of_great_weight_are_indices(shape) -> None:
    """Beside a pull of a hundred times its size, the other one is small."""

    def weighted(predictions: Tensor, target: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 100.0])
        return F.binary_cross_entropy_with_logits(predictions, F.one_hot(target, 2).float(), pos_weight=weight)

    x, y = normal(*shape), (normal(*shape[:-1]) > 1.3).long()
    task = ck.Task(train=[(x, y)], val=[(x, y)], loss=weighted, metric=lambda p, t: 0.0)
    found = class_dim(task, nn.Identity(), x)
    assert found.known
    assert found.dim in (-1, 1)


def test_a_loss_with_random_numbers_of_its_own_says_nothing_of_labels() -> None:
    own = torch.Generator().manual_seed(0)

    def dropped(predictions: Tensor, target: Tensor) -> Tensor:
        kept = torch.rand(predictions.shape, generator=own) > 0.3
        return F.binary_cross_entropy_with_logits(predictions * kept, F.one_hot(target, C).float())

    x = normal(N, T, C)
    task = ck.Task(train=[(x, LABELS)], val=[(x, LABELS)], loss=dropped, metric=lambda p, t: 0.0)
    assert {class_dim(task, nn.Identity(), x).dim for _ in range(5)} == {-1}


class Counting:
    """A loss that is no module, and counts its calls."""

    def __init__(self) -> None:
        self.calls, self.mean = 0, torch.zeros(())

    def __call__(self, predictions: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy(predictions, target)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss


def test_a_loss_that_counts_its_calls_is_as_it_was() -> None:
    x, y, loss = normal(32, C), torch.arange(32) % C, Counting()
    mean = loss.mean
    task = ck.Task(train=[(x, y)], val=[(x, y)], loss=loss, metric=lambda p, t: 0.0)
    assert class_dim(task, nn.Identity(), x) == ClassDim(1)
    assert (loss.calls, float(mean)) == (0, 0.0)
    assert loss.mean is mean


def test_a_loss_of_whole_batches_is_not_asked_where_they_are_large(monkeypatch) -> None:
    """Its gradients would take as much memory as the predictions, several times."""
    monkeypatch.setattr("compresskit.distill.class_dim.SUMMED", 60)
    asked = []

    def whole(predictions: Tensor, target: Tensor) -> Tensor:
        asked.append(len(predictions))
        return F.cross_entropy(predictions.reshape(N * T, C), target.reshape(-1))

    x = normal(N, T, C)
    task = ck.Task(train=[(x, LABELS)], val=[(x, LABELS)], loss=whole, metric=lambda p, t: 0.0)
    assert class_dim(task, nn.Identity(), x).dim == -1
    assert N not in asked
