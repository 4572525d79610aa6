"""Let parts of a captured graph compute in fp32 while the rest computes in half: casts where values go in and come out.

In a graph nothing calls the modules of the model, so that no hook of theirs can cast.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.settings import stands_in
from compresskit.graph.capture import module_path
from compresskit.graph.normalize import Node

CAST = "cast_around_fp32"  # marks the nodes in `node.meta`


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A value of the graph with its floating tensors in a dtype."""
    return pytree.tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, value)


class CastNodes:
    """The casts around the parts of a graph that compute in fp32, which are added at once; `remove` takes them out again.

    body: the graph. paths: dotted paths of the modules whose operators compute in fp32, with all inside. tensors: names of their
    parameters and buffers; operators that read one do so, too. half: dtype of the rest.
    """

    def __init__(self, body: fx.GraphModule, paths: Collection[str], tensors: Collection[str], half: torch.dtype) -> None:
        self.body = body
        inside = {node for node in body.graph.nodes if _is_operator(node) and _is_inside(node, paths, tensors)}
        for node in inside:
            for given in [given for given in node.all_input_nodes if given not in inside and _is_operand(given, node)]:
                self._cast(given, torch.float32, [node], before=node)
            if outside := [user for user in node.users if user not in inside and CAST not in user.meta]:
                self._cast(node, half, outside, before=node.next)
        body.recompile()

    def _cast(self, value: Node, dtype: torch.dtype, readers: Collection[Node], *, before: Node) -> None:
        with self.body.graph.inserting_before(before):
            cast = self.body.graph.call_function(cast_floats, (value, dtype))
        cast.meta = {key: value.meta[key] for key in ("val",) if key in value.meta} | {CAST: True}
        for reader in readers:
            reader.replace_input_with(value, cast)

    def remove(self) -> None:
        """Take the casts out."""
        drop_casts_(self.body)


def drop_casts_(body: fx.GraphModule) -> None:
    """Take the casts of `CastNodes` out of a graph, in place."""
    casts = [node for node in body.graph.nodes if CAST in node.meta]
    for node in casts:
        node.replace_all_uses_with(node.args[0])
        body.graph.erase_node(node)
    if casts:
        body.recompile()


def _is_operator(node: Node) -> bool:
    return node.op in ("call_function", "call_module")


def _is_inside(node: Node, paths: Collection[str], tensors: Collection[str]) -> bool:
    """Whether an operator belongs to one of the modules by its path, or by what it reads, rounded or not."""
    path = module_path(node)
    if "" in paths or stands_in(path, paths):
        return True
    read = [*node.all_input_nodes, *(n for given in node.all_input_nodes if _rounds_stored(given) for n in given.all_input_nodes)]
    return not _rounds_stored(node) and any(given.op == "get_attr" and given.target in tensors for given in read)


def _rounds_stored(node: Node) -> bool:
    """Whether a node is a module that reads nothing but stored tensors, as a quantizer of weights does."""
    return node.op == "call_module" and all(given.op == "get_attr" for given in node.all_input_nodes)


def _is_operand(given: Node, node: Node) -> bool:
    """Whether what a node reads is cast: values with floats, but not what a module reads by name, which keeps its dtype."""
    value = given.meta.get("val")
    if node.op == "call_module" and (given.op == "get_attr" or _rounds_stored(given)):
        return False
    return value.is_floating_point() if isinstance(value, Tensor) else value is None or isinstance(value, tuple | list)
