"""Distillation: losses as pure functions, teachers, and the objective that joins them."""

from compresskit.distill.cache import Cached, TopK, cache, top_k, top_soft_targets
from compresskit.distill.chunked import chunked_soft_targets
from compresskit.distill.crd import Contrast, MemoryBank, crd, embed
from compresskit.distill.features import (
    attention_kl,
    attention_scores,
    attention_transfer,
    cosine,
    hcl,
    hint,
    relation_kl,
)
from compresskit.distill.heads import SelfDistill, pooled_head, self_distill
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
from compresskit.distill.mixing import mixup
from compresskit.distill.mutual import Mutual, mutual
from compresskit.distill.numbered import number, numbered
from compresskit.distill.objective import Imitate, imitate
from compresskit.distill.pseudo import PseudoLabel, pseudo_label
from compresskit.distill.ramps import warm_up
from compresskit.distill.relations import (
    correlation_congruence,
    info_nce,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity,
)
from compresskit.distill.review import fuse, review
from compresskit.distill.stage import Distill
from compresskit.distill.taps import find_taps, tapped
from compresskit.distill.teacher import EMA, Teacher
from compresskit.distill.terms import DistillLoss, Term, project

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
