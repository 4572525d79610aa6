"""One short recipe, train, prune and QAT, that several tests of recipes run."""

from __future__ import annotations

from functools import partial

import networks
import torch

import compresskit as ck

ADAM = partial(torch.optim.Adam, lr=3e-3)


def run(out, task, *, macs=0.7, epochs=1, model=None):
    recipe = ck.Recipe(
        ck.Train(epochs=2, optimizer=ADAM),
        ck.Prune(budget=ck.keep(macs=macs), round_to=4),
        ck.QAT(epochs=epochs, objective=ck.imitate()),
    )
    torch.manual_seed(0)
    return recipe.run(model or networks.Residual(), task, out)
