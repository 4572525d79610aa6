"""Pruning and quantization chosen together: the channels and the bits of each layer under one size of the file.

plan = choose_channels_and_bits(model, batches, file_bytes=70_000)
small = plan.pruned(model, batches)                                   # channels removed, layers refitted
quantized = quantize_static(small, batches, bits=plan.bits)

Recipe(plan.prune(finetune=Train(epochs=2)), QAT(bits=plan.bits))     # the same as stages
"""

from compresskit.joint.choose import choose_channels_and_bits
from compresskit.joint.joint_plan import JointPlan, MeasuredChoice
from compresskit.joint.sensitivities import JointSensitivities

__all__ = ["JointPlan", "JointSensitivities", "MeasuredChoice", "choose_channels_and_bits"]
