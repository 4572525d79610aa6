"""Losses of the two networks' predictions: logits (N, C, ...) with the classes in `dim`.

Where a loss has a `weight`, it has the shape of the logits without the classes, or of their leading dimensions. It weighs
tokens, pixels or samples: 0 leaves one out, and the loss is averaged over the rest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.base.task import IGNORED, check_labels
from compresskit.distill.losses.common import (
    broadcast_weight,
    check_dim_of_classes,
    check_logits,
    check_positive,
    check_tensors,
    is_within,
    kl_divergence,
    unit_norm,
    weighted_mean,
)


def soft_targets(
    student: Tensor, teacher: Tensor, *, temperature: float = 4.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)), averaged over the batch (Hinton et al., 1503.02531).

    The factor T^2 keeps the size of the gradient the same for every temperature.

    Args:
        student, teacher: logits (N, C, ...), any floating dtype.
        temperature: T, a positive number. Above about 100 the value is rounding noise, as that of any KL in fp32 (T^2 times a
            difference of nearly equal numbers); the gradient stays good.
        weight: weights of the positions, see above.
        dim: the dimension of the classes; the loss is averaged over all others.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit; SettingError for a temperature that is not positive.
    """
    check_positive("soft_targets", "temperature", temperature)
    s, t = check_logits("soft_targets", student, teacher, dim)
    kl = kl_divergence((t / temperature).log_softmax(-1), (s / temperature).log_softmax(-1))
    return weighted_mean("soft_targets", kl, weight) * temperature**2


