"""Tracing: the model runs once, in eval mode and where needed in train mode, and is left as it was."""

from __future__ import annotations

import copy

import networks
import pytest
import special_networks as special
import torch
from networks import image
from pruned import assert_equals_zeroed, assert_untouched, cut, planned, state
from torch import nn

from compresskit import keep, remove
from compresskit.base.errors import ModelError
from compresskit.prune import apply_, plan_channels, rankings
from compresskit.prune.structure.plan import zero_


def test_heads_that_only_training_runs_are_cut_too() -> None:
    _, plan, pruned = cut(special.Auxiliary)
    one, two = pruned.train()(torch.randn(4, 3, 8, 8))
    (one.sum() + two.sum()).backward()
    assert pruned.side[0][0].weight.grad is not None
    assert plan.locked["an output of the model"] == 20


def test_a_submodule_is_traced_where_the_model_cannot_be_captured() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = networks.Residual()

        def forward(self, x):
            y = self.net(x * 2)
            return y if float(y.detach().sum()) > 0 else -y  # cannot be captured, only recorded

    model = Outer().eval()
    assert all(name.startswith("net.") for name in planned(model).remove)
    plan = planned(model, inside="net")
    assert all(name.startswith("net.") for name in plan.remove)
    apply_(model, plan)(*image(2))


def test_planning_leaves_the_model_and_the_random_state_as_they_were() -> None:
    """Also the random state, running statistics, and modules that were in train mode."""
    model = special.Auxiliary().train()
    before, seed = state(model), torch.get_rng_state()
    plan_channels(model, special.example(special.Auxiliary), budget=keep(macs=0.6), round_to=1)
    assert_untouched(model, before)
    torch.set_rng_state(seed)
    expected = torch.rand(3)
    torch.set_rng_state(seed)
    plan_channels(copy.deepcopy(model), (torch.zeros(2, 3, 8, 8),), budget=keep(macs=0.6), round_to=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 5, 16, 16), r"Chain does not run on the example \(inputs of shape \[\(2, 5, 16, 16\)\]\): RuntimeError"),
        (torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8), r"and torch\.uint8 values; use \.float\(\)"),
        (torch.randn(2, 3, 16, 16).half(), r"and torch\.float16 values; use \.float\(\)"),
        ("an image", r"Chain does not run on the example"),
    ],
    ids=["shape", "integers", "half", "text"],
)
def test_examples_that_do_not_run_are_refused(x, message) -> None:
    model = networks.build(networks.Chain).train()
    before = state(model)
    with pytest.raises(ModelError, match=message):
        plan_channels(model, (x,), budget=keep(macs=0.5))
    assert_untouched(model, before)


class Force(nn.Module):
    """Minus the derivative of an energy, as models of molecules give it."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Linear(24, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            return -torch.autograd.grad(self.energy(x).sum(), x)[0]


@pytest.mark.parametrize("inside", [None, "energy"])
def test_a_model_that_takes_gradients_itself_is_refused_with_the_part_to_prune(inside) -> None:
    torch.manual_seed(0)
    model, x = Force(), torch.randn(8, 3)
    message = r"^Force runs on the example, but not in torch\.inference_mode.*does not require grad.*prune the part that it"
    with pytest.raises(ModelError, match=message):
        plan_channels(model, x, keep(macs=0.6), inside=inside)
    plan = plan_channels(model.energy, x, keep(macs=0.6), round_to=1)
    wanted = zero_(copy.deepcopy(model.energy), plan)
    apply_(model.energy, plan)
    points = x.clone().requires_grad_()
    torch.testing.assert_close(model(x), -torch.autograd.grad(wanted(points).sum(), points)[0])


class Routed(nn.Sequential):
    """Two experts, one of which runs; which one depends on the values."""

    def forward(self, x):
        h = self[0](x)
        return self[1](h + self[2 + int(x.mean() > 0)](h))


def test_an_expert_that_the_example_does_not_reach_is_cut_with_the_others() -> None:
    model = Routed(nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.rand(4, 8)
    plan = plan_channels(model, (x,), budget=keep(macs=0.5))
    assert plan.remove["2.weight"].keys() == plan.remove["3.weight"].keys() == {0, 1}
    apply_(model, plan)
    assert model(x).shape == model(-x).shape == (4, 4)


class SentRows(nn.Module):
    """Calls each expert on the rows that are sent to it, be there any or none, and adds up what they give."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.enter, self.leave = way, nn.Linear(8, 16), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(3))

    def forward(self, x):
        h = self.enter(x).relu()
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].round() == number).nonzero()[:, 0]
            sent = expert(h[rows])
            if self.way == "index_add":
                out.index_add_(0, rows, sent)
            elif self.way == "scatter_add":
                out = out.scatter_add(0, rows[:, None].expand(-1, out.shape[1]), sent)
            else:
                out[rows] += sent
        return self.leave(h + out)


