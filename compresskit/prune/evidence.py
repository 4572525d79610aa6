"""Evidence: what criteria read besides weights, collected from the task's data a batch at a time.

for rows, evidence in collect(model, names, task, needs={"gradients"}, samples=3072):
    score += rows * criterion(group.slices(model, prefix, evidence))

Channels and single weights use the same evidence; `Slices` views it as one row for each unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ModelError
from compresskit.base.inputs import not_finite, not_finite_error, some_batches
from compresskit.base.objective import LossFunction
from compresskit.base.task import Inputs, Task, batch_size, call
from compresskit.graph.surgery import get_tensor, mode, no_attention_fastpath, owner
from compresskit.graph.tracing import no_modes_of_caller
from compresskit.mixed.compiled_model import as_written
from compresskit.prune.criteria import UNLABELLED_EVIDENCE, Need
from compresskit.train.objective import task_losses

MOST_VALUES = 2**26  # numbers of single-sample gradients that are held at once: 256 MB
MOST_POSITIONS = 4096  # values of a channel that are kept from one batch

#: (tensor, dim, role) -> (units, k) indices that vanish with each unit: `ChannelGroup.indices`.
Places = dict[tuple[str, int, str], Tensor]

MaskableLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(kw_only=True)
class Evidence:
    """The evidence of one batch, by the dotted name of a tensor; what was not needed is None.

    grads: gradient of the batch's loss. sample_grads: (samples, ...) gradients of each sample's loss.
    inputs, outputs: (channels, values) that the layer of a weight read and made.
    loss: `(places, keep) -> loss` of the batch without the other units.
    hessian: the Hessian of the loss times its gradient. norms: for each weight the norm of the input that it multiplies.
    """

    grads: dict[str, Tensor] | None = None
    sample_grads: dict[str, Tensor] | None = None
    inputs: dict[str, Tensor] | None = None
    outputs: dict[str, Tensor] | None = None
    loss: Callable[[Places, Tensor], float] | None = None
    hessian: dict[str, Tensor] | None = None
    norms: dict[str, Tensor] | None = None


def collect(
    model: nn.Module, names: Collection[str], task: Task, *, needs: Collection[Need], samples: int, prefix: str = ""
) -> Iterator[tuple[int, Evidence]]:
    """Yield (number of samples, evidence) for one batch after another, with the model in eval mode; it is left as it was.

    Args:
        model: the model.
        names: tensors that evidence is needed of.
        task: training data and loss; where no evidence needs labels, the calibration data.
        needs: what criteria declare.
        samples: how many samples to read.
        prefix: prefix of the tensor names in the `Places` that `Evidence.loss` is called with.

    Raises DataError where evidence is nan or infinite, as of data that hold such values.
    """
    objective = task_losses(model, task)
    names = [name for name in names if isinstance(get_tensor(model, name), nn.Parameter)]
    unlabelled = set(needs) <= UNLABELLED_EVIDENCE
    with readable(model):
        for number, batch in enumerate(some_batches(task, "calibration" if unlabelled else "train", samples, "score"), 1):
            rows = batch_size(task.inputs(batch))
            evidence = Evidence()
            if "gradients" in needs or "hessian_gradients" in needs:
                evidence.grads, evidence.hessian = gradients(model, objective, batch, names, hessian="hessian_gradients" in needs)
            if "activations" in needs:
                evidence.inputs, evidence.outputs = _activations(model, names, task.inputs(batch))
            if "input_norms" in needs:
                evidence.norms = _input_norms(model, names, task.inputs(batch))
            if "losses" in needs:
                evidence.loss = partial(_loss_without, model, prefix, objective, batch)
                if not_finite(batch) and not math.isfinite(_loss(model, objective, batch)):
                    raise not_finite_error("scoring", "the loss", [batch], number)
            _check_evidence(evidence, batch, number)
            if "sample_gradients" not in needs:
                yield rows, evidence
                continue
            step = max(1, MOST_VALUES // max(1, sum(get_tensor(model, name).numel() for name in names)))
            for start in range(0, rows, step):
                part = pytree.tree_map(partial(_samples, start=start, end=min(start + step, rows), total=rows), batch)
                evidence.sample_grads = sample_gradients(model, objective, part, names)
                _check_evidence(evidence, batch, number)
                yield min(step, rows - start), evidence


def _check_evidence(evidence: Evidence, batch: Any, number: int) -> None:
    """Raise DataError for evidence of a batch that is nan or infinite."""
    kinds = {
        "the gradient": evidence.grads,
        "a sample's gradient": evidence.sample_grads,
        "the Hessian": evidence.hessian,
        "the input": evidence.inputs,
        "the output": evidence.outputs,
        "the norm of the input": evidence.norms,
    }
    for kind, values in kinds.items():
        for name, value in (values or {}).items():
            if not_finite(value):
                raise not_finite_error("scoring", f"{kind} of {name}", [batch], number)


def _samples(value: Any, *, start: int, end: int, total: int) -> Any:
    return value[start:end] if isinstance(value, Tensor) and value.ndim and len(value) == total else value


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Eval mode and gradients for frozen parameters too; afterwards the model is as before, the gradients it has included.

    Raises ModelError for a model that was made in torch.inference_mode.
    """
    if made := next((name for name, p in model.named_parameters() if p.is_inference()), ""):
        raise ModelError(
            f"{type(model).__name__}: {made} was made inside torch.inference_mode(), where nothing has a gradient; make the"
            " model, or copy it, outside of that block"
        )
    frozen = [p for p in model.parameters() if not p.requires_grad]
    try:
        with no_modes_of_caller(), mode(model, training=False), torch.enable_grad():
            for parameter in frozen:
                parameter.requires_grad_(True)
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def gradients(
    model: nn.Module, objective: LossFunction, batch: Any, names: Collection[str], *, hessian: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Gradient of a batch's loss by parameter; and, if asked for, the Hessian (of these parameters alone) times it.

    A parameter that the loss does not reach, such as that of a second head, has gradient 0.
    """
    values = [get_tensor(model, name) for name in names]
    if not values:
        return {}, {} if hessian else None

    def filled(found: tuple[Tensor | None, ...]) -> list[Tensor]:
        return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(values, found, strict=True)]

    loss = torch.stack(list(objective(model, batch).values())).sum()
    grads = filled(torch.autograd.grad(loss, values, create_graph=hessian, allow_unused=True))
    products = None
    if hessian:
        flow = torch.stack([(g * g.detach()).sum() for g in grads]).sum()
        found = filled(torch.autograd.grad(flow, values, allow_unused=True))
        products = {name: h.detach() for name, h in zip(names, found, strict=True)}
    return {name: g.detach() for name, g in zip(names, grads, strict=True)}, products


def sample_gradients(model: nn.Module, objective: LossFunction, batch: Any, names: list[str]) -> dict[str, Tensor]:
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
    except (RuntimeError, DataError):  # that of one sample says whether it is the loss
        each = [gradients(model, objective, _sample(batch, row), names)[0] for row in range(rows)]
        return {name: torch.stack([g[name] for g in each]) for name in names}
    return {name: g.detach() for name, g in found.items()}


def _sample(batch: Any, row: int) -> Any:
    return pytree.tree_map(lambda v: v[row : row + 1] if isinstance(v, Tensor) and v.ndim else v, batch)


@contextmanager
def watched_calls(
    model: nn.Module, paths: Collection[str], visit: Callable[[str, nn.Module, Tensor, Any], None]
) -> Iterator[None]:
    """While the block runs, `visit(path, module, first input, output)` is called after every call of the named modules."""

    def hook(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        visit(path, module, next(iter((*args, *kwargs.values()))), output)

    handles = [model.get_submodule(path).register_forward_hook(partial(hook, path), with_kwargs=True) for path in paths]
    try:
        with no_attention_fastpath(), as_written():  # the fast path calls no inner layers, compiled code no hooks
            yield
    finally:
        for handle in handles:
            handle.remove()


def channels_first(module: nn.Module, values: Tensor) -> Tensor:
    """Inputs or outputs of a linear layer or convolution as (channels, values)."""
    if isinstance(module, nn.Linear):
        return values.detach().reshape(-1, values.shape[-1]).T
    return with_batch(module, values.detach()).movedim(1, 0).flatten(1)


def with_batch(convolution: Any, values: Tensor) -> Tensor:
    """Inputs or outputs of a convolution with a batch dimension: torch takes one sample without, (channels, height, width)."""
    return values[None] if values.ndim == convolution.weight.ndim - 1 else values


def _channel_counts(layer: Any) -> tuple[int, int]:
    """How many channels the weights of a linear layer or convolution multiply, and how many they make.

    A class with a forward of its own may be given others, to which it adds coordinates, say, or may return others.
    """
    first, second = layer.weight.shape[:2]
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    return (first, second * groups) if isinstance(layer, nn.modules.conv._ConvTransposeNd) else (second * groups, first)


def _activations(model: nn.Module, names: Collection[str], inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weight -> (channels, values) that its layer reads, and that it makes, where they are those of the weight."""
    read: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    paths = {}
    for name in sorted(names):
        module, leaf = owner(model, name)
        if leaf == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            paths[name.rpartition(".")[0]] = name

    def visit(path: str, module: nn.Module, x: Tensor, out: Tensor) -> None:
        for kept, value, channels in zip((read, made), (x, out), _channel_counts(module), strict=True):
            flat, name = channels_first(module, value), paths[path]
            if len(flat) != channels:
                continue
            chosen = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))[:MOST_POSITIONS]
            kept[name] = torch.cat([kept[name], flat[:, chosen]], 1) if name in kept else flat[:, chosen].float()

    with watched_calls(model, paths, visit), torch.no_grad():
        call(model, inputs)
    return read, made


