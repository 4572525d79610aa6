"""Layers with stored weights in a captured graph: which operators they are, and reading, replacing and scaling their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.graph.capture import parameter_name
from compresskit.graph.interpreter import read_count, run_graph
from compresskit.graph.masks import MASK_PREFIX, copy_mask_
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor

CONVS = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default})
#: Number of dimensions of a convolution's input -> the operator.
CONV_OF_RANK = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}
TRANSPOSED_CONVS = frozenset({aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input})
#: Operators that change the layout of one tensor. Of kind "move" are more: some that make several tensors, pad or pool.
LAYOUT_OPERATORS = frozenset(
    {aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.permute.default, aten.transpose.int}
    | {aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.expand.default}
)


def bias_of(layer: Node) -> Node | None:
    """The node of a layer's bias; None where it has none."""
    return layer.args[2] if len(layer.args) > 2 else None


def each_dimension(value: int | Sequence[int], spatial: int) -> tuple[int, ...]:
    """A setting of a convolution for each of its spatial dimensions, of a number or a list that may have one for all."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * spatial if len(values) == 1 else values


def stored_value(module: fx.GraphModule, node: Node | None) -> Tensor | None:
    """The values of the tensor that a node reads, detached; None for other nodes."""
    name = parameter_name(node)
    return None if name is None else get_tensor(module, name).detach()


def stored_sources(node: object) -> list[Node] | None:
    """The stored tensors that a value is computed from; None where it is one itself, or depends on inputs."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    pending, visited = [node], {node}
    while pending:
        for read in pending.pop().all_input_nodes:
            if read.op not in ("call_function", "get_attr"):
                return None
            pending += [read] if read not in visited else []
            visited.add(read)
    return [n for n in visited if n.op == "get_attr"] or None


def evaluate_constant(module: fx.GraphModule, node: Any) -> Tensor:
    """The value of a node that depends on no input, as a new tensor."""
    with torch.no_grad():
        value: Tensor = run_graph(module, (), until=node)
    return value.detach().clone()


def readers_of(module: fx.GraphModule) -> dict[int, set[Node]]:
    """Id of each stored tensor -> the nodes that read it, under whichever of its names."""
    readers: dict[int, set[Node]] = {}
    for node in module.graph.nodes:
        if (name := parameter_name(node)) is not None:
            readers.setdefault(id(get_tensor(module, name)), set()).update(node.users)
    return readers


def parameter_reads(module: fx.GraphModule) -> dict[str, int]:
    """At how many places a graph reads each stored tensor, by its name; under all its names where it has several."""
    places: dict[int, int] = {}
    names: dict[str, int] = {}
    for node in module.graph.nodes:
        if (name := parameter_name(node)) is not None:
            names[name] = id(get_tensor(module, name))
            places[names[name]] = places.get(names[name], 0) + read_count(node)
    return {name: places[tensor] for name, tensor in names.items()}


def sum_over_inputs(weight: Tensor, values: Tensor, groups: int) -> Tensor:
    """What a layer makes of an input that has one value for each channel everywhere, (channels,)."""
    grouped = weight.unflatten(0, (groups, -1)).flatten(3).sum(3) if weight.ndim > 2 else weight.unflatten(0, (groups, -1))
    return (grouped * values.view(groups, 1, -1)).sum(2).flatten()


