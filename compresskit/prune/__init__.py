"""Pruning: channels found on the graph, planned before applied, proved before handed over; and masks that are held for good."""

from compresskit.masks import Masks, detach_, hold_, masks_of
from compresskit.prune.allocate import Allocation, erk_ratios, lamp_ratios, measured_ratios, uniform_ratios
from compresskit.prune.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels import plan_channels
from compresskit.prune.criteria import CRITERIA, Criterion, Slices, l2, taylor
from compresskit.prune.elements import Units, grasp, movement, random, snip, wanda
from compresskit.prune.masks import plan_mask
from compresskit.prune.patterns import NM, Block, Pattern, Unstructured
from compresskit.prune.plan import Plan, apply_
from compresskit.prune.prove import prove
from compresskit.prune.rewind import LotteryTicket, Rewind, rewind, shuffled
from compresskit.prune.schedules import MaskSchedule, constant, cubic, cyclic, exponential, linear
from compresskit.prune.sensitivity import Sensitivity, sensitivity
from compresskit.prune.sparsify import Densify, Sparsify
from compresskit.prune.stage import Prune
from compresskit.snapshots import rewind_

__all__ = [
    "CRITERIA",
    "NM",
    "Allocation",
    "Block",
    "Criterion",
    "Densify",
    "LotteryTicket",
    "MaskSchedule",
    "Masks",
    "Pattern",
    "Plan",
    "Prune",
    "Rewind",
    "Sensitivity",
    "Slices",
    "Sparsify",
    "Units",
    "Unstructured",
    "apply_",
    "constant",
    "cubic",
    "cyclic",
    "detach_",
    "erk_ratios",
    "exponential",
    "grasp",
    "hold_",
    "l2",
    "lamp_ratios",
    "linear",
    "masks_of",
    "measured_ratios",
    "movement",
    "plan_channels",
    "plan_mask",
    "prove",
    "random",
    "reestimate_batchnorm_",
    "rewind",
    "rewind_",
    "sensitivity",
    "shuffled",
    "snip",
    "taylor",
    "uniform_ratios",
    "wanda",
]
