"""Audit an ONNX file: which operators ONNX Runtime runs in integers, read from its optimized graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compresskit.base.errors import SettingError
from compresskit.base.inputs import AnyInputs
from compresskit.base.settings import check_flag, check_timing, check_whole_number
from compresskit.export.check.benchmark import ask_for_sizes, random_inputs, shared_inputs
from compresskit.export.check.oldest_runtime import file_opset, oldest_runtime
from compresskit.export.check.profile.layers import Profile, profile_layers
from compresskit.export.check.profile.optimized_graph import (
    ANY_TYPE,
    FUSED,
    INTEGER_KERNELS,
    all_nodes,
    constant_shapes,
    fix_dimensions_,
    inferred_graph,
    narrow_values,
    node_macs,
    optimized_model,
    value_shapes,
    value_types,
)
from compresskit.export.files import read_proto

SHOWN = 8  # names of float layers that are printed


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Which operators of a file run in integers; prints as a table.

    Attributes:
        operators: operator type -> (number in integers, number in all).
        floating: names of operators with weights that run in float.
        macs_integer, macs: multiply-accumulates for one sample, in integers and in all, of convolutions and matrix products with
            constant weights.
        conversions: QuantizeLinear and DequantizeLinear nodes in the optimized graph.
        opset: version of the standard operators.
        oldest_runtime: the oldest release of onnxruntime that reads the file, "1.15"; "" where the file is newer than all
            that we know.
        profile: where the time goes, layer by layer; None where it was not asked for.
    """

    operators: dict[str, tuple[int, int]]
    floating: tuple[str, ...]
    macs_integer: int
    macs: int
    conversions: int
    opset: int
    oldest_runtime: str
    profile: Profile | None = None

    @property
    def integer_fraction(self) -> float:
        """Fraction of the MACs that run in integers, in [0, 1]."""
        return self.macs_integer / self.macs if self.macs else 0.0

    def __str__(self) -> str:
        rows = [f"  {kind:<24} {done:>4} of {count:<4}" for kind, (done, count) in sorted(self.operators.items())]
        lines = [f"{self.integer_fraction:.1%} of the MACs in integers, {self.conversions} conversions left", *rows]
        reads = f"onnxruntime {self.oldest_runtime} and newer" if self.oldest_runtime else "this onnxruntime"
        lines.append(f"  opset {self.opset}: {reads} can read it")
        if self.floating:
            more = f" and {len(self.floating) - SHOWN} more" if len(self.floating) > SHOWN else ""
            lines.append(f"  layers in float: {', '.join(self.floating[:SHOWN])}{more}")
        return "\n".join([*lines, *([str(self.profile)] if self.profile else [])])


def audit(
    path: str | Path,
    *,
    size: int | None = None,
    profile: bool = False,
    against: str | Path | None = None,
    inputs: AnyInputs | None = None,
    batch: int = 1,
    threads: int = 1,
    seconds: float = 1.0,
) -> Audit:
    """Count the operators of a file that ONNX Runtime runs in integers, after all its fusions; with `profile`, time its layers.

    Args:
        path: of the file.
        size: of input dimensions that vary, except the batch; for counting MACs 64 where it is None. The batch is the first
            dimension of the first input; of an `If`, the operators of both branches count.
        profile: also run the file and sum the times of its kernels by layer.
        against: a second file, usually of the float model, profiled in turn, which shows the layers that are no faster, and why.
            Layers are matched by the names of their weights, else by order and size.
        inputs: what is run; random numbers of `batch` rows and `size` where it is None.
        threads: of ONNX Runtime. seconds: time to profile each file.

    Raises ExportError where a file does not load or run; DataError where a file has other inputs; SettingError for a setting out
    of range, or where a dimension besides the batch varies and neither `inputs` nor `size` says how large it is.
    """
    _check_audited(size, profile, batch, threads, seconds)
    if against is not None and not profile:
        raise SettingError("audit(against=...): a second file is compared by its times; write profile=True, too")
    counted = _count_operators(path, 64 if size is None else size)
    if not profile:
        return counted
    return replace(counted, profile=_profile(path, against, inputs, batch, size, threads, seconds))


def _check_audited(size: Any, profile: Any, batch: Any, threads: Any, seconds: Any) -> None:
    """Raise SettingError for a setting out of range, also where nothing is profiled."""
    if size is not None:
        check_whole_number(size, "audit(size=...)")
    check_flag(profile, "audit(profile=...)")
    check_whole_number(batch, "audit(batch=...)")
    check_timing(threads, seconds, "audit(profile=True)")


def _count_operators(path: str | Path, size: int) -> Audit:
    import onnx  # heavy, and only auditing needs it

    proto = read_proto(path)
    optimized = optimized_model(path)
    rows, names = fix_dimensions_(proto.graph, size)
    fix_dimensions_(optimized.graph, size, names)
    known = inferred_graph(proto)
    shapes = value_shapes(known) | value_shapes(inferred_graph(optimized))
    nodes, weights = list(all_nodes(optimized.graph)), constant_shapes(optimized.graph)
    narrow = narrow_values(optimized.graph, (onnx.TensorProto.UINT8, onnx.TensorProto.INT8))
    done: Counter[str] = Counter()
    every: Counter[str] = Counter()
    floating, macs_integer, macs, conversions = [], 0, 0, 0
    for node in nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            conversions += 1
            continue
        kind = INTEGER_KERNELS.get(node.op_type, FUSED.get(node.op_type, node.op_type))
        integer = node.op_type in INTEGER_KERNELS or (kind in ANY_TYPE and node.input[0] in narrow)
        every[kind] += 1
        done[kind] += integer
        cost = node_macs(node, weights, shapes, size) // rows
        macs += cost
        macs_integer += cost if integer else 0
        if cost and not integer:
            floating.append(node.name or node.output[0])
    return Audit(
        operators={kind: (done[kind], every[kind]) for kind in every},
        floating=tuple(floating),
        macs_integer=macs_integer,
        macs=macs,
        conversions=conversions,
        opset=file_opset(proto),
        oldest_runtime=oldest_runtime(proto, value_types(known)),
    )


def _profile(
    path: str | Path,
    against: str | Path | None,
    inputs: AnyInputs | None,
    batch: int,
    size: int | None,
    threads: int,
    seconds: float,
) -> Profile:
    """Profile a file on what the user gave, or on random inputs."""
    if inputs is None:
        ask_for_sizes(path, size, "audit(profile=True)", "give inputs=, or size=")
        inputs = shared_inputs(random_inputs(path, batch=batch, size=size or 1), [] if against is None else [against])
    return profile_layers(path, inputs, against=against, threads=threads, seconds=seconds)
