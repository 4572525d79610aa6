"""What users do to the optimizer and the model by habit while a run lasts: it works as in fp32, or it raises."""

from __future__ import annotations

import gc

import pytest
import torch
from mixed_runs import FP16_ON_CPU
from torch import nn

from compresskit import mixed
from compresskit.base.errors import CheckpointError, ModelError, SettingError, TrainingError
from compresskit.mixed import (
    AMP_BF16,
    AMP_FP16,
    FP32,
    KAHAN_BF16,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    SPLIT_BF16,
    SR_BF16,
    LossScaler,
    Policy,
    level,
    prepare,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")
POLICIES = [FP32, AMP_BF16, AMP_FP16, MASTER_BF16, MASTER_FP16, SPLIT_BF16, KAHAN_BF16, SR_BF16, PURE_BF16]
by_name = {"ids": lambda policy: policy.name}


def started(policy: Policy, *, lr: float = 0.1, **settings):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, prepare(model, optimizer, policy, **settings)


def batch() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def one_step(run) -> None:
    run.backward(run(batch()).square().mean())
    run.step()


# the optimizer's own methods


@pytest.mark.parametrize("policy", POLICIES, **by_name)
def test_the_optimizers_own_step_raises_while_the_run_lasts(policy: Policy) -> None:
    model, optimizer, run = started(policy)
    one_step(run)
    run(batch()).square().mean().backward()
    with pytest.raises(TrainingError, match=r"optimizer.step\(\): SGD belongs to a run of mixed.prepare.*call run.step\(\)"):
        optimizer.step()
    run.finish()
    model(batch()).square().mean().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16], **by_name)
@pytest.mark.parametrize("settings", [{}, {"clip": 1e3}], ids=["plain", "clip"])
def test_zero_grad_of_the_optimizer_drops_the_gradients_of_the_model(policy: Policy, settings) -> None:
    model, optimizer, run = started(policy, **settings)
    other, _, fresh = started(policy, **settings)
    run.backward(run(batch()).sum() * 100)
    optimizer.zero_grad()
    assert model.weight.grad is None
    one_step(run)
    one_step(fresh)
    assert torch.equal(model.weight, other.weight)


@FP16_ON_CPU
def test_zero_grad_drops_what_several_losses_summed_up() -> None:
    _, optimizer, run = started(MASTER_FP16, losses=("a", "b"))
    run.backward(run(batch()).sum() * float("inf"), scaler="a")
    optimizer.zero_grad()
    run.backward(run(batch()).square().mean(), scaler="b")
    run.step()
    assert run.skipped.item() == 0


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16], **by_name)
def test_add_param_group_of_the_optimizer_is_the_runs(policy: Policy) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    run = prepare(model, optimizer, policy)
    before = model[1].weight.detach().float().clone()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 1.0})
    one_step(run)
    assert not torch.equal(run.named_masters()["1.weight"], before)


def test_a_group_put_in_by_hand_is_refused_at_the_next_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    run = prepare(model, optimizer, MASTER_BF16)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(model[1].parameters())})
    run.backward(run(batch()).square().mean())
    with pytest.raises(SettingError, match="2 tensors were put into the optimizer's param_groups by hand.*run.add_group"):
        run.step()


def test_a_finished_run_refuses_to_go_on() -> None:
    _, _, run = started(MASTER_BF16)
    model = run.finish()
    assert run.finish() is model
    for call in (lambda: run(batch()), lambda: run.backward(torch.ones(())), run.step):
        with pytest.raises(TrainingError, match=r"finish\(\) has ended it"):
            call()


# writes into the model's weights


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, MASTER_FP16, SR_BF16, PURE_BF16], **by_name)
@pytest.mark.parametrize("flat", [False, True], ids=["separate", "flat"])
def test_what_is_written_into_weights_is_taken_over(policy: Policy, flat: bool) -> None:
    if flat and policy in (SR_BF16, PURE_BF16):
        return  # refused
    model, _, run = started(policy, lr=1e-4, flat=flat)
    for _ in range(3):
        one_step(run)
        model.weight.data.clamp_(min=0)
        assert (run.named_masters()["weight"] >= 0).all()
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert torch.equal(run.finish().weight, torch.ones(4, 8))


