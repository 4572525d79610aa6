"""Mixed-precision training: half weights or autocast, fp32 masters, loss scaling. A leaf: it knows torch only."""

from compresskit.mixed.advise import Advice, advise
from compresskit.mixed.average import Average
from compresskit.mixed.fp8 import to_float8
from compresskit.mixed.levels import level
from compresskit.mixed.lion import Lion
from compresskit.mixed.parallel import fp32_allreduce_hook, fsdp_policy
from compresskit.mixed.policy import (
    AMP_BF16,
    AMP_FP16,
    FP8,
    FP32,
    KAHAN_BF16,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    PURE_FP16,
    SPLIT_BF16,
    SR_BF16,
    TF32,
    Policy,
)
from compresskit.mixed.run import Run, prepare
from compresskit.mixed.scaler import LossScaler

__all__ = [
    "AMP_BF16",
    "AMP_FP16",
    "FP8",
    "FP32",
    "KAHAN_BF16",
    "MASTER_BF16",
    "MASTER_FP16",
    "PURE_BF16",
    "PURE_FP16",
    "SPLIT_BF16",
    "SR_BF16",
    "TF32",
    "Advice",
    "Average",
    "Lion",
    "LossScaler",
    "Policy",
    "Run",
    "advise",
    "fp32_allreduce_hook",
    "fsdp_policy",
    "level",
    "prepare",
    "to_float8",
]
