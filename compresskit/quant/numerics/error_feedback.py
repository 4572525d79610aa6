"""Round the inputs of a weight in turn, and let those still to come make up for each error (GPTQ, Frantar et al., 2210.17323)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from compresskit.base.errors import DataError

USUAL_DAMPING = 0.01


class RoundInput(Protocol):
    """Rounds the weights of one input."""

    def __call__(self, index: int, ahead: Callable[[int], Tensor]) -> Tensor:
        """Return the rounded weights of an input, (..., outputs).

        Args:
            index: of the input in the weight.
            ahead: gives the weights of the next inputs to round, this one first, as they are by now: n -> (..., outputs, n).
        """
        ...


def rounded_in_turn(
    weight: Tensor,
    moment: Tensor,
    round_input: RoundInput,
    *,
    order: Tensor | None = None,
    damping: float = USUAL_DAMPING,
    columns: int = 128,
) -> Tensor:
    """Round a weight W such that its layer's outputs, E |W x - Q x|^2, change least (algorithm 1 of the paper).

    Args:
        weight: (..., outputs, inputs). moment: E[x x^T] of the inputs x, (..., inputs, inputs) float64.
        round_input: rounds the weights of one input.
        order: of the inputs, (inputs,); None for as they are. The best begins with those of the largest moments ("act-order").
        damping: fraction of the mean of the moment's diagonal that is added to the diagonal, so that it can be inverted.
        columns: how many inputs are rounded before the rest of the weight is updated.

    Returns the rounded weight, float64.
    """
    inputs = weight.shape[-1]
    order = torch.arange(inputs) if order is None else order
    left = weight.detach().double()[..., order]
    upper = _inverse_factors(moment[..., order, :][..., order], damping)
    result = torch.empty_like(left)
    for start in range(0, inputs, columns):
        stop = min(start + columns, inputs)
        errors = torch.zeros_like(left[..., start:stop])
        for j in range(start, stop):
            rounded = round_input(int(order[j]), partial(_ahead, left, errors, upper[..., start:stop, :], j, stop))
            error = (left[..., j] - rounded) / upper[..., None, j, j]
            result[..., j], errors[..., j - start] = rounded, error
            left[..., j:stop] -= error[..., None] * upper[..., None, j, j:stop]
        left[..., stop:] -= errors @ upper[..., start:stop, stop:]
    turned_back = torch.empty_like(result)
    turned_back[..., order] = result
    return turned_back


def _ahead(left: Tensor, errors: Tensor, upper: Tensor, start: int, updated: int, count: int) -> Tensor:
    """The next inputs of a weight; those from `updated` on still lack the updates for the errors so far."""
    end = min(start + count, left.shape[-1])
    found = left[..., start:end]
    if end > updated:
        found = found.clone()
        found[..., updated - start :] -= errors @ upper[..., updated:end]
    return found


def _inverse_factors(moments: Tensor, damping: float) -> Tensor:
    """`_inverse_factor` of each of several matrices, (..., inputs, inputs)."""
    each = [_inverse_factor(moment.double(), damping) for moment in moments.reshape(-1, *moments.shape[-2:])]
    return torch.stack(each).reshape(moments.shape)


def _inverse_factor(moment: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moment; an input that is always zero is treated as independent.

    Raises DataError for a moment that is not finite, which no damping would help.
    """
    diagonal = moment.diagonal()
    if not bool(torch.isfinite(moment).all()):
        raise DataError(
            "second moments of the values that a layer reads are wanted for its rounding, and are nan or infinite; clean the"
            " calibration data, or round this layer to nearest"
        )
    typical = diagonal.mean().clamp(min=1e-30)
    moment = moment + torch.diag(torch.where(diagonal > 0, damping * typical, typical))
    while True:
        factor, failed = torch.linalg.cholesky_ex(moment)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed:
            return upper
        moment = moment + torch.diag(torch.full_like(diagonal, float(damping * typical)))
        damping *= 2
