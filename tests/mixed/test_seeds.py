"""Rows of the checklist about whole trainings: what autocast runs in which numbers, apex's controls, the seeds' figures."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compresskit.base.errors import SettingError, TrainingError
from compresskit.mixed import (
    AMP_BF16,
    AMP_FP16,
    FP32,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    SPLIT_BF16,
    LossScaler,
    prepare,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
INF = float("inf")
EIGHT = replace(MASTER_FP16, loss_scale=8.0)


class Look(nn.Module):
    """Runs one function on fp32 and half inputs and notes what dtype comes out."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.eye(4)), function

    def forward(self, x):
        y = self.function(x, self.weight)
        self.seen = y.dtype
        return y.float().sum() + self.weight.sum()


HALF = {
    "matmul": lambda x, w: x @ w,
    "linear": F.linear,
    "conv": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
}
#: On a CPU torch's list of what must be fp32 is shorter than on CUDA: losses, and functions that lose digits beyond repair.
SINGLE = {
    "mse": lambda x, w: F.mse_loss((x @ w), torch.zeros(4, 4)),
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.arange(4)),
    "cdist": lambda x, w: torch.cdist((x @ w), (x @ w)),
    "smooth l1": lambda x, w: F.smooth_l1_loss(x @ w, torch.zeros(4, 4)),
}
PROMOTED = {
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "stack": lambda x, w: torch.stack([x @ w, x]),
    "addcmul": lambda x, w: torch.addcmul(x, x @ w, x),
}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [pytest.param(f, torch.bfloat16, id=n) for n, f in HALF.items()]
    + [pytest.param(f, torch.float32, id=n) for n, f in (SINGLE | PROMOTED).items()],
)
def test_b20_autocast_runs_products_in_half_and_losses_in_fp32(function, wanted) -> None:
    model = Look(function)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_BF16)
    out = run(torch.randn(4, 4))
    assert model.seen == wanted
    assert out.dtype == torch.float32
    run.backward(out)
    assert model.weight.grad.dtype == torch.float32
    prepare(other := Look(function), torch.optim.SGD(other.parameters(), lr=0.1), FP32)(torch.randn(4, 4))
    assert other.seen == torch.float32


def test_b20_the_autocast_cache_does_not_outlive_a_call() -> None:
    """A weight cast under no_grad and kept would leave the next forward without a gradient (pytorch#112583)."""
    model = nn.Linear(4, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_BF16)
    with torch.no_grad():
        run(torch.ones(2, 4))
    run.backward(run(torch.ones(2, 4)).sum())
    assert model.weight.grad is not None


@pytest.mark.parametrize("policy", [FP32, EIGHT, replace(AMP_FP16, loss_scale=8.0), MASTER_BF16], ids=lambda p: p.name)
@pytest.mark.parametrize("settings", [{}, {"flat": True}], ids=str)
def test_b19_gradients_can_be_looked_at_and_changed_before_the_step(policy, settings) -> None:
    """`inspect_master_grad_data` and `clip_master_grads` of FP16_Optimizer: fp32, unscaled, by name, and what `step` takes."""
    weights = []
    for factor in (None, 1.0, 0.5):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **settings)
        run.backward(run(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum())
        if factor is not None:
            grads = run.unscaled()
            assert {name: (g.tolist(), g.dtype) for name, g in grads.items()} == {"weight": ([[1, 2, 3, 4]], torch.float32)}
            grads["weight"].mul_(factor)
        run.backward(run(torch.ones(1, 4)).sum())  # a pass after the look adds to it
        run.step()
        weights.append(run.finish().weight.tolist())
    assert weights == [[[-2, -3, -4, -5]], [[-2, -3, -4, -5]], [[-1.5, -2, -2.5, -3]]]


@pytest.mark.parametrize("fused", [False, True])
def test_b19_an_overflow_that_was_looked_at_skips_all_the_same(fused) -> None:
    model = nn.Linear(2, 1, bias=False)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), EIGHT, clip=1.0)
    before = run.masters()[0].clone()
    run.backward(run(torch.full((1, 2), INF)).sum())
    assert not torch.isfinite(run.unscaled()["weight"]).any()
    run.step()
    assert run.skipped == 1
    assert torch.equal(before, run.masters()[0])
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.skipped == 1


