"""Networks whose inputs cannot be cut to a few rows by their first dimensions alone: masks, graphs, frames, time before batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MASKED_DIMS = {"x": {0: "batch", 1: "length"}, "mask": {0: "length", 1: "length"}}
GRAPH_DIMS = {"x": {0: "nodes"}, "edges": {1: "edges"}}
MEMORY_DIMS = {"x": {0: "batch"}, "memory": {0: "slots", 1: "batch"}}


class Masked(nn.Module):
    """Attention of rows (batch, length, 8) with one mask (length, length) for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.m, self.n = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q(x).chunk(3, -1)
        attention = (q @ k.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1)
        return self.n(F.relu(self.m(attention @ v)))


def masked_inputs(rows: int = 16, length: int = 9) -> tuple[Tensor, Tensor]:
    """A batch, and the mask of what comes later."""
    return torch.randn(rows, length, 8), torch.ones(length, length).tril().bool()


class Graph(nn.Module):
    """Two rounds of messages along edges (2, edges) of nodes (nodes, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = F.relu(layer(x))
            x = x.index_add(0, edges[1], x[edges[0]])
        return self.o(x)


def graph_inputs(nodes: int = 12, edges: int = 30) -> tuple[Tensor, Tensor]:
    """A random graph, whose first edge joins the first node and the last."""
    return torch.randn(nodes, 6), torch.cat([torch.tensor([[0], [nodes - 1]]), torch.randint(0, nodes, (2, edges - 1))], 1)


class Frames(nn.Module):
    """Videos of four frames each as rows, (videos * 4, 6): a class for each video."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(F.relu(self.a(x)).view(-1, 4, 32).mean(1))


class TimeFirst(nn.Module):
    """A GRU of (steps, batch, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.o = nn.GRU(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.gru(x)[0][-1])


class Memory(nn.Module):
    """Rows (batch, length, 8) that read a memory with time first, (slots, batch, 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.o = nn.Linear(8, 16), nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keys = self.keys(memory)
        return self.o((self.queries(x) @ keys.permute(1, 2, 0)).softmax(-1) @ keys.transpose(0, 1))
