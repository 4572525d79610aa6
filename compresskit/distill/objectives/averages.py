"""What a teacher's predictions are the mean of, where there are several, as the loss of an objective asks for it."""

from __future__ import annotations

import torch
from torch import Tensor

from compresskit.base.errors import ModelError
from compresskit.distill.data.cache import Cached
from compresskit.distill.models.teacher import Teacher, TeacherSource
from compresskit.distill.objectives.terms import DistillLoss, takes_argument


def averaged_for(source: TeacherSource, loss: DistillLoss, predictions: Tensor, dim: int | None = 1) -> TeacherSource:
    """Return the source, or, of one that takes a mean and was not told of what, one with the mean that the loss asks for.

    Args:
        source: of the teacher.
        loss: compares the predictions.
        predictions: of the student for an example.
        dim: the dimension of the classes in them; None where nothing says it.

    Raises: ModelError for predictions on disk, which are relative to the largest of each row, where the loss reads more of them;
        and where a mean of probabilities is wanted, or a row is, and nothing says which dimension holds the classes.
    """
    dim = 1 if dim is None and (predictions.ndim <= 2 or predictions.shape[1] == 1) else dim
    if isinstance(source, Cached):
        _check_rows(source, loss, predictions, dim)
    if not isinstance(source, Teacher) or not source.takes_mean:
        return source
    average = source.average
    if average is None and reads_more_than_softmax(loss, predictions):
        average = "outputs"
    if dim is None and average != "outputs":
        raise ModelError(
            f"the teacher {source.label} is the mean of probabilities, and nothing says which dimension of predictions"
            f" {tuple(predictions.shape)} holds the classes; set dim=..., or Teacher(average='outputs')"
        )
    return source.averaging(average, 1 if dim is None else dim)


def _check_rows(source: Cached, loss: DistillLoss, predictions: Tensor, dim: int | None) -> None:
    """Raise `ModelError` where a loss reads more of predictions on disk than their softmax along the dimension of their rows."""
    if predictions.shape[1:2] == (1,) or reads_more_than_softmax(loss, predictions):
        raise ModelError(
            f"the predictions of {source.label} on disk are logits relative to the largest of each row, and this loss compares"
            " them as numbers; imitate the teacher itself, or take a loss of probabilities such as soft_targets"
        )
    if dim is not None and dim % predictions.ndim != source.dim % predictions.ndim:
        raise ModelError(
            f"the predictions of {source.label} on disk have their classes in dimension {source.dim}, and this loss compares"
            f" those in dimension {dim}; make the cache again, with cache(dim={dim}), in another folder"
        )


def reads_more_than_softmax(loss: DistillLoss, predictions: Tensor) -> bool:
    """Whether a loss teaches something else where all channels of the teacher grow by one number, which no softmax shows.

    log(mean of softmax) is known only up to such a number, so that it means nothing to a loss like this. By the gradients, as
    the value of a KL divergence at a high temperature is rounding noise; of numbers in [0, 1], which any loss takes. The
    generators of random numbers are left as they were.

    predictions: (N, C, ...), of the student; with one channel there is nothing to ask.
    """
    if predictions.ndim < 2 or predictions.shape[1] == 1 or any(takes_argument(loss, name) for name in ("target", "index")):
        return False
    device = predictions.device
    places = torch.arange(predictions.numel(), dtype=torch.float64).reshape(predictions.shape)
    # Multiples of irrational numbers, so that the values of both are spread over [0.1, 0.6] without a pattern.
    student, teacher = (((places * step) % 1 / 2 + 0.1).float().to(device) for step in (0.5**0.5, 0.3**0.5))
    gradients = []
    for shift in (0.0, 0.3):
        leaf = student.clone().requires_grad_()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            gradients.append(torch.autograd.grad(loss(leaf, teacher + shift), leaf)[0])
    return bool((gradients[1] - gradients[0]).norm() > 0.01 * gradients[0].norm())
