"""Data parallelism over processes that torchrun started.

In training every process reads the same batches and trains on its own rows of each; gradients are averaged, so that the
effective batch size is that of one process. BatchNorm and the ranges of QAT see the rows of their process, or with `exact=True`
all rows, which gives the result of one process. Everything else (calibration, scores, plans) is computed by every process from
the same data. Rank 0 alone writes files. A loader with a DistributedSampler already gives each process samples of its own: in
training it is used as it is, elsewhere it is replaced by a loader of all samples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, TrainingError, first_line

Made = TypeVar("Made")

log = logging.getLogger(__name__)


def world_size() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


@contextmanager
def process_group(device: torch.device | str) -> Iterator[None]:
    """Initialize torch's process group inside the block, if torchrun started this process and there is no group yet.

    Args:
        device: NCCL is used for tensors on CUDA devices, gloo for those on the CPU.
    """
    started = dist.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not started or dist.is_initialized():
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    from torch.distributed.rendezvous import rendezvous  # cannot be imported where torch was built without processes

    store, own_rank, count = next(rendezvous("env://"))
    # After a restart torchrun hands out the same store, which still holds the addresses of the processes that have ended.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=count)
    try:
        _warn_of_unequal_machines(torch.device(device))
        yield
    finally:
        dist.destroy_process_group()


def _machine(device: torch.device) -> dict[str, Any]:
    """What this process computes with."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
        "instructions": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def _warn_of_unequal_machines(device: torch.device) -> None:
    """Say in rank 0's log in what the machines of the processes differ: the training goes on, as fast as the slowest of them."""
    machines = of_all_ranks(_machine(device))
    differ = [name for name, value in machines[0].items() if any(machine[name] != value for machine in machines)]
    if differ and rank() == 0:
        said = "; ".join(f"{name} {', '.join(str(machine[name]) for machine in machines)}" for name in differ)
        log.warning(
            "The processes are on unequal machines (rank 0, 1, ...: %s). Every step waits for the slowest; give each process as"
            " many cores, or leave the slow one out. Times are measured on rank 0.",
            said,
        )


def on_rank_zero(make: Callable[[], Made]) -> Made:
    """Call `make` in process 0 and return its result, plain data, in every process.

    Raises:
        TrainingError: in the other processes, where `make` raised an error in process 0.
    """
    if world_size() == 1:
        return make()
    sent: list[Any] = [None, None]
    if rank() == 0:
        try:
            sent = [make(), None]
        except Exception as error:
            dist.broadcast_object_list([None, f"{type(error).__name__}: {error}"], 0)
            raise
    dist.broadcast_object_list(sent, 0)
    if sent[1] is not None:
        raise TrainingError(f"process 0 failed, and with it the run: {sent[1]}")
    return sent[0]  # type: ignore[no-any-return]


@runtime_checkable
class HasSampler(Protocol):
    """A loader, or a batch sampler, that draws from a sampler."""

    sampler: Any


@runtime_checkable
class HasBatchSampler(Protocol):
    """A loader that draws from a batch sampler."""

    batch_sampler: Any


def samplers_of(loader: Any) -> list[Any]:
    """Return the sampler and the batch sampler of a loader, as far as it has them."""
    samplers = [loader.sampler] if isinstance(loader, HasSampler) else []
    return [*samplers, loader.batch_sampler] if isinstance(loader, HasBatchSampler) else samplers


def loader_length(loader: Any, *, about: bool = False) -> int | None:
    """Return the number of batches that a loader has; None where it is not known, nor with `about` can be guessed."""
    if not about and _guesses_length(loader):
        return None
    with suppress(TypeError):  # a DataLoader of an IterableDataset without a length
        return len(loader) if isinstance(loader, Sized) else None
    return None


def why_no_length(loader: Any) -> str:
    """Why `loader_length` is None."""
    if not _guesses_length(loader):
        return f"{type(loader).__name__} has no length"
    return (
        f"{type(loader).__name__} guesses {len(loader)}, but each of its {loader.num_workers} workers may end in a smaller batch,"
        " or drop it"
    )


def _guesses_length(loader: Any) -> bool:
    """Whether several workers of a loader share a data set without numbered samples, and each ends in a batch of its own.

    Its length is known where the data set makes the batches, or the samples, shared evenly, are whole batches of all workers.
    """
    data = torch.utils.data
    if not isinstance(loader, data.DataLoader) or not isinstance(loader.dataset, data.IterableDataset):
        return False
    size, workers = loader.batch_size or 1, loader.num_workers
    if size == 1 or workers < 2 or not isinstance(loader.dataset, Sized):
        return False
    with suppress(TypeError):  # a __len__ that knows none
        return len(loader.dataset) % (size * workers) != 0
    return False


