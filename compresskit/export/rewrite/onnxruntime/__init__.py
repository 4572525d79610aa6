"""Rewrites of a quantized ONNX graph (onnx-ir) for the integer kernels of ONNX Runtime on a CPU; its integers stay the same.

pad_input_channels    Conv on an image of 3 channels   -> the image padded to 4, or folded 2x2 into 12
pool_as_convolution   AveragePool                      -> a depthwise Conv whose weights are all 1 / positions
keep_products_apart   Gemm whose result stays float    -> Max between it and readers that would take it back to float
pool_in_float         MaxPool behind a float Conv      -> before the rounding, with a Clip without bounds between

write_transposed_ends, of any graph: ConvTranspose that adds a stride or more at its end -> less cut off, zeros behind the input
"""

from compresskit.export.rewrite.attention import avoid_skip_layernorm, merge_attention_heads
from compresskit.export.rewrite.onnxruntime.channel_padding import pad_channels
from compresskit.export.rewrite.onnxruntime.groups import join_groups
from compresskit.export.rewrite.onnxruntime.input_channels import pad_input_channels
from compresskit.export.rewrite.onnxruntime.pooling import pool_as_convolution, pool_in_float
from compresskit.export.rewrite.onnxruntime.products import keep_products_apart

#: Rewrites for files that ONNX Runtime runs on x86.
X86_REWRITES = (pad_input_channels, pool_as_convolution, join_groups, pad_channels, merge_attention_heads, avoid_skip_layernorm)
#: Rewrites for files that ONNX Runtime runs on any machine.
CPU_REWRITES = (keep_products_apart, pool_in_float)
