"""What the passes that merge layers share: which merges are allowed, what was merged, and layers as convolutions.

The model decides what *can* be merged; names that the user gave, masks and frozen weights decide what *is*. A model that is
built again from a file has neither its masks nor its frozen weights yet, so what was merged is recorded, and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from compresskit.base.settings import stands_in
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.layers.channel_affine import ChannelAffine, constant_nodes
from compresskit.graph.layers.fold_batchnorm import FoldedBatchNorm, FoldedScales
from compresskit.graph.layers.geometry import Geometry
from compresskit.graph.layers.stored import CONVS, TRANSPOSED_CONVS, Scales, bias_of, each_dimension, readers_of, stored_value
from compresskit.graph.masks import MASK_PREFIX
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, owner

FEWEST_WEIGHTS = 32  # of a layer whose weights of one size are no coincidence


class MergedLayer(NamedTuple):
    """A node that was merged into another.

    rule: "branch", "sequence", "after", "before" or "chain". into, gone: names of the nodes.
    """

    rule: str
    into: str
    gone: str


#: (layer, scale and shift of what it reads, shift that would be left) -> whether the value that it reads then may be rounded.
Rounds = Callable[[Node, ChannelAffine, Tensor | None], bool]

#: (layer, its weight with an identity added) -> whether that weight may be rounded.
TakesIdentity = Callable[[Node, Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class MergeRules:
    """What may be merged.

    skip: names of modules or nodes that the user treats apart; layers under different ones stay apart.
    named: names of modules for which the user chose something else; what one covers is not merged into a layer that it does not.
    takes_identity: asked where x + conv(x), which saves an addition and no layer, would be merged; None allows all. In eight bits
        the ones that it adds to the weights make the grid of all others coarse.
    least_decibels: signal-to-noise ratio that the weights of merged branches must have in eight bits, in dB; None allows all.
    rounds: asked where a scale or shift before a layer would be folded, so that the layer reads other values; None allows all.
    recorded: what was merged before, which alone is merged again; None decides anew.
    """

    skip: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    takes_identity: TakesIdentity | None = None
    least_decibels: float | None = None
    rounds: Rounds | None = None
    recorded: frozenset[MergedLayer] | None = None


class Merging:
    """A graph whose layers are being merged.

    module: the graph. constants: its nodes that depend on no input. rules: what may be merged. done: what was.
    """

    def __init__(self, module: fx.GraphModule, rules: MergeRules, folds: list[FoldedScales]) -> None:
        self.module, self.rules, self.done = module, rules, list[MergedLayer]()
        self.constants = constant_nodes(module.graph)
        self._folds = folds

    def may_join(self, rule: str, into: Node, gone: Node, *, layer: bool = True) -> bool:
        """Whether a node may be merged into another by the names that the user gave, or the record. layer: it has weights."""
        if self.rules.recorded is not None:
            return MergedLayer(rule, into.name, gone.name) in self.rules.recorded
        if not _covering(gone, (*self.rules.skip, *self.rules.named)) <= _covering(into, (*self.rules.skip, *self.rules.named)):
            return False
        return not layer or _covering(gone, self.rules.skip) == _covering(into, self.rules.skip)

    @property
    def replays(self) -> bool:
        """Whether a record says what is merged, whatever the values are."""
        return self.rules.recorded is not None

    def joined(self, rule: str, into: Node, gone: Iterable[Node]) -> None:
        """Note what was merged."""
        self.done += [MergedLayer(rule, into.name, node.name) for node in gone]

    def nodes(self) -> list[Node]:
        """The nodes of the graph, in order."""
        return list(self.module.graph.nodes)

    def value(self, node: Node | None) -> Tensor | None:
        """The stored values that a node reads, in float64."""
        values = stored_value(self.module, node)
        return None if values is None else values.double()

    def weight(self, layer: Node) -> Tensor:
        """The weight of a layer, in float64."""
        values = self.value(layer.args[1])
        assert values is not None
        return values

    def mask(self, layer: Node) -> Tensor | None:
        """The pruning mask of a layer's weight, or None."""
        holder, leaf = owner(self.module, str(parameter_name(layer.args[1])))
        return holder._buffers.get(f"{MASK_PREFIX}{leaf}")

    def trains(self, layer: Node) -> bool:
        """Whether the weight of a layer requires a gradient."""
        return get_tensor(self.module, str(parameter_name(layer.args[1]))).requires_grad

    def has_levels(self, layer: Node) -> bool:
        """Whether the weights of a layer are zero or of one size, which one or two bits hold; scaled, they would not be."""
        values = stored_value(self.module, layer.args[1])
        assert values is not None
        size = values.abs()
        return size.numel() >= FEWEST_WEIGHTS and bool(((size == size.max()) | (size == 0)).all())

    def is_alone(self, layer: Node) -> bool:
        """Whether no other node reads the tensors of a layer."""
        readers = readers_of(self.module)
        names = [parameter_name(node) for node in (layer.args[1], bias_of(layer)) if node is not None]
        return all(readers[id(get_tensor(self.module, str(name)))] == {layer} for name in names)

    def fold_of(self, layer: Node) -> FoldedBatchNorm | None:
        """The record of the BatchNorm that was folded into a layer, which training can unfold again."""
        return next((fold for fold in self._folds if fold.layer is layer and isinstance(fold, FoldedBatchNorm)), None)

    def forget_fold_(self, layer: Node) -> None:
        """Let the BatchNorm and the scales that were folded into a layer stay folded."""
        self._folds[:] = [fold for fold in self._folds if fold.layer is not layer]

    def settle_(self, layer: Node) -> None:
        """Let the scales that were merged into a layer stay merged."""
        folds = [fold.settled() if fold.layer is layer and isinstance(fold, FoldedBatchNorm) else fold for fold in self._folds]
        self._folds[:] = [fold for fold in folds if fold.layer is not layer or isinstance(fold, FoldedBatchNorm)]

    def scaled_(self, layer: Node, change: Callable[[Scales], Scales]) -> None:
        """Note a scale and shift that are about to be merged into a layer, so that training can still unfold them.

        change: what they make of those that were merged into it before.
        """
        if not any(fold.layer is layer for fold in self._folds):
            nodes = {name: node for name, node in (("weight", layer.args[1]), ("bias", bias_of(layer))) if node is not None}
            stored = {name: get_tensor(self.module, str(parameter_name(node))) for name, node in nodes.items()}
            tensors = {"bias": None} | {name: value.detach() for name, value in stored.items()}
            frozen = frozenset(name for name, value in stored.items() if not value.requires_grad)
            self._folds.append(FoldedScales(layer=layer, tensors=tensors, frozen=frozen))
        for i, fold in enumerate(self._folds):
            if fold.layer is layer:
                turned = layer.target in TRANSPOSED_CONVS
                none = Scales(axis=1) if turned else Scales(groups=geometry_of(self.module, layer).groups)
                self._folds[i] = replace(fold, scales=change(fold.scales or none))

    def change_fold_(self, layer: Node, **tensors: Tensor | None) -> None:
        """Replace tensors of the BatchNorm that was folded into a layer, or of the layer before it, each in float64."""
        for i, fold in enumerate(self._folds):
            if fold.layer is layer and isinstance(fold, FoldedBatchNorm):
                dtype = fold.tensors["var"].dtype  # type: ignore[union-attr]
                changed = {name: None if v is None else v.to(dtype) for name, v in tensors.items()}
                self._folds[i] = replace(fold, tensors={**fold.tensors, **changed})


