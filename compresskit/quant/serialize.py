"""Record a quantized model as plain data beside its tensors, and rebuild it; nothing from the file is executed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CheckpointError, ModelError, SettingError, named_first_line
from compresskit.base.task import Inputs, shapes_of
from compresskit.graph.capture import Dynamic, check_runs
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.surgery import restructure_
from compresskit.quant.accuracy_target.mixed_model import rebuild_mixed
from compresskit.quant.build import build_quantized
from compresskit.quant.dynamic.insert_dynamic import build_dynamic
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import TARGET_BITS, bits_from_record
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Support, Target
from compresskit.quant.passes.coverage import reasons_as_recorded
from compresskit.quant.passes.prepare_graph import MeasuredPlacement, Remedy
from compresskit.quant.weight_only.weight_model import WeightQuantized, rebuild_weights

_INPUT_TYPES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float64 float32 float16 bfloat16 complex32 complex64 complex128
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
"""
#: Types of inputs that a record may name; names from a file are only looked up here.
INPUT_DTYPES: dict[str, torch.dtype] = {f"torch.{name}": getattr(torch, name) for name in _INPUT_TYPES.split()}

#: What stands for indices in a record: int64 to int64, of the same shape.
Indices = Callable[[Tensor], Tensor]

FLOAT_LOOKUP = "no rule for aten.embedding.default"  # in records of before tables were rounded, of each; later of small ones
LEAST_FILL = 1e3  # in size, of what is added to scores where nothing is to be looked at
MAX_EXAMPLE_VALUES = 2**28  # of an example that is made from a record
MOST_RUNS = 2**16  # of equal values, that a record keeps of an input
MOST_NUMBERS = 64  # of an input of one dimension, such as lengths, that are not in order, as offsets are
FEW_NUMBERS = 4  # of integers in more dimensions, such as the sizes of two images


def record(model: Quantized) -> dict[str, Any]:
    """Return what `rebuild` needs besides the tensors and a float model of the same class, JSON-ready.

    Raises CheckpointError for a model with an input that cannot be made again from a file.
    """
    plan = {"plan": model.plan.to_json()} if isinstance(model, WeightQuantized) else {}
    return plan | {
        "kind": "quantized",
        "origin": model.origin.to_json(),
        "target": asdict(model.target),
        "placement": model.placement.to_json(),
        "example": _example_record(model),
        "dynamic": _dynamic_record(model.dynamic),
    }


def rebuild(model: nn.Module, saved: dict[str, Any]) -> Quantized:
    """Rebuild a quantized model from a float model of the same class; its ranges and weights still have to be loaded.

    What was decided by the values of weights is read from the record, since those of the model given say nothing.

    Args:
        model: a float model; its modules are cut to the recorded shapes in place.
        saved: what `record` returned.

    Raises CheckpointError for a record of another model, or one that this torch captures as another graph.
    """
    try:
        target = _target(saved["target"])
        example = _example(saved["example"])
        origin, placement = saved["origin"], saved["placement"]
        restructure_(model, origin["structure"])
        how = origin.get("dynamically")
        skip, floating, dynamic = tuple(origin["skip"]), dict(origin.get("floating", {})), _dynamic(saved["dynamic"])
        bits = bits_from_record(origin["bits"]) if "bits" in origin else TARGET_BITS
        merges = tuple(MergedLayer(*map(str, merge)) for merge in origin.get("merges", ()))
        reasons = {str(name): str(reason) for name, reason in placement["floating"].items()}
        groups = {str(point["node"]): int(point["group"]) for point in placement["points"]}
    except (KeyError, TypeError, ValueError, AttributeError, SettingError) as error:
        raise CheckpointError(
            f"not the record of a quantized model: {type(error).__name__} {error}; save the model again"
        ) from None
    settings: dict[str, Any] = {"skip": skip, "dynamic": dynamic, "merges": merges}
    with reasons_as_recorded(reasons), _names_the_example(model, example):
        quantized: Quantized
        if "mixed" in origin:
            quantized = rebuild_mixed(model, example, origin, target, floating=floating, **settings)
        elif "plan" in saved:
            quantized = rebuild_weights(model, example, origin, saved["plan"], **settings)
        elif how is None:
            quantized = build_quantized(
                model,
                example,
                target,
                MinMax,
                floating=floating | {name: reason for name, reason in reasons.items() if reason == FLOAT_LOOKUP},
                bits=bits,
                share=lambda _, placed, __: placed.with_groups(groups),
                **settings,
            )
        else:
            operators, weights = tuple(map(str, how["operators"])), how["weights"] and Scheme(**how["weights"])
            quantized = build_dynamic(model, example, target, weights=weights, operators=operators, floating=floating, **settings)
    try:
        remedies = tuple(Remedy(**remedy) for remedy in origin.get("remedies", ()))
        measured = MeasuredPlacement(**origin["measured"]) if "measured" in origin else None
    except TypeError as error:
        raise CheckpointError(f"not the record of a quantized model: {error}; save the model again") from None
    quantized.origin = replace(quantized.origin, smoothed=int(origin.get("smoothed", 0)), remedies=remedies, measured=measured)
    if json.loads(json.dumps(quantized.placement.to_json())) != placement:
        raise CheckpointError(
            f"{type(model).__name__}: this torch ({torch.__version__}), or this compresskit, captures the model as another graph"
            " than the one that was saved; load it with those that saved it, or quantize again"
        )
    quantized.enable_()
    return quantized.eval()


