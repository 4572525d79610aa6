"""Quantization on the captured graph: placed for a target, simulated as its runtime computes, trainable, exportable."""

from compresskit.quant.accuracy_target.mixed_model import MixedQuantized
from compresskit.quant.accuracy_target.quantize_to_accuracy import AccuracyReport, quantize_to_accuracy
from compresskit.quant.calibration.adaround import adaround_
from compresskit.quant.calibration.bias_correction import correct_bias_
from compresskit.quant.calibration.diagnose import Diagnosis, diagnose
from compresskit.quant.calibration.equalize import equalize_
from compresskit.quant.calibration.smoothquant import smooth_
from compresskit.quant.dynamic.insert_dynamic import DynamicallyQuantized
from compresskit.quant.dynamic.quantize_dynamic import DynamicQuant, quantize_dynamic
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.block_grid import BlockScheme, Rounding, WeightMatrix, round_to_nearest
from compresskit.quant.numerics.observers import OBSERVERS, Entropy, HistogramMSE, MinMax, MovingAverage, Observer, Percentile
from compresskit.quant.numerics.scheme import Scheme, affine, fake_quantize, to_integers
from compresskit.quant.numerics.targets import (
    ARM,
    FBGEMM,
    OPENVINO,
    QNNPACK,
    TENSORRT,
    X86,
    X86_NO_VNNI,
    Support,
    Target,
    saturating_matmul,
)
from compresskit.quant.passes.coverage import Coverage
from compresskit.quant.passes.placement import Placement, QuantizationPoint, place_quantizers
from compresskit.quant.qat.qat import QAT, prepare_qat
from compresskit.quant.static import StaticQuant, quantize_static
from compresskit.quant.weight_only.gptq import gptq
from compresskit.quant.weight_only.quantize_weights import WeightQuant, quantize_weights
from compresskit.quant.weight_only.storage import DEQUANTIZE_LINEAR, MATMUL_NBITS, MATMUL_NBITS_INT8, WeightStorage
from compresskit.quant.weight_only.weight_model import WeightQuantized
from compresskit.quant.weight_only.weight_plan import WeightPlan

__all__ = [
    "ARM",
    "DEQUANTIZE_LINEAR",
    "FBGEMM",
    "MATMUL_NBITS",
    "MATMUL_NBITS_INT8",
    "OBSERVERS",
    "OPENVINO",
    "QAT",
    "QNNPACK",
    "TENSORRT",
    "X86",
    "X86_NO_VNNI",
    "AccuracyReport",
    "BlockScheme",
    "Coverage",
    "Diagnosis",
    "DynamicQuant",
    "DynamicallyQuantized",
    "Entropy",
    "HistogramMSE",
    "MinMax",
    "MixedQuantized",
    "MovingAverage",
    "Observer",
    "Percentile",
    "Placement",
    "QuantizationPoint",
    "Quantized",
    "Rounding",
    "Scheme",
    "StaticQuant",
    "Support",
    "Target",
    "WeightMatrix",
    "WeightPlan",
    "WeightQuant",
    "WeightQuantized",
    "WeightStorage",
    "adaround_",
    "affine",
    "correct_bias_",
    "diagnose",
    "equalize_",
    "fake_quantize",
    "gptq",
    "place_quantizers",
    "prepare_qat",
    "quantize_dynamic",
    "quantize_static",
    "quantize_to_accuracy",
    "quantize_weights",
    "round_to_nearest",
    "saturating_matmul",
    "smooth_",
    "to_integers",
]
