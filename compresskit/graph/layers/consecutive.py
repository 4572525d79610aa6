"""Merge a convolution into the convolution that alone reads it, and a linear layer into the next, on a captured graph.

    conv2(conv1(x)) -> conv(x)        linear2(linear1(x)) -> linear(x)

where the one takes no more multiply-accumulates than the two, counted on the example, and is exact: see `consecutive`.
"""

from __future__ import annotations

from torch import Tensor

from compresskit.graph.layers.geometry import Geometry, composed, consecutive
from compresskit.graph.layers.merging import Merging, geometry_of, is_stored_layer, positions, set_geometry_
from compresskit.graph.layers.stored import bias_of, replace_weights_, sum_over_inputs
from compresskit.graph.normalize import Node


def merge_consecutive_(merging: Merging) -> bool:
    """Merge consecutive layers, in place; returns whether any were. Layers with a pruning mask stay."""
    before = len(merging.done)
    for second in merging.nodes():
        if not is_stored_layer(merging.module, second):
            continue
        while (first := _layer_to_merge(merging, second)) is not None:
            _merge_pair(merging, first, second)
    return len(merging.done) > before


def _layer_to_merge(merging: Merging, second: Node) -> Node | None:
    first = second.args[0]
    if first.target is not second.target or len(first.users) > 1 or not is_stored_layer(merging.module, first):
        return None
    whole = _merged_geometry(merging, first, second)
    if whole is None or not merging.may_join("sequence", second, first):
        return None
    a, b = geometry_of(merging.module, first), geometry_of(merging.module, second)
    if whole.macs * positions(second) > a.macs * positions(first) + b.macs * positions(second):
        return None
    if not merging.replays:
        apart = (layer for layer in (first, second) if merging.mask(layer) is not None or merging.has_levels(layer))
        if any(apart) or merging.trains(first) != merging.trains(second):
            return None
    return first if merging.is_alone(first) and merging.is_alone(second) else None


def _merged_geometry(merging: Merging, first: Node, second: Node) -> Geometry | None:
    a, b = geometry_of(merging.module, first), geometry_of(merging.module, second)
    return consecutive(a, b, biased=bias_of(first) is not None)


def _merge_pair(merging: Merging, first: Node, second: Node) -> None:
    module = merging.module
    for layer in (first, second):
        merging.settle_(layer)
    a, b = geometry_of(module, first), geometry_of(module, second)
    whole = _merged_geometry(merging, first, second)
    assert whole is not None
    weight, bias = merging.weight(first), merging.value(bias_of(first))

    def after_first(then: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if bias is not None:
            shift = sum_over_inputs(then, bias, b.groups) + (0 if shift is None else shift)
        return composed(weight, then, a, b), shift

    fold = merging.fold_of(second)
    if fold is not None:
        then, own = fold.tensors["weight"], fold.tensors["bias"]
        assert then is not None
        unfolded = after_first(then.double(), None if own is None else own.double())
        merging.change_fold_(second, weight=unfolded[0], bias=unfolded[1])
    replace_weights_(module, second, *after_first(merging.weight(second), merging.value(bias_of(second))))
    second.args = (first.args[0], *second.args[1:])
    set_geometry_(second, whole)
    merging.joined("sequence", second, [first])
    module.graph.erase_node(first)
