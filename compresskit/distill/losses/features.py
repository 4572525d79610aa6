"""Losses of features: feature maps, attention maps, hidden states. Each compares the two networks position by position."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import check_same_shape, check_tensors, is_within, products, unit_norm, weighted_mean


def hint(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Return the mean squared difference of features, usually behind an adapter (FitNets, Romero et al., 1412.6550).

    TinyBERT's losses of hidden states and embeddings (1909.10351, eq. 8-9) are the same function.

    Args:
        student, teacher: features (N, ...) of one shape, any floating dtype.
        weight: weights of the leading dimensions, such as a token mask (N, T).

    Returns: an fp32 scalar.
    Raises: DataError for shapes that differ.
    """
    check_same_shape("hint", student, teacher)
    return weighted_mean("hint", (student.float() - teacher.detach().float()).square(), weight)


def attention_transfer(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of spatial attention maps Q / |Q|, Q = sum over channels of f^2.

    Zagoruyko & Komodakis, 1612.03928. Where the sizes differ, the larger map is average-pooled to the smaller one.

    Args:
        student, teacher: features (N, C, H, W), any C and any floating dtype.

    Returns: an fp32 scalar.
    Raises: DataError for features that are not (N, C, H, W), or of another batch.
    """
    check_tensors("attention_transfer", student, teacher)
    for f in (student, teacher):
        if f.ndim != 4:
            raise DataError(f"attention_transfer: wanted features (N, C, H, W), got {tuple(f.shape)}")
    maps = [_energy(f) for f in (student, teacher.detach())]
    size = (min(m.shape[1] for m in maps), min(m.shape[2] for m in maps))
    s, t = (unit_norm(F.adaptive_avg_pool2d(m.unsqueeze(1), size).flatten(1)) for m in maps)
    check_same_shape("attention_transfer", s, t)
    return (s - t).square().mean()


def _energy(features: Tensor) -> Tensor:
    """Mean over channels of f^2, (N, H, W), divided by each sample's largest so that tiny features do not underflow.

    The division does not change the loss, which scales each map to length 1.
    """
    energy = features.float().square().mean(1)
    return energy / energy.detach().amax((1, 2), keepdim=True).clamp(min=1e-30)


def hcl(student: Tensor, teacher: Tensor, *, levels: tuple[int, ...] = (4, 2, 1)) -> Tensor:
    """Return ReviewKD's hierarchical context loss (Chen et al., 2104.09044, eq. 8).

    The mean squared difference at full size and average-pooled to each of `levels`, with weights proportional to
    1, 1/2, 1/4, ... that sum to 1.

    Args:
        student, teacher: features (N, C, H, W) of one shape, any floating dtype.
        levels: heights and widths to pool to; a level that is not smaller than H is left out.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit; SettingError for a level below 1.
    """
    if student.ndim != 4:
        raise DataError(f"hcl: wanted features (N, C, H, W), got {tuple(student.shape)}")
    if not isinstance(levels, tuple | list) or not all(is_within(level, 1, float("inf")) for level in levels):
        raise SettingError(f"hcl(levels=...): wanted sizes >= 1, got {levels}")
    check_same_shape("hcl", student, teacher)
    s, t = student.float(), teacher.detach().float()
    value, weight, total = F.mse_loss(s, t), 1.0, 1.0
    for level in levels:
        if level >= s.shape[2]:
            continue
        weight /= 2
        value = value + weight * F.mse_loss(F.adaptive_avg_pool2d(s, level), F.adaptive_avg_pool2d(t, level))
        total += weight
    return value / total


def cosine_distance(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None, dim: int = -1) -> Tensor:
    """Return the mean of 1 - cos(student, teacher) along `dim` (DistilBERT's loss of hidden states, Sanh et al., 1910.01108).

    Args:
        student, teacher: features (N, ..., D) of one shape, any floating dtype.
        weight: weights in the shape of the features without D, or of their leading dimensions, such as a token mask (N, T).
        dim: the dimension of the vectors.

    Returns: an fp32 scalar in [0, 2]. A vector of length 0 has cosine 0.
    Raises: DataError for shapes that differ.
    """
    check_same_shape("cosine_distance", student, teacher)
    s, t = (unit_norm(v.float(), dim=dim) for v in (student, teacher.detach()))
    return weighted_mean("cosine_distance", 1 - (s * t).sum(dim), weight)


def attention_scores(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None, floor: float = -100.0) -> Tensor:
    """Return the mean squared difference of attention scores before the softmax (TinyBERT, Jiao et al., 1909.10351, eq. 7).

    Args:
        student, teacher: scores (N, heads, T, T), any floating dtype.
        weight: weights (N,) or (N, heads).
        floor: a score at or below it is a masked one and counts as 0, as in the authors' code.

    Returns: an fp32 scalar.
    Raises: DataError for other shapes, and shapes that differ.
    """
    check_same_shape("attention_scores", student, teacher)
    if student.ndim != 4 or student.shape[2] != student.shape[3]:
        raise DataError(
            f"attention_scores: wanted scores (N, heads, T, T) before the softmax, got {tuple(student.shape)}; the output of an"
            " attention module has mixed the values already"
        )
    s, t = (v.float() for v in (student, teacher.detach()))
    s, t = (v.masked_fill(v <= floor, 0.0) for v in (s, t))
    return weighted_mean("attention_scores", (s - t).square(), weight)


def attention_kl(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) over the keys, averaged over the queries.

    MiniLM's attention transfer (Wang et al., 2002.10957, eq. 6).

    Args:
        student, teacher: scores (N, heads, T, T) before the softmax, any floating dtype.
        mask: (N, T), false for padding, which counts neither as query nor as key.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit.
    """
    check_same_shape("attention_kl", student, teacher)
    s, t = (v.float() for v in (student, teacher.detach()))
    if s.ndim != 4:
        raise DataError(f"attention_kl: wanted scores (N, heads, T, T), got {tuple(student.shape)}")
    if mask is None:
        log_p, log_q = t.log_softmax(-1), s.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if mask.shape != (s.shape[0], s.shape[-1]) or s.shape[-1] != s.shape[-2]:
        raise DataError(f"attention_kl(mask=...): wanted shape {(s.shape[0], s.shape[-1])}, got {tuple(mask.shape)}")
    padding = ~mask.bool()[:, None, None, :]
    # A large finite number, not -inf: a row that is all padding must not give nan.
    log_p, log_q = (v.masked_fill(padding, -1e30).log_softmax(-1) for v in (t, s))
    kl = (log_p.exp() * (log_p - log_q)).masked_fill(padding, 0.0).sum(-1)
    return weighted_mean("attention_kl", kl.transpose(1, 2), mask)


def relation_kl(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return `attention_kl` of the scaled value products V V' / sqrt(d): MiniLM's value relation (2002.10957, eq. 8-10).

    Applied to queries or keys it is the relation loss of MiniLMv2 (2012.15828).

    Args:
        student, teacher: values (N, heads, T, d), any floating dtype; the same number of heads, but d may differ.
        mask: (N, T), false for padding.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit.
    """
    check_tensors("relation_kl", student, teacher)
    for v in (student, teacher):
        if v.ndim != 4:
            raise DataError(f"relation_kl: wanted values (N, heads, T, d), got {tuple(v.shape)}")
    s, t = (products(v, v.mT) / v.shape[-1] ** 0.5 for v in (student, teacher.detach()))
    return attention_kl(s, t, mask=mask)
