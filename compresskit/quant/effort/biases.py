"""Bias correction in one pass over the graph: of all errors up to a layer, or of those that its own weights make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import Quantizer


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
    quantized.make_room_for_biases_()
    return len(layers)


def correct_weight_errors_(quantized: Quantized, inputs: Inputs) -> int:
    """Add to each bias the mean error that the rounding of its layer's own weights makes on a batch, in place.

    The layer reads what the float model gives it, so that errors of other roundings, which differ from sample to sample, do not
    count: few samples are enough, and it does no harm where those errors are large.

    Returns the number of layers that were corrected.
    """
    body, layers = quantized.body, {layer.node: layer for layer in integer_layers(quantized) if layer.bias is not None}
    errors: list[tuple[str, Tensor]] = []

    def compute(node: Node, value_of: ValueOf) -> Any:
        module = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Quantizer):
            return module.unrounded(value_of(node.args[0]))
        value, layer = execute(body, node, value_of), layers.get(node)
        if layer is not None and layer.bias is not None:
            arguments = [value_of(a) if isinstance(a, fx.Node) else a for a in node.args]
            arguments[1] = layer.quantizer(get_tensor(body, layer.weight))
            error = value - node.target(*arguments)
            errors.append((layer.bias, error.movedim(layer.channel_dim, 0).flatten(1).mean(1)))
        return value

    with mode(quantized, training=False), torch.no_grad():
        run_graph(body, pytree.tree_leaves(inputs), compute=compute)
        for name, error in errors:  # in the end, for the float values must be those of the biases as they were
            get_tensor(body, name).add_(error)
    quantized.make_room_for_biases_()
    return len(errors)
