"""Distillation: a student is trained with losses that compare it with a teacher.

losses/      loss functions of plain tensors                 objectives/  what a training minimises: `imitate` and others
models/      teachers, layers copied from a teacher          data/        cached predictions, batches with sample indices
stage.py     the stage `Distill`
"""

from compresskit.distill import losses
from compresskit.distill.data.cache import Cached, cache
from compresskit.distill.data.indexed import indexed_loader, with_indices
from compresskit.distill.models.init_from import distilbert_layers, init_from_, layer_map
from compresskit.distill.models.teacher import EMA, Teacher
from compresskit.distill.objectives.imitate import imitate
from compresskit.distill.objectives.loss_weights import linear_warmup
from compresskit.distill.objectives.mixup import mixup
from compresskit.distill.objectives.mutual import mutual
from compresskit.distill.objectives.pseudo_label import pseudo_label
from compresskit.distill.objectives.self_distill import pooled_head, self_distill
from compresskit.distill.objectives.terms import DistillLoss, Term, layer_terms, project
from compresskit.distill.objectives.views import mirror
from compresskit.distill.stage import Distill
from compresskit.graph.taps import find_taps, tapped

__all__ = [
    "EMA",
    "Cached",
    "Distill",
    "DistillLoss",
    "Teacher",
    "Term",
    "cache",
    "distilbert_layers",
    "find_taps",
    "imitate",
    "indexed_loader",
    "init_from_",
    "layer_map",
    "layer_terms",
    "linear_warmup",
    "losses",
    "mirror",
    "mixup",
    "mutual",
    "pooled_head",
    "project",
    "pseudo_label",
    "self_distill",
    "tapped",
    "with_indices",
]
