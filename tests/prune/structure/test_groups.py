"""Groups of channels: what is in them, and what is left out."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, image
from pruned import planned
from torch import nn

from compresskit import count_macs, keep
from compresskit.base.errors import SettingError
from compresskit.prune import plan_channels
from compresskit.prune.structure.groups import MacCounter, find_groups
from compresskit.prune.structure.propagate import propagate
from compresskit.prune.structure.trace import trace_model


def test_the_middle_channels_of_a_padded_shortcut_are_locked() -> None:
    model = build(networks.PaddedShortcut)
    found = find_groups(propagate(trace_model(model, image(2))), count_macs(model, image(2)))
    sizes = {g.layer: g.size for g in found.groups}
    assert sizes == {"stem.0": 16, "inner.0": 32}  # the stem's 16 tie the middle of out's 32 channels
    assert [n for reason, n in found.locked.items() if "cannot be cut" in reason] == [16]


def test_ignored_modules_keep_their_channels() -> None:
    plan = planned(build(networks.Concat), macs=0.8, ignore=("a",))
    assert not any(name.startswith("a.") for name in plan.remove if 0 in plan.remove[name])
    assert "ignored by the user" in plan.locked


def test_the_number_of_classes_stays() -> None:
    model = build(networks.Chain)
    plan = planned(model, macs=0.2)
    assert "head.bias" not in plan.remove
    assert 0 not in plan.remove.get("head.weight", {})
    assert plan.locked["an output of the model"] == 10


def test_an_unknown_name_to_ignore_is_refused() -> None:
    with pytest.raises(SettingError, match="no layer with channels stands in a module of that name"):
        plan_channels(networks.build(networks.Chain), networks.image(2), budget=keep(macs=0.5), ignore=("backbone",))


class StoredKinds(nn.Module):
    """Token kinds that are not given are read from a stored table, (1, 40)."""

    def __init__(self):
        super().__init__()
        self.embed, self.kinds = nn.Embedding(20, 32), nn.Embedding(2, 32)
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 4)
        self.register_buffer("stored", torch.zeros(1, 40, dtype=torch.long))

    def forward(self, ids):
        kinds = self.stored[:, : ids.shape[1]].expand(len(ids), ids.shape[1])
        return self.head(self.up(self.embed(ids) + self.kinds(kinds)).relu())


def test_a_table_of_positions_is_no_group_of_channels() -> None:
    plan = plan_channels(StoredKinds(), (torch.randint(0, 20, (2, 6)),), budget=keep(macs=0.5), round_to=1)
    assert "stored" not in plan.remove
    assert plan.macs <= 0.5 * plan.macs_before


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((nn.Conv2d(3, 4, 1), nn.PixelShuffle(2), nn.Conv2d(1, 8, 1)), "channels of 0 that only go together"),
        ((nn.Conv2d(3, 1, 1), nn.ReLU(), nn.Conv2d(1, 8, 1)), "a layer of one channel"),
    ],
)
def test_what_would_leave_nothing_of_a_layer_is_named(layers, reason) -> None:
    model = nn.Sequential(*layers, nn.Conv2d(8, 5, 1))
    found = find_groups(propagate(trace_model(model, image(2))), count_macs(model, image(2)))
    assert found.locked == {"an output of the model": 5, reason: 1}
    assert [group.layer for group in found.groups] == ["2"]


def test_layers_of_one_channel_beside_each_other_have_one_reason() -> None:
    model = build(OneByOne)
    found = find_groups(propagate(trace_model(model, image(2))), count_macs(model, image(2)))
    assert found.locked == {"an output of the model": 5, "a layer of one channel": 3}


class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.head = nn.ModuleList(nn.Conv2d(1, 1, 3) for _ in range(3)), nn.Conv2d(3, 5, 1)

    def forward(self, x):
        return self.head(torch.cat([part(x[:, i : i + 1]) for i, part in enumerate(self.parts)], 1))


def test_savings_are_those_of_a_fresh_count_after_every_cut() -> None:
    """What a cut saves is remembered until an operator of the group changes."""
    model = build(networks.Concat)
    found = find_groups(propagate(trace_model(model, image(2))), count_macs(model, image(2)))
    counter, cuts = MacCounter(found), []
    for step in range(12):
        group = found.groups[step % len(found.groups)]
        counter.cut(group, 1)
        cuts.append(group)
        fresh = MacCounter(found)
        for each in cuts:
            fresh.cut(each, 1)
        assert [counter.saving(g, n) for g in found.groups for n in (1, 2)] == [
            fresh.saving(g, n) for g in found.groups for n in (1, 2)
        ]


def test_rows_of_weights_are_those_of_the_indices() -> None:
    """Columns and rows, whole dimensions and parts of them, in the order of the group's tensors."""
    model = build(networks.Concat)
    found = find_groups(propagate(trace_model(model, image(2))), count_macs(model, image(2)))
    for group in found.groups:
        wanted = [
            torch.stack([model.get_parameter(name).movedim(dim, 0)[row].flatten() for row in indices])
            for (name, dim, _), indices in group.indices.items()
            if name in dict(model.named_parameters()) and model.get_parameter(name).ndim > 1
        ]
        assert torch.equal(group.slices(model, "").weight, torch.cat(wanted, 1))
