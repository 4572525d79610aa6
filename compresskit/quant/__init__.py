"""Quantization of captured models: simulated as the target runtime computes, trainable, exported with integers stored.

Observers are in `quant.observers`, everything about targets in `quant.targets`, how weight-only quantization rounds and stores
weights in `quant.weight_only`, and calibration without data in `quant.calibration` (`synthesize`).
"""

from compresskit.quant import weight_only
from compresskit.quant.accuracy_target.choose_bits import choose_bits
from compresskit.quant.accuracy_target.quantize_to_accuracy import quantize_to_accuracy
from compresskit.quant.accuracy_target.repair import Repair, repair
from compresskit.quant.calibration.bias_correction import correct_bias_
from compresskit.quant.calibration.diagnose import diagnose
from compresskit.quant.calibration.equalize import equalize_
from compresskit.quant.calibration.reconstruct import adaround_, reconstruct_blocks_
from compresskit.quant.calibration.smoothquant import smooth_
from compresskit.quant.dynamic.quantize_dynamic import DynamicQuant, quantize_dynamic
from compresskit.quant.effort.tuning import imitate_float_
from compresskit.quant.model import Quantized
from compresskit.quant.numerics import observers, targets
from compresskit.quant.numerics.bit_widths import Bits
from compresskit.quant.numerics.block_grid import BlockScheme
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import ARM, OPENVINO, X86, Target
from compresskit.quant.qat.qat import QAT, prepare_qat
from compresskit.quant.static import StaticQuant, quantize_static
from compresskit.quant.weight_only.quantize_weights import WeightQuant, quantize_weights

__all__ = [
    "ARM",
    "OPENVINO",
    "QAT",
    "X86",
    "Bits",
    "BlockScheme",
    "DynamicQuant",
    "Quantized",
    "Repair",
    "Scheme",
    "StaticQuant",
    "Target",
    "WeightQuant",
    "adaround_",
    "choose_bits",
    "correct_bias_",
    "diagnose",
    "equalize_",
    "imitate_float_",
    "observers",
    "prepare_qat",
    "quantize_dynamic",
    "quantize_static",
    "quantize_to_accuracy",
    "quantize_weights",
    "reconstruct_blocks_",
    "repair",
    "smooth_",
    "targets",
    "weight_only",
]
