"""Depth: remove residual blocks from any model, by what they cost and what is lost without them.

plan = depth.plan_blocks(model, example, ck.keep(latency=0.7), task=task)   # decides; the model is not changed
plan.apply_(model)                                                         # removes the blocks

depth.Depth(budget=ck.keep(latency=0.7), finetune=ck.Train(epochs=4))       # the same as a stage of a recipe
"""

from compresskit.prune.depth import costs, importance
from compresskit.prune.depth.block_plan import BlockPlan
from compresskit.prune.depth.depth_stage import Depth
from compresskit.prune.depth.find_blocks import find_blocks
from compresskit.prune.depth.narrow import narrow
from compresskit.prune.depth.plan_blocks import plan_blocks

__all__ = ["BlockPlan", "Depth", "costs", "find_blocks", "importance", "narrow", "plan_blocks"]
