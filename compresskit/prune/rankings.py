"""Rankings: which group is cut next. `(Step) -> price`; the cheapest step is taken until the budget is met.

cost_aware   the share of its group's score that a step loses, for every MAC (parameter, ...) it saves: the default
uniform      every group loses the same ratio
pooled       the lowest scores of all groups together ("global")
isomorphic   the lowest ranks among groups of the same kind
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from compresskit.prune.structure.groups import ChannelGroup


@dataclass(frozen=True, kw_only=True)
class Step:
    """The next possible cut of one group: its `count` lowest channels of those that are left.

    useful: what it saves of the budget; what lies beyond the target does not count.
    """

    group: ChannelGroup
    count: int
    useful: float

    @property
    def last(self) -> float:
        """Score of the best channel that would go."""
        return self.group.sorted_scores[self.group.removed + self.count - 1]


Ranking = Callable[[Step], float]


def cost_aware(step: Step) -> float:
    """The share lost of what is left of the scores, once for every layer that loses it, for each unit of the budget saved.

    Shares make groups comparable whatever their scale; a residual stream, which is in many layers, is dear. What a step saves
    beyond the target counts nothing.
    """
    group = step.group
    before, after = group.remaining[group.removed], max(group.remaining[group.removed + step.count], 1e-300)
    return group.layers * math.log(before / after) / step.useful if before > 0 else 0.0


def uniform(step: Step) -> float:
    """Every group loses about the same ratio: "local" ranking. Within it the lowest scores go."""
    return (step.group.removed + step.count) / step.group.size


def pooled(step: Step) -> float:
    """The lowest scores of all groups go, as `normalize` made them comparable: "global" ranking. Knows nothing of costs."""
    return step.last


def isomorphic(step: Step) -> float:
    """Ranks among the channels of all groups that are built of the same kinds of layers in the same roles; every kind of
    group loses about the same ratio, and scores are compared only where they mean the same (Fang et al., 2407.04616).
    """
    return bisect_right(step.group.pooled_scores, step.last) / len(step.group.pooled_scores)
