"""Record a quantized model as plain data beside its tensors, and rebuild it; nothing from the file is executed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CheckpointError, SettingError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Dynamic
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.surgery import restructure_
from compresskit.quant.accuracy_target.mixed_model import rebuild_mixed
from compresskit.quant.build import build_quantized
from compresskit.quant.dynamic.insert_dynamic import build_dynamic
from compresskit.quant.dynamic.placement_dynamic import zeros_as_recorded
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import TARGET_BITS, bits_from_record
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Support, Target
from compresskit.quant.passes.prepare_graph import MeasuredPlacement, Remedy
from compresskit.quant.weight_only.weight_model import WeightQuantized, rebuild_weights

#: Types of inputs that a record may name; names from a file are only looked up here.
INPUT_DTYPES = {
    str(d): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
}

MAX_EXAMPLE_VALUES = 2**28  # of an example that is made from a record


def record(model: Quantized) -> dict[str, Any]:
    """Return what `rebuild` needs besides the tensors and a float model of the same class, JSON-ready."""
    plan = {"plan": model.plan.to_json()} if isinstance(model, WeightQuantized) else {}
    return plan | {
        "kind": "quantized",
        "origin": model.origin.to_json(),
        "target": asdict(model.target),
        "placement": model.placement.to_json(),
        "example": _example_record(model.example),
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
        zeros = {str(name): str(reason) for name, reason in placement["floating"].items()}
        groups = {str(point["node"]): int(point["group"]) for point in placement["points"]}
    except (KeyError, TypeError, ValueError, AttributeError, SettingError) as error:
        raise CheckpointError(
            f"not the record of a quantized model: {type(error).__name__} {error}; save the model again"
        ) from None
    settings: dict[str, Any] = {"skip": skip, "dynamic": dynamic, "merges": merges}
    with zeros_as_recorded(zeros):
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
                floating=floating,
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


def _example_record(example: Inputs) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise CheckpointError(f"an input is {type(value).__name__}; only models whose inputs are all tensors can be saved")
        record: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype)}
        if value.numel() and not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool:
            record["value"] = int(value.max())  # 0 may be padding alone, or the length of a sequence, which no model takes
        return record

    if isinstance(example, dict):
        return {"kwargs": {name: one(value) for name, value in example.items()}}
    return {"args": [one(value) for value in example]}


def _example(saved: dict[str, Any]) -> Inputs:
    def one(value: dict[str, Any]) -> Tensor:
        shape = [int(n) for n in value["shape"]]
        if min(shape, default=0) < 0 or math.prod(shape) > MAX_EXAMPLE_VALUES:
            raise ValueError(f"an example of shape {shape}")
        return torch.full(shape, int(value.get("value", 0)), dtype=INPUT_DTYPES[value["dtype"]])

    if "kwargs" in saved:
        return {str(name): one(value) for name, value in saved["kwargs"].items()}
    return tuple(one(value) for value in saved["args"])
