"""Quantization-aware training, and what is done in it where bits are few."""

from compresskit.quant.qat.binary import Binarize, binarize_, sign_formats
from compresskit.quant.qat.oscillations import FreezeOscillating, Oscillations, damped, damping_loss
from compresskit.quant.qat.ternary import Ternarize, bake_ternary_, ternarize_, ternary_formats

__all__ = [
    "Binarize",
    "FreezeOscillating",
    "Oscillations",
    "Ternarize",
    "bake_ternary_",
    "binarize_",
    "damped",
    "damping_loss",
    "sign_formats",
    "ternarize_",
    "ternary_formats",
]
