"""Closed-form repair after blocks are removed: fit the layers that write into the residual stream again.

What a removed block gave is missing in the stream, and everything behind it reads inputs that it was not trained for. Each layer
whose output enters the stream, from the first cut on, gets the weights with which the stream comes closest, in least squares, to
what the whole network has there: before a run of removed blocks, to what the last of them gave. Layers are fitted in the order in
which they run, on what the cut network gives them, so that later ones make up for what earlier ones could not; the statistics of
BatchNorm in front of each are re-estimated before. It needs neither labels nor gradients nor training, and changes no shape.

The layer before a run of removed transformer layers is changed by ReplaceMe (2505.02819), too, there by one linear map of its
output; here it is fitted whole, and all later layers with it. Channels are refitted in `prune.channels.reconstruct`.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ModelError, first_line
from compresskit.base.inputs import AnyInputs, each_inputs, not_finite, not_finite_error
from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, batch_size
from compresskit.graph.capture import Captured, calls_inside, parameter_name
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, mode, owner
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.prune.channels.reconstruct import output_leaves, rows_at, squared_distance
from compresskit.prune.depth.stream_layers import CutGraph, StreamLayer, affine_between, cut_graph, shared_part, unpermuted
from compresskit.train.batchnorm import reestimate_batchnorm_

log = logging.getLogger(__name__)

ROWS_PER_COLUMN = 24  # output positions that a layer is fitted at, for each of its inputs
FEWEST_ROWS = 8192
MOST_IN_STREAM = 2**28  # of the stream at one place, for all samples: 1 GiB in float32
MOST_HELD = 2**29  # bytes of inputs: 890 photographs of 224 pixels in float32
#: Fractions of the mean variance of a layer's inputs that may be added to each, which pulls it to its old weights.
DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
HELD_OUT = 0.25  # of the rows of each batch, which choose the damping


@no_modes_of_caller()
def refit_stream_(model: nn.Module, dense: nn.Module, paths: Sequence[str], batches: Iterable[AnyInputs]) -> dict[str, float]:
    """Fit, in place, the layers that write into the stream of a model whose blocks were removed.

    Nothing is changed, no statistics of BatchNorm either, where no layer can be fitted, where the model cannot be captured as a
    graph, or if the outputs of the whole model come no nearer to the dense model's than with BatchNorm re-estimated alone, on the
    last batch, which the fit does not read where there are others. Grouped and transposed convolutions, layers with tied weights,
    layers of more than 6144 inputs and those behind which the stream goes through more than activations and LayerNorm are left as
    they are. Where all blocks are in a part that is called several times, such as the encoder of a Siamese network, that part is
    fitted, on what it gets in all calls.

    Args:
        model: `BlockPlan.apply_` of a plan to a copy of `dense`.
        dense: the model before, on the same device; it is not changed.
        paths: dotted names of the blocks that are gone, `BlockPlan.paths`.
        batches: inputs, shuffled; some hundred images are enough, more are better. They are held in memory, those that come
            first, up to 512 MiB. Those of another shape than the first, but for their rows, are not read.

    Returns:
        Layer -> mean squared error of what it writes, as a fraction of the variance of what it should write; empty if nothing was
        changed. Where neither a bias nor a BatchNorm can add a constant, the error of the mean counts, and it can be above 1.

    Raises:
        DataError: there is no batch, or a layer reads nan or infinite values, as of data that hold such.
    """
    data = list(_first_held(each_inputs(batches, "refit_stream_")))
    if not data:
        raise DataError("refitting layers of the stream: no batch of calibration data was given")
    try:
        if (part := shared_part(dense, paths, data[0])) is not None:
            inner = [path.removeprefix(f"{part}.") for path in paths]
            received = itertools.chain.from_iterable(_received(dense, inputs, part) for inputs in data)
            found = refit_stream_(model.get_submodule(part), dense.get_submodule(part), inner, received)
            return {f"{part}.{name}": lost for name, lost in found.items()}
        graphs = cut_graph(dense, paths, data[0])
    except ModelError as error:
        log.warning("layers around removed blocks are not fitted again: %s", first_line(error))
        return {}
    if not graphs.layers:
        return {}
    usable = [inputs for inputs in data if _fits(inputs, data[0], graphs.whole)]
    judged, read = usable[-1], usable[:-1] or usable
    fit = _StreamFit(dense, graphs, read)
    lost = {layer.weight: fit(layer) for layer in progress_bar(graphs.layers, desc="refit layers", unit="layer")}
    wanted, before = output_leaves(dense, judged), copy.deepcopy(model.state_dict())
    _restore_statistics_(model, read)
    distance = squared_distance(output_leaves(model, judged), wanted)
    fit.copy_to_(model)
    _restore_statistics_(model, read)
    if not squared_distance(output_leaves(model, judged), wanted) <= distance:
        log.warning("fitting layers brought the outputs of %s no nearer; they stay as they were", type(model).__name__)
        model.load_state_dict(before)
        return {}
    return {graphs.whole.name_in_model(name).removesuffix(".weight"): share for name, share in lost.items()}


@torch.no_grad()
def _received(dense: nn.Module, inputs: Inputs, part: str) -> list[Inputs]:
    """What a part of the model gets in every call."""
    with mode(dense, training=False):
        return calls_inside(dense, inputs, part)


def _restore_statistics_(model: nn.Module, data: Sequence[Inputs]) -> None:
    """Re-estimate BatchNorm where the data allow it: one row has no variance."""
    if any(batch_size(inputs) > 1 for inputs in data):
        reestimate_batchnorm_(model, data)


def _first_held(batches: Iterable[Inputs]) -> Iterator[Inputs]:
    """The first batches that can be held at once, and two at least: one is kept to judge the fit."""
    held = 0
    for number, inputs in enumerate(batches):
        held += sum(value.nbytes for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor))
        if number > 1 and held > MOST_HELD:
            return
        yield inputs


def _as_many_as_fit(data: Sequence[Inputs], graphs: CutGraph) -> Sequence[Inputs]:
    """The first batches whose values in the stream can be held at once, and one at least."""
    shapes = [graphs.whole.shapes[layer.target.name] for layer in graphs.layers]
    rows = MOST_IN_STREAM // max((math.prod(shape) // batch_size(graphs.whole.example) for shape in shapes), default=1)
    counts = itertools.accumulate(map(batch_size, data))
    return [inputs for number, (inputs, count) in enumerate(zip(data, counts, strict=True)) if number == 0 or count <= rows]


def _fits(inputs: Inputs, example: Inputs, captured: Captured) -> bool:
    """Whether inputs have the shapes that a graph was captured for: sequences may be of other lengths."""
    start = 1 if captured.dynamic else 0
    shapes = [[v.shape[start:] for v in pytree.tree_leaves(each) if isinstance(v, Tensor)] for each in (inputs, example)]
    return shapes[0] == shapes[1]


@dataclass(kw_only=True)
class _Sums:
    """Sums over rows of what a layer reads and of what it should write, in float64."""

    rows: int = 0
    x: Any = 0
    y: Any = 0
    xx: Any = 0
    xy: Any = 0
    yy: Any = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count rows: (rows, columns) and (rows, outputs)."""
        self.rows += len(x)
        for name, value in {"x": x.sum(0), "y": y.sum(0), "xx": x.T @ x, "xy": x.T @ y, "yy": y.square().sum(0)}.items():
            setattr(self, name, getattr(self, name) + value.double())

    def without(self, part: _Sums) -> _Sums:
        """The sums over the other rows."""
        names = ("x", "y", "xx", "xy", "yy")
        return _Sums(rows=self.rows - part.rows, **{name: getattr(self, name) - getattr(part, name) for name in names})

    def moments(self, *, centred: bool) -> _Moments:
        """Means of squares and products, around the means of x and y where the layer can add a constant."""
        x, y = self.x / self.rows, self.y / self.rows
        away = float(centred)
        return _Moments(
            x=x,
            y=y,
            xx=self.xx / self.rows - away * torch.outer(x, x),
            xy=self.xy / self.rows - away * torch.outer(x, y),
            yy=self.yy / self.rows - away * y.square(),
        )


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """Means of a layer's inputs (columns,) and outputs (outputs,), and of their products."""

    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def solved(self, old: Tensor, damping: float) -> Tensor:
        """The weights (columns, outputs) of least error, pulled to the old ones."""
        ridge = damping * self.xx.diagonal().mean().clamp(min=1e-12) * torch.eye(len(self.xx)).to(self.xx)
        return old + torch.linalg.solve(self.xx + ridge, self.xy - self.xx @ old)

    def error(self, weights: Tensor) -> Tensor:
        """Mean squared error of each output, (outputs,)."""
        return self.yy - 2 * (weights * self.xy).sum(0) + self.variance(weights)

    def variance(self, weights: Tensor) -> Tensor:
        """Mean square, or variance, of what the layer writes, (outputs,)."""
        return (weights * (self.xx @ weights)).sum(0)


