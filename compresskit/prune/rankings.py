"""Rankings: which group is cut next. `(Step) -> price`; the step with the lowest price is taken until the budget is met.

cost_aware   relative loss of the group's scores for every MAC (parameter, ...) saved: the default
uniform      every group loses the same ratio
pooled       the lowest scores of all groups together ("global")
isomorphic   the lowest ranks among groups built of the same kinds of layers
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from compresskit.prune.structure.groups import ChannelGroup


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next possible cut of one group: the `count` channels with the lowest scores of those not yet removed.

    useful: what the step saves, in the unit of the budget (MACs, parameters, ...); savings beyond the target do not count.
    """

    group: ChannelGroup
    count: int
    useful: float

    @property
    def last(self) -> float:
        """Highest score among the channels that would be removed."""
        return self.group.sorted_scores[self.group.removed + self.count - 1]


Ranking = Callable[[Step], float]


def cost_aware(step: Step) -> float:
    """Relative loss of the group's remaining scores, times its number of layers, for each unit of the budget saved.

    Relative losses make groups comparable whose scores have different scales. A residual stream has many layers and so a high
    price.
    """
    group = step.group
    before, after = group.remaining[group.removed], max(group.remaining[group.removed + step.count], 1e-300)
    return group.layers * math.log(before / after) / step.useful if before > 0 else 0.0


def uniform(step: Step) -> float:
    """Ratio that the group would have lost, so that every group loses about the same ratio: "local" ranking."""
    return (step.group.removed + step.count) / step.group.size


def pooled(step: Step) -> float:
    """Highest score that the step removes: "global" ranking of the normalized scores of all groups, whatever they cost."""
    return step.last


def isomorphic(step: Step) -> float:
    """Rank of the step's highest score, in [0, 1], among all groups with the same kinds of layers in the same roles.

    Scores are compared only between groups of one kind, and every kind loses about the same ratio (Fang et al., 2407.04616).
    """
    return bisect_right(step.group.pooled_scores, step.last) / len(step.group.pooled_scores)
