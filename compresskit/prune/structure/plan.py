"""A plan: which indices of which tensors go. It prints, serializes, and replays on a fresh model of the same class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.graph.surgery import get_tensor, holders, owner, select_, sync_attributes_


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """What happens to one group: `layer` is the layer that makes its channels."""

    layer: str
    size: int
    keep: int
    dependents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Channels to remove, not yet removed.

    remove: tensor name -> dimension -> indices that go, sorted. sizes: tensor name -> its shape before.
    macs, macs_before: multiply-accumulates of one sample. locked: why groups of channels stay, reason -> how many.
    note: what was measured of the exported file, where the target was one.
    attributes: numbers of the model's own modules that repeat a width, dotted path -> (before, after).
    scales: tensor name -> (factor, indices of dimension 0 that it multiplies): queries, where the code divides by the root of a
        width that shrinks.
    """

    remove: dict[str, dict[int, tuple[int, ...]]]
    sizes: dict[str, tuple[int, ...]]
    lines: tuple[PlanLine, ...]
    macs: int
    macs_before: int
    locked: dict[str, int] = field(default_factory=dict)
    note: str = ""
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    scales: dict[str, tuple[float, tuple[int, ...]]] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.macs / self.macs_before:.1%} of {self.macs_before / 1e6:.2f} M MACs stay" + (
            f"; {self.note}" if self.note else ""
        )
        rows = [
            f"  {line.layer}: keep {line.keep} of {line.size}"
            + (f", with {', '.join(line.dependents)}" if line.dependents else "")
            for line in self.lines
        ]
        kept = [f"  {count} channels stay: {reason}" for reason, count in self.locked.items()]
        follow = [f"  {path}: {before} becomes {after}" for path, (before, after) in self.attributes.items()]
        return "\n".join([head, *rows, *follow, *kept])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record; `from_json` reads it."""
        return {
            "format": 1,
            "remove": {name: {str(d): list(i) for d, i in dims.items()} for name, dims in self.remove.items()},
            "sizes": {name: list(shape) for name, shape in self.sizes.items()},
            "lines": [vars(line) | {"dependents": list(line.dependents)} for line in self.lines],
            "macs": self.macs,
            "macs_before": self.macs_before,
            "locked": self.locked,
            "note": self.note,
            "attributes": {path: list(values) for path, values in self.attributes.items()},
            "scales": {name: [factor, list(rows)] for name, (factor, rows) in self.scales.items()},
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Plan:
        """A plan from what `to_json` gave; CheckpointError where it is not that."""
        try:
            return Plan(
                remove={n: {int(d): tuple(map(int, i)) for d, i in dims.items()} for n, dims in record["remove"].items()},
                sizes={n: tuple(map(int, shape)) for n, shape in record["sizes"].items()},
                lines=tuple(PlanLine(**{**line, "dependents": tuple(line["dependents"])}) for line in record["lines"]),
                macs=int(record["macs"]),
                macs_before=int(record["macs_before"]),
                locked=dict(record["locked"]),
                note=str(record.get("note", "")),
                attributes={path: (_tupled(old), _tupled(new)) for path, (old, new) in record["attributes"].items()},
                scales={n: (float(factor), tuple(map(int, rows))) for n, (factor, rows) in record["scales"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not a pruning plan: {type(error).__name__} {error}") from None

    def keep(self, name: str) -> dict[int, Tensor]:
        """Indices of a tensor that stay, by dimension."""
        kept = {}
        for dim, gone in self.remove[name].items():
            mask = torch.ones(self.sizes[name][dim], dtype=torch.bool)
            mask[list(gone)] = False
            kept[dim] = mask.nonzero().flatten()
        return kept


def apply_(model: nn.Module, plan: Plan) -> nn.Module:
    """Remove the channels of a plan from a model, in place; the model is returned.

    Parameters, buffers and the attributes that repeat their sizes change; device, dtype, requires_grad, ties, train or eval
    mode and the class stay. Make the optimizer after it: an old one holds the old parameters.

    Raises ModelError, the model untouched, where its tensors are not those that the plan was made for.
    """
    _check_model(model, plan)
    _keep_weight_norms_(model, plan)
    with torch.no_grad():
        for name, (factor, rows) in plan.scales.items():
            values = get_tensor(model, name)
            values[torch.tensor(rows, device=values.device)] *= factor
    known = holders(model)
    for name in plan.remove:
        select_(model, name, plan.keep(name), known)
    changed = {id(get_tensor(model, name)) for name in plan.remove}
    for path, (_, after) in plan.attributes.items():
        module, attribute = owner(model, path)
        setattr(module, attribute, after)
    for module in model.modules():
        # A tied parameter also changed where another module holds it.
        if any(id(t) in changed for t in _own_tensors(module)):
            sync_attributes_(module)
    return model


def _keep_weight_norms_(model: nn.Module, plan: Plan) -> None:
    """Of g v / |v|, columns go: g takes what |v| loses, so that the weights that stay are what they were."""
    for name, dims in plan.remove.items():
        path, _, leaf = name.rpartition(".")
        other = {"original1": "original0", "weight_v": "weight_g"}.get(leaf)
        if other is None or not isinstance(g := getattr(model.get_submodule(path), other, None), Tensor):
            continue
        v = get_tensor(model, name).detach()
        rows = [d for d in range(v.ndim) if g.ndim != v.ndim or g.shape[d] > 1]
        others = [d for d in range(v.ndim) if d not in rows]
        left = v.clone()
        for dim, gone in dims.items():
            if dim in others:
                left.index_fill_(dim, torch.tensor(gone, device=v.device), 0)
        with torch.no_grad():
            g *= torch.linalg.vector_norm(left, dim=others, keepdim=True) / torch.linalg.vector_norm(v, dim=others, keepdim=True)


def _own_tensors(module: nn.Module) -> list[Tensor | None]:
    """Parameters and buffers of a module itself, those under a parametrization included."""
    own = [*module._parameters.values(), *module._buffers.values()]
    parametrized = module._modules.get("parametrizations")
    return own if parametrized is None else [*own, *parametrized.parameters()]


def _check_model(model: nn.Module, plan: Plan) -> None:
    advice = "replay a plan on a fresh model of the same class"
    for name, shape in plan.sizes.items():
        if tuple(get_tensor(model, name).shape) != shape:
            raise ModelError(
                f"{name}: the plan was made for shape {shape}, this {type(model).__name__} has"
                f" {tuple(get_tensor(model, name).shape)}; {advice}"
            )
    for path, (before, _) in plan.attributes.items():
        module, attribute = owner(model, path)
        if (got := getattr(module, attribute, None)) != before:
            raise ModelError(f"{path}: the plan was made for {before}, this {type(model).__name__} has {got}; {advice}")


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def zero_(model: nn.Module, plan: Plan) -> nn.Module:
    """Set to zero, in place, every value that the plan would remove: what the pruned model must equal."""
    _keep_weight_norms_(model, plan)
    with torch.no_grad():
        for name, dims in plan.remove.items():
            for dim, gone in dims.items():
                values = get_tensor(model, name)
                values.index_fill_(dim, torch.tensor(gone, device=values.device), 0)
    return model
