"""Squeezes of dimensions that are not 1, which do nothing in torch, and of which ONNX Runtime takes no file."""

from __future__ import annotations

from torch import fx

from compresskit.graph.normalize import aten

_SQUEEZES = frozenset({aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_.dim, aten.squeeze_.dims})


def drop_idle_squeezes_(module: fx.GraphModule) -> None:
    """Take dimensions out of squeezes that are not 1, and squeezes of no other dimension out of the graph.

    A dimension that varies keeps its place: where it is 1, torch drops it, of which `warn_of_conditions` tells.
    """
    for node in list(module.graph.nodes):
        if node.target not in _SQUEEZES or "val" not in node.args[0].meta:
            continue
        x, dims = node.args[:2]
        shape = x.meta["val"].shape
        dims = [dims] if isinstance(dims, int) else list(dims)
        ones = [d for d in dims if shape and type(shape[d]) is int and shape[d] == 1]  # numbers have no dimension to drop
        if len(ones) == len(dims) > 0:
            continue
        if ones:
            inplace = node.target in (aten.squeeze_.dim, aten.squeeze_.dims)
            node.target, node.args = aten.squeeze_.dims if inplace else aten.squeeze.dims, (x, ones)
        else:
            node.replace_all_uses_with(x)
            module.graph.erase_node(node)
