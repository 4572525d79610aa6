"""Several optimizers on one model: which run's step ends which gradients, and which loss scale they are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from compresskit.base.errors import TrainingError


class GradientOwner:
    """The gradients of one run: of what its optimizer has, and of what no run's optimizer has.

    Those of another run wait for its step. Where it makes none, the next backward pass of any run of the model drops them:
    otherwise, of two runs that take turns, each would step by both losses.

    others: the runs that go on and share parameters of the model with this one.
    optimized: what the optimizer has.
    pending: whether this run made a backward pass since its last step.
    left_over: whether a step of another run has left gradients here, of a pass that this run did not make.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.others: WeakSet[GradientOwner] = WeakSet()
        self.names: dict[nn.Parameter, str] = {}
        self.optimized: dict[nn.Parameter, str] = {}
        self.pending = self.left_over = False
        # Which runs' loss scales the gradients are in, by id, and None for none; kept only where there are others.
        self._scales: set[int | None] = set()
        for earlier in [owner for owner in _RUNNING if owner.optimizer is optimizer]:
            earlier.retire()  # prepare was called again
        _RUNNING.add(self)

    def own(self, optimized: dict[nn.Parameter, str], names: dict[nn.Parameter, str]) -> None:
        """Note which parameters the optimizer and the model have now."""
        self.optimized, self.names = optimized, names
        for other in _RUNNING:
            if other is not self and not names.keys().isdisjoint(other.names):
                self.others.add(other)
                other.others.add(self)
                self.left_over |= other.left_over

    def retire(self) -> None:
        """End the claim to any gradient."""
        _RUNNING.discard(self)
        for other in self.others:
            other.others.discard(self)
        self.others.clear()

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are this run's."""
        if not self.others:
            return self.names
        theirs = {p for other in self.others for p in other.optimized if p not in self.optimized}
        return [p for p in self.names if p not in theirs]

    def drop_earlier_(self) -> None:
        """Drop the gradients of before this run, which its first step would take for its own."""
        for parameter in self.parameters():
            parameter.grad = None

    def clear_(self) -> None:
        """Drop this run's gradients, and note that those of the others are left over."""
        for parameter in self.parameters():
            parameter.grad = None
        self._forget()
        for other in self.others:
            other.left_over = not other.pending

    @contextmanager
    def backward(self, *, scaled: bool) -> Iterator[None]:
        """Make a backward pass of this run in the block; `scaled` says whether under its loss scale."""
        if not self.others:
            yield
            return
        owners = [self, *self.others]
        self._drop_left_over(owners)
        before = {p: _mark(p.grad) for owner in owners for p in owner.optimized}
        yield
        self.pending = True
        for owner in owners:
            if any(_mark(p.grad) != before[p] for p in owner.optimized):
                owner._scales.add(id(self) if scaled else None)

    def check_scale(self) -> None:
        """Refuse to step by gradients in the loss scale of another run, or in several scales."""
        if self._scales <= {None} or self._scales <= {id(self)}:
            return
        name = next(iter(self.optimized.values()))
        raise TrainingError(
            f"step: a backward pass of another run of this model gave {name} gradients in another loss scale than this run's;"
            " give one optimizer the parameters of both as groups, or train under a policy without a loss scale, such as AMP_BF16"
        )

    def _drop_left_over(self, owners: list[GradientOwner]) -> None:
        waiting = {p for owner in owners if owner.pending for p in owner.optimized}
        for owner in owners:
            if owner.left_over:
                for parameter in owner.optimized:
                    if parameter not in waiting:
                        parameter.grad = None
                owner._forget()

    def _forget(self) -> None:
        self.pending = self.left_over = False
        self._scales.clear()


#: The runs that go on.
_RUNNING: WeakSet[GradientOwner] = WeakSet()


def trained_by_others(optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, str]:
    """The parameters that the optimizers of other runs have, with their names there."""
    return {p: name for owner in _RUNNING if owner.optimizer is not optimizer for p, name in owner.optimized.items()}


def _mark(grad: Tensor | None) -> tuple[int, int] | None:
    """What changes where a backward pass adds to a gradient."""
    return None if grad is None else (id(grad), grad._version)
