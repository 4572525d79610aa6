"""Round the weights of each layer in turn, such that their errors make up for each other in the layer's outputs (GPTQ)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compresskit.base.task import Inputs, batch_size
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.activation_statistics import patches, second_moment
from compresskit.quant.calibration.layer_outputs import IntegerLayer, integer_layers, only_rounded
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.error_feedback import rounded_in_turn
from compresskit.quant.numerics.quantizers import Quantizer, WeightQuantizer
from compresskit.quant.numerics.saturation import PAIR_LIMIT

MOST_INPUTS = 2304  # of an output, 3 x 3 of 256 channels: second moments of more take long to collect and to invert
POSITIONS = (4096, 4)  # of a layer that are read: at least, and for each input of an output
LEAST_READ = 2  # for each input of an output: fewer say nothing about most directions


def round_weights_in_turn_(quantized: Quantized, batches: Sequence[Inputs]) -> int:
    """Give weights the values that they are rounded to, and a constant scale, in place: of least error of each layer's outputs.

    Layers read what the float model gives them. The weights of an output are rounded one after the other, and those still to
    come make up for each error (GPTQ, Frantar et al., 2210.17323). Weights that must not overflow in pairs do not, and zeros of
    masks stay. Layers with too many inputs, or that read too few positions, stay as they are, and so do tables of lookups.

    Returns the number of layers whose weights were rounded.
    """
    layers = {layer.node: _Moment(layer) for layer in integer_layers(quantized) if _can_round(quantized, layer)}
    share = 1 / max(1, sum(map(batch_size, batches)))
    with mode(quantized, training=False), torch.no_grad():
        for inputs in batches:
            _run_in_float(quantized.body, inputs, layers, share * batch_size(inputs))
        chosen = [moment for moment in layers.values() if moment.positions >= max(1, LEAST_READ * moment.inputs)]
        for moment in chosen:
            _round_(quantized, moment)
    return len(chosen)


def _can_round(quantized: Quantized, layer: IntegerLayer) -> bool:
    scheme, weight = layer.quantizer.scheme, get_tensor(quantized.body, layer.weight)
    plain = layer.quantizer.axis == 0 and scheme.symmetric and not scheme.binary and weight.is_floating_point()
    fits = math.prod(weight.shape[1:]) <= MOST_INPUTS and layer.quantizer.ratio is None
    return plain and fits and only_rounded(quantized.body, layer.weight)


@dataclass(eq=False)
class _Moment:
    """The second moment of a layer's inputs, (groups, inputs, inputs) float64, as a sum over the positions that were read."""

    layer: IntegerLayer
    total: Tensor | None = None
    positions: int = 0
    inputs: int = 0

    def read(self, x: Tensor, kernel: Sequence[int], share: float, generator: torch.Generator) -> None:
        """Add some positions of a batch.

        x: what the layer reads. kernel: sizes of a convolution's. share: of all samples that are in the batch.
        """
        x, groups = (x.reshape(-1, x.shape[-1]), 1) if self.layer.channel_dim == -1 else patches(x, self.layer.node, kernel)
        places = x.shape[: x.ndim // 2]
        self.inputs = math.prod(x.shape[len(places) :]) // groups
        least, each = POSITIONS
        count, wanted = math.prod(places), math.ceil(share * max(least, each * self.inputs))
        drawn = torch.randint(count, (wanted,), generator=generator, device="cpu") if count > wanted else None
        chosen = torch.arange(count, device="cpu") if drawn is None else drawn
        rows = x[torch.unravel_index(chosen, places)].unflatten(1, (groups, -1)).transpose(0, 1).flatten(2).float()
        self.total = (0 if self.total is None else self.total) + second_moment(rows)
        self.positions += len(chosen)


def _run_in_float(body: fx.GraphModule, inputs: Inputs, layers: dict[Node, _Moment], share: float) -> None:
    """Run a batch in float, and let the layers read their inputs."""
    generator = torch.Generator().manual_seed(0)

    def compute(node: Node, value_of: ValueOf) -> Any:
        module = body.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Quantizer):
            return module.unrounded(value_of(node.args[0]))
        if node in layers:
            layer = layers[node]
            layer.read(value_of(node.args[0]), get_tensor(body, layer.layer.weight).shape[2:], share, generator)
        return execute(body, node, value_of)

    run_graph(body, pytree.tree_leaves(inputs), compute=compute)


def _round_(quantized: Quantized, moment: _Moment) -> None:
    layer, total = moment.layer, moment.total
    assert total is not None
    weight, quantizer = get_tensor(quantized.body, layer.weight), layer.quantizer
    scale = quantizer.qparams(weight)[0].detach()
    groups = len(total)
    rows = weight.detach().flatten(1).unflatten(0, (groups, -1))
    steps = scale.double().expand(len(weight)).reshape(groups, -1)
    kept = None if masks_of(quantized.body) is None else rows != 0
    partners = _partners(quantizer, moment.inputs)
    integers = torch.zeros(rows.shape, dtype=torch.float64)

    def round_input(index: int, ahead: Callable[[int], Tensor]) -> Tensor:
        whole = (ahead(1)[..., 0] / steps).round().clamp(quantizer.scheme.low, quantizer.scheme.high)
        for other in partners[index]:  # one that is still to come is 0
            whole = torch.minimum(torch.maximum(whole, -PAIR_LIMIT - integers[..., other]), PAIR_LIMIT - integers[..., other])
        integers[..., index] = whole if kept is None else torch.where(kept[..., index], whole, 0.0)
        return integers[..., index] * steps

    order = torch.argsort(total.diagonal(dim1=1, dim2=2).mean(0), descending=True)
    rounded = rounded_in_turn(rows, total / moment.positions, round_input, order=order)
    weight.copy_(rounded.reshape(weight.shape))
    quantizer.fix_scale_(scale)


def _partners(quantizer: WeightQuantizer, inputs: int) -> list[list[int]]:
    """For each input those with which it must not overflow."""
    found: list[list[int]] = [[] for _ in range(inputs)]
    packing = quantizer.packing
    if packing is None:
        return found
    sums = packing.sums(torch.zeros(1, inputs))
    for way, total in enumerate(sums, start=len(packing.others) - len(sums)):
        for a, b in torch.stack(packing.places(way, torch.arange(total.shape[1])), dim=1).tolist():
            found[a].append(b)
            found[b].append(a)
    return found