def shards_samples(loader: Any) -> bool:
    """Whether a loader gives every process samples of its own, by a DistributedSampler."""
    samplers = samplers_of(loader)
    samplers += [sampler.sampler for sampler in samplers if isinstance(sampler, HasSampler)]
    return any(isinstance(sampler, torch.utils.data.distributed.DistributedSampler) for sampler in samplers)


def unsharded_loader(loader: Any) -> Any:
    """Return a loader of all samples, in the same order in every process, for one that gives each process samples of its own.

    Other loaders are returned as they are.

    Raises:
        DataError: the loader has a batch_sampler of its own, which cannot be rebuilt without the sharding.
    """
    if world_size() == 1 or not shards_samples(loader):
        return loader
    sampler, data = loader.sampler, loader.dataset
    if not isinstance(sampler, torch.utils.data.distributed.DistributedSampler) or loader.batch_size is None:
        raise DataError(
            "several processes: calibration and validation need all samples in every process, and a batch_sampler shares them"
            " out; give Task(val=..., calibration=...) loaders of all samples"
        )
    order = None
    if sampler.shuffle:
        drawn = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order = torch.utils.data.RandomSampler(data, generator=drawn)
    same = ("batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")
    return torch.utils.data.DataLoader(data, sampler=order, **{name: getattr(loader, name) for name in same})


def shard_batch(batch: Any, loader: Any, *, least: int = 0) -> tuple[Any, float]:
    """Return this process's rows of a batch, and the weight of their mean loss.

    The weighted losses of all processes have the loss of the whole batch as their mean, if that is a mean over rows. Batches of a
    loader that shards the samples itself are returned as they are, with weight 1; so are those in which a process would get less
    than `least` rows.

    Raises:
        DataError: the tensors of the batch have no common first dimension.
    """
    count = world_size()
    if count == 1 or shards_samples(loader):
        return batch, 1.0
    tensors = [v for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.ndim]
    if not tensors or len({len(v) for v in tensors}) != 1:
        raise DataError(
            f"several processes: no rows to share out in a batch of shapes {[tuple(v.shape) for v in tensors]}; give the loader a"
            " DistributedSampler, which gives each process its own samples"
        )
    rows = len(tensors[0])
    if rows // count < least:
        return batch, 1.0
    begin, end = rows * rank() // count, rows * (rank() + 1) // count
    weight = (end - begin) * count / rows
    begin, end = (begin, end) if end > begin else (0, 1)  # fewer rows than processes: one row of weight 0
    return pytree.tree_map(lambda v: v[begin:end] if isinstance(v, Tensor) and v.ndim else v, batch), weight


@contextmanager
def _naming_lost_processes() -> Iterator[None]:
    """Raise TrainingError where a message in the block finds no other end."""
    try:
        yield
    except RuntimeError as error:
        first = first_line(error)
        raise TrainingError(
            f"process {rank()}: another process is gone ({first}); all end. Run the same command again to go on"
        ) from error


def _at_least_fp32(value: Tensor) -> Tensor:
    """A tensor in fp32; one in float64 as it is."""
    return value if value.dtype is torch.float64 else value.float()


def all_reduce_mean_(tensors: Sequence[Tensor], flags: Sequence[float] = ()) -> list[float]:
    """Average tensors over the processes, in place and in fp32, or float64 where one of them is, with one all-reduce.

    Args:
        tensors: of the same shapes in every process.
        flags: numbers that are summed over the processes in the same message.

    Returns:
        The sums of the flags.

    Raises:
        TrainingError: another process has ended.
    """
    if world_size() == 1:
        return list(flags)
    device = tensors[0].device if tensors else torch.device("cpu")
    sent = torch.cat([torch.tensor(list(flags), device=device), *(_at_least_fp32(t.detach()).reshape(-1) for t in tensors)])
    with _naming_lost_processes():
        dist.all_reduce(sent)
    summed = sent[: len(flags)].tolist()
    parts = sent[len(flags) :].div_(world_size()).split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
    return summed


