"""Depth: remove residual blocks, or the activations between convolutions that then become one, by what they cost and what is lost
without them.

plan = depth.plan_blocks(model, example, ck.keep(latency=0.7), task=task)   # decides; the model is not changed
plan.apply_(model)                                                         # removes the blocks
depth.refit_stream_(model, dense, plan.paths, batches)                      # fits what is left to what the whole network gave

depth.Depth(budget=ck.keep(latency=0.7), finetune=ck.Train(epochs=4))       # the same as a stage of a recipe

depth.Merge(budget=ck.keep(latency=0.7), finetune=ck.Train(epochs=4))       # activations go, and convolutions become one
"""

from compresskit.prune.depth import costs, importance, merging
from compresskit.prune.depth.block_plan import BlockPlan
from compresskit.prune.depth.depth_stage import Depth
from compresskit.prune.depth.find_blocks import find_blocks
from compresskit.prune.depth.merging import Merge, MergePlan, merge_, plan_merges
from compresskit.prune.depth.narrow import narrow
from compresskit.prune.depth.plan_blocks import plan_blocks
from compresskit.prune.depth.refit_stream import refit_stream_

__all__ = [
    "BlockPlan",
    "Depth",
    "Merge",
    "MergePlan",
    "costs",
    "find_blocks",
    "importance",
    "merge_",
    "merging",
    "narrow",
    "plan_blocks",
    "plan_merges",
    "refit_stream_",
]
