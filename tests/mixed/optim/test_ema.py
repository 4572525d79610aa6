"""Exponential moving averages of the masters."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from mixed_runs import FIXED_SCALE, INF, USER_WARNINGS
from torch import nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import (
    FP32,
    MASTER_BF16,
    MASTER_FP16,
    SPLIT_BF16,
    prepare,
)

pytestmark = USER_WARNINGS


@pytest.mark.parametrize("policy", [MASTER_FP16, MASTER_BF16, SPLIT_BF16], ids=lambda p: p.name)
def test_the_average_is_of_the_masters(policy) -> None:
    """An average of fp16 weights stays where it began: (1 - decay) of a small step is below half a step of fp16."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    policy = replace(policy, loss_scale=8.0) if policy.loss_scale else policy
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy)
    average = run.ema(0.999)
    wanted, naive, weight = 1.0, torch.ones((), dtype=torch.float16), 1.0
    for _ in range(500):
        run.backward(-run(torch.ones(1, 1)).sum())
        run.step()
        weight += 1e-4
        wanted += (1 - 0.999) * (weight - wanted)
        naive += (1 - 0.999) * (model.weight.detach().flatten()[0].half() - naive)
    assert average.values["weight"].item() == pytest.approx(wanted, rel=1e-5)
    assert naive == 1.0
    own = copy.deepcopy(model.state_dict())
    with average.applied(model):
        assert model.weight.item() == pytest.approx(wanted, rel=2**-8)
    assert torch.equal(model.weight, own["weight"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_does_not_change_the_average(fused) -> None:
    model = nn.Linear(1, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), FIXED_SCALE)
    average = run.ema(0.5)
    assert repr(average) == "WeightEMA(decay=0.5, 1 weights)"
    run.backward(run(torch.ones(1, 1)).sum())
    run.step()
    before = average.values["weight"].clone()
    run.backward(run(torch.full((1, 1), INF)).sum())
    run.step()
    assert torch.equal(before, average.values["weight"])
    with pytest.raises(SettingError, match=r"decay must be in \[0, 1\), got 1"):
        run.ema(1)


class Turned(nn.Module):
    """A complex, a float64 and a float32 weight."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.tensor([1 + 2j], dtype=torch.cfloat))
        self.fine = nn.Parameter(torch.tensor([1 + 2.0**-40], dtype=torch.float64))
        self.plain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.turn).abs() * self.fine * self.plain


def test_float64_and_complex_averages_keep_their_values() -> None:
    model = Turned()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), FP32)
    average = run.ema(0.9)
    wanted = {"turn": torch.complex64, "fine": torch.float64, "plain": torch.float32}
    for _ in range(2):
        assert {name: value.dtype for name, value in average.values.items()} == wanted
        with average.applied(model):
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        run.backward(run(torch.ones(1)).sum())
        run.step()
    with torch.no_grad():
        model.turn.fill_(3 - 1j)
    run.backward(run(torch.ones(1)).sum())
    run.step()
    torch.testing.assert_close(average.values["turn"], torch.tensor([1.2 + 1.7j]))


def averaged(policy=MASTER_BF16):
    """A model whose weights have moved away from their averages, with its run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy)
    average = run.ema(0.99)
    for _ in range(2):
        run.backward(run(torch.ones(3, 4)).square().mean())
        run.step()
    return model, run, average


@pytest.mark.parametrize("wrap", ["whole", "layer", "both", "parallel"])
def test_averages_are_applied_through_wrappers(wrap) -> None:
    model, run, average = averaged()
    own = [p.detach().clone() for p in model.parameters()]
    if wrap in ("layer", "both"):
        model[1] = torch.compile(model[1], backend="eager")
    outer = torch.compile(model, backend="eager") if wrap in ("whole", "both") else model
    run.model = nn.DataParallel(outer) if wrap == "parallel" else outer
    with average.applied(run.model) as same:
        assert same is run.model
        for p, value in zip(model.parameters(), average.values.values(), strict=True):
            assert torch.equal(p, value.bfloat16())
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), own, strict=True))


def test_averages_are_applied_through_ddp(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, run, average = averaged()
        run.model = nn.parallel.DistributedDataParallel(run.model)
        with average.applied(run.model):
            for p, value in zip(model.parameters(), average.values.values(), strict=True):
                assert torch.equal(p, value.bfloat16())
        assert not torch.equal(model[0].weight, average.values["0.weight"].bfloat16())
    finally:
        torch.distributed.destroy_process_group()


def test_averages_of_a_compiled_model_are_applied_to_the_one_inside() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    run = prepare(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1), FP32)
    average = run.ema(0.5)
    for value in average.values.values():
        value.fill_(7.0)
    for target in (model, compiled, copy.deepcopy(model)):
        with average.applied(target):
            assert all((p == 7).all() for p in target.parameters())
        assert not any((p == 7).any() for p in target.parameters())


def test_averages_are_not_applied_to_another_model() -> None:
    model, _, average = averaged()
    for other, said in ((model[0], "Linear .*: 0.weight is missing there"), (nn.Sequential(model), "0.weight is missing there")):
        with pytest.raises(ModelError, match=f"{said}; give run.model, or a copy of it"), average.applied(other):
            pass
    wider = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    before = copy.deepcopy(wider.state_dict())
    with pytest.raises(ModelError, match=r"1.weight is \(3, 4\) there, its average \(2, 4\)"), average.applied(wider):
        pass
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
    assert not average.in_use


def test_after_averages_were_in_use_what_the_user_writes_counts_again() -> None:
    model = nn.Linear(3, 2)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), MASTER_BF16)
    average = run.ema(0.5)
    with average.applied(run.model):
        assert average.in_use
    assert not average.in_use
    with torch.no_grad():
        run.model.weight.fill_(7)
    run.backward(run(torch.ones(1, 3)).sum())
    run.step()
    assert bool((run.named_masters()["weight"] == 7).all())
