"""Find calibration samples whose values are far larger than those of the others: one of them sets the range for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, call
from compresskit.graph.surgery import mode
from compresskit.quant.calibration.rows import row_count, take_rows
from compresskit.quant.model import Quantized

UNUSUAL = 4.0  # times that a sample's largest value is larger than that of the middle sample
MOST_UNUSUAL = 0.1  # of the samples; where there are more they are not unusual


def without_unusual(quantized: Quantized, batches: Sequence[Inputs]) -> tuple[list[Inputs], int, float]:
    """Leave out the samples whose largest value, of some activation, is `UNUSUAL` times that of the middle sample.

    Args:
        quantized: a calibrated model; its values are looked at in float.
        batches: inputs with a row for each sample; others are kept as they are.

    Returns the rest, how many samples were left out, and how many times larger the largest of them is; all batches, 0 and 1 where
    no sample is unusual, or more than a tenth.
    """
    sizes = [None if row_count(inputs) is None else _largest_values(quantized, inputs) for inputs in batches]
    known = [size for size in sizes if size is not None]
    if not known:
        return list(batches), 0, 1.0
    middle = torch.cat(known).median(0).values.clamp(min=1e-30)
    times = [None if size is None else (size / middle).amax(1) for size in sizes]
    every = torch.cat([t for t in times if t is not None])
    count = int((every > UNUSUAL).sum())
    if not 0 < count <= MOST_UNUSUAL * len(every):
        return list(batches), 0, 1.0
    rest: list[Inputs] = []
    for inputs, time in zip(batches, times, strict=True):
        usual = None if time is None else torch.nonzero(time <= UNUSUAL)[:, 0]
        if usual is None or len(usual):
            rest.append(inputs if usual is None else take_rows(inputs, usual))
    return rest, count, float(every.max())


def _largest_values(quantized: Quantized, inputs: Inputs) -> Tensor:
    """The largest |value| of each activation that is rounded, for each sample: (samples, activations)."""
    rows, found, handles = row_count(inputs), dict[int, Tensor](), []
    enabled = [quantizer.enabled for quantizer in quantized.quantizers()]

    def hook(number: int, value: object) -> None:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
            found[number] = value.detach().abs().flatten(1).amax(1)

    for number, quantizer in enumerate(quantized.activation_quantizers()):
        handles.append(quantizer.register_forward_pre_hook(lambda _, args, number=number: hook(number, args[0])))
    quantized.enable_(False)
    try:
        with torch.no_grad(), mode(quantized, training=False):
            call(quantized.body, inputs)
    finally:
        for handle in handles:
            handle.remove()
        for each, on in zip(quantized.quantizers(), enabled, strict=True):
            each.enabled = on
    leaves = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]
    return torch.stack([found[n] for n in sorted(found)], 1) if found else torch.ones(len(leaves[0]), 1)
