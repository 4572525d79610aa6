"""Several processes: a DDP hook that averages gradients in fp32, and the mixed-precision settings of FSDP2 for a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import SettingError
from compresskit.mixed.formats.policy import BATCH_NORMS, Policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


# torch's classes are recognised by their methods: importing torch.distributed.fsdp and .tensor takes longer than this library.
@runtime_checkable
class FSDP2Module(Protocol):
    """What `fully_shard` makes of a module: `torch.distributed.fsdp.FSDPModule`."""

    def _get_fsdp_state(self) -> Any: ...

    def reshard(self) -> None:
        """Free the gathered parameters."""


@runtime_checkable
class ShardedTensor(Protocol):
    """`torch.distributed.tensor.DTensor`."""

    def full_tensor(self) -> Tensor:
        """Gather the shards of all ranks."""


def fp32_allreduce_hook(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average the gradients of all ranks in fp32: `ddp.register_comm_hook(None, mixed.fp32_allreduce_hook)`.

    Without the hook DDP reduces half gradients in half: a sum over ranks may overflow in fp16 (pytorch#61814), and bf16 has only
    eight bits for it. With it the traffic doubles, and the mean is rounded to half once.

    Args:
        group: a process group, or None for all ranks.
        bucket: the `torch.distributed.GradBucket` that DDP hands over.

    Returns:
        A future of the averaged bucket.
    """
    group = group if group is not None else dist.group.WORLD
    half: Tensor = bucket.buffer()
    work: Any = dist.all_reduce(half.float().div_(group.size()), group=group, async_op=True)
    # The bucket's own memory, as DDP reads the gradients from there.
    return work.get_future().then(lambda done: half.copy_(done.value()[0]))


# DDP compares a hook's annotations with types, and in this file they are strings; it takes a hook without any.
fp32_allreduce_hook.__annotations__.clear()


def fsdp_policy(policy: Policy) -> MixedPrecisionPolicy:
    """Make FSDP2's `MixedPrecisionPolicy`: `fully_shard(module, mp_policy=mixed.fsdp_policy(mixed.MASTER_BF16))`.

    The sharded fp32 parameters are the masters: gathered, computed and freed in half, reduced in fp32. Shard first, then make
    the optimizer, then `mixed.prepare(model, optimizer, policy)` with the same policy: it scales, checks over all ranks, clips
    and steps, casts the outputs of `run(x)`, and leaves the other casts to FSDP2: blocks hand half values to one another. Batch
    norms lose precision in half: give each a `fully_shard` of its own with `fsdp_policy(FP32)`.

    Raises:
        SettingError: for a policy whose weights FSDP2 cannot hold.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    check_fsdp_policy(policy)
    half = policy.param_dtype
    # reduce_dtype None changed its meaning in torch 2.15, so it is always said.
    return MixedPrecisionPolicy(
        param_dtype=half,
        reduce_dtype=torch.float32,
        output_dtype=None,  # a block's outputs stay half for the next one; the run casts those of the whole model
        cast_forward_inputs=policy.cast_inputs if half is not None else False,
    )


def check_fsdp_policy(policy: Policy) -> None:
    """Refuse a policy that keeps weights in a form other than the fp32 shards of FSDP2."""
    if policy.param_dtype is not None and not policy.master:
        raise SettingError(
            f"{policy.name}: FSDP2 keeps fp32 shards, which are masters already; use MASTER_BF16, MASTER_FP16 or an fp32 policy"
        )


def sharded_policy(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, *, flat: bool, compiled: bool) -> Policy:
    """The policy of a model under FSDP2, which casts by itself and whose fp32 shards are the masters."""
    check_optimizer_shards(model, optimizer)
    check_fsdp_policy(policy)
    check_fsdp_casts(model, policy)
    if flat or compiled:
        raise SettingError("prepare: FSDP2 lays its shards out itself; leave flat=True and backend='compiled' out")
    output_dtype = None if policy.param_dtype is None and policy.autocast_dtype is None else policy.output_dtype
    return replace(policy, param_dtype=None, master=False, cast_inputs=False, output_dtype=output_dtype)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 (`fully_shard`) holds any part of a model."""
    return any(isinstance(module, FSDP2Module) for module in model.modules())


