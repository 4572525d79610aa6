"""The compiled one-pass step agrees with foreach, skips on the device, and shares its state."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from mixed_runs import HAS_COMPILER, USER_WARNINGS
from torch import nn

from compresskit import mixed
from compresskit.base.errors import SettingError
from compresskit.mixed import AMP_FP16, FP32, KAHAN_BF16, MASTER_BF16, MASTER_FP16, PURE_BF16, SPLIT_BF16, SR_BF16, Lion, prepare
from compresskit.mixed.step import compiled, native
from compresskit.mixed.step.native import native_update

pytestmark = [
    USER_WARNINGS,
    # torch.compile's own machinery warns of torch's other parts
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
compiles = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "plain": functools.partial(torch.optim.SGD, lr=0.05),
    "lion": functools.partial(Lion, lr=0.01, weight_decay=0.1),
}
BY_POLICY = [(policy, "adamw") for policy in (FP32, AMP_FP16, MASTER_BF16, MASTER_FP16, SPLIT_BF16, KAHAN_BF16, SR_BF16)]
CASES = BY_POLICY + [(MASTER_BF16, name) for name in OPTIMIZERS if name != "adamw"]


@pytest.fixture(params=["by one file of C++", "by torch.compile"])
def way(request, monkeypatch):
    """Which of the two writes the step."""
    if request.param == "by torch.compile":
        monkeypatch.setattr(native, "native_update", lambda: None)
    else:
        assert native_update() is not None
        monkeypatch.setattr(compiled, "_compile_copy", lambda function: pytest.fail("asked for torch.compile"))
    return request.param


def start(policy, make, backend, clip=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3, bias=False))
    policy = replace(policy, loss_scale=64.0) if policy.loss_scale else policy
    return prepare(model, make(model.parameters()), policy, clip=clip, backend=backend)


def go(run, steps, bad=()):
    for i in steps:
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        run.backward(run(x).square().mean() * (float("inf") if i in bad else 1))
        run.step()


@pytest.mark.matrix(every=2)
@compiles
@pytest.mark.parametrize(("policy", "name"), CASES, ids=lambda v: getattr(v, "name", v))
def test_compiled_agrees_with_foreach(policy, name, way, monkeypatch) -> None:
    if policy.param_dtype is torch.float16:  # which is torch.compile's, also with the file
        monkeypatch.undo()
    bad = (0, 3) if policy.loss_scale else ()
    runs = [start(policy, OPTIMIZERS[name], backend) for backend in ("foreach", "compiled")]
    # A sign of nearly 0, and a rounding by chance, may fall the other way after a last bit: fewer steps, or a wider margin.
    steps, margin = (2, 1e-6) if name == "lion" else (6, 4e-3 if policy in (SR_BF16, KAHAN_BF16) else 2e-5)
    for run in runs:
        go(run, range(steps), bad)
    for a, b in zip(runs[0].masters(), runs[1].masters(), strict=True):
        torch.testing.assert_close(a, b, atol=margin, rtol=margin)
    assert runs[0].stats() == pytest.approx(runs[1].stats(), rel=1e-2)
    runs[1].optimizer.param_groups[0]["lr"] *= 0.5
    go(runs[1], range(steps, steps + 1))  # a schedule does not recompile into something else
    # the state is torch's own: it moves over, and the optimizer goes on by itself after finish
    runs[0].load_state_dict(runs[1].state_dict())
    go(runs[0], range(10, 11))
    model = runs[1].finish()
    model(torch.ones(2, 6)).sum().backward()
    runs[1].optimizer.step()


@compiles
def test_compiled_skips_on_the_device_and_moves_nothing() -> None:
    run = start(MASTER_FP16, OPTIMIZERS["adamw"], "compiled", clip=None)
    go(run, range(1))
    before = run.state_dict()
    go(run, range(1, 2), bad=(1,))
    after = run.state_dict()
    assert run.skipped == 1
    for part in ("weights", "optimizer"):
        pairs = zip(torch.utils._pytree.tree_leaves(before[part]), torch.utils._pytree.tree_leaves(after[part]), strict=True)
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@compiles
def test_compiled_split_equals_compiled_masters_and_hooks_work(way) -> None:
    results = []
    for policy in (MASTER_BF16, SPLIT_BF16):
        run = start(policy, OPTIMIZERS["adamw"], "compiled")
        run.after_update.append(lambda run=run: run.masters()[0][0].zero_())
        average = run.ema(0.5)
        for i in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
            with run.accumulate(3):
                for _ in range(3):
                    run.backward(run(x).square().mean())
            run.step()
        assert not run.model[0].weight[0].any()
        results.append([*run.masters(), *average.values.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_formats_that_torch_compile_writes_slowly_are_named(monkeypatch) -> None:
    monkeypatch.setattr(mixed.checks, "has_compiler", lambda device: True)
    monkeypatch.setattr(mixed.checks, "native_update", lambda: None)
    for policy in (SPLIT_BF16, SR_BF16):
        with pytest.warns(UserWarning, match=f"torch.compile writes slow code for {policy.name}; 'foreach' is faster"):
            start(policy, OPTIMIZERS["adamw"], "compiled")


def test_without_a_compiler_it_falls_back_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(mixed.checks, "has_compiler", lambda device: False)
    with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler, which is not here: going on with 'foreach'"):
        run = start(MASTER_BF16, OPTIMIZERS["adamw"], "compiled")
    other = start(MASTER_BF16, OPTIMIZERS["adamw"], "foreach")
    go(run, range(2))
    go(other, range(2))
    assert all(torch.equal(a, b) for a, b in zip(run.masters(), other.masters(), strict=True))


@pytest.mark.parametrize(
    ("make", "policy", "settings", "message"),
    [
        (torch.optim.RMSprop, FP32, {}, "there are kernels for AdamW, SGD, Lion, got RMSprop"),
        (functools.partial(torch.optim.AdamW, amsgrad=True), FP32, {}, r"AdamW\(amsgrad=True\) is not covered"),
        (functools.partial(torch.optim.SGD, momentum=0.9, dampening=0.1), FP32, {}, r"SGD\(dampening=0.1\) is not covered"),
        (torch.optim.SGD, PURE_BF16, {}, "PURE_BF16 has no fp32 to update"),
        (torch.optim.SGD, MASTER_BF16, {"flat": True}, "leave flat=True out"),
        (
            torch.optim.SGD,
            MASTER_BF16,
            {"backend": "triton"},
            r"prepare\(backend=...\): wanted None, 'foreach' or 'compiled', got 'triton'",
        ),
    ],
)
def test_optimizers_and_policies_without_a_compiled_step_are_refused(make, policy, settings, message) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=message):
        prepare(model, make(model.parameters(), lr=0.1), policy, **({"backend": "compiled"} | settings))
    assert model.weight.dtype == torch.float32


@compiles
def test_resume_of_compiled_steps_is_uninterrupted_bit_for_bit(way) -> None:
    whole, first, second = (start(SPLIT_BF16, OPTIMIZERS["adamw"], "compiled") for _ in range(3))
    go(whole, range(4))
    go(first, range(2))
    second.load_state_dict(first.state_dict())
    go(second, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole.masters(), second.masters(), strict=True))


def wide(policy, backend, width=1000):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 1000), nn.LayerNorm(1000))
    return prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy, backend=backend)


@compiles
@pytest.mark.parametrize("policy", [SPLIT_BF16, KAHAN_BF16, SR_BF16], ids=lambda policy: policy.name)
def test_many_weights_without_masters_take_one_pass_unasked(policy) -> None:
    runs = [wide(policy, backend) for backend in (None, "foreach")]
    assert "one compiled pass" in repr(runs[0])
    assert "compiled" not in repr(runs[1])
    for i, run in itertools.product(range(3), runs):
        x = torch.randn(4, 1000, generator=torch.Generator().manual_seed(i))
        run.backward(run(x).square().mean())
        assert run.model[0].weight.grad.dtype == torch.float32  # which sums micro-batches as "foreach" does
        run.step()
    for a, b in zip(runs[0].masters(), runs[1].masters(), strict=True):
        assert (a - b).abs().max() <= 2**-8 * b.abs().max()  # a draw at a border falls the other way
        assert (a - b).abs().mean() < 1e-5


def test_few_weights_masters_and_other_optimizers_keep_torchs_operations(monkeypatch) -> None:
    monkeypatch.setattr(mixed.checks, "native_update", lambda: pytest.fail("built the file"))
    assert "compiled" not in repr(wide(MASTER_BF16, None))
    assert "compiled" not in repr(wide(SPLIT_BF16, None, width=10))
    for make in (torch.optim.RMSprop, functools.partial(torch.optim.AdamW, amsgrad=True)):
        model = nn.Linear(1000, 1000)
        assert "compiled" not in repr(prepare(model, make(model.parameters()), SPLIT_BF16))
