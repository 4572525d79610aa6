"""Metrics without labels: how far the predictions of a model agree with those of the float model.

task = Task(val=float_targets(model, batches), metric=agreement("classes"))     the targets are the float model's predictions

What is compared adds up over batches, two sums each, so that predictions of several sizes, such as pictures, count together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import Batches, call_checked, each_inputs
from compresskit.base.settings import NO_EFFECT, as_python, check_field_types
from compresskit.base.task import first_tensor, predicted_classes
from compresskit.graph.differences import without_fills
from compresskit.graph.surgery import mode

__all__ = ["OutputAgreement", "agreement", "float_targets"]

Outputs = Literal["classes", "boxes", "psnr", "sqnr"]
MOST_DECIBELS = 200.0  # of outputs that are equal


@dataclass(frozen=True)
class OutputAgreement:
    """The metric that `agreement` returns, `(predictions, targets) -> number` or a `RunningMetric`; larger is better."""

    higher_is_better: ClassVar[bool] = True

    outputs: Outputs
    score: float = 0.5
    iou: float = 0.5
    peak: float = 1.0
    dim: int | None = None
    #: Of all batches since the last reset.
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False, repr=False, compare=False, metadata=NO_EFFECT)

    def __post_init__(self) -> None:
        check_field_types(self)
        if not isinstance(self.outputs, str) or self.outputs not in _MEASURES:
            raise SettingError(f"agreement(outputs=...): wanted one of {sorted(_MEASURES)}, got {self.outputs!r}")
        for name in ("score", "iou"):
            if not 0 < vars(self)[name] < 1:
                raise SettingError(f"agreement({name}=...): wanted a number between 0 and 1, got {vars(self)[name]}")
        if not self.peak > 0:
            raise SettingError(f"agreement(peak=...): wanted a positive number, got {self.peak}")
        if self.dim is not None and (self.dim == 0 or self.outputs != "classes"):
            raise SettingError(
                f'agreement(dim=...): it is the dimension of "classes", such as -1 for (N, T, classes), got {self.dim} and'
                f" {self.outputs!r}"
            )

    def __call__(self, predictions: Tensor, targets: Any) -> float:
        """Compare predictions with those of the float model, of the same shape."""
        return self._score(*self._sums_of(predictions, targets))

    def update(self, predictions: Tensor, targets: Any) -> None:
        """Add one batch; its predictions may have another size than those before, but that of its targets."""
        for i, value in enumerate(self._sums_of(predictions, targets)):
            self.sums[i] += value

    def compute(self) -> float:
        """The agreement of all batches since the last `reset`."""
        return self._score(*self.sums)

    def reset(self) -> None:
        """Forget all batches."""
        self.sums[:] = [0.0, 0.0]

    def _sums_of(self, predictions: Tensor, targets: Any) -> tuple[float, float]:
        if not isinstance(targets, Tensor) or targets.shape != predictions.shape or not targets.is_floating_point():
            got = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
            raise DataError(
                f'agreement("{self.outputs}"): wanted the float model\'s predictions as targets, {tuple(predictions.shape)}, got'
                f" {got}; make the data with metrics.float_targets(model, batches)"
            )
        return _MEASURES[self.outputs](self, predictions.cpu().double(), targets.cpu().double())

    def _score(self, part: float, whole: float) -> float:
        if self.outputs == "sqnr":
            return decibels(part, whole, most=MOST_DECIBELS)
        if not whole:  # no box on either side is what was wanted; nothing else is
            return 1.0 if self.outputs == "boxes" else math.nan
        return part / whole


def agreement(
    outputs: Outputs, *, score: float = 0.5, iou: float = 0.5, peak: float = 1.0, dim: int | None = None
) -> OutputAgreement:
    """Return a metric that compares predictions with those of the float model, the targets of `float_targets`.

    Args:
        outputs: what the predictions are:
            "classes", (N, classes, ...), or as `dim` says: the fraction whose largest entry is at the same place, in [0, 1];
            "boxes", (N, boxes, 4 + classes), corners x1, y1, x2, y2 and a score in [0, 1] for each class: the F1, in [0, 1], of
            boxes above `score`, each matched with one of the float model's of the same picture and class above `iou`;
            "psnr", (N, ...): the peak signal-to-noise ratio in dB, mean over the samples, of values in 0..`peak`;
            "sqnr", any shape: the signal-to-noise ratio of all values in dB.
            What is not finite agrees with nothing: NaN among the entries counts as another class, a box with it matches none,
            and it makes "psnr" and "sqnr" -inf, which `evaluate` refuses.
        score: least score of a box that counts, of its best class.
        iou: least intersection over union of boxes that match.
        peak: largest value of a picture.
        dim: of "classes", the dimension that holds them: 1 for (N, classes, ...), -1 for (N, T, classes) of a tagger or a
            language model. None is 1, and predictions of three dimensions, which may be either, are refused.

    Raises SettingError for settings out of range. The metric raises DataError where it does not fit the outputs.
    """
    numbers = {}
    for name, value in {"score": score, "iou": iou, "peak": peak}.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise SettingError(f"agreement({name}=...): wanted a number, got {value!r}") from None
    return OutputAgreement(outputs, **numbers, dim=as_python(dim))


def float_targets(model: nn.Module, batches: Batches, *, predict: Callable[[Any], Tensor] = first_tensor) -> list[Any]:
    """Return batches whose target is what a float model predicts on them, for `Task(val=..., metric=agreement(...))`.

    Args:
        model: the float model.
        batches: an iterable of inputs without labels, or one batch. Inputs by name get the target as `labels`.
        predict: what of the output is compared, as in `Task(predict=...)`, which must be the same function.

    Raises DataError where the model does not run on a batch.
    """
    labelled: list[Any] = []
    with torch.no_grad(), mode(model, training=False):
        for inputs in each_inputs(batches, "float_targets"):
            target = predict(call_checked(model, inputs, "float_targets")).float()
            labelled.append({**inputs, "labels": target} if isinstance(inputs, dict) else (*inputs, target))
    return labelled


def decibels(signal: float, noise: float, *, most: float = math.inf) -> float:
    """10 log10(signal / noise), of two powers; `most` where there is no noise, and at most that; -inf where one is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return -math.inf  # min(most, nan) would be `most`, as of outputs that are equal
    if noise <= 0:
        return most
    return min(most, 10 * math.log10(max(signal, 1e-300) / noise))


