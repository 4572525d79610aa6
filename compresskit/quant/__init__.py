"""Quantization on the captured graph: placed for a target, simulated as its runtime computes, trainable, exportable."""

from compresskit.quant.insert import Quantized
from compresskit.quant.observers import OBSERVERS, MinMax, MovingAverage, Observer
from compresskit.quant.placement import Placement, Point, place
from compresskit.quant.qat import QAT, prepare_qat
from compresskit.quant.scheme import Scheme, affine, fake_quantize, to_integers
from compresskit.quant.static import StaticQuant, quantize_static
from compresskit.quant.targets import X86, Integer, Target

__all__ = [
    "OBSERVERS",
    "QAT",
    "X86",
    "Integer",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Placement",
    "Point",
    "Quantized",
    "Scheme",
    "StaticQuant",
    "Target",
    "affine",
    "fake_quantize",
    "place",
    "prepare_qat",
    "quantize_static",
    "to_integers",
]
