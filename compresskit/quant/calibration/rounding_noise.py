"""What each rounding of a quantized model adds to the noise of the outputs: linear, from a few backward passes.

A rounding changes its value by d; to first order the outputs change by J d, J the Jacobian of the float model. For a vector r of
random signs the expected (r . J d)^2 is |J d|^2 (Hutchinson), and r J comes for all roundings from one backward pass. So the cost
does not grow with the number of roundings, and errors that later layers suppress do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, batch_size
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers
from compresskit.quant.calibration.rows import kinds_of_channels, parts_by_kind
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, Quantizer
from compresskit.quant.numerics.scheme import channelwise

PROBES = 8  # random vectors; with eight samples the estimates are within some 20 %


def rounding_noise(
    quantized: Quantized, inputs: Inputs, *, exact: Collection[Node] = (), probes: int = PROBES, seed: int = 0
) -> dict[Node, float]:
    """Estimate the power that each rounding alone adds to the outputs, as a fraction of their power, summed over the outputs.

    Args:
        quantized: a calibrated model.
        inputs: a batch, whose activations fit in memory, all of them at once.
        exact: roundings of values that lie on their grid already, of which only clipping counts.
        probes: backward passes.
        seed: of the random vectors.

    Returns the noise of each node that rounds: call of an activation quantizer (its rounding and clipping) or integer layer (the
    rounding of its weights, less the mean error of each channel where it has a bias, which bias correction removes). All are 0
    where no output has a gradient. Raises RuntimeError, as torch does, for an operator without a derivative.
    """
    errors = _Errors(quantized, exact)
    outputs = errors.outputs(inputs)
    rows, generator = batch_size(inputs), torch.Generator().manual_seed(seed)
    total = dict.fromkeys(errors.of, 0.0)
    for probe in range(probes if outputs else 0):
        with torch.enable_grad():
            projected = random_product(outputs, generator)
        gradients = torch.autograd.grad(
            projected, [value for value, _ in errors.of.values()], retain_graph=probe < probes - 1, allow_unused=True
        )
        for (node, (_, error)), gradient in zip(errors.of.items(), gradients, strict=True):
            if gradient is not None:
                change = gradient * error
                each = change.flatten(1).sum(1) if change.ndim and change.shape[0] == rows else change.sum()
                total[node] += float(each.double().square().sum()) / probes
    return {node: value if math.isfinite(value) else math.inf for node, value in total.items()}


def random_product(outputs: list[Tensor], generator: torch.Generator) -> Tensor:
    """The product of all outputs, each divided by its norm, with one vector of random signs."""
    total = torch.zeros(())
    for output in outputs:
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        norm = output.detach().double().norm().clamp(min=1e-150)
        total = total + (output * signs).sum() / float(norm)
    return total


class _Errors:
    """Runs the float model of a quantized one: the value at each rounding, through which gradients pass, and its error there."""

    def __init__(self, quantized: Quantized, exact: Collection[Node]) -> None:
        self.quantized, self.body, self.exact = quantized, quantized.body, frozenset(exact)
        self.layers = {layer.node: layer for layer in integer_layers(quantized)}
        self.of: dict[Node, tuple[Tensor, Tensor]] = {}

    def outputs(self, inputs: Inputs) -> list[Tensor]:
        """Run a batch; returns the outputs that depend on a rounding, kinds of channels one by one."""
        with mode(self.quantized, training=False), torch.enable_grad():
            found = run_graph(self.body, pytree.tree_leaves(inputs), compute=self._compute)
        given = [v for v in pytree.tree_leaves(found) if isinstance(v, Tensor) and v.requires_grad]
        return [part for v in given for part in parts_by_kind(v, kinds_of_channels([v]))]

    def _compute(self, node: Node, value_of: ValueOf) -> Any:
        module = self.body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, ActivationQuantizer):
            round_ = module.clipped if node in self.exact else module
            return self._rounded(node, module.unrounded(value_of(node.args[0])), round_)
        if isinstance(module, Quantizer):
            return value_of(node.args[0])  # of a weight or bias
        value = execute(self.body, node, value_of)
        if node.op == "get_attr" and isinstance(value, Tensor):
            return value.detach()
        if node in self.layers:
            return self._kept(node, value, self._weight_error(self.layers[node], value, value_of))
        return value

    def _rounded(self, node: Node, value: Tensor, round_: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            error = round_(value) - value
        return self._kept(node, value, error)

    def _weight_error(self, layer: IntegerLayer, value: Tensor, value_of: ValueOf) -> Tensor:
        with torch.no_grad():
            arguments = [value_of(a) if isinstance(a, fx.Node) else a for a in layer.node.args]
            arguments[1] = layer.quantizer(get_tensor(self.body, layer.weight))
            error: Tensor = layer.node.target(*arguments) - value
            if layer.bias is not None:
                channel = layer.channel_dim % error.ndim
                error -= channelwise(error.movedim(channel, 0).flatten(1).mean(1), error, channel)
            return error

    def _kept(self, node: Node, value: Tensor, error: Tensor) -> Tensor:
        kept = value if value.requires_grad else value.detach().requires_grad_()
        self.of[node] = (kept, error)
        return kept
