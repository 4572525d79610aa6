"""Fold weights that are computed from other parameters (weight norm, spectral norm, ...), so that the file stores their values,
which can then be quantized.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx, nn

from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.layers.stored import (
    CONVS,
    LAYOUT_OPERATORS,
    TRANSPOSED_CONVS,
    drop_unused_,
    evaluate_constant,
    stored_sources,
)
from compresskit.graph.masks import MASK_PREFIX, masks_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.rewrites.reserved_names import RESERVED
from compresskit.graph.rewrites.stored_products import TRANSPOSES
from compresskit.graph.surgery import get_tensor


def fold_parametrizations_(module: fx.GraphModule) -> int:
    """Replace every computed weight and bias of a layer by a parameter that holds its value, in place; returns how many.

    The parameter becomes `weight` or `bias` of the layer's module, and requires a gradient where one of its sources did.
    """
    folded: list[tuple[str, str, str]] = []
    layers = [n for n in module.graph.nodes if n.target in CONVS | TRANSPOSED_CONVS or n.target is aten.linear.default]
    for layer in layers:
        for position, leaf in ((1, "weight"), (2, "bias")):
            node = layer.args[position] if len(layer.args) > position else None
            sources = stored_sources(node)
            if node is None or sources is None:
                continue
            value = evaluate_constant(module, node)
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
            if stored_sources(node.args[0]) is not None:  # it would keep what is computed from parameters alive
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


def _free_name(module: fx.GraphModule, path: str, leaf: str) -> str:
    """A dotted name in the module at `path`, made where it is missing, that no parameter or buffer has yet."""
    path = path if path.partition(".")[0] not in RESERVED else f"folded_{path}"
    if path and path not in dict(module.named_modules()):
        module.add_submodule(path, nn.Module())
    taken = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    stem = f"{path}.{leaf}" if path else leaf
    return next(n for n in itertools.chain([stem], (f"{stem}_{i}" for i in itertools.count(2))) if n not in taken)
