"""Distillation losses: pure functions of plain tensors, `(student, teacher) -> scalar`.

All of them compute in fp32 whatever the dtype of their inputs, also inside of `torch.autocast`, return a scalar fp32 tensor,
and send no gradient to the teacher.

logits.py       predictions of the two networks        chunked.py    the same for large vocabularies, with less memory
top_k.py        predictions of which only k are kept   features.py   features, attention maps, hidden states
relations.py    how the samples of a batch relate      review.py     ReviewKD: features of several depths at once
heads.py        attention, from queries and keys
contrastive.py  CRD: contrast against a memory bank    common.py     checks and reductions that the losses share

The tuples below group the losses by the arguments that they take; the tests run every loss of a group through one contract.
"""

from compresskit.distill.losses.chunked import chunked_soft_targets
from compresskit.distill.losses.contrastive import CRDLoss, crd, projection_heads
from compresskit.distill.losses.features import (
    attention_kl,
    attention_scores,
    attention_transfer,
    cosine_distance,
    hcl,
    hint,
    relation_kl,
)
from compresskit.distill.losses.heads import head_relations, query_key_scores
from compresskit.distill.losses.logits import (
    dist,
    dkd,
    hard_targets,
    jsd,
    kl_plus_ce,
    label_smoothing,
    match_predictions,
    reverse_kl,
    soft_targets,
    standardized_soft_targets,
)
from compresskit.distill.losses.relations import (
    correlation_congruence,
    info_nce,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity_preserving,
)
from compresskit.distill.losses.review import abf, reviewkd
from compresskit.distill.losses.top_k import top_k_soft_targets

__all__ = [
    "CRDLoss",
    "abf",
    "attention_kl",
    "attention_scores",
    "attention_transfer",
    "chunked_soft_targets",
    "correlation_congruence",
    "cosine_distance",
    "crd",
    "dist",
    "dkd",
    "hard_targets",
    "hcl",
    "head_relations",
    "hint",
    "info_nce",
    "jsd",
    "kl_plus_ce",
    "label_smoothing",
    "match_predictions",
    "pkt",
    "projection_heads",
    "query_key_scores",
    "relation_kl",
    "reverse_kl",
    "reviewkd",
    "rkd_angle",
    "rkd_distance",
    "similarity_preserving",
    "soft_targets",
    "standardized_soft_targets",
    "top_k_soft_targets",
]

#: `(student logits, teacher logits) -> scalar`, logits (N, C, ...).
LOGIT_LOSSES = (soft_targets, reverse_kl, jsd, standardized_soft_targets, dist, hard_targets, chunked_soft_targets)

#: `(student features, teacher features) -> scalar`; they compare the features position by position.
FEATURE_LOSSES = (hint, attention_transfer, hcl, cosine_distance, attention_scores, attention_kl, relation_kl)

#: `(student features, teacher features) -> scalar`; they compare the samples of the batch with one another.
RELATION_LOSSES = (similarity_preserving, rkd_distance, rkd_angle, pkt, correlation_congruence, info_nce)

#: Every loss of the form `(student, teacher) -> scalar`.
LOSSES = (*LOGIT_LOSSES, *FEATURE_LOSSES, *RELATION_LOSSES)

#: `(student logits, teacher logits, target) -> scalar`, target: class indices (N, ...).
TARGET_LOSSES = (dkd, kl_plus_ce)