def reshard_(model: nn.Module) -> None:
    """Free the gathered tensors of a model under FSDP2, so that its parameters are shards again.

    After a forward pass they are whole tensors, which no optimizer may be made of.
    """
    for module in model.modules():
        if isinstance(module, FSDP2Module):
            module.reshard()


def check_optimizer_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that was made of gathered tensors, after a forward pass: it would not change the model."""
    reshard_(model)
    shards = {id(p) for p in model.parameters()}
    if not all(id(p) in shards for group in optimizer.param_groups for p in group["params"]):
        raise SettingError(
            "prepare: the optimizer holds tensors that FSDP2 has put together for a forward pass, not the model's shards; make it"
            " right after fully_shard, before the model runs"
        )


def check_fsdp_casts(model: nn.Module, policy: Policy) -> None:
    """Refuse a model that was sharded without the casts of the policy: it would silently train in fp32."""
    dtypes = set()
    for module in model.modules():
        if isinstance(module, FSDP2Module) and not isinstance(module, BATCH_NORMS):
            settings = getattr(module._get_fsdp_state(), "_mp_policy", None)
            if settings is not None:
                dtypes.add(settings.param_dtype)
    if dtypes and policy.param_dtype not in dtypes:
        expected, got = policy.param_dtype or torch.float32, ", ".join(sorted(str(dtype or torch.float32) for dtype in dtypes))
        raise SettingError(
            f"prepare: {policy.name} computes in {expected}, the model was sharded for {got};"
            f" give fully_shard(mp_policy=mixed.fsdp_policy({policy.name}))"
        )


def check_sync(model: nn.Module) -> None:
    """Refuse a backward pass inside DDP's `no_sync`: a run moves gradients away after it, so the last reduction misses them."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not model.require_backward_grad_sync:
        raise SettingError(
            "backward: inside no_sync() the ranks would not share the gradients that run sums up; leave no_sync out"
        )


def broadcast_from_zero_(value: Tensor, group: Any) -> None:
    """Give all ranks of a group the tensor of its first rank; of any strides and element type."""
    sent = value.contiguous()
    dist.broadcast(sent, src=dist.get_global_rank(group, 0), group=group)
    if sent is not value:
        value.copy_(sent)


def is_dtensor(value: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, such as a parameter or gradient under FSDP2."""
    return type(value) not in (Tensor, nn.Parameter) and isinstance(value, ShardedTensor)


def full_tensor(value: Tensor) -> Tensor:
    """The whole of a `DTensor`, the same on all ranks; a plain tensor as it is."""
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]


def whole_on_rank_zero(state: Any) -> Any:
    """Nested dicts, lists and tuples whose `DTensor`s are put together, one after the other, in the CPU memory of process 0.

    To be called by all ranks; the others get None in the place of each.
    """

    def put_together(value: Any) -> Any:
        if not (isinstance(value, Tensor) and is_dtensor(value)):
            return value
        found = full_tensor(value.detach())
        return found.cpu() if dist.get_rank() == 0 else None

    return pytree.tree_map(put_together, state)


def shard_by_name(state: Any, model: nn.Module) -> Any:
    """Nested dicts in which whole tensors under the name of a sharded parameter are shards of it; the inverse of the above.

    Tensors of another shape than the parameter, such as step counters, are left as they are.
    """
    from torch.distributed.tensor import distribute_tensor

    reshard_(model)
    shards = {name: p for name, p in model.named_parameters() if is_dtensor(p)}

    def share(value: Any, like: Any) -> Any:
        if isinstance(value, dict):
            return {key: share(inside, shards.get(key, like)) for key, inside in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(share(inside, like) for inside in value)
        if like is None or not isinstance(value, Tensor) or is_dtensor(value) or value.shape != like.shape:
            return value
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)

    return share(state, None) if shards else state