def of_all_ranks(value: Any) -> list[Any]:
    """Return the plain data of every process, by rank, in every process; TrainingError where another one has ended."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with _naming_lost_processes():
        dist.all_gather_object(values, value)
    return values


def gather_on_rank_zero(state: Any) -> list[Any]:
    """Return the plain data of every process, by rank, in process 0; an empty list in the others."""
    if world_size() == 1:
        return [state]
    states: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(state, states, 0)
    return states or []


class _SyncBatchNorm(torch.autograd.Function):
    """BatchNorm with the mean and variance over all processes: one message forward, one backward, torch's own kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Ten times as fast as var_mean, whose reduction over the outer dimensions is not vectorised on CPUs.
        mean, variance = (_at_least_fp32(value) for value in torch.batch_norm_update_stats(x, None, None, 0.0))
        rows = mean.new_full((1,), x.numel() / x.shape[1])
        sent = torch.cat([mean, variance, rows])
        parts = [torch.empty_like(sent) for _ in range(world_size())]
        dist.all_gather(parts, sent)
        means, variances, counts = torch.stack(parts).split([len(mean), len(mean), 1], dim=1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, variance = ctx.saved_tensors
        # As in eval mode: what goes through the fixed statistics, and the sums of dy x' and dy, x' being x normalised.
        through, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grads[0].contiguous(), x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        both = torch.cat([_at_least_fp32(of_weight), _at_least_fp32(of_bias)])
        dist.all_reduce(both)
        summed, shift = (both / ctx.count).chunk(2)
        scale = torch.rsqrt(variance + ctx.eps)
        # Less what goes through the statistics: w s (mean(dy) + x' mean(dy x')), a line in x for each channel.
        slope = _at_least_fp32(weight) * scale.square() * summed
        offset = _at_least_fp32(weight) * scale * shift - slope * mean
        shape = [1, -1, *[1] * (x.ndim - 2)]
        through = through - offset.view(shape).to(through.dtype)
        return through.addcmul_(x, slope.view(shape).to(x.dtype), value=-1), of_weight, of_bias, None


def sync_batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm` in train mode for x (N, C, ...), with the statistics over the rows of all processes that `joins_rows`."""
    if not joins_rows():
        return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    width, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    weight = torch.ones(width, device=x.device, dtype=dtype) if weight is None else weight
    bias = torch.zeros(width, device=x.device, dtype=dtype) if bias is None else bias
    y, middle, spread, count = _SyncBatchNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    if mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(middle.to(mean.dtype), momentum)
            var.lerp_((spread * count / (count - 1).clamp(min=1)).to(var.dtype), momentum)
    return y  # type: ignore[no-any-return]


_OWN_ROWS = ContextVar("own rows", default=False)


def joins_rows() -> bool:
    """Whether BatchNorm and observers see the rows of all processes: there are several, and no `own_rows` around the call."""
    return world_size() > 1 and not _OWN_ROWS.get()


@contextmanager
def own_rows() -> Iterator[None]:
    """Let BatchNorm and observers see the rows of their own process inside the block; `running_statistics` are then averaged."""
    token = _OWN_ROWS.set(True)
    try:
        yield
    finally:
        _OWN_ROWS.reset(token)


@runtime_checkable
class FollowsBatches(Protocol):
    """A module that knows which of its tensors follow the batches."""

    def following(self) -> list[Tensor]:
        """The tensors that the next batch will move, whose mean over the processes is that of all rows; none when held."""


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of the modules in train mode, and what observers follow; frozen ones stay to the bit."""
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, FollowsBatches):
            found += module.following()
        elif module.training:
            found += [value for name, value in module.named_buffers(recurse=False) if name in ("running_mean", "running_var")]
    return found


@contextmanager
def synced_batchnorm(model: nn.Module) -> Iterator[None]:
    """Let the BatchNorm layers of a model use the statistics over all processes inside the block, in train mode.

    torch's SyncBatchNorm needs GPUs and replaces the modules.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] if world_size() > 1 else []
    synced = [norm for norm in norms if "forward" not in vars(norm) and norm.track_running_stats]
    try:
        for norm in synced:
            norm.forward = _SyncedForward(norm)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for norm in synced:
            del norm.forward


class _SyncedForward:
    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        return sync_batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, momentum, norm.eps)


def broadcast_model_(model: nn.Module, *, buffers_alone: bool = False) -> None:
    """Copy the parameters and buffers of process 0's model to the models of the others."""
    parameters = () if buffers_alone else model.parameters()
    for value in [*parameters, *model.buffers()] if world_size() > 1 else ():
        plain = value.detach().clone() if value.dtype is not torch.bool else value.detach().to(torch.uint8)
        dist.broadcast(plain, 0)
        with torch.no_grad():
            value.copy_(plain)


def barrier() -> None:
    """Wait until all processes have reached this call."""
    if world_size() > 1:
        dist.barrier()


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error was raised because another process has ended."""
    return world_size() > 1 and any(text in str(error) for text in ("Connection closed by peer", "Connection reset by peer"))
