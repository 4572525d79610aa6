"""Evidence for criteria that read more than weights: gradients, gradients of single samples, activations, losses.

for rows, evidence in collect(model, groups, prefix, task, needs={NeedsGradients}, samples=3072):
    score += rows * criterion(groups[0].slices(model, prefix, evidence))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.base.inputs import some_batches
from compresskit.base.objective import Objective
from compresskit.base.task import Inputs, Task, batch_size, call
from compresskit.graph.surgery import get_tensor, mode, owner
from compresskit.prune.criteria import Needs, NeedsActivations, NeedsGradients, NeedsLosses, NeedsSampleGradients
from compresskit.train.objective import bind_objective

VALUES = 2**26  # numbers of single-sample gradients that are held at once: 256 MB
POSITIONS = 4096  # values of a channel that are kept from one batch

#: (tensor, dim, role) -> (units, k) indices that vanish with each unit: `ChannelGroup.indices`.
Places = dict[tuple[str, int, str], Tensor]


@dataclass(kw_only=True)
class Evidence:
    """What one batch shows; a field that was not asked for is None.

    grads: parameter -> gradient of the batch's loss. sample_grads: parameter -> (samples, ...) gradients.
    inputs: layer -> (channels, values) that it read. loss: `(places, keep) -> loss` without the other units.
    """

    grads: dict[str, Tensor] | None = None
    sample_grads: dict[str, Tensor] | None = None
    inputs: dict[str, Tensor] | None = None
    loss: Callable[[Places, Tensor], float] | None = None
    outputs: dict[str, Tensor] = field(default_factory=dict)


def collect(
    model: nn.Module, all_places: list[Places], prefix: str, task: Task, *, needs: set[type[Needs]], samples: int
) -> Iterator[tuple[int, Evidence]]:
    """(samples seen, evidence) of one batch after another, with the model in eval mode; it is left as it was.

    Labels are read only where a loss is asked for; activations alone come from the calibration data.
    """
    objective = bind_objective(None, model, task)
    names = sorted({prefix + tensor for places in all_places for tensor, _, _ in places})
    names = [name for name in names if isinstance(get_tensor(model, name), nn.Parameter)]
    unlabelled = needs == {NeedsActivations}
    with readable(model):
        for batch in some_batches(task, "calibration" if unlabelled else "train", samples, "score"):
            rows = batch_size(task.split(batch)[0])
            whole = Evidence()
            if NeedsGradients in needs:
                whole.grads = _gradients(model, objective, batch, names)
            if NeedsActivations in needs:
                whole.inputs, whole.outputs = _activations(model, all_places, prefix, task.split(batch)[0])
            if NeedsLosses in needs:
                whole.loss = partial(_loss_without, model, prefix, objective, batch)
            if NeedsSampleGradients not in needs:
                yield rows, whole
                continue
            step = max(1, VALUES // max(1, sum(get_tensor(model, name).numel() for name in names)))
            for start in range(0, rows, step):
                some = pytree.tree_map(partial(_rows, start=start, end=min(start + step, rows), total=rows), batch)
                whole.sample_grads = sample_gradients(model, objective, some, names)
                yield min(step, rows - start), whole


def _rows(value: Any, *, start: int, end: int, total: int) -> Any:
    return value[start:end] if isinstance(value, Tensor) and value.ndim and len(value) == total else value


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Eval mode, gradients for frozen parameters too, none left behind."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    try:
        with mode(model, training=False), torch.enable_grad():
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        model.zero_grad(set_to_none=True)


def _gradients(model: nn.Module, objective: Objective, batch: Any, names: list[str]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.stack(list(objective(model, batch).values())).sum().backward()
    # What the loss does not reach, such as a second head, has no gradient: removing it changes nothing known.
    found = {name: get_tensor(model, name) for name in names}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in found.items()}


def sample_gradients(model: nn.Module, objective: Objective, batch: Any, names: list[str]) -> dict[str, Tensor]:
    """Gradient of each sample's loss by itself: parameter -> (samples, *shape), with one vectorized backward pass.

    A model that `torch.func.vmap` cannot follow is run a sample at a time.
    """
    values = {name: get_tensor(model, name).detach() for name in names}
    rows = next(len(v) for v in pytree.tree_leaves(batch) if isinstance(v, Tensor) and v.ndim)

    def loss(values: dict[str, Tensor], sample: Any) -> Tensor:
        one = pytree.tree_map(lambda v: v[None] if isinstance(v, Tensor) else v, sample)
        losses = objective(lambda *args, **kwargs: functional_call(model, values, args, kwargs), one)
        return torch.stack(list(losses.values())).sum()

    dims = pytree.tree_map(lambda v: 0 if isinstance(v, Tensor) and v.ndim else None, batch)
    try:
        found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, dims))(values, batch)
    except RuntimeError:
        each = [_gradients(model, objective, _sample(batch, row), names) for row in range(rows)]
        return {name: torch.stack([g[name] for g in each]) for name in names}
    return {name: g.detach() for name, g in found.items()}


def _sample(batch: Any, row: int) -> Any:
    return pytree.tree_map(lambda v: v[row : row + 1] if isinstance(v, Tensor) and v.ndim else v, batch)


def _activations(
    model: nn.Module, all_places: list[Places], prefix: str, inputs: Inputs
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensor name -> (channels, values) that its layer read, and that it made."""
    read: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    handles = []

    def keep(into: dict[str, Tensor], name: str, value: Tensor) -> None:
        module = owner(model, name)[0]
        dim = -1 if isinstance(module, nn.Linear) else 1
        flat = value.detach().movedim(dim, 0).flatten(1)
        chosen = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))[:POSITIONS]
        into[name] = torch.cat([into[name], flat[:, chosen]], 1) if name in into else flat[:, chosen].float()

    for name in sorted({prefix + tensor for places in all_places for tensor, _, role in places if role in ("in", "out")}):
        module, leaf = owner(model, name)
        if leaf == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            handles.append(module.register_forward_pre_hook(lambda _, args, name=name: keep(read, name, args[0])))
            handles.append(module.register_forward_hook(lambda _, __, out, name=name: keep(made, name, out)))
    try:
        with torch.no_grad():
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return read, made


