"""What Python computes of sizes that vary, and torch's exporter cannot write or rounds wrongly: division, roots, bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from compresskit.base.errors import ExportError

_SQUARE_ROOT: Any = torch._sym_sqrt  # type: ignore[attr-defined]


def size_translations() -> dict[Any, Any]:
    """Function of numbers -> function that writes it with onnxscript. A size is a value of int64, other numbers are Python's."""
    import onnx_ir as ir  # heavy, and only exporting needs them
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_bitwise_and, aten_bitwise_or

    def whole(number):  # type: ignore[no-untyped-def]
        return op.Constant(value_int=number) if type(number) is int else number

    def square_root(x):  # type: ignore[no-untyped-def]
        return op.Sqrt(op.Cast(x, to=ir.DataType.FLOAT))  # type: ignore[type-var]

    def to_integer(rounding: Callable[[Any], Any]) -> Callable[..., Any]:
        def rounded(x, digits=None):  # type: ignore[no-untyped-def]
            if digits is not None:
                raise ExportError("round() to digits, of a number computed of sizes that vary, has no exact form")
            return op.Cast(rounding(_in_double(x)), to=ir.DataType.INT64)

        return rounded

    def divided(a, b):  # type: ignore[no-untyped-def]
        return op.Div(op.Sub(a, op.Mod(a, b)), b)  # ONNX's own division cuts towards zero: -(-n // k) would be n // k

    def power_of_two(exponent):  # type: ignore[no-untyped-def]
        if type(exponent) is int:
            return op.Constant(value_int=2**exponent)
        return op.Pow(op.Constant(value_int=2), exponent)  # type: ignore[type-var]

    def shifted_up(a, b):  # type: ignore[no-untyped-def]
        return op.Mul(whole(a), power_of_two(b))  # type: ignore[no-untyped-call]

    def shifted_down(a, b):  # type: ignore[no-untyped-def]
        return divided(whole(a), power_of_two(b))  # type: ignore[no-untyped-call]

    def both(a, b):  # type: ignore[no-untyped-def]
        return aten_bitwise_and(whole(a), whole(b))  # type: ignore[no-untyped-call]

    def either(a, b):  # type: ignore[no-untyped-def]
        return aten_bitwise_or(whole(a), whole(b))  # type: ignore[no-untyped-call]

    return {
        _SQUARE_ROOT: square_root,
        round: to_integer(op.Round),  # both round halves to even numbers
        math.floor: to_integer(op.Floor),
        math.ceil: to_integer(op.Ceil),
        math.trunc: to_integer(lambda x: x),
        operator.floordiv: divided,
        operator.lshift: shifted_up,
        operator.rshift: shifted_down,
        operator.and_: both,
        operator.or_: either,
    }


def _in_double(x: Any) -> Any:
    """A number that is to be rounded, computed anew in double precision, as Python does, where single might round otherwise:
    `math.ceil(50 * 0.3)` is 15, and 16 in single precision.
    """
    import onnx_ir as ir
    from onnxscript import opset18 as op

    node = _written_for(x)
    if node is None or _is_exact(node):
        return x

    write: dict[Any, Callable[..., Any]] = {operator.add: op.Add, operator.sub: op.Sub, operator.mul: op.Mul}
    write |= {operator.truediv: op.Div, operator.pow: op.Pow, operator.neg: op.Neg, _SQUARE_ROOT: op.Sqrt}

    def number(x: float) -> Any:
        constant: Any = ir.tensor(np.float64(x))
        return op.Constant(value=constant)

    def again(value: Any) -> Any:
        node = _written_for(value)
        operands = [_operand(value, node, arg) for arg in node.args] if node is not None and node.target in write else []
        if value.dtype == ir.DataType.INT64 or not operands or None in operands:
            return op.Cast(value, to=ir.DataType.DOUBLE)
        assert node is not None
        return write[node.target](*(number(x) if isinstance(x, int | float) else again(x) for x in operands))

    return again(x)


def _written_for(value: Any) -> fx.Node | None:
    """The node of torch's graph that a value of the file was made for."""
    producer = value.producer()
    return None if producer is None else producer.meta.get("node")


def _is_exact(node: fx.Node) -> bool:
    """Whether a node is one operation of integers, and numbers that single precision holds."""
    return all(
        float(np.float32(arg)) == arg
        if isinstance(arg, int | float)
        else not (isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), torch.SymFloat))
        for arg in node.args
    )


def _operand(value: Any, node: fx.Node, argument: Any) -> Any:
    """The value that an argument of a node is, among those that its value is computed of; None where it is not there."""
    if not isinstance(argument, fx.Node):
        return argument
    pending = [value]
    while pending:
        found = pending.pop()
        if found.name == argument.name and found is not value:
            return found
        if _written_for(found) is node:
            pending += [read for read in found.producer().inputs if read is not None]
    return None