def scaled_inputs(weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    """A weight times a number for each input channel."""
    factor = scale.view(groups, 1, -1, *[1] * (weight.ndim - 2))
    return (weight.unflatten(0, (groups, -1)) * factor).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Scales and shifts by constants that were merged into a layer, which of its weight W and bias b then stores

        W * inward * outward * gain    and    (b + W summed over its inputs * entering) * outward * gain + leaving

    inward, entering: (inputs,). outward, leaving: (outputs,). gain: name and values of a parameter that trains, of its own shape
    and dtype, with a value for each output or one for all. Other tensors are float64; None where nothing was merged.
    groups: of the layer. axis: of the outputs in its weight.
    """

    groups: int = 1
    axis: int = 0
    inward: Tensor | None = None
    entering: Tensor | None = None
    outward: Tensor | None = None
    leaving: Tensor | None = None
    gain: tuple[str, Tensor] | None = None

    def before(self, scale: Tensor, shift: Tensor | None) -> Scales:
        """With another scale and shift before the layer; each (inputs,)."""
        entering = self.entering
        if shift is not None:
            moved = shift if self.inward is None else shift * self.inward
            entering = moved if entering is None else entering + moved
        return replace(self, inward=scale if self.inward is None else scale * self.inward, entering=entering)

    def after(self, scale: Tensor, shift: Tensor | None, gain: tuple[str, Tensor] | None) -> Scales:
        """With another scale and shift behind the layer; each (outputs,). gain: the scale, where a parameter is that."""
        if gain is not None and self.gain is None and self.leaving is None:
            return replace(self, gain=gain)
        leaving = None if self.leaving is None else self.leaving * scale
        if shift is not None:
            leaving = shift if leaving is None else leaving + shift
        return replace(self, outward=scale if self.outward is None else scale * self.outward, leaving=leaving)

    def factor(self, weight: Tensor) -> Tensor:
        """What a weight of this shape is multiplied by, in float64."""
        factor = torch.ones_like(weight, dtype=torch.float64)
        if self.inward is not None:
            factor = scaled_inputs(factor, self.inward, self.groups)
        shape = [-1 if d == self.axis else 1 for d in range(weight.ndim)]
        for scale in (self.outward, None if self.gain is None else self.gain[1]):
            factor = factor if scale is None else factor * scale.view(shape)
        return factor

    def resized(self, weight: Tensor) -> Scales:
        """Those of a convolution or linear layer that stores such a weight, with several inputs or outputs for each one."""

        def repeated(values: Tensor | None, count: int) -> Tensor | None:
            return None if values is None else values.repeat_interleave(count // len(values))

        outputs, inputs = weight.shape[0], weight.shape[1] * self.groups
        outward, gain = repeated(self.outward, outputs), self.gain
        if gain is not None and gain[1].numel() not in (1, outputs):
            scale, gain = gain[1].double().flatten().repeat_interleave(outputs // gain[1].numel()), None
            outward = scale if outward is None else outward * scale
        return Scales(
            groups=self.groups,
            inward=repeated(self.inward, inputs),
            entering=repeated(self.entering, inputs),
            outward=outward,
            leaving=repeated(self.leaving, outputs),
            gain=gain,
        )


def fold_affine_(module: fx.GraphModule, layer: Node, factor: Tensor, before: Tensor, after: Tensor) -> None:
    """Give a layer the weight and bias of `(layer + before) * factor + after`, in place; each (channels,), float64."""
    weight, bias = stored_value(module, layer.args[1]), stored_value(module, bias_of(layer))
    assert weight is not None
    shape = [1] * weight.ndim
    shape[1 if layer.target in TRANSPOSED_CONVS else 0] = -1
    shift = (0 if bias is None else bias.double()) + before
    replace_weights_(module, layer, weight.double() * factor.view(shape), shift * factor + after)


def replace_weights_(
    module: fx.GraphModule, layer: Node, weight: Tensor, bias: Tensor | None, mask: Tensor | None = None
) -> None:
    """Give a layer another weight and bias, in place, rounded to the dtype of its weight.

    Where another layer reads the old weight, the new one has another name. The mask of the old weight, if it has one, is copied,
    which is right where zeros stay; `mask` takes its place.
    """
    node = layer.args[1]
    name = str(parameter_name(node))
    old = get_tensor(module, name)
    path, frozen = name.rpartition(".")[0], not old.requires_grad
    with module.graph.inserting_before(layer):
        new_weight = _new_parameter(module, f"{path}.weight", node, weight.to(old.dtype), frozen=frozen)
        if mask is None:
            copy_mask_(module, name, str(parameter_name(new_weight)))
        else:
            owner, _, leaf = str(parameter_name(new_weight)).rpartition(".")
            module.get_submodule(owner).register_buffer(f"{MASK_PREFIX}{leaf}", mask, persistent=False)
        if new_weight.meta.get("val") is not None:
            new_weight.meta["val"] = new_weight.meta["val"].new_empty(weight.shape)
        new_bias = None
        if bias is not None:
            new_bias = _new_parameter(module, f"{path}.bias", bias_of(layer), bias.to(old.dtype), frozen=frozen)
    layer.args = (layer.args[0], new_weight, new_bias, *layer.args[3:])


def _new_parameter(module: fx.GraphModule, name: str, old: Node | None, values: Tensor, *, frozen: bool) -> Node:
    """A parameter called `name` with new values; where another layer reads that one, the name gets a number."""
    read = {parameter_name(n) for n in module.graph.nodes if n is not old and n.users}
    if old is not None and len(old.users) > 1:
        read.add(parameter_name(old))
    path, _, leaf = name.rpartition(".")
    chosen, count = leaf, 2
    while (f"{path}.{chosen}" if path else chosen) in read:
        chosen, count = f"{leaf}_{count}", count + 1
    setattr(module.get_submodule(path), chosen, nn.Parameter(values, requires_grad=not frozen))
    new = module.graph.get_attr(f"{path}.{chosen}" if path else chosen)
    new.meta = {} if old is None else dict(old.meta)
    return new


def drop_unused_(module: fx.GraphModule) -> None:
    """Delete parameters and buffers that no node reads any more, such as BatchNorm statistics. Masks stay."""
    used = {parameter_name(node) for node in module.graph.nodes}
    for path, part in list(module.named_modules()):
        for store in (part._parameters, part._buffers):
            for leaf in list(store):
                mask = leaf.startswith(MASK_PREFIX) and leaf.removeprefix(MASK_PREFIX) in part._parameters
                if (f"{path}.{leaf}" if path else leaf) not in used and not mask:
                    del store[leaf]