@contextmanager
def _names_the_example(model: nn.Module, example: Inputs) -> Iterator[None]:
    """Let errors of a block say so where it is the example, of which a file keeps little, that the model does not run on."""
    try:
        yield
    except ModelError as refusal:
        try:
            check_runs(model, example)
        except ModelError as error:
            if str(error) != str(refusal):
                raise refusal from refusal.__cause__  # which says more
            why = "" if error.__cause__ is None else f": {named_first_line(error.__cause__)}"
            raise ModelError(
                f"{type(model).__name__} does not run on inputs of shape {shapes_of(example)} with the values that the file keeps"
                f" of the example{why}; where it is as it was when it was quantized, quantize and save it again: masks, lengths"
                " and offsets are kept, which an earlier compresskit did not keep, and of other inputs few values, so that a"
                " first batch without padding may be needed"
            ) from error.__cause__
        raise


def _target(saved: dict[str, Any]) -> Target:
    fields = dict(saved)
    for name in ("activations", "weights"):
        fields[name] = Scheme(**fields[name])
    fields["processors"] = tuple(fields.get("processors", ()))
    fields["operators"] = {kind: Support(**rule) for kind, rule in fields["operators"].items()}
    return Target(**fields)


def _dynamic_record(dynamic: Dynamic) -> Any:
    if isinstance(dynamic, Mapping):
        return {name: {str(d): given for d, given in dims.items()} for name, dims in dynamic.items()}
    return list(dynamic)


def _dynamic(saved: Any) -> Dynamic:
    if isinstance(saved, dict):
        return {str(name): {int(d): str(given) for d, given in dims.items()} for name, dims in saved.items()}
    return tuple(int(d) for d in saved)


def _example_record(model: Quantized) -> dict[str, Any]:
    """What a file keeps of the example: as little of indices as lets the model run, such as one of columns in several tables."""
    whole = _inputs_record(model.example, _as_given)
    records = [_inputs_record(model.example, indices) for indices in STAND_INS]
    if records[0] == whole:
        return whole
    return next((kept for kept in records if _runs_on(model, _example(kept))), records[0])


def _runs_on(model: Quantized, example: Inputs) -> bool:
    device = next((value.device for value in model.state_dict().values()), torch.device("cpu"))
    try:
        check_runs(model, pytree.tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, example))
    except ModelError:
        return False
    return True


def _inputs_record(example: Inputs, indices: Indices) -> dict[str, Any]:
    if isinstance(example, dict):
        return {"kwargs": {name: _input_record(value, indices) for name, value in example.items()}}
    return {"args": [_input_record(value, indices) for value in example]}


def _input_record(value: Any, indices: Indices) -> dict[str, Any]:
    """What a file keeps of one input, JSON-ready. Raises CheckpointError for what cannot be made again from a file."""
    if isinstance(value, Tensor) and str(value.dtype) in INPUT_DTYPES and value.layout is torch.strided:
        values, counts = torch.unique_consecutive(_stand_in(value, indices).flatten(), return_counts=True)
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "values": [v if math.isfinite(v) else str(v) for v in values.tolist()],
            "counts": counts.tolist(),
        }
    if type(value) in (tuple, list):
        return {type(value).__name__: [_input_record(v, indices) for v in value]}
    if type(value) is dict and all(isinstance(name, str) for name in value):
        return {"dict": {name: _input_record(v, indices) for name, v in value.items()}}
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return {"constant": value}
    kind = f"a tensor of {value.dtype}, {value.layout}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise CheckpointError(
        f"save: an input of the model is {kind}, which no file can tell; wanted tensors of numbers, None, bools, numbers and"
        " texts, alone or in tuples, lists and dicts"
    )