@pytest.mark.parametrize("policy", [SPLIT_BF16, KAHAN_BF16], **by_name)
@pytest.mark.parametrize("write", [lambda w: w.data.clamp_(min=0), lambda w: nn.init.ones_(w)], ids=["data", "in place"])
def test_a_write_under_a_policy_of_remainders_raises(policy: Policy, write) -> None:
    model, _, run = started(policy, lr=1e-4)
    one_step(run)
    state = run.state_dict()
    write(model.weight)
    for call in (run.masters, run.state_dict, run.finish):
        with pytest.raises(TrainingError, match=f"weight .*was changed outside run.step.*{policy.name} keeps remainders"):
            call()
    run.load_state_dict(state)
    one_step(run)
    assert run.finish().weight.isfinite().all()


def test_a_stale_remainder_never_makes_a_nan() -> None:
    halves = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.5], dtype=torch.bfloat16)
    for remainder in (-1, -32768, 1, 32767):
        joined = mixed.formats.bf16_formats.join(halves, torch.full((5,), remainder, dtype=torch.int16))
        assert not joined.isnan().any()


def test_only_written_values_lose_their_digits() -> None:
    model, _, run = started(MASTER_BF16)
    one_step(run)
    before = run.named_masters()["weight"].clone()
    with torch.no_grad():
        model.weight[0] = 0
    after = run.named_masters()["weight"]
    assert (after[0] == 0).all()
    assert torch.equal(after[1:], before[1:])


def test_max_norm_embeddings_keep_their_norm() -> None:
    torch.manual_seed(0)
    model = nn.Embedding(16, 8, max_norm=1.0)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    for _ in range(5):
        run.backward(run(torch.arange(16)).square().sum().neg())
        run.step()
    run(torch.arange(16))
    assert run.finish().weight.norm(dim=1).max() < 1.01


def test_a_weight_replaced_by_another_parameter_raises() -> None:
    model, _, run = started(MASTER_BF16)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(TrainingError, match="weight: another parameter was put in its place after prepare"):
        run.finish()


def test_averages_in_the_place_of_weights_are_no_write() -> None:
    model, _, run = started(MASTER_BF16)
    ema = run.ema(0.9)
    for _ in range(3):
        one_step(run)
    before = run.named_masters()["weight"].clone()
    with ema.applied(model):
        assert torch.equal(run.state_dict()["weights"]["weight"], before)
    assert torch.equal(run.finish().weight, before)


# settings, models and schedulers that cannot be


@pytest.mark.parametrize("clip", [float("nan"), float("inf"), 0, True, "1"])
def test_clip_must_be_a_positive_number(clip) -> None:
    with pytest.raises(SettingError, match=r"^prepare\(clip=\.\.\.\): wanted a positive, finite norm, got .*None does not clip"):
        started(MASTER_BF16, clip=clip)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), True])
def test_a_loss_scale_must_be_a_positive_number(scale) -> None:
    with pytest.raises(SettingError, match="loss_scale must be"):
        level("O2", loss_scale=scale)
    with pytest.raises(SettingError, match="loss_scale must be positive and finite"):
        Policy(name="mine", param_dtype=torch.float16, loss_scale=scale)
    with pytest.raises(SettingError, match="wanted 0 < floor"):
        LossScaler(scale, ceiling=float("inf"))


def test_a_scaler_is_given_as_a_function() -> None:
    with pytest.raises(SettingError, match=r"wanted a function that makes a LossScaler.*got LossScaler\(scale=65536"):
        started(MASTER_FP16, scaler=LossScaler())


def test_models_that_a_policy_cannot_cast_are_refused() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    wide, lazy, model = nn.Linear(8, 4).double(), nn.LazyLinear(4), nn.Linear(8, 4)
    for policy in (MASTER_BF16, AMP_BF16):
        with pytest.raises(
            ModelError, match=rf"weight is torch.float64, which {policy.name} does not cast; give model.float\(\)"
        ):
            prepare(wide, sgd(wide), policy)
    prepare(wide, sgd(wide), FP32).finish()
    with pytest.raises(ModelError, match="weight has no shape yet; run the model once"):
        prepare(lazy, sgd(lazy), MASTER_BF16)
    with pytest.raises(SettingError, match="wanted a torch module and its torch optimizer, got list and list"):
        prepare([model], [sgd(model)], MASTER_BF16)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [MASTER_FP16, MASTER_BF16, SPLIT_BF16], **by_name)
