"""Bias correction: make up for the mean error of rounding in the biases (Nagel et al., 1906.04721, section 4.2)."""

from __future__ import annotations

import torch

from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.progress import progress_bar
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import integer_layers, layer_outputs
from compresskit.quant.model import Quantized


def correct_bias_(quantized: Quantized, batches: Batches) -> int:
    """Add to each bias the mean error of its layer's outputs, in place.

    The correction of an output channel is E[float output] - E[quantized output]. Layers are corrected in the order of the graph,
    each with those before it corrected. This costs nothing at run time, and one pass over the batches per layer.

    Args:
        quantized: a calibrated model.
        batches: an iterable of inputs, or one batch.

    Returns the number of layers that were corrected: those with a bias.
    Raises DataError where there is no batch.
    """
    data = list(first_and_all(batches, "correct_bias_")[1])
    float_weights = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}
    layers = [(layer, layer.bias) for layer in integer_layers(quantized) if layer.bias is not None]
    with mode(quantized, training=False), torch.no_grad():
        for layer, name in progress_bar(layers, desc="correct biases"):
            bias = get_tensor(quantized.body, name)
            error, count = torch.zeros_like(bias, dtype=torch.float64), 0
            for outputs in layer_outputs(quantized.body, layer.node, data, float_weights):
                difference = (outputs.float_output - outputs.quantized_output).double()
                by_channel = difference.movedim(layer.channel_dim, 0).flatten(1)
                error += by_channel.sum(1)
                count += by_channel.shape[1]
            bias.add_(error / count)
    quantized.make_room_for_biases_()
    return len(layers)
