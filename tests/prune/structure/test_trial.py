"""Trial repair: sizes in the code that the graph does not show."""

from __future__ import annotations

import json

import networks
import pytest
import torch
from networks import image, trained_like
from pruned import assert_equals_zeroed, planned
from torch import nn

import compresskit as ck
from compresskit import keep, remove
from compresskit.base.errors import ModelError
from compresskit.prune import Plan, apply_, plan_channels


def test_channels_whose_size_is_written_in_the_code_are_locked() -> None:
    model = trained_like(networks.HardView(), image(16))
    plan = planned(model, macs=0.7)
    assert any("sizes written in the code" in reason for reason in plan.locked)
    apply_(model, plan)
    assert model.head.in_features == 256
    assert model.a[0].out_channels < 16


class Scaled(nn.Sequential):
    """Repeats its width in a tuple."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 5, 3))
        self.gain, self.gain_shape = nn.Parameter(torch.randn(32)), (32, 1, 1)

    def forward(self, x):
        return self[1](self[0](x).relu() * self.gain.view(self.gain_shape))


def test_a_tuple_that_repeats_a_width_follows_it(tmp_path) -> None:
    model, x = Scaled(), image(2)
    plan = plan_channels(model, x, budget=keep(macs=0.5))
    assert plan.attributes == {"gain_shape": ((32, 1, 1), (16, 1, 1))}
    apply_(model, Plan.from_json(json.loads(json.dumps(plan.to_json()))))
    assert model.gain_shape == (16, 1, 1)
    ck.save(model, tmp_path / "saved")
    assert torch.equal(ck.load(Scaled(), tmp_path / "saved").eval()(*x), model.eval()(*x))


class GroupedQueries(nn.Sequential):
    """Four heads of queries read two of keys and values."""

    def forward(self, x):
        q, k, v = (self[i](x).view(*x.shape[:2], -1, 8).transpose(1, 2) for i in range(3))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self[3](heads.transpose(1, 2).flatten(2))


def test_heads_of_grouped_query_attention_go_with_the_queries_that_read_them() -> None:
    model = GroupedQueries(*(nn.Linear(32, n) for n in (32, 16, 16, 5)))
    x = torch.randn(4, 6, 32)
    apply_(model, plan_channels(model, (x,), budget=remove(channels=0.5)))
    assert [layer.out_features for layer in model] == [16, 8, 8, 5]
    assert model(x).shape == (4, 6, 5)


class SharedWidth(nn.Sequential):
    """Queries, keys and values read one width from one attribute."""

    def __init__(self):
        super().__init__(*(nn.Linear(*sizes) for sizes in [(64, 64)] * 4 + [(64, 128), (128, 64)]))
        self.width = 16

    def forward(self, x):
        q, k, v = (self[i](x).view(*x.shape[:2], -1, self.width).transpose(1, 2) for i in range(3))
        x = x + self[3](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self[5](self[4](x).relu())


def test_widths_that_share_an_attribute_shrink_together() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), SharedWidth(), SharedWidth(), nn.Linear(64, 10))
    plan = plan_channels(model, (torch.randn(4, 20, 16),), budget=keep(macs=0.5))
    assert 0.48 <= plan.macs / plan.macs_before <= 0.5
    apply_(model, plan)
    for block in model[1], model[2]:
        assert block[0].out_features == block[1].out_features == block[2].out_features == 4 * block.width


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


class TransposedLinear(nn.Module):
    """A linear layer as GPT-2 has it: a weight of (inputs, outputs), and an attribute that gives the result its size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.outputs)


def test_an_attribute_follows_the_result_where_inputs_of_the_same_width_shrink() -> None:
    """The first layer gets narrower; the second one, as wide on both sides, keeps its width as the model's output."""
    torch.manual_seed(0)
    model, x = nn.Sequential(TransposedLinear(16, 16), nn.ReLU(), TransposedLinear(16, 16)).eval(), torch.randn(3, 5, 16)
    plan = plan_channels(model, (x,), budget=keep(macs=0.5), round_to=1)
    assert plan.attributes == {"0.outputs": (16, 8)}
    assert_equals_zeroed(model, plan, (x,))


def test_code_that_refuses_narrow_layers_locks_them() -> None:
    plan = plan_channels(networks.build(Silent), networks.image(2), budget=keep(macs=0.8), round_to=1)
    assert any("made for 16 channels" in reason for reason in plan.locked)
    assert "b.0.weight" not in plan.remove or 0 not in plan.remove["b.0.weight"]


