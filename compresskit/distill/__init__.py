"""Distillation: losses as pure functions, teachers, and the objective that joins them."""

from compresskit.distill.losses import LOSSES, soft_targets
from compresskit.distill.objective import DistillLoss, Imitate, imitate
from compresskit.distill.stage import Distill

__all__ = ["LOSSES", "Distill", "DistillLoss", "Imitate", "imitate", "soft_targets"]
