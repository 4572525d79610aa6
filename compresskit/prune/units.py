"""Units: channels that live and die together, kept by a union-find over labels.

Every element of every activation carries a *label*: the number of the unit it belongs to, 0 for values that cannot be
removed (inputs, padding, constants). Joining two labels makes their units one; joining a label with 0 locks it. A
*member* says which index of which dimension of which parameter vanishes with which unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Member:
    """labels[i] is the unit that index i of dimension `dim` of a tensor vanishes with.

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
        """`find` of every entry."""
        unique, inverse = torch.unique(labels, return_inverse=True)
        return torch.tensor([self.find(v) for v in unique.tolist()], dtype=torch.long)[inverse]

    def join(self, a: Tensor, b: Tensor, reason: str) -> Tensor:
        """Make the units of a[i] and b[i] one, for tensors that broadcast; the result has the joined labels.

        Where one of the two is 0 the other is locked for `reason`.
        """
        a, b = torch.broadcast_tensors(a, b)
        if torch.equal(a, b):
            return a
        pairs = torch.unique(torch.stack([a.reshape(-1), b.reshape(-1)]), dim=1)
        for first, second in pairs[:, pairs[0] != pairs[1]].T.tolist():
            one, other = self.find(first), self.find(second)
            if 0 in (first, second):
                self._lock_root(one or other, reason)
            elif one != other:
                self.parent[other] = one
                if other in self.locks:
                    self.locks.setdefault(one, self.locks.pop(other))
        return torch.where(a > 0, a, b)

    def lock(self, labels: Tensor, reason: str) -> None:
        """Keep these units, for `reason`; the first reason given is the one that is told."""
        for label in torch.unique(labels).tolist():
            if label:
                self._lock_root(self.find(label), reason)

    def _lock_root(self, root: int, reason: str) -> None:
        if root:
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


def varying(labels: Tensor) -> list[int]:
    """Dimensions along which labels differ."""
    small = compact(labels)
    return [d for d in range(small.ndim) if small.shape[d] > 1 and bool((small != small.narrow(d, 0, 1)).any())]


def spread(vector: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """One label for each index of `dim`, the same everywhere else: (shape[dim],) to `shape`, without taking memory."""
    view = [1] * len(shape)
    view[dim] = len(vector)
    return vector.view(view).expand(shape)


def nothing(shape: tuple[int, ...]) -> Tensor:
    """Labels of a value in which nothing can be removed."""
    return torch.zeros((), dtype=torch.long).expand(shape)