def reverse_kl(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """Return T^2 KL(student || teacher), the mode-seeking direction (MiniLLM, Gu et al., 2306.08543).

    Args: as in `soft_targets`.
    Returns: an fp32 scalar.
    """
    check_positive("reverse_kl", "temperature", temperature)
    s, t = check_logits("reverse_kl", student, teacher, dim)
    kl = kl_divergence((s / temperature).log_softmax(-1), (t / temperature).log_softmax(-1))
    return weighted_mean("reverse_kl", kl, weight) * temperature**2


def jsd(
    student: Tensor,
    teacher: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    dim: int = 1,
) -> Tensor:
    """Return T^2 [beta KL(t || m) + (1 - beta) KL(s || m)], m = beta t + (1 - beta) s (GKD, Agarwal et al., 2306.13649).

    Args:
        student, teacher, temperature, weight, dim: as in `soft_targets`.
        beta: a number in (0, 1). At 0.5 the loss is the Jensen-Shannon divergence, at most T^2 log 2.

    Returns: an fp32 scalar.
    """
    check_positive("jsd", "temperature", temperature)
    if not is_within(beta, 0, 1) or beta == 0:
        raise SettingError(f"jsd(beta=...): wanted a number between 0 and 1, got {beta}; the ends are soft_targets, reverse_kl")
    s, t = check_logits("jsd", student, teacher, dim)
    log_q, log_p = (s / temperature).log_softmax(-1), (t / temperature).log_softmax(-1)
    empty = log_p.isneginf() & log_q.isneginf()  # counts 0 below, and logaddexp has no gradient there
    log_m = torch.logaddexp(*(v.masked_fill(empty, 0) for v in (log_p + math.log(beta), log_q + math.log(1 - beta))))
    both = beta * kl_divergence(log_p, log_m) + (1 - beta) * kl_divergence(log_q, log_m)
    return weighted_mean("jsd", both, weight) * temperature**2


def standardize(logits: Tensor, *, dim: int = 1, eps: float = 1e-6) -> Tensor:
    """Return (z - mean) / std over the classes in `dim`, in fp32, with `eps` added to the variance: equal logits become zeros.

    Logits of -inf, of masked classes, stay so and do not count.
    """
    masked = logits.isneginf()
    count = logits.shape[dim] - masked.sum(dim, keepdim=True)
    z = logits.float().masked_fill(masked, 0)
    z = (z - z.sum(dim, keepdim=True) / count).masked_fill(masked, 0)
    z = z * torch.rsqrt((z * z).sum(dim, keepdim=True) / (count - 1).clamp(min=1) + eps)
    return z.masked_fill(masked, -math.inf)


def standardized_soft_targets(
    student: Tensor, teacher: Tensor, *, temperature: float = 2.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """Return `soft_targets` of standardized logits, which ignores their mean and scale (logit standardization, 2403.01427).

    Args: as in `soft_targets`.
    Returns: an fp32 scalar.
    """
    check_dim_of_classes("standardized_soft_targets", student, teacher, dim)
    student, teacher = standardize(student, dim=dim), standardize(teacher.detach(), dim=dim)
    return soft_targets(student, teacher, temperature=temperature, weight=weight, dim=dim)


def _check_target(where: str, target: Tensor, logits: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return class indices (N, ..., 1) to gather from logits (N, ..., C), and the weight with ignored labels at 0."""
    if target.shape != logits.shape[:-1] or target.is_floating_point():
        raise DataError(
            f"{where}: wanted class indices of shape {tuple(logits.shape[:-1])}, got {target.dtype} {tuple(target.shape)}"
        )
    if logits.device.type == "cpu":
        check_labels(target, logits.shape[-1], where)
    counted = (target != IGNORED).float()
    if weight is not None:
        counted = counted * broadcast_weight(where, target, weight)
    return target.clamp(min=0).unsqueeze(-1), counted


def dkd(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    temperature: float = 4.0,
    weight: Tensor | None = None,
    dim: int = 1,
) -> Tensor:
    """Return decoupled KD: T^2 [alpha KL(b_t || b_s) + beta KL(q_t || q_s)] (Zhao et al., 2203.08679).

    b = (p_y, 1 - p_y) is the target class against all others, and q is p without the target class, renormalized. With
    beta = 1 - p_t,y of each sample instead of a constant, the sum is `soft_targets`.

    Args:
        student, teacher, temperature, weight, dim: as in `soft_targets`; at least 2 classes.
        target: class indices (N, ...); a label of -100 is ignored.
        alpha, beta: weights >= 0 of the target-class and of the non-target-class term.

    Returns: an fp32 scalar.
    Raises: DataError for shapes or labels that do not fit; SettingError for settings out of range.
    """
    check_positive("dkd", "temperature", temperature)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not is_within(value, 0, math.inf):
            raise SettingError(f"dkd({name}=...): wanted a number >= 0, got {value}")
    s, t = check_logits("dkd", student, teacher, dim)
    if s.shape[-1] < 2:
        raise DataError(f"dkd: wanted at least 2 classes, got logits {tuple(student.shape)}")
    index, weight = _check_target("dkd", target, s, weight)
    is_target = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, index, True)
    binary, others = [], []
    for z in (s / temperature, t / temperature):
        rest = z.masked_fill(is_target, -math.inf).logsumexp(-1, keepdim=True)
        binary.append(torch.cat([z.gather(-1, index), rest], -1).log_softmax(-1))
        others.append(z - rest)
    (b_s, b_t), (q_s, q_t) = binary, others
    # The target's own entry is taken out before exp: there q is not a probability and may overflow.
    non_target = (q_t.masked_fill(is_target, -math.inf).exp() * (q_t - q_s).masked_fill(is_target | q_t.isneginf(), 0)).sum(-1)
    return weighted_mean("dkd", alpha * kl_divergence(b_t, b_s) + beta * non_target, weight) * temperature**2


def dist(
    student: Tensor, teacher: Tensor, *, beta: float = 1.0, gamma: float = 1.0, temperature: float = 1.0, dim: int = 1
) -> Tensor:
    """Return T^2 [beta (1 - corr over classes) + gamma (1 - corr over samples)] of probabilities (DIST, 2205.10536).

    corr is the Pearson correlation of the student's and the teacher's probabilities (Huang et al.).

    Args:
        student, teacher, temperature, dim: as in `soft_targets`; every position counts as a sample.
        beta: weight of the relations between the classes of a sample.
        gamma: weight of the relations between the samples of a class.

    Returns: an fp32 scalar. A row or a column of equal entries counts as uncorrelated.
    """
    check_positive("dist", "temperature", temperature)
    s, t = (v.flatten(0, -2) / temperature for v in check_logits("dist", student, teacher, dim))
    p_s, p_t = s.softmax(-1), t.softmax(-1)

    def centred(p: Tensor, over: int) -> Tensor:
        # A spread of less than a millionth of the entries is rounding.
        return unit_norm(p - p.mean(over, keepdim=True), dim=over, least=1e-12 * p.detach().square().sum(over, keepdim=True))

    def one_minus_correlation(over: int) -> Tensor:
        return 1 - (centred(p_s, over) * centred(p_t, over)).sum(over).mean()

    return temperature**2 * (beta * one_minus_correlation(1) + gamma * one_minus_correlation(0))


def kl_plus_ce(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    *,
    beta: float = 1.0,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    dim: int = 1,
) -> Tensor:
    """Return T^2 KL(teacher || student) + beta CE(target, student), the textbook sum of `soft_targets` and the labels.

    Args:
        student, teacher, temperature, weight, dim: as in `soft_targets`.
        target: class indices (N, ...); a label of -100 is ignored by the cross-entropy alone.
        beta: weight >= 0 of the cross-entropy; at 0 the labels are not read.

    Returns: an fp32 scalar.
    """
    if not is_within(beta, 0, math.inf):
        raise SettingError(f"kl_plus_ce(beta=...): wanted a number >= 0, got {beta}")
    kl = soft_targets(student, teacher, temperature=temperature, weight=weight, dim=dim)
    return kl + beta * label_smoothing(student, target, smoothing=0.0, weight=weight, dim=dim) if beta else kl


def label_smoothing(
    student: Tensor, target: Tensor, *, smoothing: float = 0.1, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """Return the cross-entropy to (1 - smoothing) one-hot + smoothing / C (Szegedy et al., 1512.00567).

    C counts the classes whose logit is not -inf.

    It needs no teacher, and is the baseline to which soft targets are compared.

    Args:
        student: logits (N, C, ...), any floating dtype.
        target: class indices (N, ...); a label of -100 is ignored.
        smoothing: a number in [0, 1).
        weight, dim: as in `soft_targets`.

    Returns: an fp32 scalar.
    """
    if not is_within(smoothing, 0, 1):
        raise SettingError(f"label_smoothing(smoothing=...): wanted a number in [0, 1), got {smoothing}")
    s, _ = check_logits("label_smoothing", student, student, dim)
    index, weight = _check_target("label_smoothing", target, s, weight)
    log_q = s.log_softmax(-1)
    value = -(1 - smoothing) * log_q.gather(-1, index).squeeze(-1).masked_fill(weight == 0, 0)
    if smoothing:
        masked = s.isneginf()
        share = s.shape[-1] / (s.shape[-1] - masked.sum(-1))
        value = value - smoothing * share * log_q.masked_fill(masked, 0).mean(-1)
    return weighted_mean("label_smoothing", value, weight)


def hard_targets(
    student: Tensor, teacher: Tensor, *, threshold: float = 0.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """Return the cross-entropy to the teacher's argmax, where its probability is at least `threshold`.

    Pseudo-labels (Parthasarathi & Strom, 1904.01624); with a threshold the loss of FixMatch (Sohn et al., 2001.07685); also
    the target of DeiT's distillation token (Touvron et al., 2012.12877). No labels are needed.

    Args:
        student, teacher, weight, dim: as in `soft_targets`.
        threshold: a probability in [0, 1).

    Returns: an fp32 scalar, the mean over the positions at or above the threshold; 0 where there is none.
    """
    if not is_within(threshold, 0, 1):
        raise SettingError(f"hard_targets(threshold=...): wanted a number in [0, 1), got {threshold}")
    s, t = check_logits("hard_targets", student, teacher, dim)
    values = F.cross_entropy(s.flatten(0, -2), t.flatten(0, -2).argmax(-1), reduction="none").reshape(s.shape[:-1])
    if not threshold:
        return weighted_mean("hard_targets", values, weight)
    confident = (t.softmax(-1).amax(-1) >= threshold).float()
    if weight is not None:
        confident = confident * broadcast_weight("hard_targets", confident, weight)
    return weighted_mean("hard_targets", values, confident)


def match_predictions(student: Tensor, teacher: Tensor, *, temperature: float = 1.0, dim: int | None = 1) -> Tensor:
    """Return `soft_targets` for predictions of two or more classes, and a relative squared error for all others.

    `imitate` and `QAT` tell it what the predictions of a task are; called as a function, it has to be told of numbers.

    Args:
        student, teacher: predictions (N, C, ...), or any others, such as values (N,) or (N, 1).
        temperature: T of the soft targets.
        dim: the dimension of the classes; None for numbers, of any shape.

    Returns: an fp32 scalar; the relative error is mean (s - t)^2 / mean t^2.
    """
    check_tensors("match_predictions", student, teacher)
    if dim is not None and student.ndim >= 2 and student.shape[dim] >= 2:
        return soft_targets(student, teacher, temperature=temperature, dim=dim)
    teacher = teacher.detach().float()
    return F.mse_loss(student.float(), teacher) / teacher.square().mean().clamp(min=1e-12)
