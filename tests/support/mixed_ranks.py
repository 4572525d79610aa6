"""The processes of `tests/mixed/formats/test_parallel.py`: every case is a function of the rank and returns what is compared."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from rank_pairs import run_cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compresskit import mixed
from compresskit.base.errors import SettingError

INF = float("inf")
SCALED = replace(mixed.MASTER_FP16, loss_scale=8.0)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(steps):
    return torch.randn(steps, 8, 8, generator=torch.Generator().manual_seed(1))


def go(run, rank, ranks, steps=5):
    """Steps on this rank's share of each batch of eight; losses are means, so that the ranks average to the whole."""
    for x in batches(steps):
        run.backward(run(x.chunk(ranks)[rank]).square().mean())
        run.step()


def numbers(run):
    return {
        name: (m.full_tensor() if hasattr(m, "full_tensor") else m).detach().clone() for name, m in run.named_masters().items()
    }


def wrapped(policy, *, hook=None, make=functools.partial(torch.optim.AdamW, lr=1e-2), **settings):
    model = net()
    run = mixed.prepare(model, make(model.parameters()), policy, **settings)
    run.model = DistributedDataParallel(run.model)
    if hook is not None:
        run.model.register_comm_hook(None, hook)
    return run


def ddp(rank):
    found = {}
    for policy in (mixed.FP32, mixed.AMP_BF16, mixed.MASTER_BF16, mixed.SPLIT_BF16, mixed.SR_BF16):
        run = wrapped(policy, clip=0.5)
        go(run, rank, 2)
        found[policy.name] = numbers(run)
    run = wrapped(mixed.MASTER_BF16, hook=mixed.fp32_allreduce_hook, clip=0.5)
    go(run, rank, 2)
    found["hook"] = numbers(run)
    with run.model.no_sync():
        try:
            run.backward(run(torch.ones(2, 8)).sum())
        except SettingError as error:
            found["no_sync"] = str(error)
    return found


def overflow(rank):
    """The second step overflows on rank 1 alone."""
    run = wrapped(SCALED, make=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True))
    for i, x in enumerate(batches(3)):
        run.backward(run(x.chunk(2)[rank]).square().mean() * (INF if (i, rank) == (1, 1) else 1))
        run.step()
    return numbers(run) | run.stats()


def accumulated(rank):
    run = wrapped(mixed.MASTER_BF16)
    with run.accumulate(4):
        for x in batches(4):
            run.backward(run(x.chunk(2)[rank]).square().mean())
    run.step()
    return numbers(run)


def small(rank):
    """Gradients of 2^-24, fp16's smallest, on both ranks: half of it is 0 in fp16, so their mean is lost in half."""
    found = {}
    for name, hook in (("half", None), ("fp32", mixed.fp32_allreduce_hook)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        policy = replace(mixed.MASTER_FP16, loss_scale=None)
        run = mixed.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**24), policy)
        run.model = DistributedDataParallel(run.model)
        if hook is not None:
            run.model.register_comm_hook(None, hook)
        run.backward((run(torch.ones(1, 1)) * 2.0**-24).sum())
        run.step()
        found[name] = numbers(run)["weight"]
    return found


def sharded(policy, **settings):
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=mixed.fsdp_policy(policy))
    return mixed.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), policy, **settings)


def fsdp(rank):
    found = {}
    for policy in (mixed.FP32, mixed.MASTER_BF16, SCALED):
        run = sharded(policy, clip=0.5)
        seen = []
        # After FSDP2's own hook, which gathers the weight; its later one casts outputs back.
        run.model[0].register_forward_pre_hook(lambda module, args, seen=seen: seen.append((module.weight.dtype, args[0].dtype)))
        go(run, rank, 2)
        found[policy.name] = numbers(run)
        found[policy.name, "seen"] = sorted({str(dtype) for pair in seen[:1] for dtype in pair})
        found[policy.name, "norm"] = run.stats()["grad_norm"]
    again = sharded(SCALED, clip=0.5)
    again.load_state_dict(run.state_dict())
    for one in (run, again):
        go(one, rank, 2, steps=2)
    found["resumed"] = [numbers(run), numbers(again)]
    return found


def fsdp_overflow(rank):
    run = sharded(SCALED)
    average = run.ema(0.5)
    before = numbers(run)
    run.backward(run(batches(1)[0]).square().mean() * (INF if rank == 1 else 1))
    run.step()
    return {"moved": any(not torch.equal(before[n], m) for n, m in numbers(run).items()), **run.stats(),
            "average": average.values["0.weight"].full_tensor()}  # fmt: skip


def fsdp_refused(rank):
    from torch.distributed.fsdp import fully_shard

    found = []
    for policy, cast, settings in ((mixed.MASTER_BF16, None, {}), (mixed.SPLIT_BF16, mixed.MASTER_BF16, {}),
                                   (mixed.MASTER_BF16, mixed.MASTER_BF16, {"flat": True})):  # fmt: skip
        model = net()
        fully_shard(model, **({"mp_policy": mixed.fsdp_policy(cast)} if cast else {}))
        try:
            mixed.prepare(model, torch.optim.AdamW(model.parameters()), policy, **settings)
        except SettingError as error:
            found.append(str(error))
    model = net()
    fully_shard(model)
    model(torch.randn(2, model[0].in_features))  # the shards are put together, and stay so
    try:
        mixed.prepare(model, torch.optim.AdamW(model.parameters()), mixed.FP32)
    except SettingError as error:
        found.append(str(error))
    return found


CASES = (ddp, overflow, accumulated, small, fsdp, fsdp_overflow, fsdp_refused)


def main(rank: int, folder: str) -> None:
    run_cases(CASES, rank, rank, folder)
