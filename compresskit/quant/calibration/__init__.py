"""Calibration: activation statistics, equalization, smoothing, rounding, diagnosis."""

from compresskit.quant.calibration.blocks import Block, find_blocks
from compresskit.quant.calibration.reconstruct import reconstruct_

__all__ = ["Block", "find_blocks", "reconstruct_"]
