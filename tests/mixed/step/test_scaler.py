"""Loss scaling: how the scale moves, and that gradients are unscaled by what scaled them."""

from __future__ import annotations

import functools
import random

import oracles
import pytest
import torch
from mixed_runs import FIXED_SCALE, FP16_ON_CPU, INF, linear_steps, two_weights
from torch import nn

from compresskit import mixed
from compresskit.base.errors import CheckpointError, SettingError
from compresskit.mixed import (
    AMP_FP16,
    FP32,
    MASTER_FP16,
    LossScaler,
    Policy,
    level,
    prepare,
)
from compresskit.mixed.step.scaler import stored_values, total_norm

pytestmark = FP16_ON_CPU


@pytest.mark.parametrize("hysteresis", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_scale_moves_as_in_a_plain_loop(seed, hysteresis) -> None:
    dice = random.Random(seed)
    overflows = [dice.random() < 0.2 for _ in range(500)]
    settings = dict(interval=4, hysteresis=hysteresis, ceiling=2.0**12)
    scaler = LossScaler(2.0**10, **settings)
    seen = []
    for overflow in overflows:
        scaler.found_inf.fill_(overflow)
        scaler.update()
        seen.append(scaler.scale.item())
    assert seen == oracles.loss_scales(overflows, start=2.0**10, **settings)
    assert scaler.skipped == sum(overflows)


def test_the_scale_moves_as_in_torch() -> None:
    dice = random.Random(0)
    scaler = LossScaler(interval=20, floor=2.0**-60, ceiling=2.0**60)
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for _ in range(500):
        found = torch.tensor(float(dice.random() < 0.1))
        scaler.found_inf.copy_(found)
        scaler.update()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 20)
        assert (scaler.scale, scaler.clean) == (scale, tracker)


def test_fixed_and_large_scales_can_be_set() -> None:
    static = LossScaler.fixed(512.0)
    static.found_inf.fill_(1)
    static.update()
    assert (static.scale, static.skipped) == (512.0, 1)
    for settings in (dict(scale=2.0**24, interval=500), dict(scale=2.0**16), dict(scale=2.0**32, interval=1000, ceiling=2.0**32)):
        LossScaler(**settings)


def test_scale_never_leaves_its_bounds_and_grows_after_clean_steps() -> None:
    scaler = LossScaler(4.0, interval=3, ceiling=16.0)
    for _ in range(100):
        scaler.found_inf.fill_(1)
        scaler.update()
    assert scaler.scale == 1.0
    scaler.found_inf.zero_()
    seen = []
    for i in range(20):
        scaler.found_inf.fill_(i == 4)  # one overflow starts the count again
        scaler.update()
        seen.append(scaler.scale.item())
    assert seen[:9] == [1, 1, 2, 2, 1, 1, 1, 2, 2]
    assert max(seen) == 16.0
    again = LossScaler(4.0, interval=3, ceiling=16.0)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_an_overflow_restarts_the_count_of_clean_steps() -> None:
    """A count that went on through overflows would grow the scale at the fourth update."""
    scaler = LossScaler(4.0, interval=3)
    scales = []
    for overflow in (0, 0, 1, 0, 0, 0):
        scaler.found_inf.fill_(overflow)
        scaler.update()
        scales.append(scaler.scale.item())
    assert scales == [4, 4, 2, 2, 2, 4]


def test_unscaled_gradients_equal_float64() -> None:
    scaler = LossScaler(2.0**13)
    grads = [torch.randn(50) * 2.0**13 for _ in range(3)]
    wanted = [g.double() / 2.0**13 for g in grads]
    scaler.unscale_(grads)
    assert all(torch.equal(g.double(), w) for g, w in zip(grads, wanted, strict=True))
    grads[1][7] = float("nan")
    scaler.unscale_(grads)
    assert scaler.found_inf == 1


