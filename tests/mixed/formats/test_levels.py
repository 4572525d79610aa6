"""Policies as values, apex's levels, and what stays in fp32."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from compresskit import mixed
from compresskit.base.errors import ModelError, SettingError
from compresskit.mixed import FP32, MASTER_BF16, PURE_BF16, PURE_FP16, Policy, level, prepare

FP16, BF16 = torch.float16, torch.bfloat16
#: The table of the reference: param_dtype, autocast_dtype, master, loss_scale, batch norms kept.
TABLE = {
    "O0": (None, None, False, None, True),
    "O1": (None, FP16, False, "dynamic", True),
    "O2": (FP16, None, True, "dynamic", True),
    "O3": (FP16, None, False, None, False),
    "O4": (None, BF16, False, None, True),
    "O5": (BF16, None, True, None, True),
}


@pytest.mark.parametrize("name", TABLE)
def test_b15_levels_are_the_property_table(name) -> None:
    policy = level(name)
    got = (policy.param_dtype, policy.autocast_dtype, policy.master, policy.loss_scale, bool(policy.keep_fp32))
    assert got == TABLE[name]


def test_b15_overrides_that_make_sense() -> None:
    assert level("O2", loss_scale=128).loss_scale == 128.0
    assert level("O2", loss_scale="128.0").loss_scale == 128.0
    assert level("O1", loss_scale=1.0).loss_scale is None
    fast = level("O3", keep_batchnorm_fp32="True")  # apex's speed of light
    assert fast.pure
    assert fast.keep_fp32
    assert fast.name == "O3 keep_batchnorm_fp32=True"
    assert level("O2", master_weights=False).pure
    assert level("O2", cast_model_type=BF16).param_dtype == BF16
    assert not level("O5", keep_batchnorm_fp32=False).keep_fp32


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("O6", {}, "level must be one of O0, O1, O2, O3, O4, O5, got 'O6'"),
        ("O2", {"opt": 1}, "level O2: no property 'opt'; there are cast_model_type"),
        ("O1", {"master_weights": True}, "are their own masters; leave it out"),
        ("O4", {"master_weights": False}, "are their own masters; leave it out"),
        ("O1", {"keep_batchnorm_fp32": True}, "batch norms run in fp32 already"),
        ("O1", {"cast_model_type": FP16}, "to cast the model use O2, O3 or O5"),
        ("O0", {"cast_model_type": FP16}, "O0 is fp32; use O2, O3 or O5"),
        ("O0", {"master_weights": True}, "the weights are fp32 and are their own masters"),
        ("O0", {"keep_batchnorm_fp32": True}, "nothing is half"),
        ("O2", {"cast_model_type": torch.float32}, "the weights are fp32 and are their own masters"),
        ("O2", {"cast_model_type": torch.int8}, "must be fp32, fp16 or bf16, got torch.int8"),
        ("O2", {"patch_torch_functions": True}, "by no other level"),
        ("O1", {"patch_torch_functions": False}, "by no other level"),
        ("O2", {"loss_scale": "big"}, "must be a number or 'dynamic', got 'big'"),
        ("O2", {"loss_scale": -2}, "must be positive, got -2"),
        ("O2", {"master_weights": "yes"}, "master_weights must be True, False or None, got 'yes'"),
    ],
)
def test_b15_overrides_that_make_no_sense_are_refused(name, overrides, message) -> None:
    with pytest.raises(SettingError, match=message):
        level(name, **overrides)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_dtype": torch.float64}, "param_dtype must be None, torch.float16 or torch.bfloat16, got torch.float64"),
        ({"bf16_format": "split"}, "is for bf16 weights without masters"),
        ({"bf16_format": "kahan", "param_dtype": FP16}, "is for bf16 weights without masters"),
        ({"bf16_format": "split", "param_dtype": BF16, "master": True}, "is for bf16 weights without masters"),
        ({"bf16_format": "half"}, "bf16_format must be None, 'split', 'kahan' or 'stochastic', got 'half'"),
        ({"keep_fp32": "head"}, "must be a tuple of module classes and names, got 'head'"),
    ],
)
def test_policies_that_contradict_themselves(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Policy(name="P", **settings)


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (mixed.formats.policy.BATCH_NORMS, {"2.1.weight", "2.1.bias"}),
        (("2",), {"2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}),
        ((nn.LayerNorm, "3"), {"1.weight", "1.bias", "3.weight", "3.bias"}),
        (("0.bias", *mixed.formats.policy.BATCH_NORMS), {"0.bias", "2.1.weight", "2.1.bias"}),
        ((), set()),
    ],
)
def test_b21_kept_in_fp32_by_kind_and_by_name(keep, kept) -> None:
    model = small()
    policy = Policy(name="P", param_dtype=BF16, master=True, keep_fp32=keep)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == kept
    if "0.bias" not in kept:  # a layer with weights of two dtypes is for models that expect it
        run.backward(run(torch.randn(8, 4)).square().mean())
        run.step()
    run.finish()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_b21_a_custom_op_kept_by_name_sees_fp32() -> None:
    seen = []

    class Custom(nn.Module):
        def forward(self, x, *, scale):
            seen.append((x.dtype, scale.dtype))
            return x.exp() * scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.op, self.out = nn.Linear(4, 4), Custom(), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(self.op(self.lin(x), scale=x))

    model = Net()
    run = prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Policy(name="P", param_dtype=BF16, master=True, keep_fp32=("op",))
    )
    run(torch.randn(2, 4))
    assert seen == [(torch.float32, torch.float32)]


def test_keep_fp32_of_an_unknown_name_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    policy = Policy(name="P", param_dtype=BF16, master=True, keep_fp32=("weight",))
    with pytest.raises(ModelError, match=r"keep_fp32 names 'weight', which the model does not have; near it: 0.weight"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_pure_policies_say_what_they_are() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="PURE_BF16 has no masters"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), PURE_BF16)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_pure_fp16_refuses_an_eps_that_is_zero(make) -> None:
    """The naive way gives nan and inf at the first step: 1e-8 is 0 in fp16."""
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=f"eps=1e-08 of {make.__name__} is 0 in fp16"):
        prepare(model, make(model.parameters(), lr=0.1), PURE_FP16)
    run = prepare(model, make(model.parameters(), lr=0.1, eps=1e-4), PURE_FP16)
    run.backward(run(torch.ones(1, 2)).sum())
    run.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_pure_fp16_takes_fused_adam_and_hands_fp32_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    run = prepare(model, optimizer, PURE_FP16)
    assert model[1].weight.dtype == torch.float32
    run.backward(run(torch.randn(4, 2)).square().sum())
    run.step()
    run.finish()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}


def test_b17_fp32_is_the_script_without_it() -> None:
    torch.manual_seed(0)
    ours, plain = small(), small()
    plain.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, plain)]
    run = prepare(ours, optimizers[0], FP32)
    for _ in range(5):
        x = torch.randn(8, 4)
        run.backward(run(x).square().mean())
        run.step()
        plain(x).square().mean().backward()
        optimizers[1].step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(run.finish().state_dict().values(), plain.state_dict().values(), strict=True))


def test_an_optimizer_that_closes_over_parameters_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match="LBFGS holds weight in its attribute _params, outside its param_groups"):
        prepare(model, torch.optim.LBFGS(model.parameters()), MASTER_BF16)


@pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
def test_a_scaler_without_a_loss_scale_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="Policy FP32 has no loss scale; set loss_scale='dynamic'"):
        prepare(model, optimizer, FP32, scaler=functools.partial(mixed.LossScaler, interval=5))
    for losses in ("ab", ("a", "a")):
        with pytest.raises(SettingError, match="losses must be different names"):
            prepare(model, optimizer, level("O1"), losses=losses)
