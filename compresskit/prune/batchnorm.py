"""Label-free re-estimation of BatchNorm statistics, which a cut makes wrong at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from compresskit.surgery import mode
from compresskit.task import Inputs, call


def reestimate_batchnorm_(model: nn.Module, batches: Iterable[Inputs]) -> int:
    """Replace running means and variances by the average over batches; returns how many layers have them.

    Needs neither labels nor gradients. Everything but BatchNorm stays in eval mode, so dropout does not disturb. The batches
    must be shuffled: batches of one class each give statistics of no use.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad(), mode(model, training=False):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average
            norm.train()
        try:
            for inputs in batches:
                call(model, inputs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return len(norms)