def values_of(model: nn.Module, places: Places, prefix: str, evidence: Evidence) -> Tensor:
    """(units, V) values of the units of one group: as the first layer reads them, else as the first layer makes them."""
    for wanted, found in (("in", evidence.inputs or {}), ("out", evidence.outputs)):
        for (tensor, dim, role), indices in places.items():
            if role == wanted and (values := found.get(prefix + tensor)) is not None:
                # In a grouped layer an index stands for that position of every group.
                size = get_tensor(model, prefix + tensor).shape[dim]
                grouped = values.reshape(-1, size, values.shape[1])[:, indices.to(values.device)]
                return grouped.movedim(1, 0).flatten(1)
    raise ModelError(
        f"{prefix}{next(iter(places))[0]}: no convolution or linear layer of this group is called as a module, so its activations"
        " cannot be seen; use a criterion that reads weights or gradients, or name the layer in ignore"
    )


def _loss_without(model: nn.Module, prefix: str, objective: Objective, batch: Any, places: Places, keep: Tensor) -> float:
    """The loss of a batch with the units outside `keep` set to zero everywhere."""
    before: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for (tensor, dim, _), indices in places.items():
                values = get_tensor(model, prefix + tensor)
                before.setdefault(prefix + tensor, values.detach().clone())
                values.index_fill_(dim, indices[~keep].flatten().to(values.device), 0)
            return float(torch.stack(list(objective(model, batch).values())).sum())
    finally:
        with torch.no_grad():
            for name, old in before.items():
                get_tensor(model, name).copy_(old)
