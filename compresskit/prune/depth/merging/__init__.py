"""Merging: remove activations, and make one convolution of the layers around each.

plan = depth.plan_merges(model, example, ck.keep(latency=0.7), task=task)   # decides; the model is not changed
plan.apply_(model)                                                         # merges

depth.Merge(budget=ck.keep(latency=0.7), finetune=ck.Train(epochs=4))       # the same as a stage of a recipe
"""

from compresskit.prune.depth.merging.find_runs import find_runs
from compresskit.prune.depth.merging.merge_costs import saved_macs, saved_milliseconds
from compresskit.prune.depth.merging.merge_importance import merged_error, metric_loss
from compresskit.prune.depth.merging.merge_plan import MergePlan
from compresskit.prune.depth.merging.merge_runs import merge_
from compresskit.prune.depth.merging.merge_stage import Merge
from compresskit.prune.depth.merging.plan_merges import plan_merges

__all__ = [
    "Merge",
    "MergePlan",
    "find_runs",
    "merge_",
    "merged_error",
    "metric_loss",
    "plan_merges",
    "saved_macs",
    "saved_milliseconds",
]
