"""Recognise `q * width ** -0.5`, or the same factor on `q @ k.T`: a factor computed from a width that shrinks when channels go.

Where the code computes the factor anew, pruning changes it, and the plan rescales the queries to make up for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compresskit.prune.structure.channel_sets import collapse, varying_dims
from compresskit.prune.structure.constraints import WidthScaling
from compresskit.prune.structure.rules.base import OperatorCall


def remember_product(call: OperatorCall, first: Tensor, second: Tensor, dims: list[int]) -> None:
    """Remember a product that sums over `dims` of channels: a factor 1 / sqrt(width) may follow."""
    if dims:
        shared = bool(torch.isin(first[first > 0], second).any())
        call.state.products[call.node] = (first, dims[-1], shared)


def remember_moved_product(call: OperatorCall) -> None:
    """Remember that the operator gives a product in another shape."""
    if call.node.args[0] in call.state.products:
        call.state.products[call.node] = call.state.products[call.node.args[0]]


def add_scaling_factor(call: OperatorCall, result: Tensor) -> None:
    """Record a multiplication by 1 / sqrt(width of its channels), unless the factor is stored in the module and so stays."""
    if call.kind not in ("mul", "div"):
        return
    second = call.args[1] if len(call.args) > 1 else 0
    number = call.node.meta.get("factor", second if type(second) in (int, float) else 0)
    if not number:
        return
    factor = number if call.kind == "mul" else 1 / number
    candidates = [(result, d, False) for d in reversed(varying_dims(result))]
    if (product := call.state.products.get(call.node.args[0])) is not None:
        candidates.append(product)
    for labels, dim, shared in candidates:
        if math.isclose(factor, labels.shape[dim] ** -0.5, rel_tol=1e-4):
            if not _is_stored(call, number):
                add_width_scaling(call, labels, dim, shared=shared)
            return


def add_width_scaling(call: OperatorCall, labels: Tensor, dim: int, *, shared: bool = False) -> None:
    """Record that values are multiplied by 1 / sqrt(size of `dim`)."""
    call.state.width_scalings.append(WidthScaling(labels=collapse(labels), dim=dim, shared=shared))


def _is_stored(call: OperatorCall, number: float) -> bool:
    module = call.state.trace.module.get_submodule(call.path)
    return any(isinstance(v, float) and math.isclose(v, number, rel_tol=1e-6) for v in vars(module).values())
