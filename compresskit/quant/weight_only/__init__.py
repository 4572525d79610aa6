"""Weight-only quantization: matrices stored in 1 to 8 bits. How weights are rounded, palettes, and how a file stores them."""

from compresskit.quant.numerics.block_grid import round_to_nearest
from compresskit.quant.numerics.palette import Palette
from compresskit.quant.weight_only.gptq import gptq
from compresskit.quant.weight_only.storage import DEQUANTIZE_LINEAR, MATMUL_NBITS, MATMUL_NBITS_INT8

__all__ = ["DEQUANTIZE_LINEAR", "MATMUL_NBITS", "MATMUL_NBITS_INT8", "Palette", "gptq", "round_to_nearest"]
