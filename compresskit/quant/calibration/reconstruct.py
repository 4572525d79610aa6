"""Block-wise reconstruction: learn, block by block, the rounding with which each block computes what it does in float.

BRECQ (Li et al., arXiv 2102.05426) with the random dropping of QDrop (Wei et al., arXiv 2203.05740); AdaRound is the case of one
layer a block, without dropping. No labels are needed.

for each block, in the order of the graph:
    its inputs in float and from the quantized model so far, its output in float
    -> train: soft choices of its weights, scales of weights and activations, biases
    -> round hard; its quantized output is an input of the blocks that follow
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import SettingError, first_line
from compresskit.base.inputs import Batches
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs
from compresskit.graph.interpreter import Compute, ValueOf, execute
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor, mode
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.quant.calibration.blocks import GraphBlock, find_graph_blocks, given_nodes
from compresskit.quant.calibration.layer_outputs import IntegerLayer, finite_batches, only_rounded, parameter_readers
from compresskit.quant.calibration.paired_run import Pair
from compresskit.quant.calibration.rows import shuffled_parts
from compresskit.quant.calibration.soft_rounding import SoftRounding, fit_scale_
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, BiasQuantizer, Quantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import LEARNED_DOWN_TO
from compresskit.quant.passes.rounding_boundaries import nudge_scales_

log = logging.getLogger(__name__)

BLOCK_SCALE_RATE = 1e-3  # learning rate of scales and biases, as a fraction of their size
FREE_STEPS = 0.2  # share of the steps before choices are driven to 0 or 1
PENALTY = 5.0  # of undecided weights, in units of the block's error with weights rounded to nearest
CORRECTION_PARTS = 4  # of the data, by which biases are corrected
PLACES = 2**16  # where a piece of random numbers may begin


def reconstruct_blocks_(
    quantized: Quantized,
    batches: Batches,
    *,
    blocks: Sequence[GraphBlock] | None = None,
    steps: int = 300,
    batch_size: int = 32,
    rate: float = 2e-2,
    drop: float = 0.5,
    seed: int = 0,
) -> int:
    """Learn the rounding of a quantized model block by block, so that each block computes what it does in float, in place.

    For each block, on the inputs that it receives from the blocks before it, already rounded, these are trained by Adam for the
    least squared error of its output: for each weight a soft choice whether it is rounded up or down, which a growing penalty
    drives to 0 or 1; the scales of its weights and activations; its biases, which then also take the mean error of each channel.
    While it is trained, each value that it reads, and each that is rounded inside it, is taken in float with the probability
    `drop`, so that the choices do not fit the errors of the few samples. Before that each scale of weights is set to the one of
    least squared error of the weight. Pairs of weights that may not overflow never do, and zeros of pruning masks stay. Worth
    its minutes at 4 bits and below. No labels are needed.

    In float means: with the weights and biases that the model holds. Call it before anything that changes them for the sake of
    rounding, such as `correct_bias_`.

    Args:
        quantized: a calibrated model.
        batches: an iterable of inputs, or one batch; a few hundred samples. Inputs of a block, in float and rounded, and its
            output in float are kept in memory for all of them, with what later blocks read: three to four times the activation
            between two blocks, fp32. ResNet-18, 224 x 224: 0.8 MB a sample and activation, some 1.6 GB for 512 samples. What is
            freed in pieces below 32 MiB glibc keeps; with `MALLOC_MMAP_THRESHOLD_=4194304` in the environment it gives them back,
            in more time (`benchmarks/reconstruct_cost.md`).
        blocks: parts of the graph, in its order, that are trained one after another; default `find_graph_blocks(quantized)`.
        steps: optimizer steps for each block.
        batch_size: rows of a step.
        rate: learning rate of the choices; with fewer steps take a larger one (`benchmarks/low_bit.py` takes 60 steps at 0.05).
        drop: probability of a value in float.
        seed: of the order of rows, and of what is dropped.

    Returns the number of layers whose rounding was learned. A weight that something also reads in float, such as an embedding
    table, is rounded to nearest, and so is a block of which an operator has no derivative, or whose output is not of floating
    point; a line of the log names such a block.
    Raises DataError where there is no batch, or one holds nan or infinite values that reach a layer, SettingError for settings
    out of range; nothing is changed then.
    """
    settings = _Training(steps=steps, rate=rate, drop=drop)
    return _reconstruct_("reconstruct_blocks_", quantized, batches, blocks, settings, batch_size=batch_size, seed=seed)


def adaround_(
    quantized: Quantized, batches: Batches, *, steps: int = 1000, rate: float = 1e-2, batch_size: int = 32, seed: int = 0
) -> int:
    """Choose for each weight whether it is rounded up or down (Nagel et al., arXiv 2004.10568), in place.

    Layer by layer, on the quantized inputs that the layer receives, the squared error of its output (after its ReLU, where the
    grid applies it) is minimised over a soft choice for each weight, which a growing penalty drives to 0 or 1. It is
    `reconstruct_blocks_` with blocks of one layer, where scales and biases stay and nothing is dropped.

    Args: as in `reconstruct_blocks_`. Returns the number of layers, and raises, as that does.
    """
    settings = _Training(steps=steps, rate=rate, drop=0.0, weights_only=True)
    layers = find_graph_blocks(quantized, run=1, most=1)
    return _reconstruct_("adaround_", quantized, batches, layers, settings, batch_size=batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True)
class _Training:
    """How a block is trained; `reconstruct_blocks_` explains them. weights_only: learn nothing but the choices of weights."""

    steps: int
    rate: float
    drop: float
    weights_only: bool = False


@no_modes_of_caller()
def _reconstruct_(
    where: str,
    quantized: Quantized,
    batches: Batches,
    blocks: Sequence[GraphBlock] | None,
    settings: _Training,
    *,
    batch_size: int,
    seed: int,
) -> int:
    for name, value in (("steps", settings.steps), ("batch_size", batch_size)):
        if value < 1:
            raise SettingError(f"{where}({name}=...): wanted a whole number >= 1, got {value}")
    if settings.rate <= 0:
        raise SettingError(f"{where}(rate=...): wanted a positive number, got {settings.rate}")
    if not 0 <= settings.drop < 1:
        raise SettingError(f"{where}(drop=...): wanted a probability, 0 <= drop < 1, got {settings.drop}")
    blocks = find_graph_blocks(quantized) if blocks is None else blocks
    generator = torch.Generator().manual_seed(seed)
    parts = shuffled_parts(finite_batches(quantized, batches, where), batch_size, generator)
    frontier = _Frontier(quantized.body, parts, blocks)
    del parts  # what the first blocks read goes with them
    layers = [layer for block in blocks for layer in block.layers if only_rounded(quantized.body, layer.weight)]
    for layer in layers:
        fit_scale_(get_tensor(quantized.body, layer.weight).detach(), layer.quantizer)
    count = 0
    with mode(quantized, training=False):
        for block in progress_bar(blocks, desc="reconstruct blocks"):
            if any(only_rounded(quantized.body, layer.weight) for layer in block.layers):
                count += _train_block_(quantized.body, block, settings, frontier, generator)
            frontier.pass_(block)
    quantized.make_room_for_biases_()
    nudge_scales_(quantized.body)
    with torch.no_grad():
        for layer in layers:
            weight = get_tensor(quantized.body, layer.weight)
            weight.copy_(layer.quantizer(weight))
    quantized.keep_masked_()
    return count


def _train_block_(
    body: fx.GraphModule, block: GraphBlock, settings: _Training, frontier: _Frontier, generator: torch.Generator
) -> int:
    """Returns the number of layers whose rounding was learned."""
    trained = _TrainedBlock(body, block, settings, generator)
    inputs, wanted = frontier.inputs(block), frontier.float_outputs(block)
    reason = trained.obstacle(inputs[0], wanted[0])
    if reason:
        log.warning("%s is rounded to nearest: %s", block, reason)
    else:
        trained.train_(inputs, wanted)
        trained.round_()
    trained.end_()
    if not settings.weights_only:
        frontier.correct_(block, [layer for layer in block.layers if layer.bias in trained.biases])
    return 0 if reason else len(trained.soft)


class _Frontier:
    """The values that blocks still to come read, in float and from the quantized model so far, for each part of the data."""

    def __init__(self, body: fx.GraphModule, parts: Sequence[Inputs], blocks: Sequence[GraphBlock]) -> None:
        self.body = body
        self.float_weights = {name: value.detach().clone() for name, value in body.named_parameters()}
        self.last = {node: block for block in blocks for node in block.inputs}
        self.wanted: list[Any] = []
        self.pairs: list[dict[Node, Pair]] = []
        for inputs in parts:
            arguments = iter(body.graph.process_inputs(*pytree.tree_leaves(inputs)))
            values: dict[Node, Any] = {}
            for node in given_nodes(body.graph):
                if node.op == "placeholder":
                    values[node] = next(arguments, node.args[0] if node.args else None)
                else:
                    values[node] = execute(body, node, values.__getitem__)
            self.pairs.append({node: (value, value) for node, value in values.items()})

    def inputs(self, block: GraphBlock) -> list[dict[Node, Pair]]:
        """What a block reads, of each part."""
        return [{node: pairs[node] for node in block.inputs} for pairs in self.pairs]

    @torch.no_grad()
    def float_outputs(self, block: GraphBlock) -> list[Any]:
        """What a block returns in float, for each part."""
        self.wanted = [_run_block(block, {n: pairs[n][0] for n in block.inputs}, self._float) for pairs in self.pairs]
        return self.wanted

    @torch.no_grad()
    def pass_(self, block: GraphBlock) -> None:
        """Go on behind a block: keep its outputs, and forget what no block still to come reads."""
        is_read = block.output in self.last
        wanted = self.wanted or (self.float_outputs(block) if is_read else [None] * len(self.pairs))
        self.wanted = []
        for pairs, value in zip(self.pairs, wanted, strict=True):
            rounded = _run_block(block, {n: pairs[n][1] for n in block.inputs}, self._rounded) if is_read else None
            for node in block.inputs:
                if self.last[node] is block:
                    del pairs[node]
            if is_read:
                pairs[block.output] = (value, rounded)

    @torch.no_grad()
    def correct_(self, block: GraphBlock, layers: Iterable[IntegerLayer]) -> None:
        """Add to the bias of each of some layers of a block, one after another, the mean error of its output."""
        for layer in layers:
            total, count = torch.zeros(()), 0
            for pairs in self.pairs[:CORRECTION_PARTS]:
                in_float, rounded = (
                    _run_block(block, {n: pairs[n][i] for n in block.inputs}, compute, layer.node)
                    for i, compute in enumerate((self._float, self._rounded))
                )
                error = (in_float - rounded).movedim(layer.channel_dim, 0).flatten(1)
                total, count = total + error.sum(1), count + error.shape[1]
            get_tensor(self.body, str(layer.bias)).add_(total / count)

    def _rounded(self, node: Node, value_of: ValueOf) -> Any:
        return execute(self.body, node, value_of)

    def _float(self, node: Node, value_of: ValueOf) -> Any:
        if node.op == "get_attr" and node.target in self.float_weights:
            return self.float_weights[node.target]
        module = self.body.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, Quantizer):
            return module.unrounded(value_of(node.args[0]))
        return execute(self.body, node, value_of)


def _run_block(block: GraphBlock, inputs: Mapping[Node, Any], compute: Compute, until: Node | None = None) -> Any:
    """The output of a block, or the value of the node `until`; parameters are computed where they are read."""
    values = dict(inputs)

    def value_of(node: Node) -> Any:
        if node not in values:
            values[node] = compute(node, value_of)
        return values[node]

    for node in block.nodes:
        value_of(node)
        if node is until:
            break
    found = values[block.output if until is None else until]
    values.clear()  # value_of refers to itself, and would keep them until Python looks for cycles
    return found


class _TrainedBlock:
    """A block while it is trained: soft weights, biases and scales are its parameters."""

    def __init__(self, body: fx.GraphModule, block: GraphBlock, settings: _Training, generator: torch.Generator) -> None:
        self.body, self.block, self.settings, self.generator = body, block, settings, generator
        masks = masks_of(self.body)
        self.soft: dict[WeightQuantizer, SoftRounding] = {}
        self.biases: dict[str, nn.Parameter] = {}
        self.hard = False  # whether weights are rounded
        self.chances = torch.empty(0, dtype=torch.bool)
        self.layers = [layer for layer in block.layers if only_rounded(body, layer.weight)]
        for layer in self.layers:
            weight = get_tensor(self.body, layer.weight)
            mask = None if masks is None else masks.masks.get(layer.weight)
            self.soft[layer.quantizer] = SoftRounding(weight, layer.quantizer, mask)
        for layer in () if settings.weights_only else block.layers:
            if layer.bias is not None and len(parameter_readers(body, layer.bias)) == 1:
                self.biases[layer.bias] = nn.Parameter(get_tensor(self.body, layer.bias).detach().clone())
        self.activations = [] if settings.weights_only else list(self._own_activations())
        for activation in self.activations:
            activation.learn_()

    def _own_activations(self) -> Iterator[ActivationQuantizer]:
        """Quantizers of activations that no other block uses."""
        inside = set(self.block.nodes)
        users: dict[ActivationQuantizer, list[Node]] = {}
        for node in self.body.graph.nodes:
            if isinstance(module := self._module(node), ActivationQuantizer):
                users.setdefault(module, []).append(node)
        return (module for module, nodes in users.items() if inside.issuperset(nodes) and not module.is_fixed)

    def _module(self, node: Node) -> nn.Module | None:
        return self.body.get_submodule(str(node.target)) if node.op == "call_module" else None

    def obstacle(self, inputs: Mapping[Node, Pair], wanted: Any) -> str:
        """Why the block cannot be trained; "" where it can."""
        try:
            with torch.enable_grad():
                loss = self._error(self._mixed(inputs), wanted)
                if not loss.requires_grad:
                    return "its output has no gradient"
                loss.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "derivative" not in str(error):
                raise
            return first_line(error)
        return ""

    def train_(self, inputs: Sequence[Mapping[Node, Pair]], wanted: Sequence[Any]) -> None:
        """Bring the outputs closer to those wanted, a part of the data each step."""
        before = self._error_rounded({node: pair[1] for node, pair in inputs[0].items()}, wanted[0])
        groups = self._groups()
        rates = [group["lr"] for group in groups]
        optimizer = torch.optim.Adam(groups)
        order = list[int]()
        for step in range(self.settings.steps):
            order = order or torch.randperm(len(inputs), generator=self.generator).tolist()
            part, done = order.pop(), step / self.settings.steps
            for group, rate in zip(optimizer.param_groups[1:], rates[1:], strict=True):
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done))
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = self._error(self._mixed(inputs[part]), wanted[part]) / before
                if done >= FREE_STEPS:
                    loss = loss + PENALTY * self._undecided(20 - 18 * (done - FREE_STEPS) / (1 - FREE_STEPS))
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    @torch.no_grad()
    def _error_rounded(self, inputs: Mapping[Node, Any], wanted: Any) -> float:
        """The error with each weight on the nearer grid point."""
        self.hard = True
        error = float(self._error(inputs, wanted))
        self.hard = False
        return max(error, 1e-30)

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = [{"params": [soft.choice for soft in self.soft.values()], "lr": self.settings.rate}]
        if self.settings.weights_only:
            return groups
        sized = [
            *(soft.scale for soft in self.soft.values()),
            *(a.ratio for a in self.activations if a.ratio is not None),
            *self.biases.values(),
        ]
        return groups + [{"params": [p], "lr": BLOCK_SCALE_RATE * (float(p.detach().abs().mean()) or 1e-3)} for p in sized]

    def _undecided(self, power: float) -> Tensor:
        counts = [soft.choice.numel() for soft in self.soft.values()]
        shares = [soft.undecided(power) * count for soft, count in zip(self.soft.values(), counts, strict=True)]
        return torch.stack(shares).sum() / sum(counts)

    def _error(self, inputs: Mapping[Node, Any], wanted: Any) -> Tensor:
        """Mean squared error of the output."""
        output = _run_block(self.block, inputs, self._compute)
        pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(wanted), strict=True)
        errors = [(a - b).square().mean() for a, b in pairs if isinstance(a, Tensor) and a.is_floating_point()]
        return torch.stack([torch.zeros(()), *errors]).sum()

    def _mixed(self, inputs: Mapping[Node, Pair]) -> dict[Node, Any]:
        """Inputs from the quantized model so far, each value in float with the probability `drop`."""
        return {node: pytree.tree_map(lambda a, b: self._dropped(b, a), *pair) for node, pair in inputs.items()}

    def _dropped(self, rounded: Any, in_float: Any) -> Any:
        if not self.settings.drop or not isinstance(rounded, Tensor) or not rounded.is_floating_point() or rounded is in_float:
            return rounded
        return torch.where(self._chosen(rounded.numel()).view(rounded.shape), in_float, rounded)

    def _chosen(self, count: int) -> Tensor:
        """(count,) True with the probability `drop`: a piece at a random place of many such numbers, drawing which takes long."""
        if len(self.chances) < count + PLACES:
            self.chances = torch.rand(count + PLACES, generator=self.generator) < self.settings.drop
        start = int(torch.randint(PLACES, (), generator=self.generator))
        return self.chances[start : start + count]

    def _compute(self, node: Node, value_of: ValueOf) -> Any:
        if node.op == "get_attr":
            return self.biases.get(node.target) if node.target in self.biases else execute(self.body, node, value_of).detach()
        module = self._module(node)
        if isinstance(module, WeightQuantizer) and module in self.soft:
            return self.soft[module](hard=self.hard)
        if isinstance(module, BiasQuantizer):
            return value_of(node.args[0])
        if isinstance(module, ActivationQuantizer):
            value = value_of(node.args[0])
            return self._dropped(module(value), module.unrounded(value))
        return execute(self.body, node, value_of)

    @torch.no_grad()
    def round_(self) -> None:
        """Store weights on their grid, and biases."""
        for layer in self.layers:
            soft, weight = self.soft[layer.quantizer], get_tensor(self.body, layer.weight)
            least = layer.quantizer.qparams(weight)[0] * LEARNED_DOWN_TO
            soft.scale.copy_(torch.maximum(soft.scale, least).maximum(layer.quantizer.min_scale))
            weight.copy_(soft(hard=True))
            layer.quantizer.fix_scale_(soft.scale)
        for name, bias in self.biases.items():
            get_tensor(self.body, name).copy_(bias)

    def end_(self) -> None:
        """Make the scales of activations constants again."""
        for activation in self.activations:
            activation.learn_(on=False)
