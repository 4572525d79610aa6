"""What two processes do in `test_ranks.py`: train under FSDP2, stop on the way and go on; train on rows of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rank_pairs import run_cases
from torch import nn

import compresskit as ck
from compresskit.base.progress import Every, Progress
from compresskit.train.train import fit_

STOP_AT = 7


class Stopped(Exception):
    """Raised in the middle of a training."""


def net(sharded, policy=ck.mixed.FP32, *, offload=False):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 3))
    if sharded:
        where = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        for layer in (model[1], model[0], model[4], model):  # the norm in fp32
            held = ck.mixed.FP32 if layer is model[1] else policy
            fully_shard(layer, mp_policy=ck.mixed.fsdp_policy(held), offload_policy=where)
    return model


def task(rows=40, **settings):
    fixed = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(rows, 7, generator=fixed), torch.arange(rows) % 3)
    train, val = torch.utils.data.DataLoader(data, 8, shuffle=True), torch.utils.data.DataLoader(data, 16)
    return ck.Task(train=train, val=val, **settings)


def train(folder, *, sharded=True, stop=None, settings=None, snapshots=None, seen=None, **how_sharded):
    """Tensors of the trained model, whole; `seen` collects the steps that were taken."""
    model = net(sharded, **how_sharded)
    torch.manual_seed(3)

    def after_step(step, steps):
        if seen is not None:
            seen.append(step)
        if step == stop:
            raise Stopped

    adam = partial(torch.optim.AdamW, lr=1e-2)
    how = ck.Train(epochs=3, optimizer=adam, clip=1.0, schedule=ck.lr.OneCycle(), **settings or {})
    progress = None if folder is None else Progress(folder=Path(folder), key="sharded", every=Every(steps=2, seconds=None))
    fit_(model, task(progress=progress, snapshots=snapshots), how, after_step=[after_step])
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone() for name, value in found}


def stopped(folder, **settings):
    try:
        train(folder, stop=STOP_AT, **settings)
    except Stopped:
        pass
    else:
        raise AssertionError("the training did not stop")


def resumed(folder):
    stopped(f"{folder}/stopped")
    files = sorted(path.name for path in Path(f"{folder}/stopped").iterdir())
    whole, again = train(None), train(f"{folder}/stopped")
    return {"files": files, "whole": whole, "again": again, "read": train(f"{folder}/stopped")}


def best(folder):
    settings = {"keep_best": True, "validate_every": 1}
    stopped(f"{folder}/best", settings=settings)
    whole, again = train(None, settings=settings), train(f"{folder}/best", settings=settings)
    return {"whole": whole, "again": again}


def snapshots(folder):
    one, other = {0.2: {}}, {0.2: {}}
    train(None, snapshots=one)
    stopped(f"{folder}/snapshots", snapshots={0.2: {}})
    train(f"{folder}/snapshots", snapshots=other)
    full = [{name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in taken[0.2].items()} for taken in (one, other)]
    return {"whole": full[0], "again": full[1]}


def elsewhere(folder):
    """Leaves a stopped training, which one process continues without FSDP2."""
    stopped(f"{folder}/elsewhere")
    return {}


def refused(folder):
    try:
        ck.Recipe(ck.Train(epochs=1)).run(net(sharded=True), task(), out=f"{folder}/refused")
    except ck.ModelError as error:
        return str(error)


def in_half(folder):
    """Weights of a policy with half weights, and of one whose optimizer state is in CPU memory."""
    half = partial(train, None, settings={"precision": ck.mixed.MASTER_BF16}, policy=ck.mixed.MASTER_BF16)
    return {"whole": half(), "again": half(offload=True)}


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def pictures(rows):
    fixed = torch.Generator().manual_seed(2)
    return torch.randn(rows, 1, 4, 4, generator=fixed), torch.arange(rows) % 3


def own_rows(folder):
    """One step on ten rows; two epochs with a last batch of three rows; both with `exact` too."""
    found = {}
    for exact in (False, True):
        sgd = partial(torch.optim.SGD, lr=0.1)
        for name, rows, size, epochs in (("step", 10, 10, 1), ("epochs", 11, 4, 2)):
            model, data = plain(), torch.utils.data.TensorDataset(*pictures(rows))
            how = ck.Train(epochs=epochs, optimizer=sgd, schedule=ck.lr.Constant(), exact=exact)
            fit_(model, ck.Task(train=torch.utils.data.DataLoader(data, size)), how)
            found[f"{name}, exact" if exact else name] = {key: value.clone() for key, value in model.state_dict().items()}
    return found


def quantized(folder):
    """The state of a model after QAT whose ranges follow rows of each process, and what its quantizers round to."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pictures(40)), 8)
    sgd = partial(torch.optim.SGD, lr=0.05)
    found = {}
    for exact in (False, True):
        made = ck.QAT(epochs=2, optimizer=sgd, samples=40, exact=exact)(plain().eval(), ck.Task(train=loader, val=loader))
        found[exact] = {key: value.clone() for key, value in made.state_dict().items()}
        found[exact]["outputs"] = made(pictures(40)[0])
    return {"own": found[False], "exact": found[True]}


CASES = (resumed, best, snapshots, elsewhere, refused, in_half, own_rows, quantized)


def main(rank: int, folder: str) -> None:
    run_cases(CASES, folder, rank, folder)
