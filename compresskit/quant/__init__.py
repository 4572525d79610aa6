"""Quantization on the captured graph: placed for a target, simulated as its runtime computes, trainable, exportable."""

from compresskit.quant.blocks import Blocks, Rounding, Rows, nearest
from compresskit.quant.coverage import Coverage
from compresskit.quant.diagnose import Diagnosis, diagnose
from compresskit.quant.dynamic import DynamicQuant, quantize_dynamic
from compresskit.quant.dynamic_insert import DynamicallyQuantized
from compresskit.quant.equalize import equalize_
from compresskit.quant.floor import Met, meet_floor
from compresskit.quant.floorforms import MatrixForm, Mixed
from compresskit.quant.gptq import gptq
from compresskit.quant.insert import Quantized
from compresskit.quant.objective import Faithful, faithfulness
from compresskit.quant.observers import OBSERVERS, Entropy, HistogramMSE, MinMax, MovingAverage, Observer, Percentile
from compresskit.quant.placement import Placement, Point, place
from compresskit.quant.qat import QAT, prepare_qat
from compresskit.quant.rounding import adaround_, correct_bias_
from compresskit.quant.scheme import Scheme, affine, fake_quantize, to_integers
from compresskit.quant.smooth import smooth_
from compresskit.quant.static import StaticQuant, quantize_static
from compresskit.quant.targets import (
    ARM,
    FBGEMM,
    OPENVINO,
    QNNPACK,
    TENSORRT,
    X86,
    X86_NO_VNNI,
    Integer,
    Target,
    saturating_matmul,
)
from compresskit.quant.weightforms import DECODED, NBITS, NBITS_INT8, Form
from compresskit.quant.weightmodel import WeightQuantized
from compresskit.quant.weightplan import WeightPlan
from compresskit.quant.weights import WeightQuant, quantize_weights

__all__ = [
    "ARM",
    "DECODED",
    "FBGEMM",
    "NBITS",
    "NBITS_INT8",
    "OBSERVERS",
    "OPENVINO",
    "QAT",
    "QNNPACK",
    "TENSORRT",
    "X86",
    "X86_NO_VNNI",
    "Blocks",
    "Coverage",
    "Diagnosis",
    "DynamicQuant",
    "DynamicallyQuantized",
    "Entropy",
    "Faithful",
    "Form",
    "HistogramMSE",
    "Integer",
    "MatrixForm",
    "Met",
    "MinMax",
    "Mixed",
    "MovingAverage",
    "Observer",
    "Percentile",
    "Placement",
    "Point",
    "Quantized",
    "Rounding",
    "Rows",
    "Scheme",
    "StaticQuant",
    "Target",
    "WeightPlan",
    "WeightQuant",
    "WeightQuantized",
    "adaround_",
    "affine",
    "correct_bias_",
    "diagnose",
    "equalize_",
    "faithfulness",
    "fake_quantize",
    "gptq",
    "meet_floor",
    "nearest",
    "place",
    "prepare_qat",
    "quantize_dynamic",
    "quantize_static",
    "quantize_weights",
    "saturating_matmul",
    "smooth_",
    "to_integers",
]
