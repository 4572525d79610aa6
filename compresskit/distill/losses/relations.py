"""Losses of how samples of a batch relate. Features (N, ...) of any two widths in; Gram matrices (N, N) inside, in fp32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import flat, positive, unit

#: Rows closer than this share of their squared lengths are one point: what a Gram matrix says of them is rounding.
SAME = 1e-6


def similarity(student: Tensor, teacher: Tensor) -> Tensor:
    """|rows of F_s F_s' - rows of F_t F_t'|^2 / N^2, rows of length 1 (similarity preserving, Tung & Mori, 1907.09682)."""
    s, t = (unit(_scaled(f) @ _scaled(f).T) for f in flat("similarity", student, teacher))
    return (s - t).square().mean()


def _scaled(features: Tensor) -> Tensor:
    """Divided by the largest entry of the batch, for losses that do not depend on it: no product overflows."""
    return features / features.detach().abs().amax().clamp(min=1e-12)


def _gram(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products (N, N) of centred rows, squared distances, and where two rows are different points."""
    f = _scaled(features)
    f = f - f.mean(0)
    gram = f @ f.T
    square = gram.diagonal()
    both = square[:, None] + square[None, :]
    apart = (both - 2 * gram).clamp(min=0)
    return gram, apart, apart > SAME * both + 1e-12


def rkd_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber difference of pairwise distances, each divided by the mean of those that are not 0 (RKD-D, Park et al., 1904.05068).

    student, teacher: features (N, ...). Equal rows have distance 0 and no gradient, so duplicates do no harm.
    """
    s, t = (_relative_distances(f) for f in flat("rkd_distance", student, teacher))
    return F.smooth_l1_loss(s, t)


def _relative_distances(features: Tensor) -> Tensor:
    _, apart, different = _gram(features)
    distance = torch.where(different, apart, 1.0).sqrt() * different
    return distance * different.sum() / distance.sum().clamp(min=1e-12)


def rkd_angle(student: Tensor, teacher: Tensor) -> Tensor:
    """Huber difference of the cosines of all angles j-i-k (RKD-A, Park et al., 1904.05068, eq. 8).

    student, teacher: features (N, ...). Through the Gram matrix: N^3 numbers instead of N^2 D. An angle with a side of length 0
    has cosine 0 and no gradient.
    """
    s, t = (_angles(f) for f in flat("rkd_angle", student, teacher))
    return F.smooth_l1_loss(s, t)


def _angles(features: Tensor) -> Tensor:
    """(N, N, N): entry i, j, k is the cosine of the angle at i between j and k."""
    gram, apart, different = _gram(features)
    shorter = torch.where(different, apart, 1.0).rsqrt() * different
    at = gram.diagonal()
    # <f_j - f_i, f_k - f_i> = g_jk - g_ji - g_ik + g_ii; the sides are put in place, so that one (N, N, N) is kept.
    sides = gram[None, :, :] - gram[:, :, None]
    sides = sides - (gram - at[:, None])[:, None, :]
    return sides * (shorter[:, :, None] * shorter[:, None, :])


def pkt(student: Tensor, teacher: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Mean of p_t log(p_t / p_s) over pairs, p = rows of (cosine + 1) / 2 divided by their sum (Passalis & Tefas, 1803.10837)."""
    positive("pkt", "eps", eps)
    probabilities = []
    for f in flat("pkt", student, teacher):
        u = unit(_scaled(f))
        kernel = (u @ u.T + 1) / 2
        probabilities.append(kernel / kernel.sum(1, keepdim=True).clamp(min=eps))
    s, t = (p.clamp(min=0) + eps for p in probabilities)
    return ((t - eps) * (t / s).log()).mean()


def correlation_congruence(student: Tensor, teacher: Tensor, *, gamma: float = 0.4, order: int = 2) -> Tensor:
    """Mean squared difference of Gaussian kernels of unit features (Peng et al., 1904.01802, eq. 9, Taylor series of `order`).

    K = exp(-2 gamma) * sum_p (2 gamma)^p / p! (f_i . f_j)^p; student, teacher: features (N, ...).
    """
    positive("correlation_congruence", "gamma", gamma)
    if order < 1:
        raise SettingError(f"correlation_congruence(order=...): wanted a whole number >= 1, got {order}")
    kernels = []
    for f in flat("correlation_congruence", student, teacher):
        u = unit(_scaled(f))
        inner = u @ u.T
        kernels.append(sum((2 * gamma) ** p / math.factorial(p) * inner**p for p in range(1, order + 1)))
    s, t = kernels
    return math.exp(-2 * gamma) ** 2 * torch.as_tensor(s - t).square().mean()


def info_nce(student: Tensor, teacher: Tensor, *, temperature: float = 0.07) -> Tensor:
    """CE of finding one's own sample among the batch's teacher features (CPC, van den Oord et al., 1807.03748).

    student, teacher: (N, ...) of one width; the contrastive distillation that needs no memory bank. Not 0 for equal inputs.
    """
    positive("info_nce", "temperature", temperature)
    s, t = (unit(_scaled(f)) for f in flat("info_nce", student, teacher))
    if s.shape != t.shape:
        raise DataError(f"info_nce: wanted features of one width, got {s.shape[1]} and {t.shape[1]}; use an adapter")
    return F.cross_entropy(s @ t.T / temperature, torch.arange(len(s), device=s.device))
