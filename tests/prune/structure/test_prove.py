"""The proof of a plan: removed equals zeroed."""

from __future__ import annotations

import copy
from dataclasses import replace

import networks
import pytest
import torch
import torch.nn.functional as F
from networks import build, image
from pruned import planned
from torch import nn

from compresskit import keep
from compresskit.base.errors import ModelError
from compresskit.prune import Plan, apply_, plan_channels, prove
from compresskit.prune.structure.plan import zero_


def test_a_wrong_plan_fails_the_proof() -> None:
    """The proof is no formality: a plan that cuts one channel here and another there is refused."""
    model = build(networks.Chain)
    plan = planned(model)
    gone = plan.remove["b.0.weight"][1]
    other = tuple(sorted(set(range(16)) - set(gone)))[: len(gone)]
    wrong = dict(plan.remove) | {"b.0.weight": {**plan.remove["b.0.weight"], 1: other}}
    bad = Plan(remove=wrong, sizes=plan.sizes, lines=(), macs=1, macs_before=2)
    assert prove(model, plan, image(2)) is None
    # Zeroing the same wrong places on both sides agrees only where nothing else depends on them.
    del bad.remove["a.0.weight"]
    assert "does not run" in prove(model, bad, image(2))


class MeanOfChannels(nn.Sequential):
    """Divides by a count of channels, so that nothing can be removed from what it reads."""

    def forward(self, x):
        h = self[0](x).relu()
        return self[1](h.sum(1, keepdim=True) / h.shape[1]) + self[2](h)


def mean_of_channels(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return MeanOfChannels(nn.Conv2d(3, 48, 3, bias=False), nn.Conv2d(1, 32, 1, bias=bias), nn.Conv2d(48, 32, 1, bias=bias))


class MixesWhenTraining(nn.Sequential):
    """Doubles the first half of its channels, in train mode only."""

    def forward(self, x):
        h = self[0](x)
        return self[1](torch.cat([h[:, :24] * 2, h[:, 24:]], 1) if self.training else h)


class Coordinates(nn.Sequential):
    """A network of sines as it was published: it returns its inputs besides, to be derived by them."""

    def forward(self, x):
        x = x.clone().detach().requires_grad_(True)
        return self[2](self[1](self[0](x).sin()).sin()), x


def test_outputs_may_ask_for_gradients() -> None:
    model = Coordinates(nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)).eval()
    plan = plan_channels(model, (torch.rand(8, 2),), keep(macs=0.5))
    assert [line.layer for line in plan.lines] == ["0", "1"]
    assert prove(model, plan, (torch.rand(8, 2),)) is None


def test_a_model_with_a_table_on_demand_runs_after_planning() -> None:
    model, x = networks.TableOnDemand().eval(), torch.randn(4, 6, 8)
    plan = plan_channels(model, (x,), keep(macs=0.7))
    assert model.length == len(model.table) == 0
    small = apply_(copy.deepcopy(model), plan)
    wanted = zero_(copy.deepcopy(model), plan)(x)
    torch.testing.assert_close(small(x), wanted)
    assert model(x).shape == x.shape


def refused_reason(model: nn.Module, *example: torch.Tensor) -> str:
    with pytest.raises(ModelError) as refusal:
        plan_channels(model, example, keep(macs=0.5))
    return str(refusal.value)


def test_a_branch_that_starts_at_zero_hides_nothing_from_the_proof() -> None:
    model = mean_of_channels()
    nn.init.zeros_(model[1].weight)
    assert "48 channels: a copy that was cut there failed its proof (removed is not zeroed" in refused_reason(model, *image(2))
    assert not model[1].weight.any(), "the proof varies a copy, never the model"


def test_an_example_of_zeros_hides_nothing_from_the_proof() -> None:
    assert "48 channels: a copy that was cut there failed its proof" in refused_reason(
        mean_of_channels(bias=False), torch.zeros(2, 3, 16, 16)
    )


def test_what_only_training_computes_is_compared() -> None:
    torch.manual_seed(0)
    model = MixesWhenTraining(nn.Conv2d(3, 48, 3, bias=False), nn.Conv2d(48, 8, 1))
    assert "failed its proof (in train mode removed is not zeroed" in refused_reason(model, *image(2))


