"""Mixed-precision training: half weights or autocast, fp32 masters, loss scaling. Imports only the library's errors."""

from compresskit.mixed.advise import Advice, advise
from compresskit.mixed.formats.fp8 import to_float8
from compresskit.mixed.formats.levels import level
from compresskit.mixed.formats.parallel import fp32_allreduce_hook, fsdp_policy
from compresskit.mixed.formats.policy import (
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
from compresskit.mixed.histograms import Histograms, histograms
from compresskit.mixed.memory import MemoryReport, memory_report
from compresskit.mixed.optim.ema import WeightEMA
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.optim.run_optimizer import RunOptimizer
from compresskit.mixed.run import Run, prepare
from compresskit.mixed.step.scaler import LossScaler

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
    "Histograms",
    "Lion",
    "LossScaler",
    "MemoryReport",
    "Policy",
    "Run",
    "RunOptimizer",
    "WeightEMA",
    "advise",
    "fp32_allreduce_hook",
    "fsdp_policy",
    "histograms",
    "level",
    "memory_report",
    "prepare",
    "to_float8",
]