class Generator(nn.Sequential):
    def forward(self, z):
        return self[1](self[0](z).view(-1, 64, 4, 4))


def test_a_width_in_a_view_is_not_blamed_on_the_input() -> None:
    message = "64 channels: split into equal parts by view in the model; a copy with narrower parts failed"
    with pytest.raises(ModelError, match=message):
        plan_channels(Generator(nn.Linear(8, 1024), nn.Conv2d(64, 3, 3)), (torch.randn(4, 8),), remove(channels=0.5))


class Scan(nn.Module):
    """A scan whose first state is as wide as the code says, in an attribute or in a number."""

    def __init__(self, attribute):
        super().__init__()
        self.enter, self.head = nn.Linear(6, 24), nn.Linear(24, 5)
        if attribute:
            self.width = 24

    def forward(self, x):
        x = self.enter(x)
        state = torch.zeros(len(x), getattr(self, "width", 24), dtype=x.dtype)
        for t in range(x.shape[1]):
            state = state * x[:, t].sigmoid() + x[:, t]
        return self.head(state)


def test_the_width_of_a_first_state_follows_its_attribute_and_is_locked_without_one() -> None:
    x = (torch.randn(2, 4, 6),)
    plan = plan_channels(Scan(attribute=True), x, remove(channels=0.5), round_to=1)
    assert plan.attributes == {"width": (24, 12)}
    assert apply_(Scan(attribute=True), plan)(*x).shape == (2, 5)
    message = "24 channels: mul in the model with a value of a size written in the code; a copy that was cut there did not run"
    with pytest.raises(ModelError, match=message):
        plan_channels(Scan(attribute=False), x, remove(channels=0.5), round_to=1)


class MostTokens(nn.Module):
    """As many tokens at the most as there are channels, by chance."""

    def __init__(self):
        super().__init__()
        self.dim = self.most = 16
        self.enter, self.mix, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        y = self.enter(x).reshape(-1, self.dim).view(x.shape[0], -1, self.dim)
        return self.head(self.mix(y)[:, : self.most].relu())


@pytest.mark.parametrize("tokens", [6, 30])
def test_an_attribute_that_equals_the_width_by_chance_stays(tokens) -> None:
    torch.manual_seed(0)
    model = MostTokens().eval()
    plan = plan_channels(model, torch.randn(2, tokens, 12), keep(macs=0.6), round_to=1)
    assert plan.attributes.keys() == {"dim"}
    assert apply_(model, plan)(torch.randn(2, 30, 12)).shape == (2, 16, 5)


class StepsOfHalf(nn.Module):
    """Cuts its channels in two, and makes as many steps at the most as a half has channels."""

    def __init__(self):
        super().__init__()
        self.half = self.steps = 8
        self.enter, self.step, self.head = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(8, 8, 3, 1, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        y = self.enter(x)
        a, b = y[:, : self.half], y[:, self.half :]
        for _ in range(min(self.steps, x.shape[-1] // 4)):
            a = self.step(a).tanh()
        return self.head(torch.cat([a, b], 1))


def test_an_attribute_of_a_cut_stays_where_the_cut_does_not_need_it() -> None:
    torch.manual_seed(0)
    plan = plan_channels(StepsOfHalf().eval(), torch.randn(2, 3, 8, 8), keep(macs=0.6), round_to=1)
    assert plan.attributes.keys() == {"half"}


class TwoWidths(nn.Module):
    """Two views with sizes written in the code, the second of which follows the width, and the width of a third layer alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((8, 32), (32, 24), (24, 20), (20, 4)))

    def forward(self, x):
        h = self.layers[0](x).relu().view(-1, 32)
        h = self.layers[1](h).relu().view(len(x), -1)
        return self.layers[3](self.layers[2](h).relu().view(-1, 20))


def test_each_size_is_locked_for_a_reason_of_its_own() -> None:
    torch.manual_seed(0)
    plan = plan_channels(TwoWidths().eval(), torch.randn(6, 8), remove(channels=0.1), round_to=1)
    assert plan.remove.keys() == {"layers.1.weight", "layers.1.bias", "layers.2.weight"}
    reasons = sorted(reason for reason in plan.locked if reason.startswith("view in the model to sizes written in the code"))
    assert [("[-1, 20]" in reason, "[-1, 32]" in reason) for reason in reasons] == [(True, False), (False, True)]
