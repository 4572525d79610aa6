"""Blocks that get parameters or modules from the model around them are timed alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compresskit.prune.depth import costs
from compresskit.prune.depth.find_blocks import find_blocks


class Turning(nn.Module):
    """Turns by a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.angle, self.shift = nn.Parameter(torch.ones(8)), nn.Buffer(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angle + self.shift


class Given:
    """An object that holds what a block reads."""

    def __init__(self, what: nn.Module | nn.Parameter) -> None:
        self.what = [what]


class Handed(nn.Module):
    """A block that gets a parameter, or a module with some, from the model around it, or an object with one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, given: nn.Module | nn.Parameter | Given) -> torch.Tensor:
        given = given.what[0] if isinstance(given, Given) else given
        return x + torch.relu(self.layer(given(x) if isinstance(given, nn.Module) else x * given))


class Handing(nn.Module):
    def __init__(self, what: nn.Module | nn.Parameter, held: bool) -> None:
        super().__init__()
        self.what, self.held = what, held
        self.blocks = nn.ModuleList(Handed() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = Given(self.what) if self.held else self.what
        for block in self.blocks:
            x = block(x, given)
        return x


@pytest.mark.parametrize("held", [False, True], ids=["alone", "held"])
@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(8)), Turning], ids=["parameter", "module"])
def test_blocks_that_get_parameters_or_modules_are_timed(make, held, monkeypatch, caplog) -> None:
    monkeypatch.setattr(costs, "latency", lambda files, inputs, seconds: (1.0, 4.0))
    model, x = Handing(make(), held).eval(), (torch.randn(2, 5, 8),)
    assert costs.milliseconds(model, x, find_blocks(model, x).removable) == {"blocks.0": 1.0, "blocks.1": 1.0}
    assert not caplog.text


def test_blocks_of_a_compiled_model_that_has_run_are_handed_what_it_gives_them() -> None:
    """Its code calls no hooks of those that are registered later."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), (torch.randn(2, 8),)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x[0][:1])
    (given, *_), _ = costs.received_by(compiled, x, ["_orig_mod.2"])["_orig_mod.2"]
    (wanted, *_), _ = costs.received_by(model, x, ["2"])["2"]
    assert torch.equal(given, wanted)