def _input_norms(model: nn.Module, names: Collection[str], inputs: Inputs) -> dict[str, Tensor]:
    """Weight -> for each of its entries the norm of the input channel that it multiplies, over samples and positions."""
    norms: dict[str, Tensor] = {}

    def refuse(name: str, module: nn.Module) -> NoReturn:
        raise ModelError(
            f"{name}: the inputs of a {type(module).__name__} cannot be seen; protect it, or use a criterion without inputs"
        )

    for name in names:
        if not isinstance(module := owner(model, name)[0], MaskableLayer):
            refuse(name, module)

    def visit(path: str, module: nn.Module, x: Tensor, out: Tensor) -> None:
        norm = torch.linalg.vector_norm(channels_first(module, x).float(), dim=1)
        if len(norm) != _channel_counts(module)[0]:
            refuse(f"{path}.weight", module)
        norms[path] = norm if path not in norms else torch.hypot(norms[path], norm)

    paths = {name: name.rpartition(".")[0] for name in names}
    with watched_calls(model, paths.values(), visit), torch.no_grad():
        call(model, inputs)
    return {name: _by_weight(owner(model, name)[0], norms.get(paths[name]), get_tensor(model, name)) for name in names}


def _by_weight(module: nn.Module, norm: Tensor | None, weight: Tensor) -> Tensor:
    if norm is None:
        return torch.zeros_like(weight)  # not called on this batch
    groups = module.groups if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else 1
    # In a grouped convolution the outputs of group g read the g-th part of the inputs.
    per_output = norm.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
    return per_output.view(*per_output.shape, *[1] * (weight.ndim - 2)).expand_as(weight)


