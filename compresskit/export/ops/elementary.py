"""Functions whose translations of torch's exporter overflow, underflow, take another branch than torch does, or fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def elementary_translations() -> dict[Any, Any]:
    """Operator -> function that writes it with onnxscript."""
    from onnxscript import opset18 as op  # heavy, and only exporting needs it

    def number(value: float, like):  # type: ignore[no-untyped-def]
        return op.CastLike(op.Constant(value_float=value), like)  # type: ignore[type-var]

    def log_sigmoid(x):  # type: ignore[no-untyped-def]
        return op.Neg(op.Softplus(op.Neg(x)))  # the logarithm of a sigmoid that is 0 is none

    def logaddexp(a, b):  # type: ignore[no-untyped-def]
        apart = op.Max(a, b) + op.Softplus(op.Neg(op.Abs(a - b)))  # the sum of exponentials overflows from 89 on
        return op.Where(op.Equal(a, b), a + number(math.log(2), a), apart)  # of equal infinities the difference is none

    def logaddexp2(a, b):  # type: ignore[no-untyped-def]
        log2 = number(math.log(2), a)
        return logaddexp(a * log2, b * log2) / log2  # type: ignore[no-untyped-call]

    def atan2(y, x):  # type: ignore[no-untyped-def]
        zero, pi, half = (number(value, x) for value in (0.0, math.pi, math.pi / 2))
        turned = op.Atan(y / x) + op.Where(op.GreaterOrEqual(y, zero), pi, op.Neg(pi))  # of 0 beside a negative number, pi
        upright = op.Where(op.Equal(y, zero), zero, op.Where(op.Greater(y, zero), half, op.Neg(half)))
        return op.Where(op.Greater(x, zero), op.Atan(y / x), op.Where(op.Less(x, zero), turned, upright))

    def hypot(a, b):  # type: ignore[no-untyped-def]
        small, large = op.Min(op.Abs(a), op.Abs(b)), op.Max(op.Abs(a), op.Abs(b))
        ratio = op.Where(op.Equal(small, large), number(1.0, a), small / large)  # of zeros, and of infinities, it is none
        return large * op.Sqrt(ratio * ratio + number(1.0, a))  # squares of the values themselves overflow

    def reduced(kind):  # type: ignore[no-untyped-def]
        def reduce(x, dim: Sequence[int] = (), keepdim: bool = False):  # type: ignore[no-untyped-def]
            given = [op.Constant(value_ints=list(dim))] if dim else []  # of no dimension it is of all, which the exporter refuses
            return kind(x, *given, keepdims=int(keepdim))

        return reduce

    aten = torch.ops.aten
    return {
        aten.amax.default: reduced(op.ReduceMax),  # type: ignore[no-untyped-call]
        aten.amin.default: reduced(op.ReduceMin),  # type: ignore[no-untyped-call]
        aten.log_sigmoid.default: log_sigmoid,
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        aten.atan2.default: atan2,
        aten.hypot.default: hypot,
    }