class _Target(NamedTuple):
    """Positions of a layer's output in a batch, (rows,), which are held out, and what it should write there, (rows, outputs)."""

    chosen: Tensor
    late: Tensor
    written: Tensor


@dataclass(kw_only=True)
class _Statistics:
    """Mean and variance of a BatchNorm's inputs, summed over batches."""

    batches: int = 0
    mean: Any = 0
    variance: Any = 0


class _StreamFit:
    """Fits one layer of the cut graph after another.

    data: batches as the graph takes them. frontier: for each, the values that operators behind the last fitted layer read.
    position: how many operators are behind it. stale: BatchNorms whose inputs have changed and whose statistics have not.
    """

    def __init__(self, dense: nn.Module, graphs: CutGraph, data: Sequence[Inputs]) -> None:
        self.dense, self.graphs, self.module = dense, graphs, graphs.cut
        self.data = [pytree.tree_leaves(inputs) for inputs in _as_many_as_fit(data, graphs)]
        self.changed: set[str] = set()
        self.nodes = [node for node in self.module.graph.nodes if node.op != "output"]
        self.place = {node: number for number, node in enumerate(self.nodes)}
        start = min((self.place[layer.layer] for layer in graphs.layers), default=len(self.nodes))
        self.stale = {n for n in self.nodes[start:] if n.target is aten.batch_norm.default and n.args[3] is not None}
        self.needed = {n: max((self.place.get(user, len(self.nodes)) for user in n.users), default=-1) for n in self.nodes}
        for layer in graphs.layers:
            for node in itertools.chain.from_iterable(n.all_input_nodes for n in (layer.layer, *layer.steps, layer.value)):
                self.needed[node] = max(self.needed[node], self.place[layer.value])
        self.wanted = self._targets()
        self.position = 0
        self.frontier = [self._given(inputs) for inputs in self.data]

    def _given(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        return dict(zip(placeholders, self.module.graph.process_inputs(*inputs), strict=False))

    @torch.no_grad()
    def __call__(self, layer: StreamLayer) -> float:
        """Fit one layer; returns its mean squared error, as a fraction of the variance of what it should write."""
        for mine, theirs in layer.norms.items():
            self._set_(mine, get_tensor(self.graphs.whole.module, theirs))
        weight = get_tensor(self.module, layer.weight)
        scale = affine_between(self.graphs, layer, len(weight))[0].to(weight.device)
        lost = self._solve_(layer, *self._sums(layer), scale.square())
        chain = [node for node in (layer.layer, *layer.steps, layer.value) if self.place[node] < self.position]
        end = max(self.position, self.place[layer.value] + 1)
        for values in self.frontier:
            for node in dict.fromkeys([*chain, *self.nodes[self.position : end]]):
                self._run(node, values)
            for node in [node for node in values if self.needed[node] < end]:
                del values[node]
        self.position = end
        return lost

    def _run(self, node: Node, values: dict[Node, Any], statistics: _Statistics | None = None) -> None:
        """Compute the value of a node from those of others, and keep it."""
        if node.op == "placeholder":
            values.setdefault(node, node.args[0] if node.args else None)
        elif statistics is not None:
            values[node] = self._normalized(node, values.__getitem__, statistics)
        else:
            values[node] = execute(self.module, node, values.__getitem__)

    def copy_to_(self, model: nn.Module) -> None:
        """Copy the tensors that were changed to a model with the same names."""
        with torch.no_grad():
            for name in self.changed:
                get_tensor(model, self.graphs.whole.name_in_model(name)).copy_(get_tensor(self.module, name))

    def _targets(self) -> dict[tuple[str, int], _Target]:
        """What the whole network has where layers are fitted, by the name of the weight and the number of the batch."""
        by_node: dict[Node, list[StreamLayer]] = {}
        for layer in self.graphs.layers:
            by_node.setdefault(layer.target, []).append(layer)
        found: dict[tuple[str, int], _Target] = {}
        last = max(by_node, key=list(self.graphs.whole.module.graph.nodes).index, default=None)
        generator = torch.Generator().manual_seed(0)
        for number, inputs in enumerate(self.data if last is not None else ()):

            def visit(node: Node, value: Any, number: int = number) -> None:
                for layer in by_node.get(node, ()):
                    written = _stream_rows(layer, value)
                    columns = get_tensor(self.module, layer.weight)[0].numel()
                    count = -(-max(FEWEST_ROWS, ROWS_PER_COLUMN * columns) // len(self.data))
                    chosen = torch.randperm(len(written), generator=generator)[:count]
                    late = chosen >= (1 - HELD_OUT) * len(written)
                    found[layer.weight, number] = _Target(chosen, late, written[chosen.to(written.device)].float())

            with torch.no_grad():
                run_graph(self.graphs.whole.module, inputs, visit, until=last)
        return found

    def _sums(self, layer: StreamLayer) -> tuple[_Sums, _Sums]:
        """Run the cut network up to a layer's place in the stream on all batches; re-estimates BatchNorm on the way.

        Returns the sums over all rows, and over those that are held out.
        """
        own = {layer.layer, *layer.steps, layer.value}
        ahead = [node for node in self.nodes[self.position : self.place[layer.value]] if node not in own]
        stale = {node: _Statistics() for node in ahead if node in self.stale}
        weight = get_tensor(self.module, layer.weight)
        scale, shift = (v.to(weight.device, torch.float32) for v in affine_between(self.graphs, layer, len(weight)))
        module = owner(self.dense, self.graphs.whole.name_in_model(layer.weight))[0]
        sums, held_out = _Sums(), _Sums()
        for number, values in enumerate(map(dict, self.frontier)):
            for node in ahead:
                self._run(node, values, stale.get(node))
            chosen, late, written = self.wanted.pop((layer.weight, number))
            if layer.rest is not None:
                written = written - _stream_rows(layer, values[layer.rest])[chosen.to(written.device)].float()
            written = (written - shift) / scale
            read = rows_at(module, values[layer.layer.args[0]], chosen)
            sums.add(read, written)
            held_out.add(read[late.to(read.device)], written[late.to(read.device)])
            if not_finite((sums.xx.diagonal(), sums.yy)):
                what = f"what {layer.weight} reads or should write"
                raise not_finite_error("refitting layers of the stream", what, [self.data[number]], number + 1)
        self._settle_(stale)
        return sums, held_out

    def _normalized(self, node: Node, value_of: ValueOf, statistics: _Statistics) -> Tensor:
        """A BatchNorm's output by the statistics of the batch, which are counted."""
        x: Tensor = value_of(node.args[0])
        gamma, beta = (value_of(n) if n is not None else None for n in node.args[1:3])
        dims = [d for d in range(x.ndim) if d != 1]
        if x.numel() // x.shape[1] < 2:
            value: Tensor = execute(self.module, node, value_of)
            return value
        statistics.batches += 1
        statistics.mean = statistics.mean + x.double().mean(dims)
        statistics.variance = statistics.variance + x.double().var(dims)
        return F.batch_norm(x, None, None, gamma, beta, True, 0.0, node.args[7])

    def _settle_(self, stale: Mapping[Node, _Statistics]) -> None:
        """Write the statistics of the BatchNorms that ran."""
        for node, statistics in stale.items():
            if statistics.batches:
                self._set_(str(parameter_name(node.args[3])), statistics.mean / statistics.batches)
                self._set_(str(parameter_name(node.args[4])), statistics.variance / statistics.batches)

    def _solve_(self, layer: StreamLayer, sums: _Sums, held_out: _Sums, weights: Tensor) -> float:
        """Least squares with the damping that is best on what is held out; a constant goes into the bias, or into a BatchNorm."""
        weight = get_tensor(self.module, layer.weight).detach()
        old = weight.double().flatten(1).T
        bias = parameter_name(layer.layer.args[2]) if len(layer.layer.args) > 2 else None
        norm = next((step for step in layer.steps if step.target is aten.batch_norm.default), None)
        constant = bias is not None or norm is not None
        every = sums.moments(centred=constant)
        damping = DAMPINGS[-1]
        if held_out.rows and held_out.rows < sums.rows:
            seen, unseen = (part.moments(centred=constant) for part in (sums.without(held_out), held_out))
            damping = min(DAMPINGS, key=lambda d: float((unseen.error(seen.solved(old, d)) * weights).sum()))
        new = every.solved(old, damping)
        self._set_(layer.weight, new.T.reshape(weight.shape))
        if bias is not None:
            self._set_(bias, every.y - every.x @ new)
        elif norm is not None:
            self._renormalize_(norm, every.x @ new, every.variance(new), every.y - every.x @ new)
        varied = sums.moments(centred=True).yy  # also of a layer that can add no constant, so that all are measured alike
        return float((every.error(new) * weights).sum() / (varied * weights).sum().clamp(min=1e-300))

    def _renormalize_(self, norm: Node, mean: Tensor, variance: Tensor, constant: Tensor) -> None:
        """Let a BatchNorm add the constant, and keep the mean and variance that its inputs now have."""
        names = [parameter_name(node) for node in norm.args[1:5]]
        gamma, beta, running_mean, running_var = names
        before = get_tensor(self.module, str(running_var)).double() + norm.args[7]
        if gamma is None or beta is None:
            self._set_(str(running_mean), get_tensor(self.module, str(running_mean)).double() - constant)
            return
        factor = get_tensor(self.module, gamma).double() / before.sqrt()
        offset = get_tensor(self.module, beta).double() + factor * (
            mean + constant - get_tensor(self.module, str(running_mean)).double()
        )
        self._set_(gamma, factor * (variance + norm.args[7]).sqrt())
        self._set_(beta, offset)
        self._set_(str(running_mean), mean)
        self._set_(str(running_var), variance)

    @torch.no_grad()
    def _set_(self, name: str, values: Tensor) -> None:
        get_tensor(self.module, name).copy_(values)
        self.changed.add(name)


def _stream_rows(layer: StreamLayer, value: Tensor) -> Tensor:
    """A value of the stream as (rows, channels), in the order of the positions of a layer's output."""
    value = unpermuted(layer.steps, value)
    if layer.layer.target is not aten.linear.default:
        value = value.movedim(1, -1)
    return value.reshape(-1, value.shape[-1])
