"""Quantization-aware training, and what is done in it where bits are few."""

from compresskit.quant.qat.binary import Binarize, binarize_, sign_formats
from compresskit.quant.qat.oscillations import FreezeOscillating, Oscillations, damped, damping_loss

__all__ = ["Binarize", "FreezeOscillating", "Oscillations", "binarize_", "damped", "damping_loss", "sign_formats"]
