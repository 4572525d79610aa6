"""After calibration, without training: biases that make up for rounding, and weights rounded for their layer's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from tqdm import tqdm

from compresskit.base.errors import SettingError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs
from compresskit.graph.capture import parameter_name
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.paired_run import Pair, run_pairs
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

Seen = tuple[Tensor, Tensor, list[Tensor]]


def correct_bias_(quantized: Quantized, batches: Batches) -> int:
    """Add to each bias what its layer's output channels lost on average; returns the number of layers.

    E[float output] - E[rounded output], layer by layer, each after those before it (Nagel et al., 1906.04721, section 4.2,
    with data). Costs nothing at run time, and one pass over the batches for each layer.

    Raises DataError where there is no batch.
    """
    every = _all(batches, "correct_bias_")
    before = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}
    layers = [(node, name) for node, _, name in _layers(quantized) if name is not None]
    with mode(quantized, training=False), torch.no_grad():
        for node, bias in tqdm(layers, desc="correct biases", disable=None, leave=False):
            shift, count = torch.zeros_like(get_tensor(quantized.body, bias), dtype=torch.float64), 0
            for clean, noisy, _ in _outputs(quantized.body, node, every, before):
                lost = (clean - noisy).double().movedim(_channel(node), 0).flatten(1)
                shift += lost.sum(1)
                count += lost.shape[1]
            get_tensor(quantized.body, bias).add_(shift / count)
    return len(layers)


def adaround_(
    quantized: Quantized,
    batches: Batches,
    *,
    steps: int = 1000,
    rate: float = 1e-2,
    batch_size: int = 32,
    seed: int = 0,
) -> int:
    """Round each weight up or down, whichever serves its layer's output; returns the number of layers.

    AdaRound (Nagel et al., 2004.10568): layer by layer, on the rounded inputs that the layer really gets, the squared error of
    its output (behind its ReLU, where the grid does that) is minimised over a soft choice for each weight, which a growing
    penalty drives to 0 or 1. Scales are fixed first, to the least squared error of the weight. Holds one layer's inputs and
    outputs for all batches. Worth its minutes at 4 bits and below.

    Raises DataError where there is no batch, SettingError for settings out of range.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise SettingError(f"adaround_({name}=...): wanted a whole number >= 1, got {value}")
    if rate <= 0:
        raise SettingError(f"adaround_(rate=...): wanted a positive number, got {rate}")
    every = _all(batches, "adaround_")
    before = {name: value.detach().clone() for name, value in quantized.body.named_parameters()}
    layers = list(_layers(quantized))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for node, quantizer, _ in layers:
            quantizer.fix_scale_(_best_scale(get_tensor(quantized.body, node.args[1].args[0].target), quantizer))
    nudge_scales_(quantized.body)
    with mode(quantized, training=False):
        for node, quantizer, _ in tqdm(layers, desc="round weights", disable=None, leave=False):
            with torch.no_grad():
                weight = get_tensor(quantized.body, node.args[1].args[0].target)
                outputs = list(_outputs(quantized.body, node, every, before))
                wanted = torch.cat([clean for clean, _, _ in outputs])
                inputs = torch.cat([args[0] for _, _, args in outputs])
                rest = outputs[0][2][2:]
            del outputs
            soft = _Soft(weight.detach(), quantizer)
            _fit(soft, node, (inputs, wanted, rest), (steps, rate, batch_size), generator)
            with torch.no_grad():
                weight.copy_(soft.weight(hard=True))
    return len(layers)


def _all(batches: Batches, where: str) -> list[Inputs]:
    return list(first_and_all(batches, where)[1])


def _layers(quantized: Quantized) -> Iterator[tuple[Node, WeightQuantizer, str | None]]:
    """(layer, quantizer of its weight, name of its bias), in the order of the graph, each weight once."""
    body, seen = quantized.body, set[str]()
    for node in body.graph.nodes:
        if quantized.placement.integer.get(node.name) not in ("conv", "linear") or node.args[1].op != "call_module":
            continue
        quantizer = body.get_submodule(node.args[1].target)
        if not isinstance(quantizer, WeightQuantizer) or node.args[1].target in seen:
            continue
        seen.add(node.args[1].target)
        bias = node.args[2] if len(node.args) > 2 else None
        bias = bias.args[0] if bias is not None and bias.op == "call_module" else bias
        yield node, quantizer, parameter_name(bias)


