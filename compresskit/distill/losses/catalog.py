"""Every loss of the library, by family; the contract tests run over these lists. A loss is a pure function of plain tensors:

logits.py      what the teacher predicts           chunked.py   the same for large vocabularies
features.py    what lies inside the two networks   relations.py how the samples of a batch relate
review.py      several features at once            crd.py       contrast against a memory bank
"""

from __future__ import annotations

from compresskit.distill.losses import chunked, features, logits, relations

#: `(student logits, teacher logits) -> scalar`, (N, C, ...).
LOGIT_LOSSES = (
    logits.soft_targets,
    logits.reverse_kl,
    logits.jsd,
    logits.standardized,
    logits.dist,
    logits.hard_targets,
    chunked.chunked_soft_targets,
)

#: `(student features, teacher features) -> scalar` that compare positions one by one.
FEATURE_LOSSES = (
    features.hint,
    features.attention_transfer,
    features.hcl,
    features.cosine,
    features.attention_scores,
    features.attention_kl,
    features.relation_kl,
)

#: `(student features, teacher features) -> scalar` that compare samples with one another.
RELATION_LOSSES = (
    relations.similarity,
    relations.rkd_distance,
    relations.rkd_angle,
    relations.pkt,
    relations.correlation_congruence,
    relations.info_nce,
)

#: Every `(student, teacher) -> scalar`; the contract tests run over this list.
LOSSES = (*LOGIT_LOSSES, *FEATURE_LOSSES, *RELATION_LOSSES)

#: `(student logits, teacher logits, target) -> scalar`.
TARGET_LOSSES = (logits.dkd, logits.kl_plus_ce)
