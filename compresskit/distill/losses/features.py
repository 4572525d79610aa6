"""Losses of what lies inside: features, attention maps, hidden states. Computed in fp32; the teacher takes no gradient."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import same_shape, unit, weighted_mean


def hint(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Mean squared difference of features (N, ...), after the adapter (FitNets, Romero et al., 1412.6550).

    TinyBERT's terms of hidden states and embeddings are this one too. weight: the leading dimensions, such as (N, tokens).
    """
    same_shape("hint", student, teacher)
    return weighted_mean("hint", (student.float() - teacher.detach().float()).square(), weight)


def attention_transfer(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of unit maps Q / |Q|, Q = sum over channels of f^2 (Zagoruyko & Komodakis, 1612.03928).

    student, teacher: (N, C, H, W) with any C; where the sizes differ, the larger map is average-pooled to the smaller.
    """
    for f in (student, teacher):
        if f.ndim != 4:
            raise DataError(f"attention_transfer: wanted features (N, C, H, W), got {tuple(f.shape)}")
    maps = [_map(f) for f in (student, teacher.detach())]
    size = (min(m.shape[1] for m in maps), min(m.shape[2] for m in maps))
    s, t = (unit(F.adaptive_avg_pool2d(m.unsqueeze(1), size).flatten(1)) for m in maps)
    same_shape("attention_transfer", s, t)
    return (s - t).square().mean()


def _map(features: Tensor) -> Tensor:
    """Energy (N, H, W), divided by each sample's largest, for the map is scaled to length 1 anyway: faint ones stay alive."""
    energy = features.float().square().mean(1)
    return energy / energy.detach().amax((1, 2), keepdim=True).clamp(min=1e-30)


def hcl(student: Tensor, teacher: Tensor, *, levels: tuple[int, ...] = (4, 2, 1)) -> Tensor:
    """Squared difference at full size and pooled to each of `levels`, with weights 1, 1/2, 1/4, ... that sum to 1.

    The hierarchical context loss of ReviewKD (Chen et al., 2104.09044, eq. 8). student, teacher: (N, C, H, W) of one shape;
    a level not smaller than H is left out.
    """
    if student.ndim != 4:
        raise DataError(f"hcl: wanted features (N, C, H, W), got {tuple(student.shape)}")
    if any(level < 1 for level in levels):
        raise SettingError(f"hcl(levels=...): wanted sizes >= 1, got {levels}")
    same_shape("hcl", student, teacher)
    s, t = student.float(), teacher.detach().float()
    value, share, total = F.mse_loss(s, t), 1.0, 1.0
    for level in levels:
        if level >= s.shape[2]:
            continue
        share /= 2
        value = value + share * F.mse_loss(F.adaptive_avg_pool2d(s, level), F.adaptive_avg_pool2d(t, level))
        total += share
    return value / total


def cosine(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None, dim: int = -1) -> Tensor:
    """1 - cos(student, teacher) along `dim` (DistilBERT's term of hidden states, Sanh et al., 1910.01108).

    student, teacher: (N, ..., D); weight: the shape without D, such as the token mask (N, tokens).
    """
    same_shape("cosine", student, teacher)
    s, t = (unit(v.float(), dim=dim) for v in (student, teacher.detach()))
    return weighted_mean("cosine", 1 - (s * t).sum(dim), weight)


def attention_scores(student: Tensor, teacher: Tensor, *, weight: Tensor | None = None, floor: float = -100.0) -> Tensor:
    """Mean squared difference of attention scores before the softmax (TinyBERT, Jiao et al., 1909.10351, eq. 7).

    student, teacher: (N, heads, T, T). A score at or below `floor` is a masked one and counts as 0, as in the authors' code;
    weight: the leading dimensions, (N,) or (N, heads).
    """
    same_shape("attention_scores", student, teacher)
    s, t = (v.float() for v in (student, teacher.detach()))
    s, t = (v.masked_fill(v <= floor, 0.0) for v in (s, t))
    return weighted_mean("attention_scores", (s - t).square(), weight)


def attention_kl(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) over the keys, averaged over queries (MiniLM, Wang et al., 2002.10957, eq. 6).

    student, teacher: scores (N, heads, T, T) before the softmax; mask: (N, T), false for padding, which is neither query nor key.
    """
    same_shape("attention_kl", student, teacher)
    s, t = (v.float() for v in (student, teacher.detach()))
    if s.ndim != 4:
        raise DataError(f"attention_kl: wanted scores (N, heads, T, T), got {tuple(student.shape)}")
    if mask is None:
        log_p, log_q = t.log_softmax(-1), s.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    if mask.shape != (s.shape[0], s.shape[-1]) or s.shape[-1] != s.shape[-2]:
        raise DataError(f"attention_kl(mask=...): wanted shape {(s.shape[0], s.shape[-1])}, got {tuple(mask.shape)}")
    gone = ~mask.bool()[:, None, None, :]
    # A large finite number, not -inf: a row that is all padding must not give nan.
    log_p, log_q = (v.masked_fill(gone, -1e30).log_softmax(-1) for v in (t, s))
    kl = (log_p.exp() * (log_p - log_q)).masked_fill(gone, 0.0).sum(-1)
    return weighted_mean("attention_kl", kl.transpose(1, 2), mask)


def relation_kl(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """MiniLM's value relation: `attention_kl` of V V' / sqrt(d) (2002.10957, eq. 8-10); for queries or keys it is MiniLMv2.

    student, teacher: (N, heads, T, d) with the same number of heads; d may differ.
    """
    for v in (student, teacher):
        if v.ndim != 4:
            raise DataError(f"relation_kl: wanted values (N, heads, T, d), got {tuple(v.shape)}")
    s, t = (v.float() @ v.float().mT / v.shape[-1] ** 0.5 for v in (student, teacher.detach()))
    return attention_kl(s, t, mask=mask)
