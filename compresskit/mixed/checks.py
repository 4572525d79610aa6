"""Checks of what `prepare` and `Run` are given; each refuses before anything is changed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError, TrainingError
from compresskit.mixed.formats.fp8 import check_fp8
from compresskit.mixed.formats.parallel import is_dtensor, is_sharded
from compresskit.mixed.formats.policy import HALVES, Policy, is_positive
from compresskit.mixed.formats.slow_bf16 import warn_of_slow_bf16
from compresskit.mixed.step.compiled import check_compiled, has_compiler
from compresskit.mixed.step.flat import check_flat
from compresskit.mixed.step.masters import check_not_in_run
from compresskit.mixed.step.native import native_update
from compresskit.mixed.step.owners import trained_by_others
from compresskit.mixed.step.scaler import LossScaler

COMPILED_UNASKED = 1_000_000  # weights whose steps soon earn back the seconds of a compiler


def check_clip(clip: object, where: str) -> None:
    """Raise SettingError, which begins with `where`, for a largest gradient norm that is no positive, finite number."""
    if clip is not None and not is_positive(clip):
        raise SettingError(f"{where}(clip=...): wanted a positive, finite norm, got {clip!r}; None does not clip")


def check_backend(backend: object, where: str) -> None:
    """Raise SettingError, which begins with `where`, for what no step is computed by."""
    if backend not in (None, "foreach", "compiled"):
        raise SettingError(f"{where}(backend=...): wanted None, 'foreach' or 'compiled', got {backend!r}")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Refuse a wrapped model, one that the policy cannot cast, and an optimizer of other parameters; warn of those it lacks."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        got = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise SettingError(f"prepare: wanted a torch module and its torch optimizer, got {got}; call prepare once for each pair")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ModelError(f"prepare: wrap the model in {type(model).__name__} after prepare, not before")
    check_not_in_run(model, optimizer)
    check_start_dtypes(model, policy)
    parameters = set(model.parameters())
    optimized = {p for group in optimizer.param_groups for p in group["params"]}
    if optimized - parameters:
        raise SettingError("prepare: the optimizer holds parameters that are not the model's; make it from model.parameters()")
    moved = optimized | trained_by_others(optimizer).keys()
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and p not in moved]:
        if policy.param_dtype is None:
            own = "prepare their own optimizer too"
        else:  # `check_not_in_run` refuses a second run of this model
            own = "prepare separate parts of the model in its place, each with its own optimizer"
        warnings.warn(
            f"prepare: the optimizer does not have {missing[0]} ({len(missing)} parameters in all) that require gradients: "
            f"they will not move; freeze them, hand them over with run.add_group, or {own}",
            stacklevel=3,
        )


def check_start_dtypes(model: nn.Module, policy: Policy) -> None:
    """Refuse lazy parameters, half ones where they would have no masters, and float64 where the policy casts."""
    casts = policy.param_dtype is not None or policy.autocast_dtype is not None
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"prepare: {name} has no shape yet; run the model once on a batch, then make the optimizer")
        if p.dtype in HALVES and (policy.param_dtype is None or is_sharded(model)):
            raise ModelError(
                f"prepare: {name} is {p.dtype}; give an fp32 model, or train a half one under a policy such as MASTER_BF16"
            )
        if p.dtype == torch.float64 and casts:
            raise ModelError(f"prepare: {name} is {p.dtype}, which {policy.name} does not cast; give model.float(), or use FP32")


def check_policy(policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Refuse a policy that the device cannot run or that gives nan at the first step; warn of those only good for measuring."""
    if torch.float16 in (policy.param_dtype, policy.autocast_dtype) and device.type == "cpu":
        warnings.warn("fp16 on a CPU is for numerics only: it is many times slower than fp32", stacklevel=3)
    warn_of_slow_bf16(policy, device)
    if policy.fp8 is not None:
        check_fp8(policy.fp8, device)
    if policy.tf32 and not (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8):
        warnings.warn("TF32 is of NVIDIA GPUs from Ampere on: here products are fp32 as without it", stacklevel=3)
    if not policy.pure:
        return
    assert policy.param_dtype is not None
    for group in optimizer.param_groups:
        eps = group.get("eps")  # Adafactor has a pair, whose None is the precision of the dtype
        if (
            isinstance(eps, int | float)
            and eps
            and not group.get("fused")
            and not torch.tensor(eps, dtype=policy.param_dtype).item()
        ):
            raise SettingError(
                f"Policy {policy.name}: eps={eps} of {type(optimizer).__name__} is 0 in fp16 and its first step"
                " divides by it; use fused=True, eps=1e-4, or MASTER_FP16"
            )
    warnings.warn(
        f"{policy.name} has no masters: updates below half a step of its weights are lost; it is the speed to compare "
        "with, not one to train at",
        stacklevel=3,
    )


