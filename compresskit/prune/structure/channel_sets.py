"""Units: channels that live and die together, kept by a union-find over labels.

Every element of every activation carries a *label*: the number of the unit it belongs to, 0 for values that cannot be
removed (inputs, padding, constants), -1 for copies that take whatever width they are asked for. Joining two labels makes their
units one; joining a label with 0 locks it. A *member* says which index of which dimension of which parameter vanishes with
which unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: The label of a value that was copied along a dimension, or is not known: it holds nothing, and nothing holds it.
ANY = -1


@dataclass(frozen=True, kw_only=True)
class Member:
    """labels[i] is the unit that index i of dimension `dim` of a tensor vanishes with; -1 where another member says so.

    role: "out" where the tensor makes the channel, "in" where it reads it, "with" where it goes along (norms).
    """

    tensor: str
    dim: int
    labels: Tensor
    role: str


class Units:
    """Union-find over labels 1, 2, 3, ...; 0 is what cannot be removed."""

    def __init__(self) -> None:
        self.parent = [0]
        self.locks: dict[int, str] = {}
        self.members: list[Member] = []
        self.unions = 0
        self._table: tuple[int, int, Tensor] = (-1, -1, torch.zeros(0))

    def copy(self) -> Units:
        """Another union-find of the same state."""
        other = Units()
        other.parent, other.locks, other.members = list(self.parent), dict(self.locks), list(self.members)
        return other

    def fresh(self, count: int) -> Tensor:
        """New labels, (count,)."""
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def find(self, label: int) -> int:
        """The number that all labels of a unit have in common."""
        root = label
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[label] != root:
            self.parent[label], label = root, self.parent[label]
        return root

    def roots(self, labels: Tensor) -> Tensor:
        """`find` of every entry; 0 for what belongs to no unit."""
        unions, count, table = self._table
        if (unions, count) != (self.unions, len(self.parent)):
            table = torch.tensor(self.parent)
            while not torch.equal(table, jumped := table[table]):
                table = jumped
            self._table = (self.unions, len(self.parent), table)
        return table[compact(labels).clamp(min=0)].expand(labels.shape)

    def join(self, a: Tensor, b: Tensor, reason: str) -> Tensor:
        """Make the units of a[i] and b[i] one, for tensors that broadcast; the result has the joined labels.

        Where one of the two is 0 the other is locked for `reason`.
        """
        a, b = torch.broadcast_tensors(a, b)
        if torch.equal(a, b):
            return a
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)])
        pairs = torch.unique(pairs[:, (pairs[0] != pairs[1]) & (pairs >= 0).all(0)], dim=1)
        for first, second in pairs.T.tolist():
            if first == 0 or second == 0:
                self._lock_root(self.find(first or second), reason)
                continue
            one, other = self.find(first), self.find(second)
            if one != other:
                self.parent[other] = one
                self.unions += 1
                if other in self.locks:
                    self.locks.setdefault(one, self.locks.pop(other))
        return torch.where((a > 0) | (b < 0), a, b)

    def lock(self, labels: Tensor, reason: str) -> None:
        """Keep these units, for `reason`; the first reason given is the one that is told."""
        for label in torch.unique(compact(labels)).tolist():
            if label > 0:
                self._lock_root(self.find(label), reason)

    def _lock_root(self, root: int, reason: str) -> None:
        self.locks.setdefault(root, reason)

    def member(self, tensor: str, dim: int, labels: Tensor, role: str) -> None:
        """Index i of a dimension of a tensor vanishes with unit labels[i]."""
        self.members.append(Member(tensor=tensor, dim=dim, labels=labels, role=role))


def compact(labels: Tensor) -> Tensor:
    """The same labels with every dimension along which they do not vary cut down to 1."""
    for dim in range(labels.ndim):
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def tight(labels: Tensor) -> Tensor:
    """The same labels, spread without memory along every dimension where they turn out not to vary."""
    small = compact(labels)
    for dim in range(small.ndim):
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            if bool((small == first).all()):
                small = first
    return small.expand(labels.shape)


def varying(labels: Tensor) -> list[int]:
    """Dimensions along which labels differ."""
    small = compact(tight(labels))
    return [d for d in range(small.ndim) if small.shape[d] > 1]


def spread(vector: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """One label for each index of `dim`, the same everywhere else: (shape[dim],) to `shape`, without taking memory."""
    view = [1] * len(shape)
    view[dim] = len(vector)
    return vector.view(view).expand(shape)


def nothing(shape: tuple[int, ...]) -> Tensor:
    """Labels of a value in which nothing can be removed."""
    return torch.zeros((), dtype=torch.long).expand(shape)
