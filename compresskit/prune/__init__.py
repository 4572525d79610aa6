"""Pruning: remove channels (`Prune`), residual blocks (`depth.Depth`) or activations (`depth.Merge`), or hold weights at zero
under masks (`Sparsify`).

plan = plan_channels(model, example, keep(macs=0.5))     # decides; the model is not changed
apply_(model, plan)                                      # removes the channels

masks = plan_mask(model, remove(weights=0.9))            # decides; the model is not changed
masks.apply_(model)                                      # sets weights to zero; the model carries its masks

What scores, compares and distributes is in modules of its own: `criteria`, `rankings`, `normalizers`, `schedules`, `patterns`,
`allocations`.
"""

from compresskit.graph.masks import Masks, detach_masks_, enforce_masks_, masks_of
from compresskit.prune import allocations, criteria, normalizers, patterns, rankings, schedules
from compresskit.prune import depth as depth
from compresskit.prune import low_rank as low_rank
from compresskit.prune.channels.plan_channels import plan_channels
from compresskit.prune.channels.prune import Prune, replayed
from compresskit.prune.channels.reconstruct import reconstruct_
from compresskit.prune.channels.sparse_learning import greg, group_lasso
from compresskit.prune.masks.plan_mask import plan_mask
from compresskit.prune.masks.rewind import LotteryTicket, rewind, shuffled
from compresskit.prune.masks.sparsify import Densify, Sparsify
from compresskit.prune.masks.sweep import sweep
from compresskit.prune.sensitivity import channel_sensitivity, mask_sensitivity
from compresskit.prune.structure.plan import Plan, apply_
from compresskit.prune.structure.prove import prove
from compresskit.train.batchnorm import reestimate_batchnorm_
from compresskit.train.snapshots import rewind_

__all__ = [
    "Densify",
    "LotteryTicket",
    "Masks",
    "Plan",
    "Prune",
    "Sparsify",
    "allocations",
    "apply_",
    "channel_sensitivity",
    "criteria",
    "detach_masks_",
    "enforce_masks_",
    "greg",
    "group_lasso",
    "mask_sensitivity",
    "masks_of",
    "normalizers",
    "patterns",
    "plan_channels",
    "plan_mask",
    "prove",
    "rankings",
    "reconstruct_",
    "reestimate_batchnorm_",
    "replayed",
    "rewind",
    "rewind_",
    "schedules",
    "shuffled",
    "sweep",
]
