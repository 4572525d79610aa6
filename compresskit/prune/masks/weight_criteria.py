"""Criteria for single weights and blocks, on the same rows as those for channels: a row of one value is a weight.

Any `Criterion` of `compresskit.prune` scores a mask too (`l2` is the magnitude); those here read what only a mask has.

    snip        |w g|                       the loss without the weight, to first order
    grasp       w (H g)                     the flow of gradients without it
    movement    - sum over steps of w g     is it moving away from zero?
    wanda       |w| * norm of its input
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.base.inputs import some_batches
from compresskit.base.task import Task, batch_size, call
from compresskit.graph.surgery import owner
from compresskit.prune.criteria import Criterion, Needs, NeedsGradients, Slices
from compresskit.prune.evidence import readable
from compresskit.prune.masks.patterns import Pattern
from compresskit.train.objective import bind_objective


class NeedsCurvature(Needs):
    """Raised by `Units.curvature` where none was collected."""


class NeedsInputs(Needs):
    """Raised by `Units.inputs` where none were collected."""


NEEDED: dict[type[Exception], str] = {
    NeedsGradients: "gradients",
    NeedsCurvature: "products with the Hessian",
    NeedsInputs: "activations",
}
Need = type[Exception]
Evidence = dict[Need, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Units(Slices):
    """Rows of a mask's units: single weights, (n, 1), or blocks, (n, K). See `Slices` for weight and gradient.

    hessian: (units, K), Hessian of the loss times its gradient. norms: (units, K), for each weight the Euclidean norm of the
        input that it multiplies.
    """

    hessian: Tensor | None = None
    norms: Tensor | None = None

    @property
    def curvature(self) -> Tensor:
        """The Hessian times the gradient, (units, K)."""
        if self.hessian is None:
            raise NeedsCurvature
        return self.hessian

    @property
    def inputs(self) -> Tensor:
        """Norms of the inputs, (units, K)."""
        if self.norms is None:
            raise NeedsInputs
        return self.norms


def _units(slices: Slices) -> Units:
    if not isinstance(slices, Units):
        raise SettingError("this criterion is for masks (plan_mask, Sparsify); channels need another, such as prune.taylor")
    return slices


def snip(slices: Slices) -> Tensor:
    """|w g| summed over the row: sensitivity of the loss to the connection (Lee et al., 1810.02340)."""
    return (slices.weight * slices.gradient).abs().sum(1)


def movement(slices: Slices) -> Tensor:
    """- w g: positive where a step of gradient descent takes the weight away from zero (Sanh et al., 2005.07683, eq. 4).

    It means most on a schedule, where it is summed over all steps of the training.
    """
    return -(slices.weight * slices.gradient).sum(1)


def grasp(slices: Slices) -> Tensor:
    """W (H g): how much the squared norm of the gradient falls when the weight is removed (Wang et al., 2002.07376, eq. 8)."""
    units = _units(slices)
    return (units.weight * units.curvature).sum(1)


def wanda(slices: Slices) -> Tensor:
    """|w| times the norm of its input (Sun et al., 2306.11695); for convolutions the norm of the input channel."""
    units = _units(slices)
    return (units.weight.abs() * units.inputs).sum(1)


def rows_of(weight: Tensor, pattern: Pattern, found: dict[Need, Tensor]) -> Units:
    """One tensor and what was collected for it, as rows."""
    rows = pattern.rows(weight.detach().float())

    def seen(need: Need) -> Tensor | None:
        return pattern.rows(found[need].float()) if need in found else None

    return Units(
        weight=rows,
        reads=torch.ones(rows.shape[1], dtype=torch.bool, device=rows.device),
        grad=seen(NeedsGradients),
        hessian=seen(NeedsCurvature),
        norms=seen(NeedsInputs),
    )


def score(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    pattern: Pattern,
    criterion: Criterion,
    task: Task | None,
    samples: int,
) -> dict[str, Tensor]:
    """Scores of the units of every tensor, (units,) each; averaged over batches where the criterion reads data."""
    needs: set[Need] = set()
    while True:
        try:
            totals: dict[str, Tensor] = {}
            seen = 0
            for rows, evidence in _evidence(model, weights, task, samples, needs) if needs else [(1, {})]:
                for name, weight in weights.items():
                    found = {need: values[name] for need, values in evidence.items()}
                    one = checked(criterion(rows_of(weight, pattern, found)), weight, pattern, name) * rows
                    totals[name] = totals[name] + one if name in totals else one
                seen += rows
            break
        except tuple(NEEDED) as need:
            if task is None:
                raise SettingError(
                    f"this criterion reads {NEEDED[type(need)]}, which needs data; pass plan_mask(task=...)"
                ) from None
            needs.add(type(need))
        except Needs as need:
            raise SettingError(f"this criterion is for channels, it asks for {type(need).__name__}; masks take another") from None
    if not totals:
        raise DataError("scoring weights: the loader gave no batch")
    return agreed({name: total / seen for name, total in totals.items()})


def checked(scores: Tensor, weight: Tensor, pattern: Pattern, name: str) -> Tensor:
    """The scores, after a look at their shape and values."""
    count = len(pattern.rows(weight.detach()))
    if scores.shape != (count,) or not bool(torch.isfinite(scores).all()):
        raise ModelError(f"{name}: the criterion gave scores of shape {tuple(scores.shape)} for {count} units, or not all finite")
    return scores.detach().double()


def agreed(scores: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same on every process: summed over them, where there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for name in sorted(scores):
            torch.distributed.all_reduce(scores[name])
    return scores


def same(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first process's masks on every process, where there are several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for name in sorted(masks):
            sent = masks[name].to(torch.uint8)
            torch.distributed.broadcast(sent, 0)
            masks[name] = sent.bool()
    return masks


def _evidence(
    model: nn.Module, weights: dict[str, nn.Parameter], task: Task | None, samples: int, needs: set[Need]
) -> Iterator[tuple[int, Evidence]]:
    """(samples, what one batch shows) until enough were seen; the model is in eval mode meanwhile and left as it was."""
    assert task is not None
    objective = bind_objective(None, model, task)
    unlabelled = needs == {NeedsInputs}
    with readable(model):
        for batch in some_batches(task, "calibration" if unlabelled else "train", samples, "score"):
            evidence: Evidence = {}
            if NeedsInputs in needs:
                evidence[NeedsInputs] = _input_norms(model, weights, task, batch)
            if needs & {NeedsGradients, NeedsCurvature}:
                evidence |= _gradients(model, weights, objective, batch, curved=NeedsCurvature in needs)
            yield batch_size(task.split(batch)[0]), evidence


def _gradients(model: nn.Module, weights: dict[str, nn.Parameter], objective: Any, batch: Any, *, curved: bool) -> Evidence:
    values = list(weights.values())
    with torch.enable_grad():
        loss = torch.stack(list(objective(model, batch).values())).sum()
        grads = torch.autograd.grad(loss, values, create_graph=curved, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(values, grads, strict=True)]
        found: Evidence = {NeedsGradients: {n: g.detach() for n, g in zip(weights, filled, strict=True)}}
        if curved:
            flow = torch.stack([(g * g.detach()).sum() for g in filled]).sum()
            products = torch.autograd.grad(flow, values, allow_unused=True)
            zipped = zip(weights, values, products, strict=True)
            found[NeedsCurvature] = {n: torch.zeros_like(p) if h is None else h.detach() for n, p, h in zipped}
    return found


def _input_norms(model: nn.Module, weights: dict[str, nn.Parameter], task: Task, batch: Any) -> dict[str, Tensor]:
    """For every weight the norm of the input channel that it multiplies, over samples and positions: tensors of their shapes."""
    norms: dict[str, Tensor] = {}
    handles = []

    def note(name: str, module: nn.Module, x: Tensor) -> None:
        dim = -1 if isinstance(module, nn.Linear) else 1
        norm = torch.linalg.vector_norm(x.detach().float().movedim(dim, 0).flatten(1), dim=1)
        norms[name] = norm if name not in norms else torch.hypot(norms[name], norm)

    for name in weights:
        module, _ = owner(model, name)
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise ModelError(
                f"{name}: the inputs of a {type(module).__name__} cannot be seen; protect it, or use a criterion without inputs"
            )
        handles.append(module.register_forward_pre_hook(lambda m, args, name=name: note(name, m, args[0])))
    try:
        with torch.no_grad():
            call(model, task.split(batch)[0])
    finally:
        for handle in handles:
            handle.remove()
    return {name: _by_weight(owner(model, name)[0], norms.get(name), weight) for name, weight in weights.items()}


def _by_weight(module: Any, norm: Tensor | None, weight: Tensor) -> Tensor:
    if norm is None:
        return torch.zeros_like(weight)  # not called on this batch
    groups = getattr(module, "groups", 1)
    # In a grouped convolution the outputs of group g read the g-th part of the inputs.
    per_output = norm.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
    return per_output.view(*per_output.shape, *[1] * (weight.ndim - 2)).expand_as(weight)
