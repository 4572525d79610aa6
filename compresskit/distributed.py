"""Several processes, started by torchrun: who is who, what they share, and how each takes its part of a batch.

Every process reads the same batches and trains on its own rows of each, so that a batch is as large as it is for one process and
the result is the same. What is outside of training (calibration, scores, plans) every process computes alike, from the same data.
Process 0 alone writes. Loaders that share out the samples themselves, by a DistributedSampler, are left to it.
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

from compresskit.errors import DataError, TrainingError


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
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
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


class _Sum(torch.autograd.Function):
    """A sum over the processes that gradients pass through, by the same sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.contiguous().clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed


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
    dims = [d for d in range(x.ndim) if d != 1]
    wide = x.float()
    counted = x.new_full((1,), x.numel() / x.shape[1], dtype=torch.float32)
    sums: Tensor = _Sum.apply(torch.cat([wide.sum(dims), counted]))  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    shape = [1, -1, *[1] * (x.ndim - 2)]
    middle = sums[:-1] / count
    apart = wide - middle.view(shape)
    # About the common mean, not by E[x^2] - E[x]^2, which loses digits.
    spread: Tensor = _Sum.apply(apart.square().sum(dims)) / count  # type: ignore[no-untyped-call]
    if mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(middle.detach().to(mean.dtype), momentum)
            var.lerp_((spread.detach() * count / (count - 1).clamp(min=1)).to(var.dtype), momentum)
    y = apart * torch.rsqrt(spread + eps).view(shape)
    y = y if weight is None else y * weight.float().view(shape)
    y = y if bias is None else y + bias.float().view(shape)
    return y.to(x.dtype)


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
