"""Distillation: losses as pure functions, teachers, and the objective that joins them."""

from compresskit.distill.data.cache import Cached, TopK, cache, top_k, top_soft_targets
from compresskit.distill.data.indexed import number, numbered
from compresskit.distill.losses.catalog import LOSSES
from compresskit.distill.losses.chunked import chunked_soft_targets
from compresskit.distill.losses.crd import Contrast, MemoryBank, crd, embed
from compresskit.distill.losses.features import attention_kl, attention_scores, attention_transfer, cosine, hcl, hint, relation_kl
from compresskit.distill.losses.logits import (
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
from compresskit.distill.losses.relations import correlation_congruence, info_nce, pkt, rkd_angle, rkd_distance, similarity
from compresskit.distill.losses.reviewkd import fuse, review
from compresskit.distill.models.init_from import init_from_, layer_map
from compresskit.distill.models.taps import find_taps, tapped
from compresskit.distill.models.teacher import EMA, Teacher
from compresskit.distill.objectives.imitate import Imitate, imitate
from compresskit.distill.objectives.mixup import mixup
from compresskit.distill.objectives.mutual import Mutual, mutual
from compresskit.distill.objectives.pseudo_label import PseudoLabel, pseudo_label
from compresskit.distill.objectives.self_distill import SelfDistill, pooled_head, self_distill
from compresskit.distill.objectives.terms import DistillLoss, Term, project
from compresskit.distill.objectives.warm_up import warm_up
from compresskit.distill.stage import Distill

__all__ = [
    "EMA",
    "LOSSES",
    "Cached",
    "Contrast",
    "Distill",
    "DistillLoss",
    "Imitate",
    "MemoryBank",
    "Mutual",
    "PseudoLabel",
    "SelfDistill",
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
    "embed",
    "find_taps",
    "fuse",
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
    "mixup",
    "mutual",
    "number",
    "numbered",
    "pkt",
    "pooled_head",
    "project",
    "pseudo_label",
    "relation_kl",
    "reverse_kl",
    "review",
    "rkd_angle",
    "rkd_distance",
    "self_distill",
    "similarity",
    "soft_targets",
    "standardize",
    "standardized",
    "tapped",
    "top_k",
    "top_soft_targets",
    "warm_up",
]
