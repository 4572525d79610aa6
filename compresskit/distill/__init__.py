"""Distillation: losses as pure functions, teachers, and the objective that joins them."""

from compresskit.distill.cache import Cached, TopK, cache, top_k, top_soft_targets
from compresskit.distill.chunked import chunked_soft_targets
from compresskit.distill.crd import MemoryBank, crd
from compresskit.distill.features import (
    attention_kl,
    attention_scores,
    attention_transfer,
    cosine,
    hcl,
    hint,
    relation_kl,
)
from compresskit.distill.layers import init_from_, layer_map
from compresskit.distill.logits import (
    dist,
    dkd,
    hard_targets,
    jsd,
    kl_plus_ce,
    label_smoothing,
    reverse_kl,
    soft_targets,
    standardize,
    standardized,
)
from compresskit.distill.losses import LOSSES
from compresskit.distill.mutual import Mutual, mutual
from compresskit.distill.objective import Imitate, imitate
from compresskit.distill.relations import (
    correlation_congruence,
    info_nce,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity,
)
from compresskit.distill.stage import Distill
from compresskit.distill.taps import find_taps, tapped
from compresskit.distill.teacher import EMA, Teacher
from compresskit.distill.terms import DistillLoss, Term, project

__all__ = [
    "EMA",
    "LOSSES",
    "Cached",
    "Distill",
    "DistillLoss",
    "Imitate",
    "MemoryBank",
    "Mutual",
    "Teacher",
    "Term",
    "TopK",
    "attention_kl",
    "attention_scores",
    "attention_transfer",
    "cache",
    "chunked_soft_targets",
    "correlation_congruence",
    "cosine",
    "crd",
    "dist",
    "dkd",
    "find_taps",
    "hard_targets",
    "hcl",
    "hint",
    "imitate",
    "info_nce",
    "init_from_",
    "jsd",
    "kl_plus_ce",
    "label_smoothing",
    "layer_map",
    "mutual",
    "pkt",
    "project",
    "relation_kl",
    "reverse_kl",
    "rkd_angle",
    "rkd_distance",
    "similarity",
    "soft_targets",
    "standardize",
    "standardized",
    "tapped",
    "top_k",
    "top_soft_targets",
]
