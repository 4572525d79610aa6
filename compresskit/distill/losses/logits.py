"""Losses of the teacher's predictions. Logits in, classes in `dim`, computed in fp32; a scalar out.

weight, where there is one, has the shape of the logits without their classes, or the start of it: 0 leaves a token or a sample
out, and the mean is taken over what is left.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.base.task import check_labels
from compresskit.distill.losses.common import check_weight, positive, rows, unit, weighted_mean

IGNORE = -100  # PyTorch's label for "not counted"


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def soft_targets(
    student: Tensor, teacher: Tensor, *, temperature: float = 4.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), averaged over the batch (Hinton et al., 1503.02531).

    student, teacher: logits (N, C, ...), classes in `dim`; other dimensions are averaged over too. T^2 keeps the size of the
    gradient the same for every temperature.
    """
    positive("soft_targets", "temperature", temperature)
    s, t = rows("soft_targets", student, teacher, dim)
    kl = _kl((t / temperature).log_softmax(-1), (s / temperature).log_softmax(-1))
    return weighted_mean("soft_targets", kl, weight) * temperature**2


def reverse_kl(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """T^2 KL(student || teacher): seeks the teacher's modes (MiniLLM, Gu et al., 2306.08543). Logits (N, C, ...)."""
    positive("reverse_kl", "temperature", temperature)
    s, t = rows("reverse_kl", student, teacher, dim)
    kl = _kl((s / temperature).log_softmax(-1), (t / temperature).log_softmax(-1))
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
    """T^2 [beta KL(t || m) + (1 - beta) KL(s || m)], m = beta t + (1 - beta) s (GKD, Agarwal et al., 2306.13649).

    student, teacher: logits (N, C, ...). beta in (0, 1); at 0.5 it is the Jensen-Shannon divergence, at most T^2 log 2.
    """
    positive("jsd", "temperature", temperature)
    if not 0 < beta < 1:
        raise SettingError(f"jsd(beta=...): wanted a number between 0 and 1, got {beta}; the ends are soft_targets, reverse_kl")
    s, t = rows("jsd", student, teacher, dim)
    log_q, log_p = (s / temperature).log_softmax(-1), (t / temperature).log_softmax(-1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    both = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return weighted_mean("jsd", both, weight) * temperature**2


def standardize(logits: Tensor, *, dim: int = 1, eps: float = 1e-6) -> Tensor:
    """(z - mean) / std over the classes, in fp32; `eps` is added to the variance, so that equal logits become zeros."""
    z = logits.float()
    z = z - z.mean(dim, keepdim=True)
    return z * torch.rsqrt((z * z).sum(dim, keepdim=True) / max(1, z.shape[dim] - 1) + eps)


def standardized(
    student: Tensor, teacher: Tensor, *, temperature: float = 2.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """`soft_targets` of standardized logits: only the order and the ratios matter, not the size (Sun et al., 2403.01427)."""
    student, teacher = standardize(student, dim=dim), standardize(teacher.detach(), dim=dim)
    return soft_targets(student, teacher, temperature=temperature, weight=weight, dim=dim)


def _labels(where: str, target: Tensor, logits: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Labels (N, ...) for rows (N, ..., C), ready to gather, and the weight without the ignored ones."""
    if target.shape != logits.shape[:-1] or target.is_floating_point():
        raise DataError(
            f"{where}: wanted class indices of shape {tuple(logits.shape[:-1])}, got {target.dtype} {tuple(target.shape)}"
        )
    if logits.device.type == "cpu":
        check_labels(target, logits.shape[-1], where)
    counted = (target != IGNORE).float()
    if weight is not None:
        check_weight(where, target, weight)
        counted = counted * weight.reshape(*weight.shape, *[1] * (target.ndim - weight.ndim))
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
    """T^2 [alpha KL(b_t || b_s) + beta KL(q_t || q_s)] (decoupled KD, Zhao et al., 2203.08679).

    student, teacher: logits (N, C, ...); target: class indices (N, ...), -100 is left out. b = (p_y, 1 - p_y); q = p without y,
    renormalized. With beta = 1 - p_t,y in the place of a constant this is `soft_targets`.
    """
    positive("dkd", "temperature", temperature)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value < 0:
            raise SettingError(f"dkd({name}=...): wanted a number >= 0, got {value}")
    s, t = rows("dkd", student, teacher, dim)
    if s.shape[-1] < 2:
        raise DataError(f"dkd: wanted at least 2 classes, got logits {tuple(student.shape)}")
    index, weight = _labels("dkd", target, s, weight)
    own = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, index, True)
    binary, others = [], []
    for z in (s / temperature, t / temperature):
        rest = z.masked_fill(own, -math.inf).logsumexp(-1, keepdim=True)
        binary.append(torch.cat([z.gather(-1, index), rest], -1).log_softmax(-1))
        others.append(z - rest)
    (b_s, b_t), (q_s, q_t) = binary, others
    # The target's own entry is taken out before exp: there q is not a probability and may overflow.
    non_target = (q_t.masked_fill(own, -math.inf).exp() * (q_t - q_s).masked_fill(own, 0)).sum(-1)
    return weighted_mean("dkd", alpha * _kl(b_t, b_s) + beta * non_target, weight) * temperature**2


def dist(
    student: Tensor, teacher: Tensor, *, beta: float = 1.0, gamma: float = 1.0, temperature: float = 1.0, dim: int = 1
) -> Tensor:
    """T^2 [beta (1 - corr over classes) + gamma (1 - corr over samples)] of probabilities (DIST, Huang et al., 2205.10536).

    student, teacher: logits (N, C, ...); every position counts as a sample. A row or a class of equal entries counts as
    uncorrelated: 1.
    """
    positive("dist", "temperature", temperature)
    s, t = (v.flatten(0, -2) / temperature for v in rows("dist", student, teacher, dim))
    p_s, p_t = s.softmax(-1), t.softmax(-1)

    def centred(p: Tensor, over: int) -> Tensor:
        # A spread of less than a millionth of the entries is rounding.
        return unit(p - p.mean(over, keepdim=True), dim=over, least=1e-12 * p.detach().square().sum(over, keepdim=True))

    def apart(over: int) -> Tensor:
        return 1 - (centred(p_s, over) * centred(p_t, over)).sum(over).mean()

    return temperature**2 * (beta * apart(1) + gamma * apart(0))


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
    """T^2 KL(teacher || student) + beta CE(target, student), the sum that textbooks start from; beta 0 needs no labels.

    student, teacher: logits (N, C, ...); target: class indices (N, ...), -100 is left out of the CE alone.
    """
    if beta < 0:
        raise SettingError(f"kl_plus_ce(beta=...): wanted a number >= 0, got {beta}")
    kl = soft_targets(student, teacher, temperature=temperature, weight=weight, dim=dim)
    return kl + beta * label_smoothing(student, target, smoothing=0.0, weight=weight, dim=dim) if beta else kl


def label_smoothing(
    student: Tensor, target: Tensor, *, smoothing: float = 0.1, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """CE to (1 - smoothing) one-hot + smoothing / C: a teacher that knows nothing (Szegedy et al., 1512.00567), the baseline of
    every soft target. student: logits (N, C, ...); target: class indices (N, ...), -100 is left out.
    """
    if not 0 <= smoothing < 1:
        raise SettingError(f"label_smoothing(smoothing=...): wanted a number in [0, 1), got {smoothing}")
    s, _ = rows("label_smoothing", student, student, dim)
    index, weight = _labels("label_smoothing", target, s, weight)
    log_q = s.log_softmax(-1)
    picked = log_q.gather(-1, index).squeeze(-1)
    return weighted_mean("label_smoothing", -(1 - smoothing) * picked - smoothing * log_q.mean(-1), weight)


def hard_targets(
    student: Tensor, teacher: Tensor, *, threshold: float = 0.0, weight: Tensor | None = None, dim: int = 1
) -> Tensor:
    """CE to the teacher's argmax where its probability is at least `threshold`; needs no labels, so the data may have none.

    Pseudo-labels (Parthasarathi & Strom, 1904.01624; with a threshold, FixMatch, Sohn et al., 2001.07685), and the target of
    DeiT's distillation token (Touvron et al., 2012.12877). student, teacher: logits (N, C, ...). The mean is over what the
    teacher is sure of; 0 where it is sure of nothing.
    """
    if not 0 <= threshold < 1:
        raise SettingError(f"hard_targets(threshold=...): wanted a number in [0, 1), got {threshold}")
    s, t = rows("hard_targets", student, teacher, dim)
    values = F.cross_entropy(s.flatten(0, -2), t.flatten(0, -2).argmax(-1), reduction="none").reshape(s.shape[:-1])
    if not threshold:
        return weighted_mean("hard_targets", values, weight)
    sure = (t.softmax(-1).amax(-1) >= threshold).float()
    if weight is not None:
        check_weight("hard_targets", sure, weight)
        sure = sure * weight.reshape(*weight.shape, *[1] * (sure.ndim - weight.ndim))
    return weighted_mean("hard_targets", values, sure)