def test_masters_are_made_of_half_weights(policy: Policy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).half()
    weights = model[0].weight.detach().float().clone()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    assert model[1].weight.dtype == model[1].running_mean.dtype == torch.float32
    assert torch.equal(run.named_masters()["0.weight"], weights)
    one_step(run)
    assert {v.dtype for v in run.finish().state_dict().values() if v.is_floating_point()} == {torch.float32}


def test_schedulers_that_a_run_cannot_step_are_refused() -> None:
    model, optimizer, run = started(MASTER_BF16)
    with pytest.raises(SettingError, match="ReduceLROnPlateau.step wants metrics.*leave run.schedule out"):
        run.schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(SettingError, match="StepLR is of another optimizer than the run's"):
        run.schedule(torch.optim.lr_scheduler.StepLR(foreign, 1))


# what an optimizer holds


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        inner.param_groups = self.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_checkpoint_of_an_optimizer_inside_another_is_refused() -> None:
    model = nn.Linear(8, 4)
    run = prepare(model, Wrapper(torch.optim.AdamW(model.parameters())), MASTER_BF16)
    before = run.named_masters()["weight"].clone()
    one_step(run)
    assert not torch.equal(run.named_masters()["weight"], before)
    with pytest.raises(CheckpointError, match="Wrapper wraps AdamW in its attribute inner"):
        run.state_dict()


