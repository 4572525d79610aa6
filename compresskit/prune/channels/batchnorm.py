"""Label-free re-estimation of BatchNorm statistics, which a cut makes wrong at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from compresskit.base.errors import DataError
from compresskit.base.inputs import AnyInputs, each_inputs
from compresskit.base.task import batch_size, call_checked
from compresskit.graph.surgery import mode


def reestimate_batchnorm_(model: nn.Module, batches: Iterable[AnyInputs]) -> int:
    """Replace running means and variances by the average over batches; returns how many layers have them.

    Needs neither labels nor gradients. Everything but BatchNorm stays in eval mode, so dropout does not disturb. The batches
    must be shuffled: batches of one class each give statistics of no use. Raises DataError, the statistics as they were, where
    there is no batch.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms]
    before = [{name: value.clone() for name, value in norm.named_buffers()} for norm in norms]
    count = 0
    with torch.no_grad(), mode(model, training=False):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average
            norm.train()
        try:
            for inputs in each_inputs(batches, "reestimate_batchnorm_"):
                if batch_size(inputs) > 1:  # one row has no variance
                    call_checked(model, inputs, "calibration data")
                    count += 1
        finally:
            for norm, momentum, old in zip(norms, momenta, before, strict=True):
                norm.momentum = momentum
                if not count:
                    for name, value in old.items():
                        norm.get_buffer(name).copy_(value)
    if not count:
        raise DataError("re-estimating BatchNorm: no calibration batch of more than one row was given")
    return len(norms)
