"""Calibration: activation statistics, equalization, smoothing, rounding, diagnosis; the blocks that reconstruction works on.

`synthesize` makes inputs for calibration where there are none, `compare_calibration` says how much worse than real ones they are.
"""

from compresskit.quant.calibration.blocks import GraphBlock, find_graph_blocks
from compresskit.quant.calibration.synthetic import CalibrationComparison, compare_calibration, synthesize

__all__ = ["CalibrationComparison", "GraphBlock", "compare_calibration", "find_graph_blocks", "synthesize"]
