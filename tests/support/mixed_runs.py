"""Small runs of mixed precision whose gradients are known, and what their tests share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from compresskit.mixed import MASTER_FP16, prepare
from compresskit.mixed.step.compiled import has_compiler

INF = float("inf")
#: Loss scale 8: the default of 65536 is beyond fp16 itself, so that a gradient of 1 would overflow.
FIXED_SCALE = replace(MASTER_FP16, loss_scale=8.0)
#: The warning that fp16 on a CPU is for numerics only, which is what these tests are about; or all warnings to users.
FP16_ON_CPU = pytest.mark.filterwarnings("ignore:fp16 on a CPU:UserWarning")
USER_WARNINGS = pytest.mark.filterwarnings("ignore:.*:UserWarning")
HAS_COMPILER = has_compiler(torch.device("cpu"))


def one_weight(policy, **settings):
    """A linear model of one weight, 0, and its run with SGD at rate 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy, **settings)


def two_weights(policy, make, **settings):
    """A linear model of two weights, both 0, and its run with the optimizer that `make` makes."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, prepare(model, make(model.parameters()), policy, **settings)


def linear_steps(run, gradients):
    """Steps whose gradient on every weight is given (inf overflows); the loss is linear, so it is exact in half."""
    for gradient in gradients:
        run.backward((run(torch.ones(1, 2)) * gradient).sum())
        run.step()