def fitted(policy, make, *, closure):
    torch.manual_seed(0)
    x = torch.randn(32, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = nn.Linear(3, 1)
    run = prepare(model, make(model.parameters()), policy)

    def evaluate():
        loss = (run(x) - y).square().mean()
        run.backward(loss)
        return loss

    for _ in range(5):
        if closure:
            run.step(evaluate)
        else:
            evaluate()
            run.step()
    return run.finish().weight.detach()


def test_b19_lbfgs_fits_by_its_closure() -> None:
    make = functools.partial(torch.optim.LBFGS, max_iter=5)
    torch.testing.assert_close(fitted(FP32, make, closure=True), torch.tensor([[1.0, -2.0, 0.5]]), atol=1e-4, rtol=0)
    with pytest.raises(SettingError, match=r"step: LBFGS evaluates the loss itself; give run.step\(closure\)"):
        fitted(FP32, make, closure=False)


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, EIGHT, PURE_BF16], ids=lambda p: p.name)
def test_b19_a_closure_makes_the_same_step(policy) -> None:
    make = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    assert torch.equal(*(fitted(policy, make, closure=closure) for closure in (False, True)))


def test_b19_closures_that_cannot_work_are_refused() -> None:
    make = functools.partial(torch.optim.SGD, lr=0.05)
    with pytest.raises(SettingError, match="a dynamic loss scale would change between evaluations"):
        fitted(MASTER_FP16, make, closure=True)
    with pytest.raises(SettingError, match="the optimizer needs separate weights between evaluations"):
        fitted(SPLIT_BF16, make, closure=True)
    model = nn.Linear(1, 1)
    run = prepare(model, make(model.parameters()), EIGHT)

    def overflowing():
        loss = run(torch.full((1, 1), INF)).sum()
        run.backward(loss)
        return loss

    with pytest.raises(TrainingError, match="a gradient overflowed under the fixed loss scale 8.0"):
        run.step(overflowing)


def test_b18_delayed_unscaling_is_one_division_at_the_step() -> None:
    """apex's `delay_unscale`: passes of one loss add up scaled, in fp32, and are checked and divided once."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), EIGHT)
    for _ in range(3):
        run.backward(run(torch.ones(1, 1)).sum())
    assert not hasattr(torch.Tensor, "grad_dtype") or model.weight.grad.item() == 24
    run.step()
    assert run.masters()[0].item() == -3


def test_n3_masters_show_at_the_fifth_step_and_bf16_at_the_fortieth() -> None:
    for policy, step in ((replace(MASTER_FP16, loss_scale=512.0), 5), (MASTER_BF16, 40)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy)
        seen = []
        for _ in range(step):
            run.backward(-run(torch.ones(1, 1)).sum())
            run.step()
            seen.append(model.weight.item())
        assert seen[:-1] == [1.0] * (step - 1)
        assert seen[-1] > 1.0


def digits():
    data = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    return x, torch.tensor(data.target)


@pytest.mark.parametrize("policy", [MASTER_BF16, MASTER_FP16], ids=lambda p: p.name)
def test_n11_adamw_and_one_cycle_reach_in_half_what_they_reach_in_fp32(policy) -> None:
    """S2's recipe, on data that is at hand; the figures for CIFAR-10 need a GPU (benchmarks/mixed_gpu.py)."""
    x, y = digits()
    found = []
    for chosen in (FP32, policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = prepare(model, optimizer, chosen)
        run.schedule(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=150), on="attempt")
        for i in range(150):
            batch = slice(i % 14 * 100, i % 14 * 100 + 100)
            run.backward(F.cross_entropy(run(x[batch]), y[batch]))
            run.step()
        found.append((run.finish()(x[1400:]).argmax(1) == y[1400:]).float().mean().item())
    assert found[0] > 0.85
    assert found[1] == pytest.approx(found[0], abs=0.03)


