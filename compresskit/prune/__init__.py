"""Channel pruning: found on the graph, planned before applied, proved before handed over."""

from compresskit.prune.aggregate import by_deviation, by_largest, by_mean, largest, mean, over_layers, total, unscaled
from compresskit.prune.batchnorm import reestimate_batchnorm_
from compresskit.prune.channels import plan_channels
from compresskit.prune.criteria import (
    CRITERIA,
    Criterion,
    Slices,
    apoz,
    bn_scale,
    fisher,
    fpgm,
    group_l2,
    l1,
    l2,
    lamp,
    mean_activation,
    obd,
    output_energy,
    random,
    shapley,
    taylor,
    taylor_samples,
)
from compresskit.prune.plan import Plan, apply_
from compresskit.prune.prove import prove
from compresskit.prune.stage import Prune

__all__ = [
    "CRITERIA",
    "Criterion",
    "Plan",
    "Prune",
    "Slices",
    "apoz",
    "apply_",
    "bn_scale",
    "by_deviation",
    "by_largest",
    "by_mean",
    "fisher",
    "fpgm",
    "group_l2",
    "l1",
    "l2",
    "lamp",
    "largest",
    "mean",
    "mean_activation",
    "obd",
    "output_energy",
    "over_layers",
    "plan_channels",
    "prove",
    "random",
    "reestimate_batchnorm_",
    "shapley",
    "taylor",
    "taylor_samples",
    "total",
    "unscaled",
]
