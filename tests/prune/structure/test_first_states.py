"""First states of zeros that the code writes out: the attribute that gives their width follows, or they are locked by name."""

from __future__ import annotations

import pytest
import torch
from pruned import assert_equals_zeroed
from torch import nn

from compresskit import remove
from compresskit.prune import plan_channels


class Tutorial(nn.Module):
    """An LSTM of two layers as tutorials write it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.layers = 24, 2
        self.lstm, self.head = nn.LSTM(8, 24, 2, batch_first=True), nn.Linear(24, 6)

    def states(self, x):
        zeros = torch.zeros(self.layers, x.size(0), self.hidden, dtype=x.dtype).to(x.device)
        return zeros, torch.zeros_like(zeros)

    def forward(self, x):
        return self.head(self.lstm(x, self.states(x))[0][:, -1])


class Helper(Tutorial):
    def states(self, x):
        h = self.head.weight.new_zeros(self.layers, len(x), self.hidden)
        return h, h.clone()


class Ones(Tutorial):
    def states(self, x):
        return (x.new_full((self.layers, len(x), self.hidden), 0.5),) * 2


class Decoder(nn.Module):
    """Reads what it attends to and its own state, before which channels of an encoder stand."""

    width = None

    def __init__(self):
        super().__init__()
        self.hidden = 16
        self.encoder, self.query = nn.GRU(8, 24, batch_first=True), nn.Linear(16, 24)
        self.cell, self.head = nn.GRUCell(40, 16), nn.Linear(16, 5)

    def forward(self, x):
        read = self.encoder(x)[0]
        h = x.new_zeros(len(x), self.width or self.hidden)
        for _ in range(3):
            weights = torch.bmm(read, self.query(h).unsqueeze(2)).softmax(1)
            h = self.cell(torch.cat([(weights * read).sum(1), h], 1), h)
        return self.head(h)


class WrittenOut(Decoder):
    width = 16


class Step(nn.Module):
    """One step of an LSTM, by hand."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(24, 64)

    def forward(self, x, h, c):
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class ByHand(nn.Module):
    """The states are made by another module than the one that reads them."""

    def __init__(self):
        super().__init__()
        self.hidden, self.step, self.head = 16, Step(), nn.Linear(16, 5)

    def forward(self, x):
        h = c = torch.zeros(len(x), self.hidden, dtype=x.dtype).to(x.device)
        for t in range(x.shape[1]):
            h, c = self.step(x[:, t], h, c)
        return self.head(h)


class Elman(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = 24
        self.enter, self.back, self.head = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = torch.tanh(self.enter(x[:, t]) + self.back(h))
        return self.head(h)


class ConvLSTM(nn.Module):
    """Its states stand behind the channels of another layer."""

    width = None

    def __init__(self):
        super().__init__()
        self.hidden = 16
        self.enter, self.gates, self.head = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(24, 64, 3, 1, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        h = c = None
        for t in range(x.shape[1]):
            y = self.enter(x[:, t, None, None].expand(-1, -1, 8, -1)).relu()
            if h is None:
                h = y.new_zeros(len(y), self.width or self.hidden, *y.shape[2:])
                c = torch.zeros_like(h)
            i, f, o, g = self.gates(torch.cat([y, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h)


class WrittenOutConv(ConvLSTM):
    width = 16


class Stacked(nn.Module):
    """The states of two cells are rows of one tensor, which may be written into."""

    written = False

    def __init__(self):
        super().__init__()
        self.hidden, self.cells, self.head = 16, nn.ModuleList([nn.GRUCell(8, 16), nn.GRUCell(16, 16)]), nn.Linear(16, 5)

    def forward(self, x):
        states = x.new_zeros(2, len(x), self.hidden)
        rows = states if self.written else [*states]
        for y in x.unbind(1):
            for i, cell in enumerate(self.cells):
                y = rows[i] = cell(y, rows[i])
        return self.head(y)


class WrittenInto(Stacked):
    """Beside the states stand channels that can be cut."""

    written = True

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x):
        return super().forward(self.enter(x))


def planned_half(kind, channels=0.5):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(3, 7, 8)
    plan = plan_channels(model, x, remove(channels=channels), round_to=1)
    assert_equals_zeroed(model, plan, (x,))
    return plan


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        (Tutorial, "lstm.weight_hh_l1"),
        (Helper, "lstm.weight_hh_l1"),
        (Ones, "lstm.weight_hh_l1"),
        (Decoder, "query.weight"),
        (ByHand, "step.gates.weight"),
        (Elman, "back.weight"),
        (ConvLSTM, "gates.weight"),
        (Stacked, "cells.1.weight_hh"),
    ],
)
def test_the_attribute_that_gives_the_width_of_a_first_state_follows(kind, weight) -> None:
    plan = planned_half(kind)
    width, after = plan.attributes["hidden"]
    assert after < width
    assert plan.attributes.keys() == {"hidden"}
    assert plan.remove[weight][1]
    assert plan.locked.keys() <= {"an output of the model"}


@pytest.mark.parametrize(("kind", "other"), [(WrittenOut, "encoder.weight_hh_l0"), (WrittenOutConv, "enter.weight")])
def test_a_width_written_in_the_code_is_named_and_locks_no_other_channels(kind, other) -> None:
    plan = planned_half(kind)
    reason = "new_zeros in the model makes a state of 16 channels, as the code says; a copy that was cut there did not run"
    assert [count for name, count in plan.locked.items() if name.startswith(reason)] == [16]
    assert plan.remove[other][0]


def test_a_state_that_is_written_into_is_none_of_zeros() -> None:
    plan = planned_half(WrittenInto)
    assert plan.locked["an initial state of gru_cell in cells.0 cannot be cut"] == 16
    assert plan.remove.keys() == {"enter.weight", "enter.bias", "cells.0.weight_ih"}


class OneLearned(nn.Module):
    """The first state of one cell is learned, that of the next one a literal of the same code."""

    def __init__(self):
        super().__init__()
        self.first, self.cells, self.head = nn.Parameter(torch.randn(1, 20)), nn.ModuleList(), nn.Linear(24, 5)
        self.cells.extend([nn.GRUCell(8, 20), nn.GRUCell(20, 24)])

    def forward(self, x):
        g, h = self.first.expand(len(x), -1), x.new_zeros(len(x), 24)
        for y in x.unbind(1):
            g = self.cells[0](y, g)
            h = self.cells[1](g, h)
        return self.head(h)


def test_of_the_sizes_of_one_module_those_alone_are_locked_at_which_a_copy_fails() -> None:
    plan = planned_half(OneLearned, channels=0.3)
    (reason,) = plan.locked.keys() - {"an output of the model"}
    assert reason.startswith("new_zeros in the model makes a state of 24 channels, as the code says; a copy that was cut there")
    assert plan.locked[reason] == 24
    assert plan.remove["first"][1] == plan.remove["cells.1.weight_ih"][1]