def _classes(how: OutputAgreement, predictions: Tensor, targets: Tensor) -> tuple[float, float]:
    """How many places agree, and how many there are."""
    dims, shape, dim = predictions.ndim, tuple(predictions.shape), how.dim or 1
    if how.dim is None and dims == 3:
        raise DataError(
            f'agreement("classes"): predictions {shape} may be (N, classes, T) or (N, T, classes); write'
            ' agreement("classes", dim=1) or agreement("classes", dim=-1)'
        )
    if dims < 2 or not -dims < dim < dims or shape[dim] < 2:
        wanted_shape = "(N, classes, ...)" if dim == 1 else f"with two or more classes in dimension {dim}"
        raise DataError(f'agreement("classes"): wanted predictions {wanted_shape}, got {shape}; see "sqnr"')
    found, wanted = (predicted_classes(each.movedim(dim, 1)) for each in (predictions, targets))
    same = (found == wanted) & (wanted >= 0)
    return float(same.sum()), float(same.numel())


def _psnr(how: OutputAgreement, predictions: Tensor, targets: Tensor) -> tuple[float, float]:
    """The sum of the decibels of all samples, and how many there are."""
    if predictions.ndim < 2:
        raise DataError(f'agreement("psnr"): wanted pictures (N, ...), got {tuple(predictions.shape)}; see "sqnr"')
    error = (predictions - targets).square().flatten(1).mean(1)
    error = error.where(error.isfinite(), math.inf)
    ratios = (10 * (how.peak**2 / error.clamp(min=1e-300)).log10()).clamp(max=MOST_DECIBELS)
    return float(ratios.sum()), float(len(ratios))


def _sqnr(_: OutputAgreement, predictions: Tensor, targets: Tensor) -> tuple[float, float]:
    """The powers of the signal and of the noise."""
    targets, predictions = without_fills(targets, predictions)
    return float(targets.square().sum()), float((predictions - targets).square().sum())


def _boxes(how: OutputAgreement, predictions: Tensor, targets: Tensor) -> tuple[float, float]:
    """How many boxes of both sides match, and how many there are."""
    if predictions.ndim != 3 or predictions.shape[2] < 5:
        raise DataError(f'agreement("boxes"): wanted predictions (N, boxes, 4 + classes), got {tuple(predictions.shape)}')
    scores = targets[..., 4:]
    low, high = (float(bound) for bound in torch.aminmax(scores)) if scores.numel() else (0.0, 1.0)
    if low < 0 or high > 1:
        raise DataError(
            f'agreement("boxes"): wanted scores in 0..1 after the four corners, got {low:.3g}..{high:.3g}; apply softmax or'
            " sigmoid in Task(predict=...)"
        )
    matched = both = 0
    for found, wanted in zip(predictions, targets, strict=True):
        sides = [boxes[~(boxes[:, 4:].amax(1) <= how.score)] for boxes in (found, wanted)]  # with those whose score is NaN
        both += sum(map(len, sides))
        found, wanted = (boxes[boxes.isfinite().all(1)] for boxes in sides)
        matched += _matched_boxes(found, wanted, how.iou)
    return 2.0 * matched, float(both)


def _matched_boxes(found: Tensor, wanted: Tensor, least: float) -> int:
    """How many boxes match, the best overlap first, each with one other of its class."""
    corners = torch.maximum(found[:, None, :2], wanted[None, :, :2]), torch.minimum(found[:, None, 2:4], wanted[None, :, 2:4])
    inside = (corners[1] - corners[0]).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:4] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (found, wanted)]
    overlap = inside / (areas[0][:, None] + areas[1][None] - inside).clamp(min=1e-300)
    overlap[found[:, None, 4:].argmax(2) != wanted[None, :, 4:].argmax(2)] = 0
    count = 0
    while overlap.numel() and float(overlap.max()) > least:
        row, column = divmod(int(overlap.argmax()), overlap.shape[1])
        overlap[row], overlap[:, column] = 0, 0
        count += 1
    return count


_MEASURES = {"classes": _classes, "boxes": _boxes, "psnr": _psnr, "sqnr": _sqnr}
