"""Several processes: what DistributedDataParallel reduces in, and FSDP2's own mixed precision as a policy asks for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.mixed.formats.policy import BATCH_NORMS, Policy


def fp32_allreduce_hook(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average the gradients of all ranks in fp32: `ddp.register_comm_hook(None, mixed.fp32_allreduce_hook)`.

    Half gradients are reduced in half otherwise: a sum over ranks may overflow in fp16 (pytorch#61814), and in bf16 it keeps
    eight digits of many addends. Twice the traffic; the mean is rounded to half once. `group` is a process group, or None for
    all ranks.
    """
    group = group if group is not None else dist.group.WORLD
    half: Tensor = bucket.buffer()
    work: Any = dist.all_reduce(half.float().div_(group.size()), group=group, async_op=True)
    # The bucket's own memory, as DDP reads the gradients from there.
    return work.get_future().then(lambda done: half.copy_(done.value()[0]))


# DDP compares a hook's annotations with types, and in this file they are strings; it takes a hook without any.
fp32_allreduce_hook.__annotations__.clear()


def fsdp_policy(policy: Policy) -> Any:
    """FSDP2's `MixedPrecisionPolicy` for a policy: `fully_shard(module, mp_policy=mixed.fsdp_policy(mixed.MASTER_BF16))`.

    The sharded fp32 parameters are the masters: gathered, computed and freed in half, reduced in fp32. Shard first, then make
    the optimizer, then `mixed.prepare(model, optimizer, policy)` with the same policy: it scales, checks over all ranks, clips
    and steps, and leaves the casts to FSDP2. Batch norms computed in half lose digits: give each `fully_shard` of its own with
    `fsdp_policy(FP32)`.

    Raises SettingError for a policy whose weights FSDP2 cannot hold.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    check_sharded(policy)
    half = policy.param_dtype
    # reduce_dtype None changed its meaning in torch 2.15, so it is always said.
    return MixedPrecisionPolicy(
        param_dtype=half,
        reduce_dtype=torch.float32,
        output_dtype=policy.output_dtype if half is not None else None,
        cast_forward_inputs=policy.cast_inputs if half is not None else False,
    )


def check_sharded(policy: Policy) -> None:
    """Refuse policies whose weights are not what FSDP2 shards."""
    if policy.param_dtype is not None and not policy.master:
        raise SettingError(
            f"{policy.name}: FSDP2 keeps fp32 shards, which are masters already; use MASTER_BF16, MASTER_FP16 or an fp32 policy"
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (`fully_shard`) holds any part of a model."""
    return any(hasattr(module, "_get_fsdp_state") for module in model.modules())


def reshard_(model: nn.Module) -> None:
    """Give a model under FSDP2 its shards back: after a forward pass it holds whole tensors, which no optimizer may be given."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()  # type: ignore[operator]


def check_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was made after a forward pass, of whole tensors: it would change nothing of the model."""
    reshard_(model)
    own = {id(p) for p in model.parameters()}
    if not all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise SettingError(
            "prepare: the optimizer holds tensors that FSDP2 has put together for a forward pass, not the model's shards; make it"
            " right after fully_shard, before the model runs"
        )


def check_casts(model: nn.Module, policy: Policy) -> None:
    """Refuse a model that was sharded without the casts that its policy asks for: it would train in fp32 and say nothing."""
    found = set()
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        own = getattr(state, "_mp_policy", None)
        if own is not None and not isinstance(module, BATCH_NORMS):
            found.add(own.param_dtype)
    if found and policy.param_dtype not in found:
        wanted, got = policy.param_dtype or torch.float32, ", ".join(sorted(str(dtype or torch.float32) for dtype in found))
        raise SettingError(
            f"prepare: {policy.name} computes in {wanted}, the model was sharded for {got};"
            f" give fully_shard(mp_policy=mixed.fsdp_policy({policy.name}))"
        )


def check_sync(model: nn.Module) -> None:
    """Refuse a backward pass inside DDP's `no_sync`: sums are taken away after a pass, and the last reduction would miss them."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not model.require_backward_grad_sync:
        raise SettingError(
            "backward: inside no_sync() the ranks would not share the gradients that run sums up; leave no_sync out"
        )


def whole(value: Tensor) -> Tensor:
    """A number that all ranks share; a plain tensor as it is."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()
