"""Several runs in one training: which run's step ends which gradients, and which loss scale they are in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock, get_ident
from weakref import WeakSet

import torch
from torch import Tensor, nn

from compresskit.base.errors import TrainingError


class GradientOwner:
    """The gradients of one run: of what its optimizer has, and of what no run's optimizer has.

    A backward pass of a run may reach the parameters of others: those of the same model, and those of another model that the loss
    went through, as a generator's loss goes through the discriminator. What it leaves there waits for their step. Where they make
    none, their next backward pass drops it, as does the next one of the run that left it or of any run of the model: otherwise,
    of two runs that take turns, each would step by both losses.

    others: the runs that go on and share parameters of the model with this one.
    optimized: what the optimizer has.
    pending: whether this run made a backward pass since its last step.
    given: whether a pass of another run gave gradients here, of which no step was made, and none of this run's own waited.
    givers: those other runs, as long as they go on.

    Trainings in several threads have nothing of one another unless they share parameters, and change while a pass here goes on.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.others: WeakSet[GradientOwner] = WeakSet()
        self.givers: WeakSet[GradientOwner] = WeakSet()
        self.names: dict[nn.Parameter, str] = {}
        self.optimized: dict[nn.Parameter, str] = {}
        self.pending = self.given = False
        # Which runs' loss scales the gradients are in, by id, and None for none; kept only where there are other runs.
        self._scales: set[int | None] = set()
        self._thread = get_ident()  # that made the last backward pass or step, and before them the run
        for earlier in [owner for owner in _owners_in(_RUNNING) if owner.optimizer is optimizer]:
            earlier.retire()  # prepare was called again
        with LOCK:
            _RUNNING.add(self)

    @property
    def left_over(self) -> bool:
        """Whether other runs have made their steps and left gradients here, of passes that this run did not make."""
        return self.given and not self.pending and not any(giver.pending for giver in _owners_in(self.givers))

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that a step is to be made of."""
        return not self.left_over and any(p.grad is not None for p in self.parameters())

    def own(self, optimized: dict[nn.Parameter, str], names: dict[nn.Parameter, str]) -> None:
        """Note which parameters the optimizer and the model have now."""
        self.optimized, self.names = optimized, names
        with LOCK:
            for other in _RUNNING:
                if other is not self and not names.keys().isdisjoint(other.names):
                    self.others.add(other)
                    other.others.add(self)

    def retire(self) -> None:
        """End the claim to any gradient."""
        with LOCK:
            _RUNNING.discard(self)
            for other in self.others:
                other.others.discard(self)
            for owner in _RUNNING:
                owner.givers.discard(self)
            self.others.clear()
            self.givers.clear()

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters whose gradients are this run's."""
        if not self.others:
            return self.names
        theirs = {p for other in _owners_in(self.others) for p in other.optimized if p not in self.optimized}
        return [p for p in self.names if p not in theirs]

    def drop_earlier_(self) -> None:
        """Drop the gradients of before this run, which its first step would take for its own."""
        for parameter in self.parameters():
            parameter.grad = None

    def clear_(self) -> None:
        """Drop this run's gradients; what its passes gave the others is left over then."""
        for parameter in self.parameters():
            parameter.grad = None
        self._thread = get_ident()
        self._forget()

    @contextmanager
    def backward(self, *, scaled: bool) -> Iterator[None]:
        """Make a backward pass of this run in the block; `scaled` says whether under its loss scale."""
        # Runs that were prepared together may begin in another thread.
        threads = {self._thread, get_ident()}
        self._thread = get_ident()
        owners = [self, *(o for o in _owners_in(_RUNNING) if o is not self and self._concerns(o, threads))]
        if len(owners) == 1 and not self.given:
            yield
            return
        waiting = [_marks(owner.optimized) for owner in owners]
        for owner, marks in zip(owners, waiting, strict=True):
            if marks and not owner.pending and not owner.given and self._concerns(owner, threads):
                # Gradients that no pass of a run gave are of a pass that the user made for the run that has the parameters.
                owner.pending = True
        self._drop_left_over(owners)
        before = [_marks(owner.optimized) if marks else marks for owner, marks in zip(owners, waiting, strict=True)]
        try:
            yield
        finally:  # an error may have left a part of the gradients
            for owner, marks in zip(owners, before, strict=True):
                # A run whose first pass another thread has made meanwhile has its gradients from there.
                if _has_more(owner.optimized, marks) and self._concerns(owner, threads):
                    owner._scales.add(id(self) if scaled else None)
                    if owner is not self:
                        owner.given = True
                        with LOCK:
                            owner.givers.add(self)
            self.pending = True

    def _concerns(self, owner: GradientOwner, threads: set[int]) -> bool:
        """Whether a pass that this run makes in one of these threads may reach the gradients of the other."""
        return owner is self or owner._thread in threads or owner in self.others

    def check_scale(self) -> None:
        """Refuse to step by gradients in the loss scale of another run, or in several scales."""
        if self._scales <= {None} or self._scales <= {id(self)}:
            return
        name = next(iter(self.optimized.values()))
        raise TrainingError(
            f"step: a backward pass of another run gave {name} gradients in another loss scale than this run's; call backward of"
            " the run that steps, and its zero_grad() first where the other has not stepped, or give one optimizer the parameters"
            " of both as groups, or train under a policy without a loss scale, such as AMP_BF16"
        )

    def _drop_left_over(self, owners: list[GradientOwner]) -> None:
        waiting = {p for owner in owners if owner.pending for p in owner.optimized}
        for owner in owners:
            if owner.left_over and (owner is self or owner in self.others or self in owner.givers):
                for parameter in owner.optimized:
                    if parameter not in waiting:
                        parameter.grad = None
                owner._forget()

    def _forget(self) -> None:
        self.pending = self.given = False
        with LOCK:
            self.givers.clear()
        self._scales.clear()


#: The runs that go on.
_RUNNING: WeakSet[GradientOwner] = WeakSet()

#: Held where sets of runs are changed or gone through, which other threads may do at the same time.
LOCK = RLock()


def trained_by_others(optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, str]:
    """The parameters that the optimizers of other runs have, with their names there."""
    return {p: name for owner in _owners_in(_RUNNING) if owner.optimizer is not optimizer for p, name in owner.optimized.items()}


def _owners_in(owners: WeakSet[GradientOwner]) -> list[GradientOwner]:
    with LOCK:
        return list(owners)


def _mark(grad: Tensor) -> tuple[int, int]:
    """What changes where a backward pass adds to a gradient."""
    return id(grad), grad._version


def _marks(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, tuple[int, int]]:
    """The marks of the gradients that there are: few where a run is idle, as those of earlier trainings are."""
    return {p: _mark(grad) for p in parameters if (grad := p.grad) is not None}


def _has_more(parameters: Iterable[nn.Parameter], marks: Mapping[nn.Parameter, tuple[int, int]]) -> bool:
    """Whether there are gradients that were not there, or that a pass has added to."""
    return any(_mark(grad) != marks.get(p) for p in parameters if (grad := p.grad) is not None)
