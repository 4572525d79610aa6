"""Programs whose operators get values of the dtypes that they compute in are left as they are by torch's exporter.

`torch.onnx.export` runs every program once more, operator by operator, to insert a conversion where an operator promotes what it
is given: integers that are added to floats, a whole number by which floats are multiplied. Most graphs have none, which the
dtypes of their values tell; the others are run by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.graph.normalize import Node

#: The dtype of a number that is no tensor, as torch's exporter writes it.
_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
    torch.SymBool: torch.bool,
    torch.SymInt: torch.int64,
    torch.SymFloat: torch.float32,
}


def insert_where_promoted(insert: Callable[[fx.GraphModule], None], table: Any) -> Callable[[fx.GraphModule], None]:
    """Stands in for `insert`, torch's `insert_type_promotion_nodes`, and calls it only for programs that need it.

    table: torch's rules, by operator.
    """

    def inserted(module: fx.GraphModule) -> None:
        parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
        if any(_is_promoted(node, table) for part in parts for node in part.graph.nodes):
            insert(module)

    return inserted


def _is_promoted(node: Node, table: Any) -> bool:
    """Whether an operator converts a value that it is given, or may do so."""
    if not isinstance(node.target, torch._ops.OpOverload) or (rule := table.get_rule(node.target.overloadpacket)) is None:
        return False
    try:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda value: value.meta["val"])
        promoted = rule.preview_type_promotion(args, kwargs)
    except Exception:  # torch says what is wrong
        return True
    return _get_another_dtype(dict(enumerate(args)), promoted.args_dtypes) or _get_another_dtype(kwargs, promoted.kwargs_dtypes)


def _get_another_dtype(values: Mapping[Any, Any], dtypes: Mapping[Any, torch.dtype | None]) -> bool:
    given = [(leaf, dtypes.get(key)) for key, value in values.items() for leaf in pytree.tree_leaves(value)]
    return any(
        dtype is not None and (value.dtype if isinstance(value, Tensor) else _DTYPES.get(type(value))) != dtype
        for value, dtype in given
    )
