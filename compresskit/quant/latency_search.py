"""Measured placement: leave in float the operators that run faster in float on this machine.

The rules of a target say which operators are usually faster in integers. Here each part of the quantized graph is also tried in
float: the ONNX file of every variant is timed beside the others in ONNX Runtime, and the parts that are faster in float stay so.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, first_rows
from compresskit.export import export_onnx
from compresskit.graph.capture import Captured, Dynamic
from compresskit.graph.normalize import Node
from compresskit.measure import latency
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.operators import is_depthwise
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.insert import insert_quantizers_
from compresskit.quant.passes.placement import Placement, place_quantizers
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph

log = logging.getLogger(__name__)

MIN_GAIN = 0.98  # a part goes back to float only if the latency falls below this fraction, more than measurement noise

Floating = Mapping[str, str]  # node that stays float -> the reason
Measure = Callable[[Sequence[Floating]], list[float]]  # milliseconds of the variants with these nodes in float, timed in turn


def faster_in_float(
    model: nn.Module,
    example: Inputs,
    target: Target,
    *,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    seconds: float = 1.0,
) -> dict[str, str]:
    """Find the operators that should stay float on this machine, each with the measured reason.

    Every part (see `candidate_parts`) is timed in float, at batch 1 on one thread, in turn with the whole model in integers.
    Where nothing would be left in integers, everything stays in integers. Logs a warning where the result is no faster than the
    file of the float model. Writes to a temporary folder only.

    Args:
        model: a float module. example: inputs that capture it. target, skip, dynamic: as in `quantize_static`.
        seconds: how long each variant is timed.

    Returns node of the captured graph -> the reason.
    """
    captured, origin, _ = prepare_graph(model, example, target, skip, dynamic)
    placement = place_quantizers(captured.module.graph, target, skip=skip)
    if not placement.integer:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        variants = _Variants(captured, origin, target, skip, Path(folder), seconds)
        choice = choose_floating(candidate_parts(captured, placement), variants.measure)
        if not place_quantizers(captured.module.graph, target, skip=skip, floating=choice.floating).integer:
            choice = LatencyChoice({}, choice.all_integer_ms, choice.all_integer_ms)
        float_ms = variants.measure_float()
    if choice.ms >= MIN_GAIN * float_ms:
        log.warning(
            "%s: int8 is no faster than float here (%.3f ms against %.3f ms at batch 1, one thread)",
            origin.float_class,
            choice.ms,
            float_ms,
        )
    return choice.floating


@dataclass(frozen=True)
class LatencyChoice:
    """What stays float (node -> reason), the latency of that variant, and of the one with everything in integers."""

    floating: dict[str, str]
    ms: float
    all_integer_ms: float


def choose_floating(parts: Mapping[str, list[str]], measure: Measure) -> LatencyChoice:
    """Choose the parts that stay float: all that are faster in float, or the best of them alone where that is faster still.

    parts: name of each candidate -> its nodes. measure: times variants.
    """
    all_integer_ms, *times = measure([{}, *(dict.fromkeys(nodes, "tried") for nodes in parts.values())])
    faster = sorted((ms, name) for name, ms in zip(parts, times, strict=True) if ms < MIN_GAIN * all_integer_ms)
    if not faster:
        return LatencyChoice({}, all_integer_ms, all_integer_ms)
    together, best = (_reasons(parts, some, all_integer_ms) for some in (faster, faster[:1]))
    together_ms, best_ms = measure([together, best])  # parts that help alone may not help together
    if together_ms <= best_ms:
        return LatencyChoice(together, together_ms, all_integer_ms)
    return LatencyChoice(best, best_ms, all_integer_ms)


def _reasons(parts: Mapping[str, list[str]], faster: list[tuple[float, str]], all_integer_ms: float) -> dict[str, str]:
    return {
        node: f"measured: with {name} in float the model takes {ms:.3f} ms, not {all_integer_ms:.3f}"
        for ms, name in faster
        for node in parts[name]
    }


class _Variants:
    """Writes the ONNX files of variants of one model, each once, and times them in turn."""

    def __init__(
        self, captured: Captured, origin: Origin, target: Target, skip: tuple[str, ...], folder: Path, seconds: float
    ) -> None:
        self.captured, self.origin, self.target, self.skip = captured, origin, target, skip
        self.folder, self.seconds = folder, seconds
        self.row = first_rows(captured.example, 1)
        self.files: dict[frozenset[str], Path] = {}

    def measure(self, variants: Sequence[Floating]) -> list[float]:
        """Milliseconds of the variants whose given nodes stay float."""
        bar = progress_bar(variants, desc="measure placement", unit="part")
        return latency([self._file(floating) for floating in bar], self.row, seconds=self.seconds)

    def measure_float(self) -> float:
        """Milliseconds of the float model."""
        path = export_onnx(self.captured.module, self.folder / "float.onnx", self.captured.example)
        return latency([path], self.row, seconds=self.seconds)[0]

    def _file(self, floating: Floating) -> Path:
        nodes = frozenset(floating)
        if nodes not in self.files:
            path = self.folder / f"{len(self.files)}.onnx"
            self.files[nodes] = export_onnx(self._variant(floating), path, self.captured.example)
        return self.files[nodes]

    def _variant(self, floating: Floating) -> nn.Module:
        captured = copy.deepcopy(self.captured)
        placement = place_quantizers(captured.module.graph, self.target, skip=self.skip, floating=floating)
        if not placement.integer:
            return captured.module
        insert_quantizers_(captured.module, placement, self.target, MinMax)
        quantized = Quantized(captured, self.target, placement, self.origin)
        quantized.calibrate_([captured.example])  # the latency does not depend on the ranges
        return quantized.eval()


def candidate_parts(captured: Captured, placement: Placement) -> dict[str, list[str]]:
    """Return the parts that are tried in float, name -> nodes: each kind of operator, and each group of equal regions.

    A region is a set of operators that hand integers to each other. Regions of the same operators with the same shapes, such as
    the blocks of a transformer, are tried together.
    """
    graph = captured.module.graph
    nodes = {node.name: node for node in graph.nodes}
    groups: dict[str, list[str]] = {}
    for name, kind in placement.integer.items():
        depthwise = kind == "conv" and is_depthwise(captured.module, nodes[name])
        groups.setdefault("depthwise convolutions" if depthwise else f"every {kind}", []).append(name)
    equal: dict[str, list[list[str]]] = {}
    for region in _regions(nodes, placement):
        operators = Counter(f"{placement.integer[n]} {captured.shapes.get(n, ())[1:]}" for n in region)
        equal.setdefault(str(sorted(operators.items())), []).append(region)
    for regions in equal.values():
        first = placement.layers.get(regions[0][0]) or regions[0][0]
        name = f"the region of {first}" + (f" and {len(regions) - 1} like it" if len(regions) > 1 else "")
        groups[name] = [node for region in regions for node in region]
    distinct = {frozenset(members): name for name, members in reversed(groups.items())}
    return {name: members for name, members in groups.items() if distinct[frozenset(members)] == name}


def _regions(nodes: Mapping[str, Node], placement: Placement) -> list[list[str]]:
    root = {name: name for name in placement.integer}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    for name in placement.integer:
        pending = [a for a in nodes[name].all_input_nodes if a.op == "call_function"]
        while pending:
            source = pending.pop()
            if source.name in root:
                root[find(source.name)] = find(name)
            elif source.name not in placement.floating:  # a move, or a clamp that the grid does
                pending += [a for a in source.all_input_nodes if a.op == "call_function"]
    regions: dict[str, list[str]] = {}
    for name in placement.integer:
        regions.setdefault(find(name), []).append(name)
    return list(regions.values())
