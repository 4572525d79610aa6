"""Re-estimate BatchNorm statistics without labels: after channels are removed the old ones are wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from compresskit.base.errors import DataError
from compresskit.base.inputs import AnyInputs, call_checked, each_inputs
from compresskit.base.task import batch_size
from compresskit.graph.surgery import mode


def reestimate_batchnorm_(model: nn.Module, batches: Iterable[AnyInputs]) -> int:
    """Replace the running means and variances of all BatchNorm layers by their averages over batches.

    Neither labels nor gradients are needed. Only BatchNorm layers are in train mode, so dropout is off.

    Args:
        model: changed in place.
        batches: inputs, shuffled; batches of one class each give useless statistics. Batches of one row are skipped.

    Returns: the number of BatchNorm layers with running statistics.
    Raises: DataError where no batch has more than one row; the statistics are then as before.
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
