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
from compresskit.prune.curves import Curves, allocate, by_curves, channel_sensitivity
from compresskit.prune.plan import Plan, apply_
from compresskit.prune.prove import prove
from compresskit.prune.ranking import Ranking, Step, cost_aware, isomorphic, pooled, uniform
from compresskit.prune.reconstruct import reconstruct_
from compresskit.prune.sparse import group_lasso, growing
from compresskit.prune.stage import Prune, replayed

__all__ = [
    "CRITERIA",
    "Criterion",
    "Curves",
    "Plan",
    "Prune",
    "Ranking",
    "Slices",
    "Step",
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
    "fisher",
    "fpgm",
    "group_l2",
    "group_lasso",
    "growing",
    "irreplaceable",
    "isomorphic",
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
    "pooled",
    "prove",
    "random_scores",
    "reconstruct_",
    "reestimate_batchnorm_",
    "replayed",
    "shapley",
    "taylor",
    "taylor_samples",
    "total",
    "uniform",
    "unscaled",
]