def _covering(node: Node, names: Iterable[str]) -> set[str]:
    path = module_path(node)
    return {name for name in names if name == node.name or stands_in(path, [name])}


def is_stored_layer(module: fx.GraphModule, node: Node) -> bool:
    """Whether a node is a convolution or linear layer of fp32 or more, over a batch, with stored weights."""
    if (node.target not in CONVS and node.target is not aten.linear.default) or node.kwargs:
        return False
    weight, bias = stored_value(module, node.args[1]), bias_of(node)
    if weight is None or (bias is not None and parameter_name(bias) is None):
        return False
    ranks = node.args[0].meta["val"].ndim, weight.ndim
    batched = ranks[0] == ranks[1] if node.target in CONVS else ranks[0] > 1
    return batched and weight.dtype in (torch.float32, torch.float64) and node.meta["val"].dtype == weight.dtype


def layer_axis(layer: Node) -> int:
    """The dimension of channels, of the input and of the result of a layer."""
    return node_rank(layer) - 1 if layer.target is aten.linear.default else 1


def node_rank(node: Node) -> int:
    """Number of dimensions of a value."""
    return int(node.meta["val"].ndim)


def geometry_of(module: fx.GraphModule, layer: Node) -> Geometry:
    """The sizes of a convolution; of a linear layer, those without spatial dimensions."""
    weight = stored_value(module, layer.args[1])
    assert weight is not None
    outputs, inputs, *kernel = weight.shape
    if layer.target is aten.linear.default:
        return Geometry(outputs=outputs, inputs=inputs, kernel=(), stride=(), padding=(), dilation=(), groups=1)
    given = [*layer.args[3:], *[1, 0, 1, 1][len(layer.args[3:]) :]]
    stride, padding, dilation = (each_dimension(value, len(kernel)) for value in given[:3])
    groups = given[3]
    return Geometry(
        outputs=outputs,
        inputs=inputs * groups,
        kernel=tuple(kernel),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


def set_geometry_(layer: Node, geometry: Geometry) -> None:
    """Give a convolution other settings; a linear layer has none."""
    if layer.target in CONVS:
        settings = (list(geometry.stride), list(geometry.padding), list(geometry.dilation), geometry.groups)
        layer.args = (layer.args[0], layer.args[1], bias_of(layer), *settings)


def positions(layer: Node) -> int:
    """Number of positions of a layer's result in the example, of all samples."""
    sizes = [size for i, size in enumerate(layer.meta["val"].shape) if i != layer_axis(layer)]
    return math.prod(size if isinstance(size, int) else size.node.hint if size.node.has_hint() else 1 for size in sizes)
