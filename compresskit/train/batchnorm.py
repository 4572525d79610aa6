"""Re-estimate BatchNorm statistics without labels: after channels are removed the old ones are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from compresskit.base.errors import DataError
from compresskit.base.inputs import AnyInputs, call_checked, each_inputs, not_finite, not_finite_error
from compresskit.base.task import Inputs, batch_size, shapes_of
from compresskit.graph.surgery import mode


def norms_with_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that have running statistics, by dotted name."""
    return {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}


def reestimate_batchnorm_(model: nn.Module, batches: Iterable[AnyInputs]) -> int:
    """Replace the running means and variances of all BatchNorm layers by their averages over batches.

    Neither labels nor gradients are needed. Only BatchNorm layers are in train mode, so dropout is off.

    Args:
        model: changed in place.
        batches: inputs, shuffled; batches of one class each give useless statistics. Batches of one row are skipped behind
            larger ones, as each batch counts the same, and where a layer has one value for each channel, which has no variance.

    Returns: the number of BatchNorm layers with running statistics.
    Raises: DataError where all batches are skipped, the model does not run on one, or statistics are nan or infinite, as of data
        that hold such values; the statistics are then as before.
    """
    norms = norms_with_statistics(model)
    if not norms:
        return 0
    momenta = [norm.momentum for norm in norms.values()]
    before = [{name: value.clone() for name, value in norm.named_buffers()} for norm in norms.values()]
    done = False
    with torch.no_grad(), mode(model, training=False):
        for norm in norms.values():
            norm.reset_running_stats()
            norm.momentum = None  # a plain average
            norm.train()
        try:
            _average_(model, norms, batches)
            done = True
        finally:
            for norm, momentum, old in zip(norms.values(), momenta, before, strict=True):
                norm.momentum = momentum
                for name, value in ({} if done else old).items():
                    norm.get_buffer(name).copy_(value)
    return len(norms)


def _average_(model: nn.Module, norms: Mapping[str, _BatchNorm], batches: Iterable[AnyInputs]) -> None:
    """Run a model on batches. Raises DataError where the statistics are then none."""
    where, count, larger = "re-estimating BatchNorm", 0, False
    usable: dict[str, bool] = {}  # of batches of one row, by their shapes
    device = next(iter(norms.values())).get_buffer("running_mean").device
    for number, inputs in enumerate(each_inputs(batches, "reestimate_batchnorm_"), 1):
        rows, shapes = batch_size(inputs), str(shapes_of(inputs))
        larger = larger or rows > 1
        if rows == 1 and not larger and shapes not in usable:
            usable[shapes] = _have_variances(model, norms, inputs)
        if rows > 1 or (rows == 1 and not larger and usable[shapes]):
            call_checked(model, inputs, "calibration data")
            count += 1
            names = ("running_mean", "running_var")
            values = [norm.get_buffer(name).to(device) for norm in norms.values() for name in names]
            if bool(torch.cat(values).isfinite().all()):  # one look at the device for all layers
                continue
            bad = next(path for path, norm in norms.items() if not_finite((norm.running_mean, norm.running_var)))
            raise not_finite_error(where, f"the mean or the variance of {bad}", [inputs], number)
    if not count:
        raise DataError(
            f"{where}: wanted calibration batches with more than one value for each channel, got none; give them two rows or more"
        )


def _have_variances(model: nn.Module, norms: Mapping[str, _BatchNorm], inputs: Inputs) -> bool:
    """Whether each layer has more than one value for each channel in a batch, which is run in eval mode."""
    single: list[bool] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = next(iter((*args, *kwargs.values())))
        single.append(x.numel() == x.shape[1])

    handles = [norm.eval().register_forward_pre_hook(note, with_kwargs=True) for norm in norms.values()]
    try:
        call_checked(model, inputs, "calibration data")
    finally:
        for handle, norm in zip(handles, norms.values(), strict=True):
            handle.remove()
            norm.train()
    return not any(single)
