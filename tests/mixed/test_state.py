"""Checkpoints: resume is bit-exact, policies and layouts convert, another model is refused."""

from __future__ import annotations

import copy
import functools
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from compresskit import mixed
from compresskit.base.errors import CheckpointError, TrainingError
from compresskit.mixed import prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # fp16 on a CPU, pure policies: meant here
POLICIES = [getattr(mixed, name) for name in mixed.__all__ if name.isupper() and name != "FP8"]
POLICIES.append(replace(mixed.FP8, fp8="emulated"))
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 3))


def start(policy, make, *, flat=False):
    model = net()
    optimizer = make(model.parameters())
    scaler = functools.partial(mixed.LossScaler, 2.0**10, interval=3) if policy.loss_scale else None
    run = prepare(model, optimizer, policy, clip=1.0, flat=flat, scaler=scaler)
    run.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), on="success")
    return run, run.ema(0.9)


def go(run, steps):
    for i in steps:
        x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(i))
        overflow = i == 2 and run.scaler is not None
        run.backward(run(x).square().mean() * (float("inf") if overflow else 1))
        run.step()


def stored(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(state):
    return dict(torch.utils._pytree.tree_flatten_with_path(state)[0])


def same(one, other):
    one, other = leaves(one), leaves(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        equal = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert equal, key


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_resume_is_uninterrupted_bit_for_bit(policy, fused, name) -> None:
    make = functools.partial(OPTIMIZERS[name], fused=fused)
    whole, _ = start(policy, make)
    go(whole, range(8))
    first, _ = start(policy, make)
    go(first, range(4))
    second, _ = start(policy, make)
    go(second, range(6, 7))  # it may have trained already
    second.load_state_dict(stored(first.state_dict()))
    same(first.state_dict(), second.state_dict())
    halves = [torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)]
    assert all(halves)
    go(second, range(4, 8))
    same(whole.state_dict(), second.state_dict())
    results = zip(whole.finish().state_dict().values(), second.finish().state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in results)


def test_the_state_is_fp32_by_name() -> None:
    run, _ = start(mixed.MASTER_BF16, OPTIMIZERS["adamw"])
    go(run, range(2))
    state = run.state_dict()
    assert list(state["weights"]) == [name for name, _ in run.model.named_parameters()]
    assert {v.dtype for v in state["weights"].values()} == {torch.float32}
    assert set(state["optimizer"]["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("target", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("source", POLICIES, ids=lambda p: p.name)
def test_policies_convert(source, target) -> None:
    make = OPTIMIZERS["adamw"]
    before, _ = start(source, make)
    go(before, range(3))
    after, _ = start(target, make)
    after.load_state_dict(stored(before.state_dict()))
    exact = {None, "split"}
    loses = target.pure or target.bf16_format not in exact
    for a, b in zip(before.masters(), after.masters(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-8 if loses else 0, atol=1e-6 if loses else 0)
    go(after, range(3, 5))
    assert all(torch.isfinite(m).all() for m in after.masters())


@pytest.mark.parametrize("policy", [mixed.FP32, mixed.MASTER_BF16, mixed.MASTER_FP16], ids=lambda p: p.name)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_flat_and_separate_masters_share_checkpoints(policy, name) -> None:
    for flat in (False, True):
        before, _ = start(policy, OPTIMIZERS[name], flat=flat)
        go(before, range(3))
        after, _ = start(policy, OPTIMIZERS[name], flat=not flat)
        go(after, range(1))
        after.load_state_dict(stored(before.state_dict()))
        go(after, range(3, 6))
        go(before, range(3, 6))
        states = before.state_dict(), after.state_dict()
        same(*states) if policy.loss_scale is None else same(states[0]["weights"], states[1]["weights"])


def test_resume_from_unfused_into_fused() -> None:
    results = []
    for fused in (False, True):
        before, _ = start(mixed.MASTER_BF16, OPTIMIZERS["adamw"])
        go(before, range(3))
        after, _ = start(mixed.MASTER_BF16, functools.partial(OPTIMIZERS["adamw"], fused=fused))
        after.load_state_dict(before.state_dict())
        go(after, range(3, 5))
        assert after.optimizer.param_groups[0]["fused"] is fused
        results.append(after.masters())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_states_of_other_runs_are_refused() -> None:
    run, _ = start(mixed.MASTER_BF16, OPTIMIZERS["sgd"])
    good = run.state_dict()

    def changed(**new):
        return copy.deepcopy(good) | new

    weights = dict(good["weights"])
    wrong = {"0.weight": torch.zeros(1)} | {k: v for k, v in weights.items() if k != "0.weight"}
    for state, message in (
        ({"model": 1}, "wanted the state of a Run, version 1, got None"),
        ([], "wanted the state of a Run, version 1, got list"),
        (changed(weights=weights | {"6.weight": torch.zeros(1)}), "another model: parameter 6.weight is only in the state"),
        (changed(weights={k: v for k, v in weights.items() if k != "4.bias"}), "parameter 4.bias is not in the state"),
        (changed(weights=wrong), r"parameter 0.weight is \(4, 2, 3, 3\) here, \(1,\) in the state"),
        (changed(buffers={}), "another model: buffer 1.num_batches_tracked is not in the state"),
        (changed(optimizer=good["optimizer"] | {"kind": "AdamW"}), "of optimizer AdamW, this run has SGD"),
        (changed(optimizer=good["optimizer"] | {"groups": []}), "param groups hold other parameters"),
        (changed(emas=[]), "the state has 0 emas, this run 1"),
        (changed(schedules=[]), "the state has 0 schedules, this run 1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            run.load_state_dict(state)
    same(good, run.state_dict())
    run.backward(run(torch.randn(4, 2, 6, 6)).sum())
    with pytest.raises(CheckpointError, match="call it after step"):
        run.state_dict()


def test_the_seed_of_stochastic_rounding_is_a_setting_and_its_step_is_saved() -> None:
    run, _ = start(replace(mixed.SR_BF16, seed=3), OPTIMIZERS["sgd"])
    go(run, range(3))
    assert run.state_dict()["steps"] == 3


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("policy", [mixed.FP32, mixed.MASTER_BF16, mixed.SPLIT_BF16], ids=lambda p: p.name)
def test_a_state_is_laid_out_as_its_weight(policy, flat) -> None:
    """Files hold states in the order of their indices; fused AdamW reads them in that of memory, here another one."""
    if flat and policy is mixed.SPLIT_BF16:
        pytest.skip("has no masters to lay flat")
    make, weights = functools.partial(OPTIMIZERS["adamw"], fused=True), []
    for resumed in (False, True):
        model = net().to(memory_format=torch.channels_last)
        run = prepare(model, make(model.parameters()), policy, flat=flat)
        go(run, range(3))
        if resumed:
            state = torch.utils._pytree.tree_map(lambda v: v.contiguous() if isinstance(v, torch.Tensor) else v, run.state_dict())
            model = net().to(memory_format=torch.channels_last)
            run = prepare(model, make(model.parameters()), policy, flat=flat)
            run.load_state_dict(state)
        go(run, range(3, 6))
        weights.append(run.finish().state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def fit_by_lbfgs(run, steps):
    x = torch.linspace(-1, 1, 64).reshape(16, 4)

    def closure():
        loss = (run(x).squeeze(1) - x.prod(1)).square().mean()
        run.backward(loss)
        return loss

    for _ in range(steps):
        run.step(closure)


def start_lbfgs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5), mixed.FP32)


def test_tensors_in_lists_of_a_state_are_copied_and_stay_as_they_were_saved() -> None:
    """LBFGS keeps its directions in lists, which going on would change: in what was saved, and in what was loaded."""
    run = start_lbfgs()
    fit_by_lbfgs(run, 3)
    state = run.state_dict()
    before = copy.deepcopy(state)
    fit_by_lbfgs(run, 3)
    wanted = run.state_dict()
    same(state, before)
    for resumed in (run, start_lbfgs()):
        resumed.load_state_dict(state)
        fit_by_lbfgs(resumed, 3)
        same(resumed.state_dict(), wanted)
        same(state, before)


def test_a_learning_rate_that_is_a_tensor_is_not_shared_with_the_state() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    run = prepare(model, optimizer, mixed.FP32)
    run.schedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    state = run.state_dict()
    before = copy.deepcopy(state)
    run.load_state_dict(state)
    for _ in range(2):
        run.backward(run(torch.ones(2, 4)).square().mean())
        run.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.025)
    same(state, before)


@pytest.mark.parametrize("policy", [mixed.FP32, mixed.MASTER_BF16, mixed.AMP_FP16], ids=lambda p: p.name)
def test_going_back_to_a_state_drops_the_gradients_that_wait(policy) -> None:
    run, _ = start(policy, OPTIMIZERS["sgd"])
    go(run, range(1))
    state = run.state_dict()
    go(run, range(3, 4))
    wanted = run.state_dict()
    run.load_state_dict(state)
    run.backward(run(torch.ones(2, 2, 6, 6)).square().sum())
    run.load_state_dict(state)
    go(run, range(3, 4))
    same(run.state_dict(), wanted)


def test_a_state_has_what_was_written_through_data() -> None:
    """Every value is compared for it, not only those that each step samples; the others keep all digits of their masters."""
    model = nn.Linear(256, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), mixed.MASTER_BF16)
    wanted = run.named_masters()["weight"].clone()
    wanted[0, 1] = model.weight.data[0, 1] = 3.0
    assert torch.equal(run.state_dict()["weights"]["weight"], wanted)


@pytest.mark.parametrize("policy", [mixed.SPLIT_BF16, mixed.KAHAN_BF16], ids=lambda policy: policy.name)
def test_weights_loaded_before_the_first_step_are_taken_as_they_are(policy) -> None:
    """A Trainer that resumes loads the model, asks the optimizer for its state, and loads that one."""
    run, _ = start(policy, OPTIMIZERS["adamw"])
    go(run, range(2))
    model, state = copy.deepcopy(run.model.state_dict()), stored(run.state_dict())
    go(run, range(2, 4))
    resumed, _ = start(policy, OPTIMIZERS["adamw"])
    resumed.model.load_state_dict(model)
    weights = resumed.state_dict()["weights"]
    assert all(torch.equal(weights[name].to(model[name].dtype), model[name]) for name in weights)
    resumed.load_state_dict(state)
    go(resumed, range(2, 4))
    same(resumed.state_dict(), run.state_dict())
    resumed.model.load_state_dict(model)
    with pytest.raises(TrainingError, match="was changed outside run.step"):  # now its remainders are of a training
        resumed.state_dict()


@pytest.mark.parametrize("policy", [mixed.SPLIT_BF16, mixed.MASTER_BF16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("asked", [False, True])
def test_a_write_before_the_first_step_changes_what_is_written_alone(policy, asked) -> None:
    model = nn.Linear(8, 8)
    wanted = model.weight.detach().clone()
    wanted[0, 0] = 0.5
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    model.load_state_dict({name: values.clone() for name, values in model.state_dict().items()})  # what is there already
    with torch.no_grad():
        model.weight[0, 0] = 0.5
    if asked:
        run.state_dict()
    run.backward(run(torch.randn(4, 8)).square().mean())
    run.step()
    assert torch.equal(run.finish().weight, wanted)


@pytest.mark.parametrize("policy", [mixed.SPLIT_BF16, mixed.KAHAN_BF16], ids=lambda policy: policy.name)
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float])
@pytest.mark.parametrize("asked", [mixed.Run.state_dict, mixed.Run.finish])
def test_a_cast_by_hand_before_the_first_step_is_refused(policy, cast, asked) -> None:
    model = nn.Linear(8, 8)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    cast(model)
    with pytest.raises(TrainingError, match=r"weight was cast to torch\.float.* by hand after prepare"):
        asked(run)