@pytest.mark.parametrize("before", [False, True], ids=["eval", "train"])
def test_statistics_that_one_mode_alone_takes_lock_nothing(before) -> None:
    """The zeroed model leaves out its zeros in the calls of eval mode, which are others in train mode then."""

    class OneMore(nn.Sequential):
        def forward(self, x):
            h = self[0](x).movedim(1, -1)
            if self.training is before:
                other = h if before else x
                h = h + F.layer_norm(other, other.shape[-1:]).mean()
            return self[1](F.layer_norm(h, h.shape[-1:]).movedim(-1, 1))

    torch.manual_seed(0)
    model = OneMore(nn.Conv2d(3, 48, 3, bias=False), nn.Conv2d(48, 8, 1)).eval()
    assert plan_channels(model, image(2), budget=keep(macs=0.5)).remove


@pytest.mark.parametrize("noise", [torch.randn_like, lambda h: F.dropout(h, 0.5)], ids=["noise", "dropout"])
def test_noise_locks_nothing_and_buffers_stay(noise) -> None:
    class Noisy(nn.Sequential):
        def forward(self, x):
            self.calls.add_(1)
            h = self[0](x).relu()
            return self[1](h + noise(h))

    model = Noisy(nn.Linear(12, 32), nn.Linear(32, 5))
    model.register_buffer("calls", torch.zeros(()))
    plan = plan_channels(model, (torch.randn(4, 12),), keep(macs=0.5))
    assert len(plan.remove["0.weight"][0]) == 16
    assert model.calls == 0


def test_equal_infinities_do_not_differ() -> None:
    class WithoutSomeClasses(nn.Sequential):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.arange(5) > 3, float("-inf"))

    model = WithoutSomeClasses(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))
    assert len(plan_channels(model, (torch.randn(4, 12),), keep(macs=0.5)).remove["0.weight"][0]) == 16


def test_a_wrong_plan_of_a_model_with_infinities_fails_the_proof() -> None:
    class HalfInfinite(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return torch.cat([y, torch.full_like(y, float("inf")) * y.sign()], 1)

    torch.manual_seed(0)
    model = HalfInfinite(nn.Linear(12, 32), nn.Linear(32, 5))
    x = (torch.randn(4, 12),)
    plan = plan_channels(model, x, keep(macs=0.5))
    keeps = [i for i in range(32) if i not in plan.remove["0.weight"][0]]
    wrong = replace(plan, remove=plan.remove | {"1.weight": {1: tuple(keeps)}})
    assert "removed is not zeroed" in (prove(model, wrong, x) or "")


class CountsRows(nn.Sequential):
    """Notes how many rows it is run on in float64."""

    rows: list[int] = []  # noqa: RUF012

    def forward(self, x):
        if x.dtype == torch.float64:
            self.rows.append(len(x))
        return super().forward(x)


def test_a_large_batch_is_proved_on_a_few_of_its_rows() -> None:
    model = CountsRows(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 80, 3)).eval()
    CountsRows.rows.clear()
    plan = plan_channels(model, image(64), budget=keep(macs=0.5))
    assert max(CountsRows.rows) == 8
    CountsRows.rows.clear()
    assert plan_channels(model, image(4), budget=keep(macs=0.5)).remove == plan.remove
    assert max(CountsRows.rows) == 4


