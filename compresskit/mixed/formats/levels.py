"""apex's optimization levels O0 to O5 as policies: its property table, overrides and checks (NVIDIA/apex, amp/frontend.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from compresskit.base.errors import SettingError
from compresskit.mixed.formats.policy import BATCH_NORMS, HALVES, Policy, is_positive


@dataclass(frozen=True, kw_only=True)
class LevelProperties:
    """The properties that one level sets, by apex's names."""

    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0


#: O0-O3 as in apex; O4 and O5, their bf16 counterparts, as in ROCm/apex.
LEVELS = {
    "O0": LevelProperties(cast_model_type=torch.float32, master_weights=False),
    "O1": LevelProperties(patch_torch_functions=True, patch_torch_functions_type=torch.float16, loss_scale="dynamic"),
    "O2": LevelProperties(cast_model_type=torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"),
    "O3": LevelProperties(cast_model_type=torch.float16, keep_batchnorm_fp32=False, master_weights=False),
    "O4": LevelProperties(patch_torch_functions=True, patch_torch_functions_type=torch.bfloat16),
    "O5": LevelProperties(cast_model_type=torch.bfloat16, keep_batchnorm_fp32=True, master_weights=True),
}


def level(name: str, **overrides: Any) -> Policy:
    """Make the policy of an apex level: O0 fp32, O1 autocast, O2 half with masters, O3 pure half, O4 and O5 as O1 and O2 in bf16.

    Args:
        name: "O0" to "O5".
        overrides: replace single properties of the level's table, by apex's names. `level("O3", keep_batchnorm_fp32=True)` is
            apex's "speed of light".

    Returns:
        The policy, for `prepare` or `Train(precision=...)`.

    Raises:
        SettingError: for an unknown level or property, and for an override that makes no sense at that level.
    """
    if name not in LEVELS:
        raise SettingError(f"level must be one of {', '.join(LEVELS)}, got {name!r}")
    known = [field.name for field in fields(LevelProperties)]
    if unknown := sorted(set(overrides) - set(known)):
        raise SettingError(f"level {name}: no property {unknown[0]!r}; there are {', '.join(known)}")
    overrides = {key: _parsed(name, key, value) for key, value in overrides.items()}
    if LEVELS[name].patch_torch_functions:
        _check_autocast(name, overrides)
    chosen = replace(LEVELS[name], **overrides)
    _check_cast(name, chosen)
    half = chosen.cast_model_type if chosen.cast_model_type in HALVES else None
    return Policy(
        name=" ".join([name, *(f"{key}={value}" for key, value in overrides.items())]),
        param_dtype=half,
        autocast_dtype=chosen.patch_torch_functions_type if chosen.patch_torch_functions else None,
        master=bool(chosen.master_weights),
        loss_scale=None if chosen.loss_scale == 1.0 else chosen.loss_scale,
        keep_fp32=BATCH_NORMS if chosen.keep_batchnorm_fp32 or half is None else (),
    )


def _parsed(name: str, key: str, value: Any) -> Any:
    # Scripts pass these on from a command line as strings, which apex accepts too.
    if key in ("keep_batchnorm_fp32", "master_weights", "patch_torch_functions"):
        value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        if value is not None and not isinstance(value, bool):
            raise SettingError(f"level {name}: {key} must be True, False or None, got {value!r}")
    if key == "loss_scale" and value != "dynamic":
        try:
            number = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise SettingError(f"level {name}: loss_scale must be a number or 'dynamic', got {value!r}")
        if not is_positive(number):
            raise SettingError(f"level {name}: loss_scale must be positive and finite, got {value!r}")
        return number
    return value


def _check_autocast(name: str, overrides: dict[str, Any]) -> None:
    cast = f"{name} casts around functions, so the weights themselves stay in fp32"
    reasons = {
        "cast_model_type": f"{cast}; to cast the model use O2, O3 or O5",
        "master_weights": f"{cast} and are their own masters; leave it out",
        "keep_batchnorm_fp32": f"{cast} and batch norms run in fp32 already; leave it out",
    }
    for key, reason in reasons.items():
        if overrides.get(key) not in (None, torch.float32 if key == "cast_model_type" else None):
            raise SettingError(f"level {name}: {key}={overrides[key]} makes no sense: {reason}")


def _check_cast(name: str, chosen: LevelProperties) -> None:
    patches = LEVELS[name].patch_torch_functions
    if chosen.patch_torch_functions != patches or (chosen.patch_torch_functions_type is None) == patches:
        raise SettingError(f"level {name}: functions are cast by O1 (fp16) and O4 (bf16), by no other level; choose one of them")
    half = chosen.cast_model_type in HALVES
    if chosen.cast_model_type not in (None, torch.float32, *HALVES):
        raise SettingError(f"level {name}: cast_model_type must be fp32, fp16 or bf16, got {chosen.cast_model_type}")
    if half and name == "O0":
        raise SettingError(f"level O0: cast_model_type={chosen.cast_model_type} makes no sense: O0 is fp32; use O2, O3 or O5")
    if chosen.master_weights and not half:
        raise SettingError(f"level {name}: master_weights=True makes no sense: the weights are fp32 and are their own masters")
    if chosen.keep_batchnorm_fp32 is not None and not half:
        raise SettingError(f"level {name}: keep_batchnorm_fp32={chosen.keep_batchnorm_fp32} makes no sense: nothing is half")


def require_policy(policy: object, where: str) -> None:
    """Refuse what is not a `Policy`, such as the name of an apex level or a torch dtype, and say what to write instead.

    where: begins the message, such as "Train(precision=...)".
    """
    if isinstance(policy, Policy):
        return
    if isinstance(policy, str) and policy in LEVELS:
        write = f"mixed.level({policy!r})"
    elif policy is torch.float16:
        write = "mixed.AMP_FP16 or mixed.MASTER_FP16"
    elif policy is torch.float32:
        write = "mixed.FP32"
    else:
        write = "mixed.AMP_BF16 or mixed.MASTER_BF16"
    raise SettingError(f"{where}: wanted a policy of compresskit.mixed, got {policy!r}; write {write}")