@pytest.mark.parametrize("way", ["index_add", "scatter_add", "index_put"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_expert_that_the_first_rows_are_not_sent_to_is_cut_with_the_others(first, way) -> None:
    """The run on two rows calls the other experts on none, which shows no channels; all of the example does."""
    torch.manual_seed(0)
    model, x = SentRows(way).eval(), torch.randn(12, 8)
    x[:, 0] = (first + torch.arange(12) // 4) % 3
    plan = plan_channels(model, x, remove(channels=0.5), ranking=rankings.uniform, round_to=1)
    assert plan.locked == {"an output of the model": 3}
    removed = [plan.remove[f"experts.{i}.0.weight"] for i in range(3)]
    assert [len(dims[0]) for dims in removed] == [12] * 3
    assert [dims[1] for dims in removed] == [plan.remove["enter.weight"][0]] * 3
    assert_equals_zeroed(model, plan, (x,))


def test_an_expert_that_no_row_is_sent_to_stays_with_what_it_reads() -> None:
    torch.manual_seed(0)
    model, x = SentRows("index_add").eval(), torch.randn(12, 8)
    x[:, 0] = torch.arange(12) % 2
    plan = plan_channels(model, x, remove(channels=0.3), round_to=1)
    removed = {name for name, dims in plan.remove.items() if dims}
    assert removed == {f"experts.{i}.{name}" for i in range(2) for name in ("0.weight", "0.bias", "2.weight")}
    assert apply_(model, plan)(torch.full((4, 8), 2.0)).shape == (4, 3)


class OptionalToken(nn.Sequential):
    """Adds a parameter only where an argument asks for it."""

    def forward(self, x, masked=None):
        h = self[0](x)
        return self[1](h if masked is None else torch.where(masked[:, None], self.token, h))


def test_channels_that_an_unread_parameter_may_meet_stay() -> None:
    model = OptionalToken(nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)))
    model.token = nn.Parameter(torch.randn(32))
    x = torch.rand(4, 8)
    plan = plan_channels(model, (x,), budget=keep(macs=0.7))
    assert any("as wide as token, which the model does not read on the example" in reason for reason in plan.locked)
    assert 0 not in plan.remove.get("0.weight", {})
    assert plan.remove["1.0.weight"][0], "what has another width is cut"
    plan = plan_channels(model, (x, torch.arange(4) > 2), budget=keep(macs=0.5))
    assert plan.remove["token"][0] == plan.remove["0.weight"][0]


def test_inputs_that_cannot_be_cut_to_two_rows_are_taken_whole() -> None:
    class Graph(nn.Sequential):
        def forward(self, x, adjacent):
            return self[1](adjacent @ self[0](x).relu())

    plan = plan_channels(Graph(nn.Linear(12, 32), nn.Linear(32, 5)), (torch.randn(20, 12), torch.eye(20)), budget=keep(macs=0.5))
    assert len(plan.remove["0.weight"][0]) == 16


class Centred(nn.Sequential):
    """Reads a buffer on demand."""

    def forward(self, x, centre=False):
        y = self[0](x)
        return self[1]((y - self.mean if centre else y).relu())


def test_channels_that_an_unread_buffer_may_meet_stay() -> None:
    model, x = Centred(nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))), torch.rand(4, 8)
    model.register_buffer("mean", torch.randn(32))
    plan = plan_channels(model, (x,), budget=keep(macs=0.7))
    assert any("as wide as mean, which the model does not read on the example" in reason for reason in plan.locked)
    assert 0 not in plan.remove.get("0.weight", {})
    assert plan.remove["1.0.weight"][0], "what has another width is cut"


class AuxiliaryHead(nn.Module):
    """Reads its channels flattened, on demand."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 1, 1), nn.Linear(32, 5)
        self.auxiliary = nn.Linear(64, 5)

    def forward(self, x, auxiliary=False):
        y = nn.functional.adaptive_avg_pool2d(self.a(x), 2)
        return self.auxiliary(y.flatten(1)) if auxiliary else self.head(self.b(y).mean((2, 3)))


def test_channels_that_an_unread_matrix_may_read_flattened_stay() -> None:
    plan = plan_channels(AuxiliaryHead(), torch.rand(2, 3, 4, 4), budget=keep(macs=0.7), round_to=1)
    assert any("as wide as auxiliary.weight" in reason for reason in plan.locked)
    assert 0 not in plan.remove.get("a.weight", {})
    assert plan.remove["b.weight"][0]


class MovingMean(nn.Sequential):
    """Writes a buffer in train mode that it does not read in eval mode."""

    def forward(self, x):
        y = self[0](x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)), alpha=0.1)
        return self[1](y.relu())


def test_a_buffer_that_only_training_writes_is_cut() -> None:
    model = MovingMean(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 5, 1))
    model.register_buffer("mean", torch.zeros(16))
    plan = plan_channels(model, torch.rand(2, 3, 8, 8), budget=keep(macs=0.6), round_to=1)
    assert plan.remove["mean"][0] == plan.remove["0.weight"][0]


class RotaryWithCopy(special.Rotary):
    """Keeps its first frequencies for later, as models of Hugging Face do, and reads them where they are asked for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("original", self.frequencies.clone(), persistent=False)
        self.long = False

    def turned(self, x):
        if self.long:
            self.frequencies = self.original
        return super().turned(x)


def test_an_unread_copy_of_a_buffer_is_cut_with_it() -> None:
    """It locked the heads of all models of Hugging Face that have rotary positions."""
    model, plan, pruned = cut(RotaryWithCopy)
    assert plan.remove["q.weight"][0]
    assert plan.remove["frequencies"] == plan.remove["original"]
    assert not any("original" in reason for reason in plan.locked)
    assert_equals_zeroed(model, plan, special.example(RotaryWithCopy))
    model.long = True
    model.frequencies.zero_()
    assert_equals_zeroed(model, plan, special.example(RotaryWithCopy))
    assert torch.equal(pruned.original, pruned.frequencies)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.original.mul_(2),
        lambda model: (model.original.fill_(0.5), model.frequencies.fill_(0.5)),
        lambda model: model.register_buffer("another", torch.rand(4)),
    ],
    ids=["other values", "values that are all alike", "another unread buffer"],
)
def test_channels_that_an_unread_buffer_may_meet_stay_where_it_is_no_clear_copy(change) -> None:
    model = RotaryWithCopy().eval()
    change(model)
    plan = plan_channels(model, special.example(RotaryWithCopy), budget=keep(macs=0.8), round_to=1)
    assert any("which the model does not read on the example" in reason for reason in plan.locked)
    assert not plan.remove.keys() & {"frequencies", "original"}
