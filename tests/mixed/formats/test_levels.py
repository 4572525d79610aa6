"""apex's levels as policies."""

from __future__ import annotations

import pytest
import torch

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    level,
)

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
def test_levels_are_the_property_table_of_apex(name) -> None:
    policy = level(name)
    got = (policy.param_dtype, policy.autocast_dtype, policy.master, policy.loss_scale, bool(policy.keep_fp32))
    assert got == TABLE[name]


def test_overrides_replace_properties() -> None:
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
        ("O2", {"loss_scale": -2}, "must be positive and finite, got -2"),
        ("O2", {"master_weights": "yes"}, "master_weights must be True, False or None, got 'yes'"),
    ],
)
def test_overrides_that_make_no_sense_are_refused(name, overrides, message) -> None:
    with pytest.raises(SettingError, match=message):
        level(name, **overrides)
