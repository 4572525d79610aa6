"""Pruning: channels found on the graph, planned before applied, proved before handed over; and masks that are held for good."""

from compresskit.graph.masks import Masks, detach_masks_, enforce_masks_, masks_of
from compresskit.prune import schedules
from compresskit.prune.channels.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels.normalize import by_deviation, by_largest, by_mean, largest, mean, over_layers, total, unscaled
from compresskit.prune.channels.plan_channels import plan_channels
from compresskit.prune.channels.prune import Prune, replayed
from compresskit.prune.channels.ranking import Ranking, Step, cost_aware, isomorphic, pooled, uniform
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.channels.sensitivity import Curves, allocate, by_curves, channel_sensitivity
from compresskit.prune.channels.sparse_learning import group_lasso, growing
from compresskit.prune.criteria import (
    CRITERIA,
    Criterion,
    Slices,
    apoz,
    bn_scale,
    fisher,
    fpgm,
    group_l2,
    irreplaceable,
    l1,
    l2,
    lamp,
    mean_activation,
    obd,
    output_energy,
    random_scores,
    shapley,
    taylor,
    taylor_samples,
)
from compresskit.prune.masks.allocate import Allocation, erk_ratios, lamp_ratios, measured_ratios, uniform_ratios
from compresskit.prune.masks.mask_sensitivity import Sensitivity, mask_sensitivity
from compresskit.prune.masks.patterns import NM, Block, Pattern, Unstructured
from compresskit.prune.masks.plan_mask import plan_mask
from compresskit.prune.masks.rewind import LotteryTicket, Rewind, rewind, shuffled
from compresskit.prune.masks.sparsify import Densify, Sparsify
from compresskit.prune.masks.weight_criteria import Units, grasp, movement, snip, wanda
from compresskit.prune.structure.plan import Plan, apply_
from compresskit.prune.structure.prove import prove
from compresskit.train.snapshots import rewind_

__all__ = [
    "CRITERIA",
    "NM",
    "Allocation",
    "Block",
    "Criterion",
    "Curves",
    "Densify",
    "LotteryTicket",
    "Masks",
    "Pattern",
    "Plan",
    "Prune",
    "Ranking",
    "Rewind",
    "Sensitivity",
    "Slices",
    "Sparsify",
    "Step",
    "Units",
    "Unstructured",
    "allocate",
    "apoz",
    "apply_",
    "bn_scale",
    "by_curves",
    "by_deviation",
    "by_largest",
    "by_mean",
    "channel_sensitivity",
    "cost_aware",
    "detach_masks_",
    "enforce_masks_",
    "erk_ratios",
    "fisher",
    "fpgm",
    "grasp",
    "group_l2",
    "group_lasso",
    "growing",
    "irreplaceable",
    "isomorphic",
    "l1",
    "l2",
    "lamp",
    "lamp_ratios",
    "largest",
    "mask_sensitivity",
    "masks_of",
    "mean",
    "mean_activation",
    "measured_ratios",
    "movement",
    "obd",
    "output_energy",
    "over_layers",
    "plan_channels",
    "plan_mask",
    "pooled",
    "prove",
    "random_scores",
    "reconstruct_",
    "reestimate_batchnorm_",
    "replayed",
    "rewind",
    "rewind_",
    "schedules",
    "shapley",
    "shuffled",
    "snip",
    "taylor",
    "taylor_samples",
    "total",
    "uniform",
    "uniform_ratios",
    "unscaled",
    "wanda",
]
