"""Merge the layers of a captured graph, exactly: fewer operators that compute the same function.

    merge_layers_(module) -> list of what was merged

scales and shifts by constants -> the layers beside them       `constants`
branches of a sum              -> one layer                    `branches`
consecutive layers             -> one layer                    `consecutive`

It comes after BatchNorm is folded. Weights are computed in float64 and rounded once; layers in half precision stay as they are.
A layer whose weight another operator reads, too, stays, since the file would store the weight twice.
"""

from __future__ import annotations

from torch import fx

from compresskit.graph.layers.branches import merge_branches_
from compresskit.graph.layers.consecutive import merge_consecutive_
from compresskit.graph.layers.constants import fold_constants_, join_chains_
from compresskit.graph.layers.fold_batchnorm import FoldedScales
from compresskit.graph.layers.merging import MergedLayer, MergeRules, Merging
from compresskit.graph.layers.stored import drop_unused_


def merge_layers_(
    module: fx.GraphModule, rules: MergeRules | None = None, folds: list[FoldedScales] | None = None
) -> list[MergedLayer]:
    """Merge the layers of a captured graph whose BatchNorm is folded, in place.

    Args:
        module: the graph.
        rules: what may be merged; None merges all that can be.
        folds: records of the BatchNorms that were folded; receives those of the layers that scales and shifts are merged into,
            too. They are changed with their layers, such that training can still unfold them; those of layers that became one
            with others are removed.

    Returns what was merged, in order; the same again as `rules.recorded` gives the same graph.
    """
    merging = Merging(module, rules or MergeRules(), [] if folds is None else folds)
    while fold_constants_(merging) | merge_branches_(merging) | merge_consecutive_(merging):
        pass
    join_chains_(merging)
    if merging.done:
        left = set(module.graph.nodes)
        if folds is not None:
            folds[:] = [fold for fold in folds if fold.layer in left]
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
        drop_unused_(module)
    return merging.done
