"""Label-free tuning: train weights, biases and scales of a quantized model so that its outputs are those of the float model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches
from compresskit.base.progress import progress_bar
from compresskit.base.task import call
from compresskit.graph.differences import without_fills
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import mode
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.calibration.layer_outputs import finite_batches
from compresskit.quant.calibration.rows import row_count
from compresskit.quant.effort.aligned_sums import quantizers_in_exact_sums
from compresskit.quant.effort.samples import OutputError
from compresskit.quant.model import CALIBRATION_BYTES, Quantized
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

WEIGHT_RATE = 0.005  # learning rate of a weight, in steps of its grid
SCALE_RATE = 1e-4  # of a scale, as a fraction of it


@no_modes_of_caller()
def imitate_float_(
    quantized: Quantized,
    model: nn.Module,
    batches: Batches,
    *,
    steps: int = 500,
    batch_size: int = 32,
    weight_rate: float = 0.02,
    scale_rate: float = 1e-3,
    seed: int = 0,
) -> None:
    """Train a quantized model, without labels, to give the outputs of its float model, in place.

    All weights, biases and scales are trained at once by Adam, with the rounding in place, for the least squared error of the
    outputs. For two and three bits it makes up for much that no choice of rounding can; for 8 bits take smaller rates.

    Args:
        quantized: a calibrated model, on its own or after `reconstruct_blocks_`. Zeros of pruning masks stay.
        model: the float model it was made from.
        batches: an iterable of inputs, or one batch; a few hundred samples.
        steps: optimizer steps; the learning rates fall as a cosine.
        batch_size: rows of a step.
        weight_rate: learning rate of a weight, in steps of its grid. scale_rate: of scales and biases, as a fraction of them.
        seed: of the choice of rows.

    Raises DataError where there is no batch, or one holds nan or infinite values that reach a layer, SettingError for settings
    out of range; nothing is changed then.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise SettingError(f"imitate_float_({name}=...): wanted a whole number >= 1, got {value}")
    for name, rate in (("weight_rate", weight_rate), ("scale_rate", scale_rate)):
        if rate <= 0:
            raise SettingError(f"imitate_float_({name}=...): wanted a positive number, got {rate}")
    data = finite_batches(quantized, batches, "imitate_float_")
    error = OutputError(model, data, max(1, CALIBRATION_BYTES // quantized.row_bytes))
    minimise_error_(quantized, error, steps=steps, batch=batch_size, weight_rate=weight_rate, scale_rate=scale_rate, seed=seed)
    nudge_scales_(quantized.body)


def minimise_error_(
    quantized: Quantized,
    error: OutputError,
    *,
    steps: int,
    batch: int,
    weight_rate: float = WEIGHT_RATE,
    scale_rate: float = SCALE_RATE,
    seed: int = 0,
) -> None:
    """Minimise the squared error of the outputs, each relative to what it is at first, with Adam and the rounding in place.

    Args:
        quantized: a calibrated model. Zeros of pruning masks stay.
        error: the float model's outputs on the data to learn from.
        steps: optimizer steps; the learning rate falls as a cosine.
        batch: rows of a step.
        weight_rate, scale_rate: as in `imitate_float_`.
        seed: of the choice of rows.
    """
    weights = [1 / max(value, 1e-12) for value in error.of(quantized)]
    real = [[without_fills(value.double(), value.double())[0] for value in outputs] for outputs in error.outputs]
    powers = [sum(float(o[i].square().mean()) for o in real) / len(real) for i in range(len(weights))]
    groups = _groups(quantized, weight_rate, scale_rate)
    zeros = _zeros(quantized)
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    with mode(quantized, training=False), torch.enable_grad():
        for step in progress_bar(range(steps), desc="imitate the float model"):
            part = int(torch.randint(len(error.batches), (), generator=generator, device="cpu"))
            count = row_count(error.batches[part])
            rows = torch.randperm(count or 0, generator=generator, device="cpu")[:batch]
            whole = count is None or len(rows) == count
            inputs, wanted = (error.batches[part], error.outputs[part]) if whole else error.rows_of(part, rows)
            outputs = error.outputs_of(call(quantized, inputs))
            pairs = [without_fills(*pair) for pair in zip(wanted, outputs, strict=True)]
            losses = [
                w * (b - a).square().mean() / max(p, 1e-30)
                for (a, b), w, p in zip(pairs, weights, powers, strict=True)
                if b.requires_grad
            ]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                for parameter, zero in zeros:
                    parameter.masked_fill_(zero, 0)
    for activation in quantized.activation_quantizers():
        if activation.ratio is not None:
            activation.learn_(on=False)
    quantized.make_room_for_biases_()


def _groups(quantized: Quantized, weight_rate: float, scale_rate: float) -> list[dict[str, object]]:
    """Parameters with a learning rate each: weights in steps of their grid, other parameters relative to their size, scales."""
    kept = quantizers_in_exact_sums(quantized.body)  # scales that move apart would round the sums again
    for activation in quantized.activation_quantizers():
        if activation not in kept:
            activation.learn_()
    groups: list[dict[str, object]] = []
    seen = set[int]()
    steps = {weight.data_ptr(): rounding.qparams(weight)[0].detach() for rounding, weight in quantized.rounded_weights()}
    for parameter in quantized.parameters():
        step = steps.get(parameter.data_ptr())
        if step is not None:
            groups.append({"params": [parameter], "lr": weight_rate * float(step.mean())})
            seen.add(id(parameter))
    for activation in quantized.activation_quantizers():
        if activation.ratio is not None:
            groups.append({"params": [activation.ratio], "lr": scale_rate})
            seen.add(id(activation.ratio))
    others = [p for p in quantized.parameters() if id(p) not in seen and p.is_floating_point()]
    return groups + [{"params": [p], "lr": scale_rate * (float(p.detach().abs().mean()) or 1e-3)} for p in others]


def _zeros(quantized: Quantized) -> list[tuple[Tensor, Tensor]]:
    """Parameters of a masked model and where they are zero."""
    if masks_of(quantized.body) is None:
        return []
    return [(p, p.detach() == 0) for p in quantized.parameters() if p.ndim > 1]
