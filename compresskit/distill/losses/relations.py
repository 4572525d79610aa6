"""Losses of how the samples of a batch relate. They take features (N, ...) of any two widths and compare (N, N) matrices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import check_features, check_positive, products, unit_norm

#: Two rows whose squared distance is below this fraction of their squared lengths count as one point: the rest is rounding.
SAME_POINT = 1e-6


def similarity_preserving(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of row-normalized Gram matrices F F' (similarity-preserving KD, 1907.09682).

    Tung & Mori, eq. 3-4.

    Args:
        student, teacher: features (N, ...) of one batch, any widths and any floating dtype.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches.
    """
    s, t = (unit_norm(products(_scaled(f), _scaled(f).T)) for f in check_features("similarity_preserving", student, teacher))
    return (s - t).square().mean()


def _scaled(features: Tensor) -> Tensor:
    """Divide by the largest entry of the batch, so that no product overflows; for losses that do not depend on the scale."""
    return features / features.detach().abs().amax().clamp(min=1e-12)


def _gram(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of centred rows, squared distances, and whether two rows are different points, each (N, N)."""
    f = _scaled(features)
    f = f - f.mean(0)
    gram = products(f, f.T)
    square = gram.diagonal()
    both = square[:, None] + square[None, :]
    squared_distance = (both - 2 * gram).clamp(min=0)
    return gram, squared_distance, squared_distance > SAME_POINT * both + 1e-12


def rkd_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the Huber difference of relative pairwise distances (RKD-D, Park et al., 1904.05068).

    Each distance is divided by the mean of those that are not 0. Equal rows have distance 0 and no gradient.

    Args:
        student, teacher: features (N, ...) of one batch, any widths and any floating dtype.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches.
    """
    s, t = (_relative_distances(f) for f in check_features("rkd_distance", student, teacher))
    return F.smooth_l1_loss(s, t)


def _relative_distances(features: Tensor) -> Tensor:
    _, squared_distance, different = _gram(features)
    distance = torch.where(different, squared_distance, 1.0).sqrt() * different
    return distance * different.sum() / distance.sum().clamp(min=1e-12)


def rkd_angle(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the Huber difference of the cosines of all angles j-i-k (RKD-A, Park et al., 1904.05068, eq. 8).

    Computed from the Gram matrix, which takes N^3 numbers instead of N^2 D. An angle with a side of length 0 has cosine 0 and
    no gradient.

    Args:
        student, teacher: features (N, ...) of one batch, any widths and any floating dtype.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches.
    """
    s, t = (_angles(f) for f in check_features("rkd_angle", student, teacher))
    return F.smooth_l1_loss(s, t)


def _angles(features: Tensor) -> Tensor:
    """(N, N, N): entry i, j, k is the cosine of the angle at i between j and k."""
    gram, squared_distance, different = _gram(features)
    inverse = torch.where(different, squared_distance, 1.0).rsqrt() * different
    square = gram.diagonal()
    # <f_j - f_i, f_k - f_i> = g_jk - g_ji - g_ik + g_ii, in two steps, so that only one (N, N, N) is kept.
    sides = gram[None, :, :] - gram[:, :, None]
    sides = sides - (gram - square[:, None])[:, None, :]
    return sides * (inverse[:, :, None] * inverse[:, None, :])


def pkt(student: Tensor, teacher: Tensor, *, eps: float = 1e-7) -> Tensor:
    """Return the mean of p_t log(p_t / p_s) over pairs of samples (probabilistic knowledge transfer, 1803.10837).

    p = rows of (cosine + 1) / 2, divided by their sum (Passalis & Tefas).

    Args:
        student, teacher: features (N, ...) of one batch, any widths and any floating dtype.
        eps: a positive number that is added to both probabilities.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches.
    """
    check_positive("pkt", "eps", eps)
    probabilities = []
    for f in check_features("pkt", student, teacher):
        u = unit_norm(_scaled(f))
        kernel = (products(u, u.T) + 1) / 2
        probabilities.append(kernel / kernel.sum(1, keepdim=True).clamp(min=eps))
    s, t = (p.clamp(min=0) + eps for p in probabilities)
    return ((t - eps) * (t / s).log()).mean()


def correlation_congruence(student: Tensor, teacher: Tensor, *, gamma: float = 0.4, order: int = 2) -> Tensor:
    """Return the mean squared difference of Gaussian kernel matrices of unit features (Peng et al., 1904.01802, eq. 9).

    K = exp(-2 gamma) * sum over p of (2 gamma)^p / p! (f_i . f_j)^p, the Taylor series of the Gaussian kernel up to `order`.

    Args:
        student, teacher: features (N, ...) of one batch, any widths and any floating dtype.
        gamma: width of the kernel, a positive number.
        order: last power of the series, at least 1.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches; SettingError for settings out of range.
    """
    check_positive("correlation_congruence", "gamma", gamma)
    if order < 1:
        raise SettingError(f"correlation_congruence(order=...): wanted a whole number >= 1, got {order}")
    kernels = []
    for f in check_features("correlation_congruence", student, teacher):
        u = unit_norm(_scaled(f))
        inner = products(u, u.T)
        kernels.append(sum((2 * gamma) ** p / math.factorial(p) * inner**p for p in range(1, order + 1)))
    s, t = kernels
    return math.exp(-2 * gamma) ** 2 * torch.as_tensor(s - t).square().mean()


def info_nce(student: Tensor, teacher: Tensor, *, temperature: float = 0.07) -> Tensor:
    """Return the cross-entropy of finding each sample's own teacher feature in the batch (CPC, van den Oord et al., 1807.03748).

    Contrastive distillation without a memory bank: the other samples of the batch are the negatives. It is not 0 for equal
    features.

    Args:
        student, teacher: features (N, ...) of one batch and one width, any floating dtype.
        temperature: a positive number.

    Returns: an fp32 scalar.
    Raises: DataError for features of different batches or widths.
    """
    check_positive("info_nce", "temperature", temperature)
    s, t = (unit_norm(_scaled(f)) for f in check_features("info_nce", student, teacher))
    if s.shape != t.shape:
        raise DataError(f"info_nce: wanted features of one width, got {s.shape[1]} and {t.shape[1]}; use an adapter")
    return F.cross_entropy(products(s, t.T) / temperature, torch.arange(len(s), device=s.device))
