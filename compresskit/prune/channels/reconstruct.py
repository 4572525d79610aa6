"""Closed-form repair after pruning: refit each layer that lost inputs so that the remaining inputs make up for them.

A layer that read channels X with weights W and now reads only some of them, X', gets the weights W' that come closest to its
old output on data: W' = cov(X W, X') cov(X')^-1, the least squares solution (as in He et al., 1707.06168, without the outer
iterations); the mean of what is lost goes into the bias, or into the BatchNorm that follows. It needs neither labels nor
gradients nor training, and changes no shape.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import AnyInputs, call_checked, each_inputs, not_finite, not_finite_error
from compresskit.base.task import Inputs
from compresskit.graph.surgery import get_tensor, mode, owner
from compresskit.prune.channels.own_forwards import OwnForwards, has_own_forward
from compresskit.prune.evidence import watched_calls, with_batch
from compresskit.prune.structure.plan import Plan

log = logging.getLogger(__name__)

MOST_COLUMNS = 6144  # a layer with more inputs is left as it was: the system to solve is columns x columns
SAMPLED_ROWS = 512  # output positions at which a layer's inputs are read in one batch, and at once, or half as many as its inputs

RefittableLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def reconstruct_(
    model: nn.Module, dense: nn.Module, plan: Plan, batches: Iterable[AnyInputs], *, damping: float = 1e-4
) -> dict[str, float]:
    """Refit, in place, every layer of a pruned model that reads fewer channels than it did in the dense one.

    Nothing is changed if the outputs of the whole model come no nearer to the dense model's on the first batch. Grouped and
    transposed convolutions, layers with tied weights, layers of more than 6144 inputs and those whose class multiplies other
    weights than it stores, such as standardized ones, are left as they are; of the last, the log says so.

    Args:
        model: `apply_` of `plan` to a copy of `dense`.
        dense: the model before pruning; it runs on the data, in eval mode.
        plan: what was removed.
        batches: inputs, shuffled; some thousand images are enough.
        damping: fraction of the mean variance of the inputs that is added to each, against inputs that hardly vary.

    Returns:
        Layer -> fraction of the variance of its output that is still lost, 0 for none; empty if nothing was changed.

    Raises:
        DataError: there is no batch, or a layer reads nan or infinite values, as of data that hold such.
    """
    if damping <= 0:
        raise SettingError(f"reconstruct_(damping=...): wanted a positive number, got {damping}")
    names = [n for n, dims in plan.remove.items() if 1 in dims and can_refit(dense, n)]
    stream = each_inputs(batches, "reconstruct_")
    first = next(stream, None)
    if first is None:
        raise DataError("reconstructing layers: no batch of calibration data was given")
    statistics = input_statistics(dense, names, itertools.chain([first], stream), norms=True)
    computed = [n for n in names if n in statistics and statistics[n].computed]
    if left := [n for n in names if has_own_forward(owner(dense, n)[0]) and (n in computed or n not in statistics)]:
        kinds = ", ".join(sorted({type(owner(dense, n)[0]).__name__ for n in left}))
        log.warning("not refitted, since the forward of %s does more with weights than multiply them: %s", kinds, ", ".join(left))
    before, wanted = copy.deepcopy(model.state_dict()), output_leaves(dense, first)
    distance = squared_distance(output_leaves(model, first), wanted)
    lost = refit_(model, dense, plan, statistics, damping=damping)
    if not squared_distance(output_leaves(model, first), wanted) <= distance:
        # Each layer is nearer to its old output and yet the model is not, for instance because a norm over channels sees others.
        log.warning("refitting layers brought the outputs of %s no nearer; they stay as they were cut", type(model).__name__)
        model.load_state_dict(before)
        return {}
    return lost


@torch.no_grad()
def refit_(
    model: nn.Module, dense: nn.Module, plan: Plan, statistics: Mapping[str, InputStatistics], *, damping: float = 1e-4
) -> dict[str, float]:
    """Refit the layers of a pruned model that lost inputs, in place, as `reconstruct_` does, from statistics of their inputs.

    statistics: of weights by name, of the dense model; weights that keep all inputs are left out. Nothing is run, and whether
    the outputs of the whole model come nearer is not looked at. Returns what `reconstruct_` returns.
    """
    # Queries that the plan rescales are left out: their old output is no target.
    changed = {n: s for n, s in statistics.items() if 1 in plan.remove.get(n, {}) and n not in plan.scales and not s.computed}
    return {n.removesuffix(".weight"): _refit_(model, dense, plan, n, inputs, damping) for n, inputs in changed.items()}


def output_leaves(model: nn.Module, inputs: Inputs) -> list[Any]:
    """What a model gives in eval mode."""
    with torch.no_grad(), mode(model, training=False):
        return pytree.tree_leaves(call_checked(model, inputs, "calibration data"))


def squared_distance(outputs: list[Any], wanted: list[Any]) -> float:
    """Sum of squared differences, without entries that are equal, infinities among them, or not finite where they should be."""
    pairs = zip(outputs, wanted, strict=True)
    # Outputs of different shapes, such as lists of boxes, cannot be compared.
    same = [(a.double(), b.double()) for a, b in pairs if isinstance(a, Tensor) and a.shape == b.shape]
    return sum(float((a - b)[b.isfinite() & (a != b)].square().sum()) for a, b in same)


def can_refit(dense: nn.Module, name: str) -> bool:
    """Whether a weight, by its name, is one of a layer that least squares can refit."""
    module, leaf = owner(dense, name)
    plain = isinstance(module, RefittableLayer) and leaf == "weight"
    if (
        not plain
        or (not isinstance(module, nn.Linear) and module.groups != 1)
        or get_tensor(dense, name)[0].numel() > MOST_COLUMNS
    ):
        return False
    # Weights that fit one layer do not fit another that shares them.
    return sum(p is get_tensor(dense, name) for m in dense.modules() for p in m._parameters.values()) == 1


class InputStatistics:
    """Sums over rows of a layer's inputs, and the BatchNorm that alone reads its output, where a constant may go.

    computed: the layer multiplies the rows with weights that it computes from its own.
    """

    def __init__(self) -> None:
        self.rows, self.total, self.products = 0, torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
        self.norm: str | None = None
        self.computed = False

    def add(self, x: Tensor) -> None:
        """Count rows of inputs, (rows, columns)."""
        self.rows += len(x)
        self.total = self.total + x.sum(0).double()
        self.products = self.products + (x.T @ x).double()


class _Readers(TorchDispatchMode):
    """Counts what reads the outputs of layers while a model runs: operators of any kind, and BatchNorms."""

    supports_higher_order_operators = True  # such as torch.cond, which reads what it is called with

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: dict[int, tuple[str, Tensor]] = {}  # the tensor too, so that its id is not given to another
        self.read: Counter[str] = Counter()
        self.normalized: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count((args, kwargs))
        return func(*args, **(kwargs or {}))

    def count(self, values: Any) -> None:
        """Count tensors that are read now."""
        self.read.update(self.outputs[id(v)][0] for v in pytree.tree_leaves(values) if id(v) in self.outputs)

    def add_output(self, layer: str, out: Tensor) -> None:
        """Count what reads `out` from now on."""
        self.outputs[id(out)] = (layer, out)

    def add_norm(self, norm: str, x: Tensor) -> None:
        """Count a BatchNorm that read x."""
        self.normalized[norm, self.outputs[id(x)][0] if id(x) in self.outputs else ""] += 1

    def norm_of(self, layer: str) -> str | None:
        """The BatchNorm that reads the outputs of a layer and no other value, where nothing else reads them."""
        found = {norm for norm, source in self.normalized if source == layer}
        if len(found) != 1:
            return None
        norm = found.pop()
        own = self.normalized[norm, layer]
        calls = sum(count for (other, _), count in self.normalized.items() if other == norm)
        return norm if own == calls == self.read[layer] else None


def input_statistics(
    dense: nn.Module, names: list[str], batches: Iterable[Inputs], *, norms: bool = False, for_each_input: int = 0
) -> dict[str, InputStatistics]:
    """Run the dense model once over the data and sum up what its layers read, by the name of their weights.

    Args:
        dense: the model. names: of weights. batches: inputs.
        norms: whether to look for the BatchNorm that alone reads a layer's output; every operator is then watched.
        for_each_input: a layer is read at so many positions for each of its inputs, or at all there are, each counted once;
            0 samples each batch, whatever others gave, and may count a position twice.

    Raises DataError where a layer reads nan or infinite values.
    """
    statistics = {name.removesuffix(".weight"): InputStatistics() for name in names}
    generator, readers = torch.Generator(device="cpu").manual_seed(0), _Readers() if norms else None

    def visit(path: str, module: Any, x: Tensor, out: Any) -> None:
        if path in statistics:
            inputs, found = module.weight[0].numel(), statistics[path]
            at_once = max(SAMPLED_ROWS, inputs // 2)
            count = max(at_once, for_each_input * inputs - found.rows)
            chosen = _sampled_positions(module, x, count, generator, distinct=for_each_input > 0)
            for part in chosen.split(at_once):  # all rows of a wide layer would take much memory
                found.add(rows_at(module, x.detach(), part))
            if readers is not None:
                readers.add_output(path, out)
        elif readers is not None:
            readers.add_norm(path, x)

    layers = {path: dense.get_submodule(path) for path in statistics}
    forwards = OwnForwards({path: layer for path, layer in layers.items() if has_own_forward(layer)}, visit)
    watched = [*(path for path in layers if path not in forwards.layers), *(_batchnorms(dense) if norms else ())]
    with watched_calls(dense, watched, visit), torch.no_grad(), mode(dense, training=False):
        for number, inputs in enumerate(batches, 1):
            if readers is not None:
                readers.outputs.clear()
            with readers or nullcontext(), forwards if forwards.layers else nullcontext():
                outputs = call_checked(dense, inputs, "calibration data")
            if readers is not None:
                readers.count(outputs)
            for path, found in statistics.items():
                if not_finite(found.total) or not_finite(found.products.diagonal() if found.rows else None):
                    raise not_finite_error("calibration data", f"the input of {path}", [inputs], number)
    for path, found in statistics.items():
        found.norm = None if readers is None else readers.norm_of(path)
        found.computed = path in forwards.computed
    return {f"{path}.weight": inputs for path, inputs in statistics.items() if inputs.rows}


def _batchnorms(model: nn.Module) -> list[str]:
    """Names of those that have a running mean."""
    modules = model.named_modules()
    return [path for path, m in modules if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None]


def _sampled_positions(layer: Any, x: Tensor, count: int, generator: torch.Generator, *, distinct: bool) -> Tensor:
    """(rows,) random positions of a layer's output for the input x, counted over all but its channels."""
    if isinstance(layer, nn.Linear):
        total = x.numel() // x.shape[-1]
    else:
        x = with_batch(layer, x)
        total = len(x) * math.prod(_output_sizes(layer, x))
    if count >= total:
        return torch.arange(total, device="cpu")
    if distinct:
        return torch.randperm(total, generator=generator, device="cpu")[:count]
    return torch.randint(total, (count,), generator=generator, device="cpu")


