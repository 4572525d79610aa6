"""Mixed-precision training: half weights or autocast, fp32 masters, loss scaling. A leaf: it knows torch only."""

from compresskit.mixed.policy import AMP_BF16, AMP_FP16, FP32, MASTER_BF16, MASTER_FP16, Policy
from compresskit.mixed.run import Run, prepare
from compresskit.mixed.scaler import LossScaler

__all__ = ["AMP_BF16", "AMP_FP16", "FP32", "MASTER_BF16", "MASTER_FP16", "LossScaler", "Policy", "Run", "prepare"]
