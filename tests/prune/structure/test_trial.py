"""Trial repair: sizes in the code that the graph does not show."""

from __future__ import annotations

import networks
from networks import image, trained_like
from pruned import planned
from torch import nn

from compresskit import keep
from compresskit.prune import apply_, plan_channels


def test_channels_whose_size_is_written_in_the_code_are_locked() -> None:
    model = trained_like(networks.HardView(), image(16))
    plan = planned(model, macs=0.7)
    assert any("sizes written in the code" in reason for reason in plan.locked)
    apply_(model, plan)
    assert model.head.in_features == 256
    assert model.a[0].out_channels < 16


class Silent(nn.Module):
    """Fails in a way of its own once it is narrower."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = networks.conv(3, 16), networks.conv(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.b(self.a(x))
        if x.shape[1] != 16:
            raise ValueError("made for 16 channels")
        return self.head(x.mean((2, 3)))


def test_code_that_refuses_narrow_layers_locks_them() -> None:
    plan = plan_channels(networks.build(Silent), networks.image(2), budget=keep(macs=0.8), round_to=1)
    assert any("made for 16 channels" in reason for reason in plan.locked)
    assert "b.0.weight" not in plan.remove or 0 not in plan.remove["b.0.weight"]
