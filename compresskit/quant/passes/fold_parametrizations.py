"""Fold what is the same for every input in eval mode, so that the file stores its value, which can then be quantized.

Parametrizations: weights computed from other parameters (weight norm, spectral norm, ...).
Frozen norms: scales and shifts of channels that are computed from buffers, behind a convolution or linear layer.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.masks import MASK_PREFIX, masks_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.reserved_names import RESERVED
from compresskit.graph.stored_products import TRANSPOSES
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import CONVS, LAYOUT_OPERATORS, TRANSPOSED_CONVS
from compresskit.quant.passes.fold_batchnorm import drop_unused_, fold_affine_


def fold_parametrizations_(module: fx.GraphModule) -> int:
    """Replace every computed weight and bias of a layer by a parameter that holds its value, in place; returns how many.

    The parameter becomes `weight` or `bias` of the layer's module, and requires a gradient where one of its sources did.
    """
    folded: list[tuple[str, str, str]] = []
    layers = [n for n in module.graph.nodes if n.target in CONVS | TRANSPOSED_CONVS or n.target is aten.linear.default]
    for layer in layers:
        for position, leaf in ((1, "weight"), (2, "bias")):
            node = layer.args[position] if len(layer.args) > position else None
            sources = _sources(node)
            if node is None or sources is None:
                continue
            value = _evaluate(module, node)
            trains = any(get_tensor(module, str(parameter_name(source))).requires_grad for source in sources)
            with module.graph.inserting_before(node):
                name = _free_name(module, module_path(layer), leaf)
                owner = module.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], nn.Parameter(value, requires_grad=trains))
                new = module.graph.get_attr(name)
            _move_mask(module, node, name)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            folded.append((name, module_path(layer), leaf))
    if folded:
        for node in [n for n in module.graph.nodes if n.target is aten._assert_tensor_metadata.default]:
            if _sources(node.args[0]) is not None:  # it would keep what is computed from parameters alive
                module.graph.erase_node(node)
        module.graph.eliminate_dead_code()
        drop_unused_(module)
        for name, path, leaf in folded:
            _shorten_name_(module, name, path, leaf)
        module.recompile()
    return len(folded)


def _shorten_name_(module: fx.GraphModule, name: str, path: str, leaf: str) -> None:
    """Give a folded parameter the name of the one that it was computed from, where that one is gone."""
    free = _free_name(module, path, leaf)
    old, new = name.rpartition(".")[2], free.rpartition(".")[2]
    owner = module.get_submodule(name.rpartition(".")[0])
    if len(new) >= len(old) or f"{MASK_PREFIX}{old}" in owner._buffers:
        return
    owner.register_parameter(new, owner._parameters.pop(old))
    for node in [n for n in module.graph.nodes if n.op == "get_attr" and n.target == name]:
        node.target = free


def fold_frozen_norms_(module: fx.GraphModule) -> int:
    """Fold scales and shifts that are computed from buffers alone into the layer before them, in place; returns how many.

    `FrozenBatchNorm2d` of torchvision and of detection models is such: `x * scale + shift`.
    """
    folded: list[Node] = []
    for node in list(module.graph.nodes):
        layer = _only_layer_before(node)
        if layer is None:
            continue
        other = next(a for a in node.args if a is not layer)
        values = _channel_values(module, layer, other, stored=any(layer is one for one in folded))
        if values is None:
            continue
        zeros, ones = torch.zeros_like(values), torch.ones_like(values)
        if node.target in (aten.mul.Tensor, aten.div.Tensor):
            fold_affine_(module, layer, values if node.target is aten.mul.Tensor else 1 / values, zeros, zeros)
        else:
            fold_affine_(module, layer, ones, zeros, values if node.target is aten.add.Tensor else -values)
        node.replace_all_uses_with(layer)
        module.graph.erase_node(node)
        folded.append(layer)
    if folded:
        module.graph.eliminate_dead_code()
        module.recompile()
        drop_unused_(module)
    return len(folded)


def _only_layer_before(node: Node) -> Node | None:
    """The convolution or linear layer with a stored weight that this scale or shift alone reads."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
        return None
    first, second = node.args
    swapped = node.target in (aten.mul.Tensor, aten.add.Tensor) and isinstance(second, fx.Node) and _is_layer(second)
    layer = second if swapped else first
    return layer if _is_layer(layer) and len(layer.users) == 1 and first is not second else None


def _is_layer(node: Node) -> bool:
    layer = node.target in CONVS or node.target is aten.linear.default
    return layer and parameter_name(node.args[1]) is not None and node.meta["val"].ndim > 1


def _channel_values(module: fx.GraphModule, layer: Node, node: object, *, stored: bool) -> Tensor | None:
    """A value for each output channel of a layer, (channels,) in float64; None unless it is computed from buffers alone.

    stored: whether it may be a buffer itself, as the shift of a norm whose scale is computed.
    """
    sources = _sources(node) or ([node] if stored and parameter_name(node) is not None else None)
    if sources is None or any(isinstance(get_tensor(module, str(parameter_name(n))), nn.Parameter) for n in sources):
        return None
    value, result = _evaluate(module, node), layer.meta["val"]
    channels, axis = layer.args[1].meta["val"].shape[0], 1 if layer.target in CONVS else result.ndim - 1
    shape = [1] * (result.ndim - value.ndim) + list(value.shape)
    if result.ndim < value.ndim or not value.is_floating_point() or any(n != 1 for i, n in enumerate(shape) if i != axis):
        return None
    return value.double().reshape(-1).expand(channels) if shape[axis] in (1, channels) else None


def _sources(node: object) -> list[Node] | None:
    """The parameters that a value is computed from; None where it is none, or depends on inputs."""
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


def _move_mask(module: fx.GraphModule, node: Node, name: str) -> None:
    """Give the tensor `name`, the value of `node`, the mask of the parameter that it is a rearrangement of, if it is one."""
    source = node
    while source.op == "call_function" and source.target in LAYOUT_OPERATORS | TRANSPOSES:
        source = source.args[0]
    stored, masks = parameter_name(source), masks_of(module)
    if masks is None or stored is None or stored not in masks.masks:
        return
    mask = masks.masks[stored]

    def compute(current: Node, value_of: ValueOf) -> Any:
        return mask if current is source else execute(module, current, value_of)

    owner, _, leaf = name.rpartition(".")
    moved = run_graph(module, (), until=node, compute=compute).contiguous()
    module.get_submodule(owner).register_buffer(f"{MASK_PREFIX}{leaf}", moved, persistent=False)


def _evaluate(module: fx.GraphModule, node: Any) -> Tensor:
    with torch.no_grad():
        value: Tensor = run_graph(module, (), until=node)
    return value.detach().clone()


def _free_name(module: fx.GraphModule, path: str, leaf: str) -> str:
    """A dotted name in the module at `path`, made where it is missing, that no parameter or buffer has yet."""
    path = path if path.partition(".")[0] not in RESERVED else f"folded_{path}"
    if path and path not in dict(module.named_modules()):
        module.add_submodule(path, nn.Module())
    taken = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    stem = f"{path}.{leaf}" if path else leaf
    return next(n for n in itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(2))) if n not in taken)