def _outputs(body: fx.GraphModule, node: Node, batches: list[Inputs], weights: dict[str, Tensor]) -> Iterator[Seen]:
    """(float output, rounded output, rounded arguments) of a layer for each batch; nothing behind it is run."""
    for inputs in batches:
        seen: list[Seen] = []

        def look(here: Node, pair: Pair, value: Callable[[Node], Pair], keep: Callable[[Seen], None] = seen.append) -> None:
            if here is node:
                keep((pair[0], pair[1], [value(a)[1] for a in node.args if isinstance(a, fx.Node)]))

        run_pairs(body, inputs, look, weights, until=node)
        yield seen[0]


def _channel(node: Node) -> int:
    return -1 if "linear" in str(node.target) else 1


def _best_scale(weight: Tensor, quantizer: WeightQuantizer, tries: int = 60) -> Tensor:
    """Of shares 1 to 0.4 of the extremes' scale, for each channel that of the least squared error."""
    scheme, full = quantizer.scheme, quantizer.qparams(weight)[0]
    best, least = full, torch.full_like(full, torch.inf)
    axes = [d for d in range(weight.ndim) if d != quantizer.axis] if full.ndim else list(range(weight.ndim))
    for i in range(tries + 1):
        scale = full * (1 - 0.6 * i / tries)
        shaped = _shaped(scale, weight, quantizer)
        error = ((weight / shaped).round().clamp(scheme.low, scheme.high) * shaped - weight).square().sum(axes)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _shaped(scale: Tensor, weight: Tensor, quantizer: WeightQuantizer) -> Tensor:
    return scale.view([-1 if d == quantizer.axis else 1 for d in range(weight.ndim)]) if scale.ndim else scale


class _Soft:
    """A weight between its two grid points: floor(w / s) + h, h = clamp(1.2 sigmoid(v) - 0.1, 0, 1) (2004.10568, eq. 23)."""

    def __init__(self, weight: Tensor, quantizer: WeightQuantizer) -> None:
        self.scheme, self.scale = quantizer.scheme, _shaped(quantizer.qparams(weight)[0], weight, quantizer)
        steps = weight / self.scale
        self.floor = steps.floor()
        share = (steps - self.floor).clamp(0.01, 0.99)
        self.v = torch.logit((share + 0.1) / 1.2).requires_grad_()

    def choice(self) -> Tensor:
        """h, from 0 (down) to 1 (up)."""
        return (torch.sigmoid(self.v) * 1.2 - 0.1).clamp(0, 1)

    def weight(self, *, hard: bool = False) -> Tensor:
        """The weight of the choice, made or not yet."""
        up = (self.choice() >= 0.5).float() if hard else self.choice()
        return (self.floor + up).clamp(self.scheme.low, self.scheme.high) * self.scale


def _fit(
    soft: _Soft, node: Node, data: tuple[Tensor, Tensor, list[Tensor]], how: tuple[int, float, int], generator: torch.Generator
) -> None:
    inputs, wanted, rest = data
    steps, rate, batch_size = how
    behind = _activation(node)
    optimizer = torch.optim.Adam([soft.v], lr=rate)
    more = [*rest, *node.args[2 + len(rest) :]]  # the bias, if there is one, and what is no tensor
    for step in range(steps):
        rows = torch.randint(len(inputs), (min(batch_size, len(inputs)),), generator=generator)
        output = node.target(inputs[rows], soft.weight(), *more)
        loss = (behind(output) - behind(wanted[rows])).square().sum(_channel(node)).mean()
        done = step / steps
        if done >= 0.2:  # first the output alone
            beta = 20 - 18 * (done - 0.2) / 0.8
            loss = loss + 0.01 * (1 - (2 * soft.choice() - 1).abs().pow(beta)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _activation(node: Node) -> Callable[[Tensor], Tensor]:
    """The activation function whose work the grid behind a layer does."""
    users = list(node.users)
    module = node.graph.owning_module.get_submodule(users[0].target) if len(users) == 1 and users[0].op == "call_module" else None
    return module.unrounded if isinstance(module, ActivationQuantizer) else lambda x: x
