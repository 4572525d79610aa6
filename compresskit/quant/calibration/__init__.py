"""Calibration: activation statistics, equalization, smoothing, rounding, diagnosis; the blocks that reconstruction works on."""

from compresskit.quant.calibration.blocks import GraphBlock, find_graph_blocks

__all__ = ["GraphBlock", "find_graph_blocks"]