class HalfMomentum(torch.optim.SGD):
    """SGD whose momentum is bf16, as a dtype in its param group says."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                new = p.grad.to(group["momentum_dtype"])
                state["m"] = new if "m" not in state else state["m"].lerp(new, 0.5)
                p.sub_(state["m"].float(), alpha=group["lr"])


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16], **by_name)
def test_an_optimizer_with_a_dtype_in_its_group_resumes_with_the_same_bits(policy: Policy) -> None:
    def start():
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        group = {"params": list(model.parameters()), "momentum_dtype": torch.bfloat16}
        return prepare(model, HalfMomentum([group], lr=0.1), policy)

    run, resumed = start(), start()
    one_step(run)
    state = run.state_dict()
    assert "momentum_dtype" not in state["optimizer"]["groups"][0]
    resumed.load_state_dict(state)
    for each in (run, resumed):
        one_step(each)
    assert all(map(torch.equal, run.masters(), resumed.masters()))


@pytest.mark.parametrize("policy", [FP32, MASTER_BF16, SPLIT_BF16], **by_name)
@pytest.mark.parametrize("classes", [4, 6])
def test_a_new_head_takes_the_place_of_the_old_one(policy: Policy, classes: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    run = prepare(model, torch.optim.AdamW(model.parameters()), policy)
    ema = run.ema(0.5)
    one_step(run)
    model[1] = nn.Linear(8, classes)
    run.add_group({"params": model[1].parameters()})
    before = run.named_masters()["1.weight"].clone()
    assert torch.equal(ema.values["1.weight"], before)
    one_step(run)
    assert not torch.equal(run.named_masters()["1.weight"], before)
    assert sum(len(group["params"]) for group in run.optimizer.param_groups) == 4
    run.load_state_dict(run.state_dict())
    assert run.finish()(batch()).shape == (16, classes)


# sparse and complex gradients


class Complex(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x) @ self.weight).real


@pytest.mark.parametrize(("policy", "clip"), [(FP32, 0.1), (AMP_FP16, None), (AMP_FP16, 0.1)], ids=str)
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_scaled_and_clipped_as_torch_does(policy: Policy, clip, kind: str) -> None:
    def make() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        if kind == "sparse":
            return nn.Embedding(20, 8, sparse=True), torch.tensor([[1, 2, 1]])
        return Complex(8, 8, bias=False, dtype=torch.cfloat), torch.randn(4, 8)

    model, x = make()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy, clip=clip)
    run.backward(run(x).sum() * 3)
    run.step()
    plain, x = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (plain(x).sum() * 3).backward()
    plain.weight.grad = plain.weight.grad.coalesce() if kind == "sparse" else plain.weight.grad
    if clip is not None:
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        torch.testing.assert_close(run.grad_norm, norm)
    optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight)


def test_a_hook_of_the_step_may_write_into_weights_that_masters_then_replace() -> None:
    model = nn.Linear(8, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), SPLIT_BF16)
    run.after_update.append(lambda: model.weight.detach().zero_())
    for _ in range(3):
        run.backward(run(torch.randn(16, 8)).square().mean())
        run.step()
    assert bool(model.weight.any())
    assert not run.finish().weight.isnan().any()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("policy", [MASTER_BF16, KAHAN_BF16], **by_name)
def test_a_write_right_after_a_look_at_the_masters_is_noticed(policy: Policy) -> None:
    model = nn.Linear(8, 4)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), policy)
    for number in range(2):
        run.masters()
        model.weight.data.fill_(1.0 + number)
        run.backward(run(torch.randn(16, 8)).square().mean())
        if policy is KAHAN_BF16 and number:  # before the first step it is taken over
            with pytest.raises(TrainingError, match="was changed outside run.step"):
                run.step()
            return
        run.step()
    assert torch.equal(run.named_masters()["weight"], torch.full((4, 8), 2.0))


@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, PURE_BF16], **by_name)
@pytest.mark.parametrize("again", [MASTER_BF16, FP32], **by_name)
def test_a_model_in_a_run_is_refused_until_the_run_ends(policy: Policy, again: Policy) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    first = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    for given in (model, nn.Sequential(model)):
        with pytest.raises(SettingError, match=rf"Sequential is in a run under {policy.name} already.*call finish\(\)"):
            prepare(given, torch.optim.SGD(model.parameters(), lr=0.1), again)
    first.finish()
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), again).finish()


def test_the_half_model_of_a_run_that_is_gone_is_a_half_model() -> None:
    model = nn.Linear(8, 4)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    gc.collect()
    half = model.weight.detach().clone()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_BF16)
    assert torch.equal(run.finish().weight, half.float())


def test_a_64_bit_model_stays_64_bit_under_fp32() -> None:
    """The same numbers as a plain loop in float64."""
    torch.manual_seed(0)
    model, plain = nn.Linear(8, 4).double(), nn.Linear(8, 4).double()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(16, 8, dtype=torch.float64)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), FP32)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        output = run(x)
        run.backward(output.square().mean())
        run.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    assert output.dtype == model.weight.dtype == torch.float64
    # The loss is scaled in fp32, as in every run.
    assert torch.allclose(model.weight, plain.weight, rtol=1e-6, atol=1e-8)


def test_an_operation_in_place_keeps_the_half_dtype_under_autocast() -> None:
    seen = {}

    class Add(nn.Linear):
        def forward(self, x):
            half, more = super().forward(x), torch.full((16, 4), 1.0 + 2.0**-20)
            seen["out of place"] = (half + more).dtype
            half += more
            seen["in place"] = half.dtype
            return half

    model = Add(8, 4)
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_BF16)(torch.randn(16, 8))
    assert seen == {"out of place": torch.float32, "in place": torch.bfloat16}


# what is there before


@pytest.mark.parametrize("policy", POLICIES, **by_name)
def test_gradients_of_before_are_no_part_of_the_first_step(policy: Policy) -> None:
    """Every plain loop that clears gradients before its backward pass ends with some."""
    trained = []
    for earlier in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        if earlier:
            model(torch.ones(2, 8)).sum().backward()
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        one_step(run)
        trained.append(run.finish().weight.detach())
    assert torch.equal(*trained)


def test_gradients_of_before_do_not_come_with_a_new_group() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(True)
    model[1].requires_grad_(False)
    run = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), FP32)
    model[1].requires_grad_(True).weight.grad = torch.ones(4, 8)
    run.add_group({"params": model[1].parameters()})
    assert model[1].weight.grad is None


@pytest.mark.parametrize("policy", [MASTER_BF16, SPLIT_BF16, PURE_BF16], **by_name)
@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.half])
def test_a_model_that_was_cast_by_hand_is_named(policy: Policy, cast) -> None:
    model, _, run = started(policy)
    one_step(run)
    cast(model)
    with pytest.raises(TrainingError, match=r"weight was cast to torch.float\d+ by hand after prepare .*; leave the cast out"):
        run(batch())
