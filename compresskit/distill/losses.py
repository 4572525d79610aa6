"""Every loss of the library, by family; the contract tests run over these lists. A loss is a pure function of plain tensors:

logits.py      what the teacher predicts           chunked.py   the same for large vocabularies
features.py    what lies inside the two networks   relations.py how the samples of a batch relate
crd.py         contrast against a memory bank
"""

from __future__ import annotations

from compresskit.distill.chunked import chunked_soft_targets
from compresskit.distill.features import (
    attention_kl,
    attention_scores,
    attention_transfer,
    cosine,
    hcl,
    hint,
    relation_kl,
)
from compresskit.distill.logits import (
    dist,
    dkd,
    hard_targets,
    jsd,
    kl_plus_ce,
    label_smoothing,
    reverse_kl,
    soft_targets,
    standardized,
)
from compresskit.distill.relations import (
    correlation_congruence,
    info_nce,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity,
)

#: `(student logits, teacher logits) -> scalar`, (N, C, ...).
LOGIT_LOSSES = (soft_targets, reverse_kl, jsd, standardized, dist, hard_targets, chunked_soft_targets)

#: `(student features, teacher features) -> scalar` that compare positions one by one.
FEATURE_LOSSES = (hint, attention_transfer, hcl, cosine, attention_scores, attention_kl, relation_kl)

#: `(student features, teacher features) -> scalar` that compare samples with one another.
RELATION_LOSSES = (similarity, rkd_distance, rkd_angle, pkt, correlation_congruence, info_nce)

#: Every `(student, teacher) -> scalar`; the contract tests run over this list.
LOSSES = (*LOGIT_LOSSES, *FEATURE_LOSSES, *RELATION_LOSSES)

#: `(student logits, teacher logits, target) -> scalar`.
TARGET_LOSSES = (dkd, kl_plus_ce)

__all__ = ["FEATURE_LOSSES", "LOGIT_LOSSES", "LOSSES", "RELATION_LOSSES", "TARGET_LOSSES", "label_smoothing", "soft_targets"]
