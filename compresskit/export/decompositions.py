"""Programs that need no decomposition go to torch's exporter without one.

`torch.onnx.export` traces every program a second time, to replace the operators that it has no translation for, which takes half
of the export of a small network. Most graphs hold few such operators, and `DECOMPOSED` replaces these by what torch would take.
A graph with anything else (writes into views, branches, operators without a translation) is decomposed by torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from compresskit.graph.normalize import Node, aten, functional_form, is_inplace, mutates_a_view

#: Their result is their input, in another shape.
RESHAPING = (aten.flatten.using_ints, aten.reshape.default, aten.unflatten.int)
#: Operators that torch's exporter removes by itself.
REMOVED_BY_TORCH = (aten._assert_tensor_metadata.default,)


def replace_or(decompose: Callable[..., ExportedProgram]) -> Callable[..., ExportedProgram]:
    """Stands in for `decompose`, torch's `decompose_with_registry`, and calls it only for programs that need it."""

    def decomposed(program: ExportedProgram, registry: Any) -> ExportedProgram:
        module = program.graph_module
        nested = any(isinstance(child, fx.GraphModule) for child in module.children())
        if nested or mutates_a_view(module.graph) or not _names_its_outputs(program):
            return decompose(program, registry)
        _make_functional(program)
        known = {found[0].fx_target for found in registry.functions.values()}
        if not all(_is_translated(node, known) for node in module.graph.nodes):
            return decompose(program, registry)
        for node in list(module.graph.nodes):
            if node.target in DECOMPOSED:
                with module.graph.inserting_before(node):
                    _put_in_place(program, node, DECOMPOSED[node.target](module.graph, node))
        module.recompile()
        return program

    return decomposed


def _names_its_outputs(program: ExportedProgram) -> bool:
    """Whether the signature names the nodes that the graph returns: a pass that replaced the last one may not have told it."""
    returned = [node.name for node in pytree.tree_leaves(program.graph.output_node().args) if isinstance(node, fx.Node)]
    named = [spec.arg.name for spec in program.graph_signature.output_specs]
    return set(returned) <= set(named)


def _put_in_place(program: ExportedProgram, node: Node, by: Node) -> None:
    program.graph_signature.replace_all_uses(node.name, by.name)
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _make_functional(program: ExportedProgram) -> None:
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if is_inplace(node) and (target := functional_form(node.target)) is not None:
            with graph.inserting_before(node):
                made = graph.call_function(target, node.args, node.kwargs)
            made.meta = dict(node.meta)
            _put_in_place(program, node, made)


def _is_translated(node: Node, known: set[Any]) -> bool:
    """Whether torch would leave the node as it is, or replace it as `DECOMPOSED` does."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if "val" not in node.meta:
        return False
    if node.target in DECOMPOSED:
        return _is_replaced(node)
    if node.target in REMOVED_BY_TORCH:
        return True
    if not isinstance(node.target, OpOverload):
        return node.target in known
    return node.target in known and (node.target is aten.sym_size.int or _is_kept(node.target))


def _is_kept(target: OpOverload) -> bool:
    """Whether a decomposition leaves an operator that has a translation: neither it nor what it is made of writes."""
    if target._schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    aliases = any(argument.alias_info is not None for argument in target._schema.arguments)
    return not (composite and aliases) and target not in FunctionalTensor.metadata_fns


def _is_replaced(node: Node) -> bool:
    """Whether the replacement of a node is the same as torch's decomposition."""
    x = node.args[0] if node.args else None
    if node.kwargs or not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor):
        return False
    if node.target is aten.batch_norm.default:
        return node.args[5] is False
    if node.target is aten.dropout.default:
        return node.args[2] is False
    if node.target is aten.adaptive_avg_pool2d.default:
        return list(node.args[1]) == [1, 1]
    if node.target is aten.to.dtype:
        return len(node.args) == 2
    if node.target is aten.chunk.default:
        return isinstance(x.meta["val"].shape[(*node.args, 0)[2]], int)
    if node.target in RESHAPING:
        return sum(_find_size(node.graph, size) is None for size in node.meta["val"].shape) <= 1
    return True


def _find_size(graph: fx.Graph, size: Any) -> int | tuple[Node, int] | None:
    """A size as a number, or as the input and its dimension that has it; None where no input has it."""
    if isinstance(size, int):
        return size
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for d, other in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not isinstance(other, int) and other.node.expr == size.node.expr:
                return node, d
    return None


def _call_like(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Node, value: Any, **settings: Any) -> Node:
    made = graph.call_function(target, args, settings)
    made.meta = {**like.meta, "val": value}
    return made


def _decomposed_batch_norm(graph: fx.Graph, node: Node) -> Node:
    value = node.meta["val"]
    empty = value.new_empty(0)
    args = (*node.args[:5], *node.args[6:8])
    made = _call_like(graph, aten._native_batch_norm_legit_no_training.default, args, node, (value, empty, empty))
    return _call_like(graph, operator.getitem, (made, 0), node, value)


def _decomposed_pool(graph: fx.Graph, node: Node) -> Node:
    return _call_like(graph, aten.mean.dim, (node.args[0], [-1, -2], True), node, node.meta["val"])


def _decomposed_chunk(graph: fx.Graph, node: Node) -> Node:
    x, count, dim = (*node.args, 0)[:3]
    size = -(-x.meta["val"].shape[dim] // count)
    return _call_like(graph, aten.split.Tensor, (x, size, dim), node, node.meta["val"])


def _decomposed_cast(graph: fx.Graph, node: Node) -> Node:
    x, dtype = node.args
    return (
        x if x.meta["val"].dtype == dtype else _call_like(graph, aten._to_copy.default, (x,), node, node.meta["val"], dtype=dtype)
    )


def _decomposed_reshape(graph: fx.Graph, node: Node) -> Node:
    """A view of a contiguous copy, in the sizes of inputs. One size that no input has is -1, the number that remains."""
    value = node.meta["val"]
    sizes: list[Any] = []
    for size in value.shape:
        found = _find_size(graph, size)
        if isinstance(found, tuple):
            readers = (user for user in found[0].users if user.target is aten.sym_size.int and user.args == found)
            found = next(readers, None) or _call_like(graph, aten.sym_size.int, found, node, size)
        sizes.append(-1 if found is None else found)
    return _call_like(graph, aten._unsafe_view.default, (_dense_copy(graph, node), sizes), node, value)


def _dense_copy(graph: fx.Graph, node: Node) -> Node:
    """The input of a node in contiguous memory. Whether this is a copy is not known: strides differ between traces, and
    torch 2.11 checks those of views that follow. The exporter removes it.
    """
    x = node.args[0]
    return _call_like(graph, aten.clone.default, (x,), node, x.meta["val"].contiguous(), memory_format=torch.contiguous_format)


def _only_input(graph: fx.Graph, node: Node) -> Node:
    return node.args[0]


DECOMPOSED: dict[Any, Callable[[fx.Graph, Node], Node]] = {
    aten.batch_norm.default: _decomposed_batch_norm,
    aten.adaptive_avg_pool2d.default: _decomposed_pool,
    aten.chunk.default: _decomposed_chunk,
    aten.to.dtype: _decomposed_cast,
    aten.dropout.default: _only_input,
    aten.contiguous.default: _dense_copy,
    **dict.fromkeys(RESHAPING, _decomposed_reshape),
}