def rows_at(layer: Any, x: Tensor, chosen: Tensor) -> Tensor:
    """(rows, inputs x kernel positions) that a layer multiplies its weights with at these positions of its output."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])[chosen.to(x.device)].float()
    x = with_batch(layer, x)
    image, *corner = torch.unravel_index(chosen, (len(x), *_output_sizes(layer, x)))
    sides = layer._reversed_padding_repeated_twice
    x = F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    starts = [(c * s).to(x.device) for c, s in zip(corner, layer.stride, strict=True)]
    image, channels_last = image.to(x.device), x.movedim(1, -1)
    patches = [
        channels_last[(image, *(s + o * d for s, o, d in zip(starts, offset, layer.dilation, strict=True)))]
        for offset in itertools.product(*map(range, layer.kernel_size))
    ]
    return torch.stack(patches, 2).flatten(1).float()


def _output_sizes(layer: Any, x: Tensor) -> list[int]:
    """Height and width, or how many there are, of a convolution's output."""
    sides = layer._reversed_padding_repeated_twice[::-1]
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    padded = [n + a + b for n, a, b in zip(x.shape[2:], sides[::2], sides[1::2], strict=True)]
    return [(n - r - 1) // s + 1 for n, r, s in zip(padded, reach, layer.stride, strict=True)]


def _refit_(model: nn.Module, dense: nn.Module, plan: Plan, name: str, inputs: InputStatistics, damping: float) -> float:
    """Least squares for one layer; returns the fraction of the output's variance that is lost."""
    weight = get_tensor(dense, name).detach()
    keep = {dim: kept.to(weight.device) for dim, kept in plan.keep(name).items()}
    outputs = weight[keep[0]] if 0 in keep else weight
    old = outputs.double().flatten(1)
    columns = torch.arange(weight[0].numel(), device=weight.device).view(weight.shape[1], -1)[keep[1]].flatten()
    layer: Any = owner(model, name)[0]
    mean = inputs.total / inputs.rows
    moment = inputs.products / inputs.rows
    norm: Any = None if inputs.norm is None else model.get_submodule(inputs.norm)
    if layer.bias is not None or norm is not None:
        moment = moment - torch.outer(mean, mean)  # the bias or the BatchNorm takes the mean
    whole = torch.einsum("oi,ij,oj->", old, moment, old)
    small = moment[columns][:, columns]
    small = small + damping * moment.diagonal().mean().clamp(min=1e-12) * torch.eye(len(small), device=small.device)
    new = torch.linalg.solve(small, moment[columns] @ old.T).T
    change = old.clone()
    change[:, columns] -= new
    get_tensor(model, name).copy_(new.view(get_tensor(model, name).shape))
    shift = change @ mean
    if layer.bias is not None:
        layer.bias += shift.to(layer.bias.dtype)
    elif norm is not None:
        norm.running_mean -= shift.to(norm.running_mean.dtype)
    return float(torch.einsum("oi,ij,oj->", change, moment, change) / whole.clamp(min=1e-300))
