"""Conditions on sizes, as torch writes them down when it traces a model: whether one holds, and how people read it."""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
#: Functions of `math` and torch in conditions, such as `math.trunc(0.5*torch.sym_float(L['x'].size()[2])) == 8`.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "sym_float": float, "sym_int": int, "sym_max": max, "sym_min": min, "sym_sqrt": math.sqrt, "sym_sum": sum,
    "ceil": math.ceil, "exp": math.exp, "floor": math.floor, "log": math.log, "log2": math.log2, "pow": math.pow,
    "sqrt": math.sqrt, "trunc": math.trunc, "abs": abs, "max": max, "min": min, "round": round,
}  # fmt: skip


def holds(condition: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a condition of torch holds, such as `L['x'].size()[1] % 4 == 0`. L: the arguments of `forward`."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id="L"):
                return arguments
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Call(func=ast.Attribute(attr="size", value=tensor), args=[]):
                return value(tensor).shape
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name()) | ast.Name(id=name)) if name in _OF_NUMBERS:
                return _OF_NUMBERS[name](*map(value, node.args))
            case ast.BinOp():
                return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return _OPERATIONS[type(node.op)](value(node.operand))
            case ast.BoolOp():
                return (all if isinstance(node.op, ast.And) else any)(map(value, node.values))
            case ast.Compare():
                sides = [value(node.left), *map(value, node.comparators)]
                return all(_OPERATIONS[type(op)](*pair) for op, pair in zip(node.ops, pairwise(sides), strict=True))
        raise ValueError(ast.dump(node))

    return bool(value(_syntax_of(condition)))


@functools.lru_cache(maxsize=1024)
def _syntax_of(condition: str) -> ast.expr:
    return ast.parse(condition, mode="eval").body


def in_words(condition: str) -> str:
    """`x.size(1) <= 10` of `L['x'].size()[1] <= 10`."""
    text = re.sub(r"L\['(\w+)'\]", r"\1", condition)
    return re.sub(r"\.size\(\)\[(\d+)\]", r".size(\1)", text)
