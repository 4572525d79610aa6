"""Bias correction: make up for the mean error of rounding in the biases (Nagel et al., 1906.04721, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compresskit.base.errors import DataError
from compresskit.base.inputs import Batches, first_and_all, not_finite, not_finite_error
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs
from compresskit.graph.capture import module_path
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers, layer_outputs
from compresskit.quant.model import Quantized


def correct_bias_(quantized: Quantized, batches: Batches) -> int:
    """Add to each bias the mean error of its layer's outputs, in place.

    The correction of an output channel is E[float output] - E[quantized output]. Layers are corrected in the order of the graph,
    each with those before it corrected. This costs nothing at run time, and one pass over the batches per layer.

    Args:
        quantized: a calibrated model.
        batches: an iterable of inputs, or one batch.

    Returns the number of layers that were corrected: those with a bias.
    Raises DataError where there is no batch, or the error of a layer is nan or infinite, as of data that hold such values; the
    biases are then as before.
    """
    data = list(first_and_all(batches, "correct_bias_")[1])
    float_weights = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}
    layers = [(layer, layer.bias) for layer in integer_layers(quantized) if layer.bias is not None]
    try:
        with mode(quantized, training=False), torch.no_grad():
            for layer, name in progress_bar(layers, desc="correct biases"):
                get_tensor(quantized.body, name).add_(_mean_error(quantized, layer, data, float_weights))
    except DataError:
        with torch.no_grad():
            for _, name in layers:
                get_tensor(quantized.body, name).copy_(float_weights[name])
        raise
    quantized.make_room_for_biases_()
    return len(layers)


def _mean_error(quantized: Quantized, layer: IntegerLayer, data: Sequence[Inputs], float_weights: Mapping[str, Tensor]) -> Tensor:
    """E[float output] - E[quantized output] of a layer, (channels,), in float64. Raises DataError where it is not finite."""
    error, count = torch.zeros((), dtype=torch.float64), 0
    for number, outputs in enumerate(layer_outputs(quantized.body, layer.node, data, float_weights), 1):
        difference = (outputs.float_output - outputs.quantized_output).double()
        by_channel = difference.movedim(layer.channel_dim, 0).flatten(1)
        error = error + by_channel.sum(1)
        count += by_channel.shape[1]
        if not_finite(error):
            what = f"the output of {module_path(layer.node) or layer.node.name}"
            raise not_finite_error("correct_bias_", what, [data[number - 1]], number)
    return error / count
