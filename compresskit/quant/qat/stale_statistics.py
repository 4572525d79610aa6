"""Find BatchNorm statistics that do not belong to the weights before them, and start training from those of a batch instead.

Calibration normalizes by the running statistics, training by those of each batch. In a network that was never trained the running
ones are 0 and 1, whatever its layers compute: from layer to layer the calibrated values shrink or grow, in a deep network to
1e-9. In training the values have their usual size, are clipped to such a range, and become constant; BatchNorm then divides by
sqrt(eps), and the gradient grows by that factor in each layer.
"""

from __future__ import annotations

import copy
import warnings

import torch

from compresskit.base.task import Inputs, batch_size, call
from compresskit.graph.surgery import mode
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.observers import KnownRange, MinMax
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.passes.unfold_batchnorm import conv_bn_layers

#: Ranges that differ by this factor do not belong together; a trained network's differ by less than 10.
FACTOR = 100.0
#: Fraction of the activations that must differ so: a few may, such as those of a layer that hardly reacts.
FRACTION = 0.25


def renew_stale_statistics_(quantized: Quantized, inputs: Inputs, where: str) -> None:
    """Take statistics and ranges from a batch where the running statistics of BatchNorm do not belong to the weights, in place.

    Nothing changes where they do. A warning, which begins with `where`, says so otherwise.

    Args:
        quantized: calibrated, with unfolded BatchNorm.
        inputs: a batch. With fewer than two samples nothing is compared.
        where: the function that the user called.
    """
    layers = conv_bn_layers(quantized.body)
    if not layers or batch_size(inputs) < 2:
        return
    before = [(layer.momentum, layer.running_mean.clone(), layer.running_var.clone()) for layer in layers]
    quantizers = quantized.activation_quantizers()
    observers = [quantizer.observer for quantizer in quantizers]
    enabled = [quantizer.enabled for quantizer in quantized.quantizers()]
    _normalize_by_batch(quantized, inputs)
    stale = [q.label for q, old in zip(quantizers, observers, strict=True) if _differs(q, old.range())]
    if len(stale) >= FRACTION * len(quantizers):
        with torch.no_grad():
            _take_ranges_(quantized)
        warnings.warn(
            f"{where}: the running statistics of BatchNorm do not belong to the weights, as in a network that was never trained:"
            f" with those of a batch {len(stale)} of {len(quantizers)} activations are more than {FACTOR:g} times larger or"
            f" smaller (first {stale[0]!r}). Training starts from the statistics and ranges of the first batch; to start from"
            " more, train in float first, or run the model in train mode on some batches",
            stacklevel=4,
        )
    else:
        for quantizer, observer in zip(quantizers, observers, strict=True):
            quantizer.observer = observer
        for layer, (_, mean, var) in zip(layers, before, strict=True):
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
    for layer, (momentum, _, _) in zip(layers, before, strict=True):
        layer.momentum = momentum
    for rounding, on in zip(quantized.quantizers(), enabled, strict=True):
        rounding.enabled = on


def _normalize_by_batch(quantized: Quantized, inputs: Inputs) -> None:
    """Run a batch in float with its own statistics, which the layers keep, while new observers watch."""
    for layer in conv_bn_layers(quantized.body):
        layer.momentum = 1.0
    quantized.enable_(False)
    for quantizer in quantized.activation_quantizers():
        quantizer.observing = True
        if not isinstance(quantizer.observer, KnownRange):
            quantizer.observer = MinMax()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), mode(quantized, training=True):
        call(quantized, copy.deepcopy(inputs))
    quantized.observe_(False)


def _differs(quantizer: ActivationQuantizer, other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether the observed range is another by `FACTOR`; a range of zeros says nothing."""
    now, before = (max(abs(float(end[0])) for end in ends) for ends in (quantizer.observer.range(), other))
    return min(now, before) > 0 and not 1 / FACTOR <= now / before <= FACTOR


def _take_ranges_(quantized: Quantized) -> None:
    """Take the ranges that the observers saw; weights get no more room than the biases need with them."""
    for quantizer in quantized.quantizers():
        if isinstance(quantizer, ActivationQuantizer):
            quantizer.freeze_range_(checked=True)
        if isinstance(quantizer, WeightQuantizer):
            quantizer.min_scale.zero_()
    quantized.make_room_for_biases_()