def test_n10_n12_half_weights_halve_what_is_kept_for_backward() -> None:
    """A convolutional network saves more of it than one of few large products, as weights are no part of it."""
    kept = {}
    for policy in (FP32, MASTER_BF16):
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten())
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        weights = {p.data_ptr() for p in model.parameters()}
        sizes = {}

        def pack(t, sizes=sizes, weights=weights):
            if t.data_ptr() not in weights:
                sizes[t.data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(torch.randn(8, 3, 16, 16))
        kept[policy.name] = sum(sizes.values())
    assert kept["MASTER_BF16"] == 0.5 * kept["FP32"]


def pointers(run):
    tensors = [*run.model.parameters(), run._weights.steps, run.skipped]
    tensors += [h.remainder for h in run._weights.halves if h.remainder is not None]
    tensors += [v for s in run.scalers.values() for v in (s.scale, s.clean, s.tolerance, s.skipped, s.found_inf)]
    tensors += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("name", ["MASTER_BF16", "MASTER_FP16", "SPLIT_BF16", "KAHAN_BF16", "SR_BF16", "AMP_FP16"])
def test_cuda_graphs_find_all_state_where_it_was(name) -> None:
    """A replay writes where the recording wrote: nothing that a step carries over may move to new memory."""
    import compresskit.mixed as mixed

    model = nn.Linear(4, 4)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True), getattr(mixed, name))
    for i in range(3):
        run.backward(run(torch.randn(2, 4)).sum())
        run.step()
        if i == 0:
            before = pointers(run)
    assert pointers(run) == before


def test_cuda_graphs_that_would_freeze_or_read_something_are_refused(monkeypatch) -> None:
    import compresskit.mixed as mixed

    monkeypatch.setattr(mixed.run, "capturing_cuda_graph", lambda device: True)

    def run(policy, make, **settings):
        model = nn.Linear(2, 2)
        made = prepare(model, make(model.parameters(), **settings), policy, scaler=None)
        made.backward(made(torch.ones(1, 2)).sum())
        return made

    rate = torch.tensor(0.1)
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    with pytest.raises(
        SettingError, match="lr=0.1 of SGD would be frozen into the graph; make the optimizer with lr=torch.tensor"
    ):
        run(MASTER_BF16, sgd, lr=0.1).step()
    with pytest.raises(SettingError, match="AdamW counts its steps on the host; make it with capturable=True"):
        run(MASTER_BF16, adamw, lr=rate, fused=True).step()
    with pytest.raises(SettingError, match="SGD reads the overflow flag back; make it with fused=True"):
        run(EIGHT, sgd, lr=rate).step()
    good = run(EIGHT, sgd, lr=rate, fused=True)
    pushed = []
    good._overflow.last.push = pushed.append
    good.step()
    assert not pushed  # no event may be asked for
    assert good.stats()["skipped"] == 0


def test_b10_consecutive_means_that_an_overflow_starts_the_count_anew() -> None:
    """The seed's callback counts on through overflows."""
    scaler = LossScaler(4.0, interval=3)
    scales = []
    for overflow in (0, 0, 1, 0, 0, 0):
        scaler.found_inf.fill_(overflow)
        scaler.update()
        scales.append(scaler.scale.item())
    assert scales == [4, 4, 2, 2, 2, 4]


#: By policy: bytes per parameter of the foreach step, and of the compiled one.
BYTES = dict.fromkeys(("FP32", "TF32", "AMP_BF16", "AMP_FP16"), (16, 16))
BYTES |= dict.fromkeys(("MASTER_BF16", "MASTER_FP16", "FP8"), (18, 16)) | dict.fromkeys(("SPLIT_BF16", "KAHAN_BF16"), (16, 14))
BYTES |= {"SR_BF16": (14, 12), "PURE_BF16": (8, None), "PURE_FP16": (8, None)}


@pytest.mark.parametrize("backend", ["foreach", "compiled"])
@pytest.mark.parametrize("name", BYTES)
def test_n10_bytes_per_parameter(name, backend) -> None:
    """Weight, master or remainder, moments, gradient: the table of docs/mixed.md; of the compiled step by its gradients alone."""
    import compresskit.mixed as mixed

    wanted = BYTES[name][backend == "compiled"]
    if wanted is None:
        pytest.skip("no compiled step")
    policy = getattr(mixed, name)
    policy = replace(policy, fp8="emulated") if policy.fp8 else policy
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), policy)
    if backend == "compiled" and run._weights.halves:
        run._weights.use_fp32_gradients_(enabled=False)  # what prepare(backend="compiled") does
    for _ in range(2):
        run.backward(run(torch.randn(16, 64)).sum())
        held = [*model.parameters(), *(p.grad for p in model.parameters()), *(h.master for h in run._weights.halves)]
        held += [h.remainder for h in run._weights.halves if h.remainder is not None]
        held += [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
        run.step()
    assert sum(storages.values()) == wanted * 64 * 64
