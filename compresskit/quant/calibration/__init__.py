"""Calibration: activation statistics, equalization, smoothing, rounding, diagnosis."""

from compresskit.quant.calibration.blocks import GraphBlock, find_graph_blocks
from compresskit.quant.calibration.reconstruct import reconstruct_blocks_

__all__ = ["GraphBlock", "find_graph_blocks", "reconstruct_blocks_"]