class SixteenRows(nn.Module):
    """Takes sixteen rows or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shift = nn.Linear(8, 16), nn.Linear(16, 80), nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        return self.b(self.a(x + self.shift).relu())


def test_a_model_of_a_fixed_batch_is_proved_on_all_of_it() -> None:
    plan = plan_channels(SixteenRows().eval(), torch.randn(16, 8), budget=keep(macs=0.5))
    assert plan.macs <= 0.5 * plan.macs_before


class ConstantScale(nn.Module):
    """Attention whose factor does not follow the width; last: what becomes of the outputs. gate: what the branch is times."""

    def __init__(self, last=lambda y: y, gate=None, buffer=False):
        super().__init__()
        self.enter, self.q, self.k, self.v = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head, self.last = nn.Linear(32, 10), last
        if buffer:
            self.register_buffer("gate", gate)
        else:
            self.gate = None if gate is None else nn.Parameter(gate)

    def forward(self, x):
        y = self.enter(x) * 3
        q, k, v = (layer(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        branch = ((q * 8**-0.5 @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.last(self.head(branch if self.gate is None else y + self.gate * branch).mean(1))


def masked(value):
    return lambda y: y.masked_fill(torch.arange(10) > 8, value(y.dtype))


LASTS = {
    "filled": masked(lambda _: -1e9),
    "filled with the least": masked(lambda dtype: torch.finfo(dtype).min),
    "filled by adding": lambda y: y - 1e9 * (torch.arange(10) > 8).to(y.dtype),
    "infinite": masked(lambda _: -float("inf")),
    "tiny": lambda y: y * 1e-12,
    "saturated": lambda y: (y + 8).clamp(0, 1),
    "not a number": lambda y: y * float("nan"),
}


def queries_are_rescaled(model: nn.Module) -> bool:
    torch.manual_seed(1)
    plan = plan_channels(model, torch.randn(8, 6, 12), keep(macs=0.6), round_to=1, ignore=("enter", "v", "head"))
    return bool(plan.scales)


@pytest.mark.parametrize("last", LASTS)
def test_outputs_that_say_little_hide_nothing_from_the_proof(last) -> None:
    torch.manual_seed(0)
    assert not queries_are_rescaled(ConstantScale(LASTS[last]).eval())


@pytest.mark.parametrize(
    ("gate", "buffer"),
    [(torch.zeros(1), False), (torch.tensor(0.0), False), (torch.full((1,), 1e-12), False), (torch.zeros(32), True)],
)
def test_a_gate_that_is_zero_hides_nothing_from_the_proof(gate, buffer) -> None:
    torch.manual_seed(0)
    model = ConstantScale(gate=gate.clone(), buffer=buffer).eval()
    assert not queries_are_rescaled(model)
    assert torch.equal(model.gate, gate)


def test_nothing_is_proved_where_no_output_is_finite() -> None:
    class NotNumbers(nn.Sequential):
        def forward(self, x):
            return super().forward(x * float("nan"))

    reason = "no output of the model is finite on the example, so that nothing can be compared"
    assert reason in refused_reason(NotNumbers(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5)), torch.randn(4, 12))


class Scaled(nn.Module):
    """Two layers with a function of channels and of a vector as long between them."""

    def __init__(self, between, buffers=False, image=False):
        super().__init__()
        self.a, self.c = (nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 1)) if image else (nn.Linear(6, 24), nn.Linear(24, 4))
        self.between = between
        gain, mean = (values.view(-1, 1, 1) if image else values for values in (torch.rand(24) + 0.5, torch.randn(24)))
        if buffers:
            self.register_buffer("gain", gain)
        else:
            self.gain = nn.Parameter(gain)
        if "mean" in between.__code__.co_varnames:
            self.register_buffer("mean", mean)

    def forward(self, x):
        return self.c(self.between(self.a(x), self.gain, *([self.mean] if "mean" in self._buffers else [])))


BETWEEN = {
    "quotient": lambda h, g: h / g,
    "divide": lambda h, g: torch.divide(h, g),
    "in place": lambda h, g: h.clone().div_(g),
    "standardized": lambda h, g, mean: (h - mean) / g,
    "power": lambda h, g: h * g**-0.5,
    "rsqrt": lambda h, g: h * g.rsqrt(),
    "reciprocal": lambda h, g: (h * g.reciprocal()).relu(),
    "logarithm": lambda h, g: h + g.log(),
    "divisor computed": lambda h, g: h / (g.abs().sqrt() * h.new_ones(1).exp()),
    "behind another": lambda h, g: ((h / g).tanh() + h) / g,
    "not zero": lambda h, g: ((h + 1) / g).sigmoid(),
}


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
def test_channels_that_are_divided_by_a_vector_are_cut(between, image) -> None:
    """The reference has zeros in the layers before and behind the channels, and the vector as it is, in float64."""
    torch.manual_seed(0)
    model = Scaled(BETWEEN[between], buffers=between in ("quotient", "rsqrt"), image=image).eval()
    x = torch.randn(4, 3, 6, 6) if image else torch.randn(4, 6)
    plan = plan_channels(model, x, keep(macs=0.5), round_to=1)
    gone = list(plan.remove["a.weight"][0])
    assert plan.remove["gain"] == {0: tuple(gone)}
    zeroed = copy.deepcopy(model).double()
    with torch.no_grad():
        zeroed.a.weight[gone] = zeroed.a.bias[gone] = 0
        zeroed.c.weight[:, gone] = 0
    pruned = apply_(copy.deepcopy(model).double(), plan)
    for rows in (4, 1, 7):
        inputs = 3 * torch.randn(rows, *x.shape[1:], dtype=torch.float64)
        assert torch.allclose(pruned(inputs), zeroed(inputs), rtol=1e-12, atol=1e-12)


def test_a_plan_that_cuts_a_divisor_elsewhere_fails_the_proof() -> None:
    """The divisor keeps its values there, and those of the wrong channels are others."""
    torch.manual_seed(0)
    model, x = Scaled(BETWEEN["quotient"]).eval(), torch.randn(4, 6)
    nn.init.ones_(model.gain)
    plan = plan_channels(model, x, keep(macs=0.5), round_to=1)
    gone = plan.remove["gain"][0]
    other = tuple(sorted(set(range(24)) - set(gone)))[: len(gone)]
    assert prove(model, plan, x) is None
    for name, dim in (("gain", 0), ("a.weight", 0), ("c.weight", 1)):
        wrong = replace(plan, remove=plan.remove | {name: {**plan.remove[name], dim: other}})
        assert "removed is not zeroed" in prove(model, wrong, x)


MIXES = {
    "softmax": lambda h, g: (h / g).softmax(1),
    "unit vectors": lambda h, g: F.normalize((h + 1) / g, dim=1),
    "sum of what is not zero": lambda h, g: h * ((h + 1) / g).sum(1, keepdim=True),
    "sum of logarithms": lambda h, g: h * (h.abs() + g.log()).sum(1, keepdim=True),
    "mean by a count": lambda h, g: h - (h / g).sum(1, keepdim=True) / h.shape[1],
    "other divisor": lambda h, g: h / g.roll(1),
    "logarithm of channels": lambda h, g: h * (h / g).abs().log().sum(1, keepdim=True),
}


@pytest.mark.parametrize("between", MIXES)
def test_channels_that_are_divided_and_mixed_stay(between) -> None:
    torch.manual_seed(0)
    reason = refused_reason(Scaled(MIXES[between]).eval(), torch.randn(4, 6))
    assert "no channel can be removed; locked: 24 channels" in reason
    assert "finite" not in reason or between == "logarithm of channels"


def test_zeros_that_leave_nothing_finite_are_named() -> None:
    """The model itself gives numbers."""
    torch.manual_seed(0)
    reason = refused_reason(Scaled(lambda h, g: (h * g).abs().log()).eval(), torch.randn(4, 6))
    assert "with the removed channels at zero no output of the model is finite (a division by them, or their log" in reason


class NearlyEqualRows(nn.Module):
    """BatchNorm of values that differ in their last digits, as of two images whose last feature maps have one place."""

    def __init__(self, apart: float = 1e-10, of_width: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 8, 1)
        self.norm, self.head = nn.BatchNorm2d(8, eps=1e-30), nn.Linear(8, 4)
        self.apart, self.of_width = apart, of_width

    def forward(self, x):
        h = self.up(1 + self.apart * x).relu()
        y = self.head(self.norm(self.down(h)).flatten(1))
        return y * (1 + self.of_width * h.shape[1]) if self.training else y


@pytest.mark.parametrize("rows", [2, 8])
def test_rounding_that_train_mode_makes_large_is_no_difference(rows) -> None:
    torch.manual_seed(1)
    plan = plan_channels(NearlyEqualRows().eval(), torch.randn(rows, 3, 1, 1), keep(macs=0.5))
    assert plan.macs <= 0.5 * plan.macs_before


def test_rounding_that_train_mode_makes_large_hides_no_wrong_plan() -> None:
    torch.manual_seed(1)
    reason = refused_reason(NearlyEqualRows(apart=1e-12, of_width=1e-5).eval(), torch.randn(8, 3, 1, 1))
    assert "failed its proof (in train mode" in reason