def test_the_scale_never_reaches_zero() -> None:
    """torch's GradScaler writes inf after 144 skips in a row and nan after 166; ours is usable after 200."""
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for _ in range(200):
        torch._amp_update_scale_(scale, tracker, torch.tensor(1.0), 2.0, 0.5, 2000)
    assert scale == 0
    model, run = two_weights(MASTER_FP16, functools.partial(torch.optim.SGD, lr=0.1))
    linear_steps(run, [INF] * 200 + [1.0])
    assert run.scaler is not None
    assert run.scaler.scale == 1
    assert run.finish().weight.tolist() == [[pytest.approx(-0.1)] * 2]


def test_the_growth_step_is_unscaled_by_the_scale_of_its_backward() -> None:
    """DeepSpeed grows first and divides by twice the scale; with lr 1 and gradient 1 every step must move by 1."""
    for fused in (False, True):
        model, run = two_weights(
            MASTER_FP16,
            functools.partial(torch.optim.SGD, lr=1.0, fused=fused),
            scaler=functools.partial(LossScaler, 4.0, interval=1),
        )
        for i in range(1, 5):
            linear_steps(run, [1.0])
            assert run.masters()[0].tolist() == [[-i, -i]]
        assert run.scaler.scale == 64


def test_small_gradients_survive_with_a_scale() -> None:
    for scale, kept in ((None, False), (2.0**12, True)):
        policy = Policy(name="p", param_dtype=torch.float16, master=True, loss_scale=scale)
        model = nn.Linear(1, 1, bias=False)
        before = model.weight.item()
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**20), policy)
        run.backward((run(torch.ones(1, 1)) * 2.0**-26).sum())
        run.step()
        run.finish()
        assert (model.weight.item() != before) is kept


def test_the_loss_that_is_logged_is_not_scaled() -> None:
    model = nn.Linear(2, 1)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), FIXED_SCALE)
    loss = run(torch.ones(1, 2)).sum()
    value = loss.item()
    run.backward(loss)
    assert loss.item() == value
    assert model.bias.grad.item() == 8.0
    with torch.no_grad():
        assert run(torch.ones(1, 2)).sum().item() == value


def test_a_fixed_scale_works_with_clipping_and_in_the_state() -> None:
    model = nn.Linear(2, 2)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), AMP_FP16, clip=1.0, scaler=lambda: LossScaler.fixed(512.0))
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert run.stats()["scale"] == 512.0
    assert run.state_dict()["scalers"][""]["scale"] == 512.0


def test_settings_and_states_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingError, match="wanted hysteresis >= 1, got 0"):
        LossScaler(hysteresis=0)
    with pytest.raises(CheckpointError, match="holds scale, clean, tolerance and skipped, got 'device'"):
        LossScaler().load_state_dict({"device": torch.tensor(0)})


@pytest.mark.parametrize("settings", [{"scale": 0.5}, {"growth": 1.0}, {"backoff": 1.5}, {"interval": 0}], ids=str)
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(SettingError, match="LossScaler: wanted"):
        LossScaler(**settings)


@pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
def test_a_scaler_without_a_loss_scale_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="Policy FP32 has no loss scale; set loss_scale='dynamic'"):
        prepare(model, optimizer, FP32, scaler=functools.partial(mixed.LossScaler, interval=5))
    for losses in ("ab", ("a", "a")):
        with pytest.raises(SettingError, match="losses must be different names"):
            prepare(model, optimizer, level("O1"), losses=losses)


def test_scalers_print_their_scale() -> None:
    assert repr(LossScaler(4.0, interval=3)) == "LossScaler(scale=4, interval=3, skipped=0)"
    assert repr(LossScaler.fixed(512.0)) == "LossScaler(scale=512, fixed, skipped=0)"


def test_rows_that_a_sparse_gradient_holds_twice_are_added_before_they_count() -> None:
    rows = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0, 4.0], [2.0, 0.0], [12.0, 0.0]], (5, 2), check_invariants=False)
    opposite = torch.sparse_coo_tensor([[0, 0]], [[7.0], [-7.0]], (2, 1), check_invariants=False)
    torch.testing.assert_close(total_norm([rows, opposite, torch.zeros(3)], torch.device("cpu")), torch.tensor(13.0))


def test_conjugated_gradients_are_changed_in_place() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    (stored,) = stored_values([values.conj()])
    stored.mul_(2)
    assert values.tolist() == [2 + 4j, 6 - 8j]