def new_parameters(group: Mapping[str, Any], model: nn.Module, optimized: Container[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of a new param group; refuses those of another model, and those that the optimizer has."""
    params = group.get("params", ())
    parameters: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    known = {parameter: name for name, parameter in model.named_parameters()}
    if not parameters or not all(isinstance(p, nn.Parameter) and p in known for p in parameters):
        raise SettingError(
            "add_group: wanted {'params': [...]} with parameters of the prepared model; add a new module to it first"
        )
    if twice := [known[p] for p in parameters if p in optimized]:
        raise SettingError(f"add_group: the optimizer has {twice[0]} already; leave it out")
    return parameters


class StepForm(NamedTuple):
    """How a step is computed: with flat masters, in one compiled pass, from fp32 gradients of half weights."""

    flat: bool
    compiled: bool
    fp32_gradients: bool


def step_form(
    policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device, *, flat: bool, backend: str | None
) -> StepForm:
    """The form of the step; refuses what the chosen layout or backend does not cover."""
    check_backend(backend, "prepare")
    if flat:
        check_flat(policy, optimizer)
    if backend == "compiled":
        compiled = _can_compile(policy, optimizer, device, flat=flat)
    else:
        compiled = backend is None and not flat and _pays_to_compile(policy, optimizer, device)
    return StepForm(flat, compiled, fp32_gradients=not compiled or backend is None)


def _can_compile(policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device, *, flat: bool) -> bool:
    """Whether a compiler is here, which is said where it is not; refuses what the compiled step does not cover."""
    check_compiled(policy, optimizer)
    if flat:
        raise SettingError("backend='compiled' visits every weight once as it is; leave flat=True out")
    if not has_compiler(device):
        missing = "Triton" if device.type == "cuda" else "a C++ compiler"
        warnings.warn(f"backend='compiled' needs {missing}, which is not here: going on with 'foreach'", stacklevel=4)
        return False
    if device.type == "cpu" and policy.bf16_format in ("split", "stochastic") and native_update() is None:
        warnings.warn(
            f"backend='compiled': on a CPU torch.compile writes slow code for {policy.name}; 'foreach' is faster", stacklevel=4
        )
    return True


def _pays_to_compile(policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a step of bf16 weights without masters, on a CPU, is long enough to compile it unasked."""
    if policy.bf16_format is None or device.type != "cpu":
        return False
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if sum(p.numel() for p in weights) < COMPILED_UNASKED or any(map(is_dtensor, weights)):
        return False
    try:
        check_compiled(policy, optimizer)
    except SettingError:
        return False
    return native_update() is not None


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer cannot step without a closure, as LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def check_accumulation(count: object, *, is_open: bool) -> None:
    """Refuse a number of backward passes that is none, and a block in a block, which is open."""
    if not isinstance(count, int) or count < 1:
        raise SettingError(f"accumulate: wanted a whole number >= 1 of backward passes, got {count}")
    if is_open:
        raise SettingError("accumulate: a block is open already; blocks do not nest")


def check_closure(policy: Policy, scalers: Iterable[LossScaler], *, separate_weights: bool) -> None:
    """Refuse a step with a closure whose evaluations would differ in their loss scale or lack separate weights."""
    if any(scaler.dynamic for scaler in scalers):
        raise SettingError(
            "step(closure): a dynamic loss scale would change between evaluations; set loss_scale to a number, or use bf16"
        )
    if policy.bf16_format is not None or not separate_weights:
        raise SettingError(
            "step(closure): the optimizer needs separate weights between evaluations; use an fp32, MASTER or pure policy with"
            " backend='foreach' and flat=False"
        )


def check_no_overflow(found_inf: Tensor | None, policy: Policy) -> None:
    """Refuse a gradient that overflowed in a step with a closure."""
    if found_inf is not None and found_inf.item():
        raise TrainingError(
            f"step(closure): a gradient overflowed under the fixed loss scale {policy.loss_scale}, and a step with a closure"
            " cannot be skipped; lower the scale, or use bf16"
        )


def capturing_cuda_graph(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on this thread's stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_cuda_graph(optimizer: torch.optim.Optimizer, *, scaled: bool, compiled: bool) -> None:
    """Refuse settings that a CUDA graph would freeze or that make the host read the device, while one is recorded."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), torch.Tensor):
            raise SettingError(
                f"CUDA graph: lr={group.get('lr')} of {kind} would be frozen into the graph; make the optimizer "
                "with lr=torch.tensor(..., device='cuda')"
            )
        if group.get("capturable") is False and not compiled:
            raise SettingError(f"CUDA graph: {kind} counts its steps on the host; make it with capturable=True")
        if scaled and not compiled and not group.get("fused"):
            raise SettingError(
                f"CUDA graph: {kind} reads the overflow flag back; make it with fused=True, or use backend='compiled'"
            )
