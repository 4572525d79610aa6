"""Closed-form repair after a cut: what a layer lost with some of its inputs is made up from those that are left.

A layer that read channels X with weights W and now reads only some of them, X', gets the weights W' that come closest to its
old output on data: W' = cov(X W, X') cov(X')^-1, the least squares solution (as in He et al., 1707.06168, without the outer
iterations), and the mean of what is lost goes into the bias, or into the BatchNorm that follows. Needs neither labels nor
gradients nor training, and changes no shape.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, SettingError
from compresskit.base.inputs import AnyInputs, each_inputs
from compresskit.base.task import Inputs, call_checked
from compresskit.graph.surgery import get_tensor, mode, owner
from compresskit.prune.structure.plan import Plan

log = logging.getLogger(__name__)

COLUMNS = 6144  # inputs of a layer beyond which it is left as it was: the system to solve is columns x columns
ROWS = 512  # places of its output at which a layer's inputs are looked at in one batch, or half as many as it has inputs

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def reconstruct_(
    model: nn.Module, dense: nn.Module, plan: Plan, batches: Iterable[AnyInputs], *, damping: float = 1e-4
) -> dict[str, float]:
    """Refit, in place, every layer of a pruned model that reads fewer channels than it did in the dense one.

    Args:
        model: `apply_` of `plan` to a copy of `dense`.
        dense: the model before the cut; it runs on the data, in eval mode.
        batches: inputs, shuffled; some thousand images are enough.
        damping: share of the mean variance of the inputs that is added to each, so that inputs that hardly vary do no harm.

    Returns layer -> share of the variance of its output that is still lost, 0 for none; nothing, and the model is as it was cut,
    where the outputs of the whole came no nearer to the dense model's on the first batch. Grouped and transposed convolutions,
    layers with tied weights and layers of more than 6144 inputs stay as they are. Raises DataError where there is no batch.
    """
    if damping <= 0:
        raise SettingError(f"reconstruct_(damping=...): wanted a positive number, got {damping}")
    # Queries that the plan rescales are not what they were: they are left alone.
    names = [n for n, dims in plan.remove.items() if 1 in dims and n not in plan.scales and _refits(dense, n)]
    stream = each_inputs(batches, "reconstruct_")
    first = next(stream, None)
    if first is None:
        raise DataError("reconstructing layers: no batch of calibration data was given")
    moments = _look(dense, names, itertools.chain([first], stream))
    before, far = copy.deepcopy(model.state_dict()), _distance(model, dense, first)
    with torch.no_grad():
        lost = {n.removesuffix(".weight"): _refit_(model, dense, plan, n, seen, damping) for n, seen in moments.items()}
    if not _distance(model, dense, first) <= far:
        # Each layer is nearer to what it was, and yet the whole is not: a norm over the channels, say, sees others than it did.
        log.warning("refitting layers brought the outputs of %s no nearer; they stay as they were cut", type(model).__name__)
        model.load_state_dict(before)
        return {}
    return lost


def _distance(model: nn.Module, dense: nn.Module, inputs: Inputs) -> float:
    """Sum of squared differences of the outputs, in eval mode."""
    with torch.no_grad(), mode(model, training=False), mode(dense, training=False):
        pairs = zip(*(pytree.tree_leaves(call_checked(m, inputs, "calibration data")) for m in (model, dense)), strict=True)
        # Lists of boxes may differ in length; they say nothing then.
        same = [(a.double(), b.double()) for a, b in pairs if isinstance(a, Tensor) and a.shape == b.shape]
        return sum(float((a - b).square().sum()) for a, b in same)


def _refits(dense: nn.Module, name: str) -> bool:
    module, leaf = owner(dense, name)
    plain = isinstance(module, Layer) and leaf == "weight" and getattr(module, "groups", 1) == 1
    if not plain or get_tensor(dense, name)[0].numel() > COLUMNS:
        return False
    # What suits one layer does not suit another that has the same weights.
    return sum(p is get_tensor(dense, name) for m in dense.modules() for p in m._parameters.values()) == 1


class _Moments:
    """Sums over rows of inputs, and where the constant part of an output may go."""

    def __init__(self) -> None:
        self.rows, self.total, self.products = 0, torch.zeros(()), torch.zeros(())
        self.norms: set[str] = set()

    def add(self, x: Tensor) -> None:
        """Count rows of inputs, (rows, columns)."""
        self.rows += len(x)
        self.total = self.total + x.sum(0).double()
        self.products = self.products + (x.T @ x).double()


def _look(dense: nn.Module, names: list[str], batches: Iterable[Inputs]) -> dict[str, _Moments]:
    """Run the dense model once over the data and sum up what its layers read."""
    moments = {name: _Moments() for name in names}
    made: dict[int, tuple[str, Tensor]] = {}
    handles: list[Any] = []
    chance = torch.Generator().manual_seed(0)

    def reads(name: str, layer: Any, x: Tensor) -> None:
        moments[name].add(_rows(layer, x.detach(), max(ROWS, layer.weight[0].numel() // 2), chance))

    def norms(path: str, x: Tensor) -> None:
        if id(x) in made:
            moments[made[id(x)][0]].norms.add(path)

    for name in names:
        layer = owner(dense, name)[0]
        handles.append(layer.register_forward_pre_hook(lambda m, args, name=name: reads(name, m, args[0])))
        handles.append(layer.register_forward_hook(lambda m, _, out, name=name: made.update({id(out): (name, out)})))
    for path, module in dense.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(lambda m, args, path=path: norms(path, args[0])))
    try:
        with torch.no_grad(), mode(dense, training=False):
            for inputs in batches:
                made.clear()
                call_checked(dense, inputs, "calibration data")
    finally:
        for handle in handles:
            handle.remove()
    return {name: seen for name, seen in moments.items() if seen.rows}


def _rows(layer: Any, x: Tensor, count: int, chance: torch.Generator) -> Tensor:
    """(rows, inputs x kernel positions) of what a layer multiplies its weights with, at random places of its output."""
    if isinstance(layer, nn.Linear):
        flat = x.reshape(-1, x.shape[-1])
        return flat[_some(len(flat), count, chance).to(x.device)].float()
    sides = layer._reversed_padding_repeated_twice
    x = F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sizes = [(n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, layer.stride, strict=True)]
    chosen = _some(len(x) * int(torch.tensor(sizes).prod()), count, chance)
    image, *corner = torch.unravel_index(chosen, (len(x), *sizes))
    starts = [(c * s).to(x.device) for c, s in zip(corner, layer.stride, strict=True)]
    image, channels_last = image.to(x.device), x.movedim(1, -1)
    patches = [
        channels_last[(image, *(s + o * d for s, o, d in zip(starts, offset, layer.dilation, strict=True)))]
        for offset in itertools.product(*map(range, layer.kernel_size))
    ]
    return torch.stack(patches, 2).flatten(1).float()


def _some(total: int, count: int, chance: torch.Generator) -> Tensor:
    return torch.randint(total, (count,), generator=chance) if count < total else torch.arange(total)


def _refit_(model: nn.Module, dense: nn.Module, plan: Plan, name: str, seen: _Moments, damping: float) -> float:
    """Least squares for one layer; the share of the variance that is lost."""
    weight = get_tensor(dense, name).detach()
    keep = {dim: kept.to(weight.device) for dim, kept in plan.keep(name).items()}
    outputs = weight[keep[0]] if 0 in keep else weight
    old = outputs.double().flatten(1)
    columns = torch.arange(weight[0].numel(), device=weight.device).view(weight.shape[1], -1)[keep[1]].flatten()
    layer: Any = owner(model, name)[0]
    mean = seen.total / seen.rows
    moment = seen.products / seen.rows
    norm: Any = model.get_submodule(next(iter(seen.norms))) if len(seen.norms) == 1 else None
    if layer.bias is not None or norm is not None:
        moment = moment - torch.outer(mean, mean)  # the constant part has a place of its own
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
