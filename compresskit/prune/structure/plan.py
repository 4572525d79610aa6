"""A pruning plan: which indices of which tensors are removed. It prints, serializes, and applies to models of one class."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from compresskit.base.errors import CheckpointError, ModelError
from compresskit.base.files import sealed, unsealed
from compresskit.graph.masks import masks_of
from compresskit.graph.surgery import check_is_module, get_tensor, owner, parameter_owners, select_

#: Attributes of torch's own layers that repeat a size of their parameters, as (attribute, tensor, dimension).
_MIRRORS: dict[type[nn.Module], tuple[tuple[str, str, int], ...]] = {
    nn.Linear: (("out_features", "weight", 0), ("in_features", "weight", 1)),
    nn.modules.batchnorm._NormBase: (("num_features", "weight", 0), ("num_features", "running_mean", 0)),
    nn.GroupNorm: (("num_channels", "weight", 0),),
    nn.PReLU: (("num_parameters", "weight", 0),),
    nn.Bilinear: (("out_features", "weight", 0), ("in1_features", "weight", 1), ("in2_features", "weight", 2)),
    nn.Embedding: (("num_embeddings", "weight", 0), ("embedding_dim", "weight", 1)),
}

#: What a plan changes, whose digest it has; the lines for reading do not count.
_CHANGES = ("remove", "sizes", "attributes", "scales")


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """What a plan does to one group of channels.

    layer: the layer that makes the channels; "" where a parameter of the model itself does. size, keep: how many there are, and
        how many stay.
    dependents: the other layers that change with it; "[in]" marks those that read the channels.
    """

    layer: str
    size: int
    keep: int
    dependents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Channels to remove, not yet removed; `print(plan)` lists them, `apply_(model, plan)` removes them.

    remove: tensor name -> dimension -> indices to remove, sorted. sizes: tensor name -> its shape before.
    lines: the same by group of channels, for reading. macs, macs_before: multiply-accumulates of one sample.
    locked: reason -> how many channels stay for it. note: what was measured of the exported file, where the budget is one.
    attributes: attributes of the user's modules that repeat a width, dotted path -> (before, after).
    scales: tensor name -> (factor, indices of dimension 0 that it multiplies): attention queries, where the code divides by the
        square root of a width that shrinks.
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
        head = f"{self.macs / max(1, self.macs_before):.1%} of {self.macs_before / 1e6:.2f} M MACs stay" + (
            f"; {self.note}" if self.note else ""
        )
        rows = [
            f"  {line.layer or 'the model'}: keep {line.keep} of {line.size}"
            + (f", with {', '.join(_shortened(line.dependents))}" if line.dependents else "")
            for line in self.lines
        ]
        kept = [f"  {count} channels stay: {reason}" for reason, count in self.locked.items()]
        follow = [f"  {path}: {before} becomes {after}" for path, (before, after) in self.attributes.items()]
        return "\n".join([head, *rows, *follow, *kept])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data that `json.dumps` takes; `from_json` reads it."""
        record = {
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
        return sealed(record, _CHANGES)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote; CheckpointError where the record is something else, or was changed since."""
        advice = "plan again, with ratios={layer: ratio} for what shall differ"
        record = unsealed(record, _CHANGES, "pruning plan", advice)
        try:
            return Plan(
                remove={n: {int(d): tuple(map(int, i)) for d, i in dims.items()} for n, dims in record["remove"].items()},
                sizes={n: tuple(map(int, shape)) for n, shape in record["sizes"].items()},
                lines=tuple(PlanLine(**{**line, "dependents": tuple(line["dependents"])}) for line in record["lines"]),
                macs=int(record["macs"]),
                macs_before=int(record["macs_before"]),
                locked=dict(record["locked"]),
                note=str(record.get("note", "")),
                attributes={path: (as_plan_value(old), as_plan_value(new)) for path, (old, new) in record["attributes"].items()},
                scales={n: (float(factor), tuple(map(int, rows))) for n, (factor, rows) in record["scales"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"not a pruning plan: {type(error).__name__} {error}") from None

    def keep(self, name: str) -> dict[int, Tensor]:
        """The indices of a tensor that stay: dimension -> (kept,) int64."""
        kept = {}
        for dim, removed in self.remove[name].items():
            gone = set(removed)
            kept[dim] = torch.tensor([i for i in range(self.sizes[name][dim]) if i not in gone], dtype=torch.long)
        return kept


def apply_(model: nn.Module, plan: Plan) -> nn.Module:
    """Remove the channels of a plan from a model, in place, and return the model.

    Parameters, buffers and the attributes that repeat their sizes change; device, dtype, requires_grad, tied parameters, train or
    eval mode and the class stay. A buffer with `persistent=False` that is cut is in state dicts from then on: a new model of the
    class has other values. Make the optimizer afterwards: an old one holds the old parameters.

    Args:
        model: the model that the plan was made for, or another one of the same class and sizes.
        plan: from `plan_channels` or `Plan.from_json`.

    Raises:
        ModelError: its tensors or attributes are not those that the plan was made for, or it is none; nothing was changed.
    """
    check_is_module(model, "apply_(model, plan)")
    if not isinstance(plan, Plan):
        raise ModelError(f"apply_(model, plan): wanted a Plan, as of plan_channels or Plan.from_json, got {type(plan).__name__}")
    _check_model(model, plan)
    _keep_weight_norms_(model, plan)
    with torch.no_grad():
        for name, (factor, rows) in plan.scales.items():
            values = get_tensor(model, name)
            values[torch.tensor(rows, device=values.device)] *= factor
    known = parameter_owners(model)
    for name in plan.remove:
        select_(model, name, plan.keep(name), known)
        module, leaf = owner(model, name)
        module._non_persistent_buffers_set.discard(leaf)
    changed = {id(get_tensor(model, name)) for name in plan.remove}
    for path, (_, after) in plan.attributes.items():
        module, attribute = owner(model, path)
        setattr(module, attribute, list(after) if isinstance(getattr(module, attribute), list) else after)
    for module in model.modules():
        # A tied parameter also changed where another module holds it.
        if any(id(t) in changed for t in _tensors_of(module)):
            _sync_attributes_(module)
    return model


def _keep_weight_norms_(model: nn.Module, plan: Plan) -> None:
    """Scale g of a weight-normalised g v / |v| by what |v| loses with its columns, so that weights that stay do not change."""
    for name, dims in plan.remove.items():
        if (g := _gain_of(model, name)) is None:
            continue
        v = get_tensor(model, name).detach()
        rows = [d for d in range(v.ndim) if g.ndim != v.ndim or g.shape[d] > 1]
        others = [d for d in range(v.ndim) if d not in rows]
        zeroed = v.clone()
        for dim, removed in dims.items():
            if dim in others:
                zeroed.index_fill_(dim, torch.tensor(removed, device=v.device), 0)
        with torch.no_grad():
            after, before = (torch.linalg.vector_norm(values, dim=others, keepdim=True) for values in (zeroed, v))
            g *= after / before


def _gain_of(model: nn.Module, name: str) -> Tensor | None:
    """The gain g of a tensor that is v of torch's weight norm, new or old; None for all others, whatever their names are."""
    module, leaf = owner(model, name)
    if isinstance(module, ParametrizationList):
        return module.get_parameter("original0") if leaf == "original1" and type(module[0]) is _WeightNorm else None
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and leaf == f"{hook.name}_v":
            return module.get_parameter(f"{hook.name}_g")
    return None


def _tensors_of(module: nn.Module) -> list[Tensor | None]:
    """Parameters and buffers of a module itself, those under a parametrization included."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    parametrized = module._modules.get("parametrizations")
    return tensors if parametrized is None else [*tensors, *parametrized.parameters()]


def _sync_attributes_(module: nn.Module) -> None:
    """Set `in_channels`, `groups`, `num_features` and similar attributes of a layer to the shapes of its parameters."""
    if isinstance(module, nn.modules.conv._ConvNd):
        _sync_conv_(module)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)
    if isinstance(module, nn.MultiheadAttention):
        _sync_attention_(module)
    if isinstance(module, nn.RNNBase):
        rows, hidden = get_tensor(module, "weight_hh_l0").shape
        if module.proj_size:
            module.proj_size, hidden = hidden, rows // 4  # of an LSTM, with four gates
        module.hidden_size = hidden
        module.input_size = get_tensor(module, "weight_ih_l0").shape[1]
        module._init_flat_weights()  # it keeps a list of its parameters beside them
    if isinstance(module, nn.RNNCellBase):
        module.hidden_size, module.input_size = module.weight_hh.shape[1], module.weight_ih.shape[1]
    for kind, mirrors in _MIRRORS.items():
        if not isinstance(module, kind):
            continue
        for attribute, leaf, dim in mirrors:
            values = getattr(module, leaf, None)
            # A PReLU with one shared slope has num_parameters == 1 whatever the channels are.
            if isinstance(values, Tensor) and values.ndim > dim:
                setattr(module, attribute, values.shape[dim])


def _sync_attention_(attention: nn.MultiheadAttention) -> None:
    packed = attention.in_proj_weight
    attention.embed_dim = (packed if packed is not None else attention.q_proj_weight).shape[1]
    attention.kdim = attention.embed_dim if packed is not None else attention.k_proj_weight.shape[1]
    attention.vdim = attention.embed_dim if packed is not None else attention.v_proj_weight.shape[1]
    attention.head_dim = attention.embed_dim // attention.num_heads


def _sync_conv_(conv: nn.modules.conv._ConvNd) -> None:
    first, second = conv.weight.shape[:2]
    outputs, inputs = (second, first) if conv.transposed else (first, second)
    if conv.transposed and conv.groups == conv.in_channels > 1:
        conv.groups = first
    elif not conv.transposed and conv.groups == conv.in_channels and second == 1 and conv.groups > 1:
        # Depthwise: a group is a channel, so groups shrink with the channels; the multiplier stays.
        conv.groups = outputs // max(1, conv.out_channels // conv.groups)
    if conv.transposed:
        conv.in_channels, conv.out_channels = inputs, outputs * conv.groups
    else:
        conv.in_channels, conv.out_channels = inputs * conv.groups, outputs


def _check_model(model: nn.Module, plan: Plan) -> None:
    if masks_of(model) is not None:
        raise ModelError(
            f"{type(model).__name__} has masks, which are for its present shapes; prune channels first, then Sparsify"
            " (or remove the masks with detach_masks_)"
        )
    advice = "replay a plan on a fresh model of the same class"
    for name, shape in plan.sizes.items():
        if tuple(get_tensor(model, name).shape) != shape:
            raise ModelError(
                f"{name}: the plan was made for shape {shape}, this {type(model).__name__} has"
                f" {tuple(get_tensor(model, name).shape)}; {advice}"
            )
    for name, dims in plan.remove.items():
        shape = tuple(get_tensor(model, name).shape)
        for dim, indices in dims.items():
            size = shape[dim] if 0 <= dim < len(shape) else 0
            if not all(0 <= i < size for i in indices) or not len(set(indices)) == len(indices) < size:
                raise ModelError(
                    f"{name}: the plan removes indices of dimension {dim} that a tensor of shape {shape} has not; plan again"
                )
    for path, (before, _) in plan.attributes.items():
        module, attribute = owner(model, path)
        if (got := as_plan_value(getattr(module, attribute, None))) != before:
            raise ModelError(f"{path}: the plan was made for {before}, this {type(model).__name__} has {got}; {advice}")


def _shortened(names: Sequence[str]) -> list[str]:
    """Three names or more that differ in one number as one, where the first was: `blocks.{0-3}.norm`, `blocks.{0,2,5}.norm`."""
    alike: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)  # (before, after the number) -> names, numbers
    for name in names:
        for number in re.finditer("[0-9]+", name):
            alike[name[: number.start()], name[number.end() :]].append((name, int(number[0])))
    short: dict[str, str] = {}
    for (before, after), members in sorted(alike.items(), key=lambda item: -len(item[1])):
        free = sorted({(number, name) for name, number in members if name not in short})
        if len(free) > 2:
            numbers = [number for number, _ in free]
            gapless = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            inside = f"{numbers[0]}-{numbers[-1]}" if gapless else ",".join(map(str, numbers))
            short |= {name: f"{before}{{{inside}}}{after}" for _, name in free}
    return list(dict.fromkeys(short.get(name, name) for name in names))


def as_plan_value(value: Any) -> Any:
    """The value of an attribute as it stands in a plan: a tuple in the place of a list."""
    return tuple(value) if isinstance(value, list) else value


def zero_(model: nn.Module, plan: Plan, left: Collection[str] = ()) -> nn.Module:
    """Set every value to zero that the plan would remove, in place, and return the model: the pruned model must equal it.

    left: names of tensors that keep their values, since zeros in them are not neutral: what the model divides by.
    """
    _keep_weight_norms_(model, plan)
    with torch.no_grad():
        for name, dims in plan.remove.items():
            if name in left:
                continue
            for dim, removed in dims.items():
                values = get_tensor(model, name)
                values.index_fill_(dim, torch.tensor(removed, device=values.device), 0)
    return model
