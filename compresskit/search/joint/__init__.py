"""Pruning and quantization chosen together: the channels and the bits of each layer under one size of the file.

plan = choose_channels_and_bits(model, batches, file_bytes=70_000)
small = plan.pruned(model, batches)                                   # channels removed, layers refitted
quantized = quantize_static(small, batches, bits=plan.bits)

Recipe(plan.prune(finetune=Train(epochs=2)), QAT(epochs=2, bits=plan.bits))  # the same as stages
"""

from compresskit.search.joint.choose import choose_channels_and_bits
from compresskit.search.joint.joint_plan import JointPlan, MeasuredJointChoice
from compresskit.search.joint.sensitivities import JointSensitivities

__all__ = ["JointPlan", "JointSensitivities", "MeasuredJointChoice", "choose_channels_and_bits"]
