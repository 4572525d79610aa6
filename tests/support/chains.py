"""The chains that the fault tests run, small and with everything on: `python chains.py NAME OUT` runs one."""

from __future__ import annotations

import random
import sys
from functools import partial

import numpy as np
import torch
from quick import make_quick
from torch import nn
from torch.utils.data import DataLoader, Dataset

import compresskit as ck
from compresskit import mixed, prune, quant
from compresskit.base.progress import Every
from compresskit.distill import Term, indexed_loader, mutual, pseudo_label
from compresskit.distill.losses import CRDLoss, projection_heads
from compresskit.distill.models.teacher import EMA

make_quick()
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.003)


class Net(nn.Module):
    """A shortcut, BatchNorm, and dropout, which draws from the generator that loaders draw from too."""

    def __init__(self, width=16):
        super().__init__()
        self.stem, self.n1 = nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.inner, self.n2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 4)

    def forward(self, x):
        x = torch.relu(self.n1(self.stem(x)))
        x = torch.relu(self.n2(self.inner(x)) + x)
        return self.head(self.drop(x.mean((2, 3))))


class Augmented(Dataset):
    """Images whose class shows in their mean; each draw is changed by numbers from every generator there is."""

    def __init__(self, samples=96):
        fixed = torch.Generator().manual_seed(5)
        self.labels = torch.arange(samples) % 4
        self.images = torch.randn(samples, 1, 8, 8, generator=fixed) + self.labels.view(-1, 1, 1, 1)
        self.own = np.random.default_rng(3)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        shift = random.random() + np.random.random() + torch.rand(()).item() + self.own.random()  # noqa: NPY002
        return self.images[i] + 0.1 * shift, int(self.labels[i])


def task(*, workers=0, loader=DataLoader, **settings):
    data = Augmented()
    plain = [(data.images[i : i + 24], data.labels[i : i + 24]) for i in range(0, 96, 24)]
    return ck.Task(train=loader(data, batch_size=16, shuffle=True, num_workers=workers, **settings), val=plain, calibration=plain)


def long(*, save=None, export="last"):
    """Masters, distillation with an average of the student, pruning in steps, and QAT."""
    return ck.Recipe(
        ck.Train(epochs=2, optimizer=adamw, precision=mixed.MASTER_BF16, clip=1.0, accumulate=2),
        ck.Distill(student=partial(Net, 12), epochs=1, optimizer=sgd, generations=2),
        ck.Prune(budget=ck.keep(macs=0.6), steps=2, round_to=2,
                 between=ck.Train(epochs=1, optimizer=sgd, objective=ck.imitate(EMA(decay=0.9))),
                 finetune=ck.Train(epochs=1, optimizer=sgd, objective=mutual(Net(8)))),
        ck.QAT(epochs=2, optimizer=sgd, samples=64, freeze=0.6),
        save=save or Every(seconds=None, steps=2), export=export,
    )  # fmt: skip


def sparse(*, save=None, export="last"):
    """Masks that grow on a schedule, a lottery ticket that rewinds, learned scales under masks."""
    return ck.Recipe(
        ck.Train(epochs=1, optimizer=sgd, precision=mixed.SPLIT_BF16),
        ck.Sparsify(budget=ck.remove(weights=0.6), schedule=prune.schedules.Cubic(), updates=6, regrow=0.2,
                    criterion=prune.criteria.taylor, finetune=ck.Train(epochs=2, optimizer=adamw, precision=mixed.AMP_BF16)),
        ck.Densify(),
        ck.LotteryTicket(budget=ck.remove(weights=0.5), rounds=2, rewind=prune.rewind(to=0.3),
                         train=ck.Train(epochs=1, optimizer=sgd)),
        ck.QAT(epochs=1, optimizer=sgd, samples=64, learned=True),
        save=save or Every(seconds=None, steps=2), export=export,
    )  # fmt: skip


def taught(*, save=None, export="last"):
    """Objectives with a memory: a bank of features, unlabelled data, a growing penalty, an observer with a histogram."""
    unlabelled = DataLoader(Augmented().images[:40] + 0.5, batch_size=8, shuffle=True)
    teacher = Net().eval()
    return ck.Recipe(
        ck.Train(epochs=1, optimizer=sgd),
        ck.Train(epochs=1, optimizer=sgd, objective=ck.imitate(
            teacher, terms=[Term(CRDLoss(samples=96, negatives=16), "inner", adapt=partial(projection_heads, width=8))])),
        ck.Train(epochs=1, optimizer=sgd, precision=mixed.KAHAN_BF16, objective=pseudo_label(teacher, unlabelled, threshold=0.1)),
        ck.Prune(budget=ck.keep(macs=0.6), round_to=2,
                 learn=ck.Train(epochs=1, optimizer=sgd, objective=prune.group_lasso(strength=1e-4))),
        ck.QAT(epochs=1, optimizer=sgd, samples=64, observer=partial(quant.observers.HistogramMSE, 8), freeze=0.8),
        save=save or Every(seconds=None, steps=2), export=export,
    )  # fmt: skip


def short(*, save=None, export="last"):
    """Masters and QAT."""
    return ck.Recipe(
        ck.Train(epochs=2, optimizer=adamw, precision=mixed.MASTER_BF16),
        ck.QAT(epochs=1, optimizer=sgd, samples=64, freeze=0.6),
        save=save or Every(seconds=None, steps=2), export=export,
    )  # fmt: skip


def run(name, out, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "taught":
        return taught(**settings).run(Net(), task(loader=indexed_loader), out)
    return {"long": long, "sparse": sparse, "short": short}[name](**settings).run(Net(), task(), out)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])
