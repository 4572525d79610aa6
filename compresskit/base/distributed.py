"""Several processes, started by torchrun: who is who, what they share, and how each takes its part of a batch.

Every process reads the same batches and trains on its own rows of each, so that a batch is as large as it is for one process and
the result is the same. What is outside of training (calibration, scores, plans) every process computes alike, from the same data.
Process 0 alone writes. Loaders that share out the samples themselves, by a DistributedSampler, are left to it in training and
are read whole outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, TrainingError


def ranks() -> int:
    """How many processes work together; 1 where there are no others."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if ranks() > 1 else 0


@contextmanager
def joined(device: torch.device | str) -> Iterator[None]:
    """Inside the block the processes that torchrun started know each other; nothing changes where it started none."""
    started = dist.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not started or dist.is_initialized():
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    from torch.distributed.rendezvous import rendezvous  # cannot be imported where torch was built without processes

    store, number, count = next(rendezvous("env://"))
    # After a restart torchrun hands out the same store, which still holds the addresses of the processes that are gone.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)  # type: ignore[attr-defined]
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def first_of(make: Callable[[], Any]) -> Any:
    """What `make` gives in process 0, in every process; plain data. An error of process 0 is raised in all of them."""
    if ranks() == 1:
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
    return sent[0]


def shares_itself(loader: Any) -> bool:
    """Whether a loader gives every process samples of its own."""
    kind = torch.utils.data.distributed.DistributedSampler
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return any(isinstance(sampler, kind) for sampler in samplers)


def whole(loader: Any) -> Any:
    """A loader of all samples, in an order that all processes share, in the place of one that gives each its own.

    Raises DataError where it is batched in a way that cannot be done again.
    """
    if ranks() == 1 or not shares_itself(loader):
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


def part_of(batch: Any, loader: Any) -> tuple[Any, float]:
    """(rows of a batch for this process, the weight of their mean loss): the mean over processes is that of the whole batch."""
    count = ranks()
    if count == 1 or shares_itself(loader):
        return batch, 1.0
    tensors = [v for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.ndim]
    if not tensors or len({len(v) for v in tensors}) != 1:
        raise DataError(
            f"several processes: no rows to share out in a batch of shapes {[tuple(v.shape) for v in tensors]}; give the loader a"
            " DistributedSampler, which gives each process its own samples"
        )
    rows = len(tensors[0])
    begin, end = rows * rank() // count, rows * (rank() + 1) // count
    weight = (end - begin) * count / rows
    begin, end = (begin, end) if end > begin else (0, 1)  # of less rows than processes: one, of no weight
    return pytree.tree_map(lambda v: v[begin:end] if isinstance(v, Tensor) and v.ndim else v, batch), weight


def mean_(tensors: Sequence[Tensor], flags: Sequence[float] = ()) -> list[float]:
    """Average tensors over the processes, in place and in fp32, all in one message; the flags are summed and handed back.

    Raises TrainingError where another process has gone.
    """
    if ranks() == 1:
        return list(flags)
    device = tensors[0].device if tensors else torch.device("cpu")
    sent = torch.cat([torch.tensor(list(flags), device=device), *(t.detach().float().reshape(-1) for t in tensors)])
    try:
        dist.all_reduce(sent)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise TrainingError(
            f"process {rank()}: another process is gone ({first}); all end. Run the same command again to go on"
        ) from error
    summed = sent[: len(flags)].tolist()
    parts = sent[len(flags) :].div_(ranks()).split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))
    return summed


def gathered(state: Any) -> list[Any]:
    """The plain data of every process, in process 0; elsewhere an empty list."""
    if ranks() == 1:
        return [state]
    found: list[Any] | None = [None] * ranks() if rank() == 0 else None
    dist.gather_object(state, found, 0)
    return found or []


class _Norm(torch.autograd.Function):
    """Normalise by the mean and variance of the rows of all processes: one message forward, one backward, torch's own kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Ten times as fast as var_mean, whose reduction over the outer dimensions is not vectorised on CPUs.
        mean, variance = (value.float() for value in torch.batch_norm_update_stats(x, None, None, 0.0))
        rows = mean.new_full((1,), x.numel() / x.shape[1])
        sent = torch.cat([mean, variance, rows])
        parts = [torch.empty_like(sent) for _ in range(ranks())]
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
        both = torch.cat([of_weight.float(), of_bias.float()])
        dist.all_reduce(both)
        summed, shift = (both / ctx.count).chunk(2)
        scale = torch.rsqrt(variance + ctx.eps)
        # Less what goes through the statistics: w s (mean(dy) + x' mean(dy x')), a line in x for each channel.
        slope = weight.float() * scale.square() * summed
        offset = weight.float() * scale * shift - slope * mean
        shape = [1, -1, *[1] * (x.ndim - 2)]
        through = through - offset.view(shape).to(through.dtype)
        return through.addcmul_(x, slope.view(shape).to(x.dtype), value=-1), of_weight, of_bias, None


def batch_norm(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm` in training, (N, C, ...), with the statistics of the rows of all processes together."""
    if ranks() == 1:
        return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps)
    width = x.shape[1]
    weight = torch.ones(width, device=x.device) if weight is None else weight
    bias = torch.zeros(width, device=x.device) if bias is None else bias
    y, middle, spread, count = _Norm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    if mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(middle.to(mean.dtype), momentum)
            var.lerp_((spread * count / (count - 1).clamp(min=1)).to(var.dtype), momentum)
    return y  # type: ignore[no-any-return]


@contextmanager
def common_statistics(model: nn.Module) -> Iterator[None]:
    """Inside the block the BatchNorm layers of a model normalise by the rows of all processes, in train mode.

    torch's SyncBatchNorm does so on GPUs alone, and stands in the model as another module.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] if ranks() > 1 else []
    own = [norm for norm in norms if "forward" not in vars(norm) and norm.track_running_stats]
    try:
        for norm in own:
            norm.forward = _Common(norm)  # type: ignore[method-assign, assignment]
        yield
    finally:
        for norm in own:
            del norm.forward


class _Common:
    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        norm = self.norm
        if not norm.training:
            return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        return batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, momentum, norm.eps)


def equal_(model: nn.Module) -> None:
    """Give the model of every process the values of process 0's."""
    for value in [*model.parameters(), *model.buffers()] if ranks() > 1 else ():
        plain = value.detach().clone() if value.dtype is not torch.bool else value.detach().to(torch.uint8)
        dist.broadcast(plain, 0)
        with torch.no_grad():
            value.copy_(plain)


def wait() -> None:
    """Until all processes are here."""
    if ranks() > 1:
        dist.barrier()


def gone(error: BaseException) -> bool:
    """Whether an error says that another process has ended."""
    return ranks() > 1 and any(said in str(error) for said in ("Connection closed by peer", "Connection reset by peer"))
