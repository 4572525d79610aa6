"""Quantization-aware training, and what is done in it where bits are few."""

from compresskit.quant.qat.oscillations import FreezeOscillating, Oscillations, damped, damping_loss

__all__ = ["FreezeOscillating", "Oscillations", "damped", "damping_loss"]
