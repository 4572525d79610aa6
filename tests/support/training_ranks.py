"""What two processes do in `test_ranks.py`: train under FSDP2, stop on the way and go on; train on rows of their own."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    x, y = pictures(10)
    model = plain().double()
    how = ck.Train(epochs=1, optimizer=sgd, schedule=ck.lr.Constant(), exact=True)
    found["float64, exact"] = fit_(model, ck.Task(train=[(x.double(), y)]), how).state_dict()
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


class Experts(nn.Module):
    """Rows that begin below 0 go through one layer, others through another; a third is for none."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.none = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 4)), nn.Linear(8, 4)

    def forward(self, x):
        low = x[:, 0] < 0
        y = x.new_zeros(len(x), 4)
        for layer, rows in ((self.low, low), (self.high, ~low)):
            if rows.any():
                y = y.masked_scatter(rows[:, None].expand(-1, 4), layer(x[rows]))
        return y


def expert_steps(precision="FP32", dtype=torch.float32):
    """The second process has no row for the first expert, and the first none for the second."""
    torch.manual_seed(0)
    x, model = torch.randn(16, 8).to(dtype), Experts().to(dtype)
    x[:, 0] = torch.arange(16.0) - 7.5
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    how = ck.Train(epochs=3, optimizer=sgd, schedule=ck.lr.Constant(), precision=getattr(ck.mixed, precision), clip=1.0)
    fit_(model, ck.Task(train=[(x, torch.arange(16) % 4)]), how)
    return {name: value.detach() for name, value in model.named_parameters()}


def experts(folder):
    found = {precision: expert_steps(precision) for precision in ("FP32", "MASTER_BF16", "MASTER_FP16")}
    return found | {"float64": expert_steps(dtype=torch.float64)}


def trained_by(loss, labels):
    """Exact steps by a loss on 33 rows, so that the processes have different numbers of them; and the losses that are told."""
    torch.manual_seed(0)
    model, told = nn.Linear(8, 4), []
    sgd = partial(torch.optim.SGD, lr=0.1)
    how = ck.Train(
        epochs=2, exact=True, optimizer=sgd, schedule=ck.lr.Constant(), on_epoch=lambda report: told.append(report.loss)
    )
    fit_(model, ck.Task(train=[(torch.randn(33, 8), labels)], loss=loss), how)
    return {"weight": model.weight.detach(), "told": torch.tensor(told)}


def by_losses():
    """Losses that are no means over rows: of classes that weigh, of labels that are ignored, and sums."""
    ordered, first_half = torch.arange(33) // 9, torch.arange(33) % 4
    first_half[:16] = -100  # all of the first process
    uneven = first_half.clone()
    uneven[0], uneven[20] = 2, -100
    weights = torch.tensor([1.0, 5.0, 0.1, 2.0])
    return {
        "plain": trained_by(F.cross_entropy, ordered),
        "weights": trained_by(partial(F.cross_entropy, weight=weights, label_smoothing=0.1), ordered),
        "module": trained_by(nn.CrossEntropyLoss(weight=weights, ignore_index=3), ordered),
        "ignored": trained_by(F.cross_entropy, uneven),
        "all ignored": trained_by(partial(F.cross_entropy, label_smoothing=0.1), first_half),
        "sum": trained_by(partial(F.cross_entropy, reduction="sum"), ordered),
        "squares": trained_by(lambda y, target: F.mse_loss(y[:, 0], target.float()), ordered),
    }


def losses(folder):
    return by_losses()


def read(batches, loss=F.cross_entropy):
    """What a training says of batches; empty where nothing."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("compresskit").addHandler(handler)
    try:
        fit_(nn.Linear(8, 4), ck.Task(train=batches, loss=loss), ck.Train(epochs=1))
    except ck.DataError as error:
        return f"refused: {error}"
    finally:
        logging.getLogger("compresskit").removeHandler(handler)
    return "; ".join(records)


class Turned(torch.utils.data.Dataset):
    """Samples whose label an augmentation draws."""

    def __init__(self):
        self.random = np.random.default_rng(dist.get_rank())

    def __len__(self):
        return 64

    def __getitem__(self, index):
        label = int(self.random.integers(4))
        return torch.full((8,), index + label / 4), label


class Simulated(torch.utils.data.IterableDataset):
    def __init__(self, rows=8):
        self.rows = rows

    def __len__(self):
        return 4

    def __iter__(self):
        own = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            yield torch.randn(self.rows, 8, generator=own), torch.randint(4, (self.rows,), generator=own)


class Ahead:
    """A class around a loader that has no attribute of it."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return iter(self.loader)


def unsure(folder):
    """Batches that differ, where nothing may be lost; and labels of pixels, which are the samples'."""
    loader = torch.utils.data.DataLoader
    own = torch.Generator().manual_seed(dist.get_rank())
    data = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].expand(-1, 8), torch.arange(64) % 4)
    pixels = [(torch.full((3, 8), float(i)), torch.tensor([i, i + 1, 2]) % 4) for i in range(64)]
    return {
        "drawn labels": read(loader(Turned(), batch_size=8)),
        "simulated": read(loader(Simulated(), batch_size=None)),
        "around a loader": read(Ahead(loader(data, 8, sampler=torch.utils.data.distributed.DistributedSampler(data)))),
        "rows": read([(torch.randn(8 - 2 * dist.get_rank(), 8), torch.arange(8 - 2 * dist.get_rank()) % 4)]),
        "pixels": read(loader(pixels, 8, shuffle=True, generator=own), loss=lambda y, z: F.cross_entropy(y.mT, z)),
    }


def reads(folder):
    own = torch.Generator().manual_seed(dist.get_rank())
    data = [(torch.full((8,), float(i)), i % 4) for i in range(64)]
    part = torch.utils.data.Subset(data, range(dist.get_rank() * 9, 64, 2))
    loader = partial(torch.utils.data.DataLoader, batch_size=8)
    augmented = [(torch.randn(8, 8, generator=own), torch.arange(8) % 4)]
    return {
        "same": read(loader(data, shuffle=True)),
        "part": read(list(loader(part, drop_last=True))[:3]),
        "order": read(loader(data, shuffle=True, generator=own)),
        "augmented": read(augmented),
        "sampler": read(loader(data, sampler=torch.utils.data.distributed.DistributedSampler(data))),
        "rows": read([(x[:3], y[:3] + dist.get_rank()) for x, y in augmented]),
    }


def told(folder):
    """The loss of a batch whose second half is harder; a layer that a callback of the first process freezes."""
    torch.manual_seed(0)
    x, model = torch.randn(16, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x[8:] *= 5
    start, reported, frozen = {name: v.detach().clone() for name, v in model.named_parameters()}, [], []

    def freeze(report):
        reported.append(report.loss)
        model[0].requires_grad_(False)
        model[1].eval()
        frozen.append(model[0].weight.detach().clone())

    sgd = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    how = ck.Train(epochs=3, exact=True, optimizer=sgd, schedule=ck.lr.Constant(), on_epoch=freeze)
    fit_(model, ck.Task(train=[(x, torch.arange(16) % 4)]), how)
    after = {name: v.detach() for name, v in model.state_dict().items()}
    return {"x": x, "start": start, "reported": reported, "frozen": frozen, "after": after}


CASES = (resumed, best, snapshots, elsewhere, refused, in_half, own_rows, quantized, experts, losses, reads, unsure, told)


def main(rank: int, folder: str) -> None:
    run_cases(CASES, folder, rank, folder)
