"""Policies: contradicting settings are refused, and a policy prints what it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    FP32,
    MASTER_BF16,
    MASTER_FP16,
    PURE_BF16,
    TF32,
    Policy,
    level,
    prepare,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"param_dtype": torch.float64}, "param_dtype must be None, torch.float16 or torch.bfloat16, got torch.float64"),
        ({"bf16_format": "split"}, "is for bf16 weights without masters"),
        ({"bf16_format": "kahan", "param_dtype": torch.float16}, "is for bf16 weights without masters"),
        ({"bf16_format": "split", "param_dtype": torch.bfloat16, "master": True}, "is for bf16 weights without masters"),
        ({"bf16_format": "half"}, "bf16_format must be None, 'split', 'kahan' or 'stochastic', got 'half'"),
        ({"keep_fp32": "head"}, "must be a tuple of module classes and names, got 'head'"),
    ],
)
def test_contradicting_settings_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Policy(name="P", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": "auto"}, "'dynamic', got 'auto'"),
        ({"loss_scale": -1.0}, "must be positive and finite, got -1.0"),
        ({"master": True}, "needs a half param_dtype"),
        ({"param_dtype": torch.float16, "autocast_dtype": torch.float16}, "exclude one another"),
        ({"tf32": "yes"}, "tf32 must be True, False or None for torch's own setting, got 'yes'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        Policy(name="P", **settings)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("O2", r"prepare\(policy=...\): wanted a policy of compresskit.mixed, got 'O2'; write mixed.level\('O2'\)"),
        ("bf16", "got 'bf16'; write mixed.AMP_BF16 or mixed.MASTER_BF16"),
        (torch.bfloat16, "got torch.bfloat16; write mixed.AMP_BF16 or mixed.MASTER_BF16"),
        (torch.float16, "got torch.float16; write mixed.AMP_FP16 or mixed.MASTER_FP16"),
    ],
    ids=str,
)
def test_levels_by_name_and_dtypes_are_refused_with_the_policy_to_give(policy, message) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(SettingError, match=message):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)


def test_policies_and_runs_print_their_formats() -> None:
    assert str(FP32) == "FP32: fp32 weights, IEEE fp32 products"
    assert str(TF32) == "TF32: fp32 weights, TF32 products"
    assert str(level("O0")) == "O0: fp32 weights, products as torch is set"
    assert str(MASTER_BF16) == "MASTER_BF16: bf16 weights, fp32 masters, BatchNorm in fp32"
    assert (
        str(level("O2", loss_scale=128)) == "O2 loss_scale=128.0: fp16 weights, fp32 masters, BatchNorm in fp32, loss scale 128.0"
    )
    assert str(level("O1")) == "O1: fp32 weights, fp16 products by autocast, loss scale dynamic"
    assert str(level("O3")) == "O3: fp16 weights, no masters"
    model = nn.Linear(2, 2)
    assert (
        repr(prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))) == "SGD on cpu, FP32: fp32 weights, IEEE fp32 products"
    )


def test_a_pure_policy_warns_that_it_has_no_masters() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="PURE_BF16 has no masters"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), PURE_BF16)


@pytest.mark.filterwarnings("default")
def test_fp16_on_a_cpu_warns() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="for numerics only"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), MASTER_FP16)