def _greatest_two(numbers: Tensor, dim: int | None = None) -> Tensor:
    """Indices of which the greatest stays where it is and the next stands for the others; along a dimension, or of all."""
    if dim is None or numbers.ndim < max(2, -dim):
        return _greatest_two(numbers.reshape(-1, 1), -1).reshape(numbers.shape)
    lines = numbers.movedim(dim, 0).flatten(1)
    greatest = lines.amax(1, keepdim=True)
    below = lines.where(lines < greatest, lines.amin(1, keepdim=True)).amax(1, keepdim=True)
    chosen = lines.where(lines == greatest, below)
    return chosen.reshape(numbers.movedim(dim, 0).shape).movedim(0, dim)


def _first_row(numbers: Tensor) -> Tensor:
    """The first row, in the place of all."""
    return numbers[:1].expand_as(numbers)


def _as_given(numbers: Tensor) -> Tensor:
    """All of them."""
    return numbers


#: What a file keeps of indices, the least first: of all, of each column, of each row of a table that stands on its side, of each
#: entry of the first dimension, one row, and what is there.
STAND_INS: tuple[Indices, ...] = (
    _greatest_two,
    *(partial(_greatest_two, dim=dim) for dim in (-1, -2, 0)),
    _first_row,
    _as_given,
)


def _stand_in(value: Tensor, indices: Indices) -> Tensor:
    """An input with the values that code depends on, as float64 or int64, and none else: they may be a user's data.

    Kept are masks (bools; two numbers, each row one or two runs of them, or one of them as large as what is added to scores),
    lengths and offsets (one dimension, few or in order), and a few integers. Of other indices the greatest stays where it is,
    which may be padding, and the next stands for the others, since the least may be padding, too, or a length that no model
    takes. Other integers become the greatest, other inputs 0.

    indices: what is kept of indices.
    """
    if value.is_complex():
        return torch.zeros(value.shape)
    whole = not value.is_floating_point()
    numbers = value.detach().cpu().to(torch.int64 if whole else torch.float64)
    different = numbers.unique()
    is_mask = value.dtype == torch.bool or (len(different) <= 2 and _are_masks(numbers, different))
    is_row = numbers.ndim < 2 and (numbers.numel() <= MOST_NUMBERS or bool((numbers.diff() >= 0).all()))
    if is_mask or is_row or (whole and numbers.numel() <= FEW_NUMBERS):
        kept = numbers
    elif value.dtype in (torch.int32, torch.int64):  # indices; integers of fewer bits are images and recordings
        kept = indices(numbers)
    else:
        kept = torch.full_like(numbers, different[-1].item() if whole else 0)
    runs = len(kept.flatten().unique_consecutive())
    return kept if runs <= MOST_RUNS else torch.full_like(numbers, different[-1].item() if whole else 0)


def _are_masks(numbers: Tensor, different: Tensor) -> bool:
    """Whether numbers of at most two values are masks, and not pictures of two colours or tables of yes and no."""
    if not len(different) or not bool((different.isinf() | (different == different.round())).all()):
        return False
    return float(different.abs().max()) >= LEAST_FILL or numbers.ndim < 2 or int((numbers.diff() != 0).sum(-1).max()) < 2


def _example(saved: dict[str, Any]) -> Inputs:
    if "kwargs" in saved:
        return {str(name): _input(value) for name, value in saved["kwargs"].items()}
    return tuple(_input(value) for value in saved["args"])


def _input(saved: dict[str, Any]) -> Any:
    """One input from its record. Records of earlier versions have one value, or none, for all places of a tensor."""
    for kind in (tuple, list):
        if kind.__name__ in saved:
            return kind(_input(value) for value in saved[kind.__name__])
    if "dict" in saved:
        return {str(name): _input(value) for name, value in saved["dict"].items()}
    if "constant" in saved:
        return saved["constant"]
    shape = [int(n) for n in saved["shape"]]
    total = math.prod(shape)
    if min(shape, default=0) < 0 or total > MAX_EXAMPLE_VALUES:
        raise ValueError(f"an example of shape {shape}")
    dtype = INPUT_DTYPES[saved["dtype"]]
    if "values" not in saved:
        return torch.full(shape, int(saved.get("value", 0)), dtype=dtype)
    counts = [int(n) for n in saved["counts"]]
    if min(counts, default=0) < 0 or sum(counts) != total or len(counts) != len(saved["values"]):
        raise ValueError(f"an example of shape {shape} with {sum(counts)} values")
    wide, number = (torch.float64, float) if dtype.is_floating_point or dtype.is_complex else (torch.int64, int)
    values = torch.tensor([number(v) for v in saved["values"]], dtype=wide)
    return values.repeat_interleave(torch.tensor(counts, dtype=torch.int64)).reshape(shape).to(dtype)
