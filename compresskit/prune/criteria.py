"""Criteria: which channels matter. `(Slices) -> scores (channels,)`, larger = keep.

Row c of `Slices` holds every weight that vanishes with channel c, so a criterion is written once for all kinds of layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class NeedsGradients(Exception):
    """Raised by `Slices.gradient` where none were collected; the planner then collects them and asks again."""


@dataclass(frozen=True, kw_only=True)
class Slices:
    """All that vanishes with each channel of one group.

    weight: (channels, K), every weight of convolutions and linear layers in a row; the rows that make the channel and
        the columns that read it. Norms and biases are left out: they have another scale.
    reads: (K,) bool, which of the K are columns of a layer that reads the channel.
    grad: (channels, K) gradient of the loss of one batch, or None.
    """

    weight: Tensor
    reads: Tensor
    grad: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """The gradients; asking for them is how a criterion says that it needs them."""
        if self.grad is None:
            raise NeedsGradients
        return self.grad


Criterion = Callable[[Slices], Tensor]


def l2(slices: Slices) -> Tensor:
    """Euclidean norm of the row (Li et al., 1608.08710, with L2 and over the whole group)."""
    return torch.linalg.vector_norm(slices.weight, dim=1)


def taylor(slices: Slices) -> Tensor:
    """Squared first-order change of the loss when the channel is removed (Molchanov et al., 1906.10771, eq. 8).

    Removing a channel is removing the columns that read it, so only those are summed; a group that nothing with weights
    reads falls back on the rows that make it.
    """
    change = slices.weight * slices.gradient
    used = slices.reads if bool(slices.reads.any()) else torch.ones_like(slices.reads)
    return change[:, used].sum(1).square()


#: Every criterion of the library; the contract tests run over this list.
CRITERIA = (l2, taylor)
