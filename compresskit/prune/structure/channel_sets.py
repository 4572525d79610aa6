"""Channel sets: channels that can only be removed together, kept by a union-find over integer labels.

Every element of every activation carries a label, the number of the channel set it belongs to. Two labels are special: 0 for
values that cannot be removed (inputs, padding, constants), and `UNCONSTRAINED` (-1) for copies that take any width. Joining two
labels merges their sets; joining a label with 0 locks its set. `AxisLabels` says to which set each index of a dimension of a
parameter belongs.

Labels of an activation are a tensor of its shape. Dimensions along which labels do not vary are expanded (stride 0), so they take
no memory; the functions at the end of this file create and inspect such tensors.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: The label of a value that was copied along a dimension, or is not known: it adds no constraint.
UNCONSTRAINED = -1

#: What a tensor does with its channels: makes them ("out"), reads them ("in"), or has one entry for each, like a norm ("with").
Role = Literal["out", "in", "with"]


@dataclass(frozen=True, kw_only=True)
class AxisLabels:
    """Index i of dimension `dim` of a tensor belongs to channel set `labels[i]`; -1 where another record says so."""

    tensor: str
    dim: int
    labels: Tensor
    role: Role


class ChannelSets:
    """Union-find over labels 1, 2, 3, ...; label 0 stands for everything that cannot be removed.

    locks: root label -> why the set cannot be removed. axes: the dimensions of parameters and buffers that belong to sets.
    """

    def __init__(self) -> None:
        self.parent = array("q", [0])
        self.locks: dict[int, str] = {}
        self.axes: list[AxisLabels] = []
        self.unions = 0
        self._table: tuple[int, int, Tensor] = (-1, -1, torch.zeros(0))

    def copy(self) -> ChannelSets:
        """An independent copy of the same state."""
        other = ChannelSets()
        other.parent, other.locks, other.axes = self.parent[:], dict(self.locks), list(self.axes)
        return other

    def fresh(self, count: int) -> Tensor:
        """New labels, (count,), each a set of its own."""
        start = len(self.parent)
        self.parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def find(self, label: int) -> int:
        """The root label of a label's set."""
        root = label
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[label] != root:
            self.parent[label], label = root, self.parent[label]
        return root

    def roots(self, labels: Tensor) -> Tensor:
        """The root label of every entry; 0 for what belongs to no set."""
        unions, count, table = self._table
        if (unions, count) != (self.unions, len(self.parent)):
            table = torch.frombuffer(self.parent, dtype=torch.long).clone()  # a view would keep the array from growing
            while not torch.equal(table, jumped := table[table]):
                table = jumped
            self._table = (self.unions, len(self.parent), table)
        small = collapse_expanded(labels)
        found = table[small.clamp(min=0)]
        return found if small is labels else found.expand(labels.shape)

    def join(self, a: Tensor, b: Tensor, reason: str) -> Tensor:
        """Merge the sets of a[i] and b[i], for tensors that broadcast; returns labels of the merged sets.

        Where one of the two is 0, the set of the other is locked for `reason`.
        """
        a, b = torch.broadcast_tensors(a, b)
        if torch.equal(a, b):
            return a
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)])
        pairs = torch.unique(pairs[:, (pairs[0] != pairs[1]) & (pairs >= 0).all(0)], dim=1)
        for first, second in pairs.T.tolist():
            if first == 0 or second == 0:
                self.locks.setdefault(self.find(first or second), reason)
                continue
            one, other = self.find(first), self.find(second)
            if one != other:
                self.parent[other] = one
                self.unions += 1
                if other in self.locks:
                    self.locks.setdefault(one, self.locks.pop(other))
        return torch.where((a > 0) | (b < 0), a, b)

    def join_rows(self, rows: Tensor, reason: str) -> Tensor:
        """Merge, for labels (n, ...), the sets at the same position of every row; returns `rows`."""
        self.join(rows[:1], rows, reason)
        return rows

    def lock(self, labels: Tensor, reason: str) -> None:
        """Lock the sets of these labels; the first reason given for a set is the one that is reported."""
        for label in torch.unique(collapse_expanded(labels)).tolist():
            if label > 0:
                self.locks.setdefault(self.find(label), reason)

    def all_locked(self, labels: Tensor) -> bool:
        """Whether none of these labels can be removed, as far as is known yet."""
        return all(label <= 0 or self.find(label) in self.locks for label in torch.unique(collapse_expanded(labels)).tolist())

    def add_axis(self, tensor: str, dim: int, labels: Tensor, role: Role) -> None:
        """Record that index i of a dimension of a tensor belongs to the set of labels[i]."""
        self.axes.append(AxisLabels(tensor=tensor, dim=dim, labels=labels, role=role))


def collapse_expanded(labels: Tensor) -> Tensor:
    """The same labels with expanded dimensions (stride 0) reduced to size 1; looks at strides only."""
    for dim in range(labels.ndim):
        if labels.stride(dim) == 0 and labels.shape[dim] > 1:
            labels = labels.narrow(dim, 0, 1)
    return labels


def collapse(labels: Tensor) -> Tensor:
    """The same labels with every dimension along which they do not vary reduced to size 1; compares values."""
    small = collapse_expanded(labels)
    for dim in range(small.ndim):
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            if bool((small == first).all()):
                small = first
    return small


def tighten(labels: Tensor) -> Tensor:
    """The same labels in the same shape, expanded without memory along every dimension where they do not vary."""
    return collapse(labels).expand(labels.shape)


def varying_dims(labels: Tensor) -> list[int]:
    """Dimensions along which labels differ."""
    small = collapse(labels)
    return [d for d in range(small.ndim) if small.shape[d] > 1]


def expand_along(vector: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Labels of shape `shape` with `vector`, (shape[dim],), along `dim` and the same everywhere else; takes no memory."""
    view = [1] * len(shape)
    view[dim] = len(vector)
    return vector.view(view).expand(shape)


def fixed_labels(shape: tuple[int, ...]) -> Tensor:
    """Labels of a value in which nothing can be removed: all 0."""
    return torch.zeros((), dtype=torch.long).expand(shape)
