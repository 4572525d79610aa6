"""Bias correction in one pass: each layer is corrected as the graph runs, with those before it corrected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compresskit.base.task import Inputs
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.model import Quantized


def correct_biases_(quantized: Quantized, inputs: Inputs) -> int:
    """Add to each bias the mean error of its layer's outputs on a batch, in place.

    The same correction as `correct_bias_`, from one pass over the graph: give few samples.

    Returns the number of layers that were corrected.
    """
    layers = {layer.node: layer for layer in integer_layers(quantized) if layer.bias is not None}
    float_weights = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}

    def visit(node: Node, pair: Pair, pair_of: Callable[[Node], Pair]) -> None:
        layer = layers.get(node)
        if layer is not None and layer.bias is not None:
            error = (pair[0] - pair[1]).movedim(layer.channel_dim, 0).flatten(1).mean(1)
            get_tensor(quantized.body, layer.bias).add_(error)
            pair[1].movedim(layer.channel_dim, -1).add_(error)

    with mode(quantized, training=False), torch.no_grad():
        run_float_and_quantized(quantized.body, inputs, visit, float_weights)
    return len(layers)
