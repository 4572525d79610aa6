"""Channel pruning: found on the graph, planned before applied, proved before handed over."""

from compresskit.prune.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels import plan_channels
from compresskit.prune.criteria import CRITERIA, Criterion, Slices, l2, taylor
from compresskit.prune.plan import Plan, apply_
from compresskit.prune.prove import prove
from compresskit.prune.stage import Prune

__all__ = [
    "CRITERIA",
    "Criterion",
    "Plan",
    "Prune",
    "Slices",
    "apply_",
    "l2",
    "plan_channels",
    "prove",
    "reestimate_batchnorm_",
    "taylor",
]