def values_of(model: nn.Module, places: Places, prefix: str, evidence: Evidence) -> Tensor:
    """(units, V) values of the units of one group: as the first layer reads them, else as the first layer makes them.

    V is 0 where no layer saw any: the batch sends no rows to an expert, or none of the layers is called as a module.
    """
    for wanted, found in (("in", evidence.inputs or {}), ("out", evidence.outputs or {})):
        for (tensor, dim, role), indices in places.items():
            if role == wanted and (values := found.get(prefix + tensor)) is not None and values.shape[1]:
                # In a grouped layer an index stands for that position of every group.
                size = get_tensor(model, prefix + tensor).shape[dim]
                grouped = values.reshape(-1, size, values.shape[1])[:, indices.to(values.device)]
                return grouped.movedim(1, 0).flatten(1)
    return torch.empty(len(next(iter(places.values()))), 0)


def refuse_unseen(places: Places, prefix: str) -> NoReturn:
    """Raise ModelError for a group of which no batch showed a value."""
    raise ModelError(
        f"{prefix}{next(iter(places))[0]}: no convolution or linear layer of this group is called as a module, so its activations"
        " cannot be seen; use a criterion that reads weights or gradients, or name the layer in ignore"
    )


@contextmanager
def restored_after(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Restore the values of the named tensors when the block ends."""
    before = {name: get_tensor(model, name).detach().clone() for name in names}
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for name, values in before.items():
                get_tensor(model, name).copy_(values)


def _loss_without(model: nn.Module, prefix: str, objective: LossFunction, batch: Any, places: Places, keep: Tensor) -> float:
    """The loss of a batch with the units outside `keep` set to zero everywhere."""
    with restored_after(model, {prefix + tensor for tensor, _, _ in places}):
        for (tensor, dim, _), indices in places.items():
            values = get_tensor(model, prefix + tensor)
            values.index_fill_(dim, indices[~keep].flatten().to(values.device), 0)
        return _loss(model, objective, batch)


def _loss(model: nn.Module, objective: LossFunction, batch: Any) -> float:
    return float(torch.stack(list(objective(model, batch).values())).sum().detach())


def mean_loss(model: nn.Module, task: Task, batches: Collection[Any]) -> float:
    """Mean loss of the task over batches, by sample, in eval mode and without gradients."""
    objective = task_losses(model, task)
    total, seen = 0.0, 0
    with torch.no_grad(), mode(model, training=False):
        for batch in batches:
            rows = batch_size(task.inputs(batch))
            total += rows * _loss(model, objective, batch)
            seen += rows
    return total / seen
