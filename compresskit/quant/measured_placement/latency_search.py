"""Measured placement: leave in float the operators that run faster in float on this machine.

The rules of a target say which operators are usually faster in integers. Here each part of the quantized graph is also tried in
float: the ONNX file of every variant is timed beside the others in ONNX Runtime, and the parts that are faster in float stay so.
Placements that the times of single layers predict (`placement_model`) are tried beside them, and the fastest file wins, all of
them and the float model's timed in turn.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from compresskit.base.progress import progress_bar
from compresskit.base.task import Inputs, row_dims
from compresskit.export import export_onnx
from compresskit.export.check.profile.layers import profile_layers
from compresskit.graph.capture import Captured
from compresskit.graph.normalize import Node
from compresskit.measure import latency
from compresskit.quant.build import placed_by_ranges
from compresskit.quant.calibrated import CalibratedSettings
from compresskit.quant.measured_placement.beside_float import MIN_GAIN, MOST_PROFILED, measures, rows_of_batch, unless_guarding
from compresskit.quant.measured_placement.by_ranges import ByRanges
from compresskit.quant.measured_placement.placement_model import layer_graph, predicted_placements
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.observers import MinMax
from compresskit.quant.numerics.operators import is_depthwise
from compresskit.quant.passes.insert import insert_quantizers_
from compresskit.quant.passes.placement import Placement, place_quantizers
from compresskit.quant.passes.prepare_graph import MeasuredPlacement, Origin, prepare_graph

log = logging.getLogger(__name__)

#: Where integers save less than this share of the float model's time, a guarded choice looks for a better placement.
WORTHWHILE = 0.1
LEAST_SECONDS, ENOUGH_RUNS = 0.3, 500  # that each variant of a network is timed, where its runs are short

Floating = Mapping[str, str]  # node that stays float -> the reason
Measure = Callable[[Sequence[Floating]], list[float]]  # milliseconds of the variants with these nodes in float, timed in turn


@dataclass(frozen=True)
class MeasuredChoice:
    """Nodes that stay float, each with the measured reason, and a record of the search; None where none was asked for."""

    floating: dict[str, str]
    record: MeasuredPlacement | None = None


def measured_choice(
    model: nn.Module,
    example: Inputs,
    settings: CalibratedSettings,
    by_ranges: ByRanges | None = None,
    *,
    seconds: float = 1.0,
    trains: bool = False,
) -> MeasuredChoice:
    """Find the operators that should stay float on this machine, where the settings ask for that.

    Every part (see `candidate_parts`) is timed in float, for `settings.deployment`, in turn with the whole model in integers. The
    best of them, all that help together, and the predicted placements are then timed in turn with the file of the float model.
    Where nothing would be left in integers, everything stays in integers. Where the settings only guard the speed, and integers
    save `WORTHWHILE`, nothing more is tried. Logs what was chosen, and a warning where the result is no faster than the file of
    the float model. Writes to a temporary folder only.

    Args:
        model: a float module. example: inputs that capture it. settings: of the quantization.
        by_ranges: names what every variant leaves float, or gives another form, by the ranges of its values; None for nothing.
        seconds: how long each variant is timed, at most. trains: whether the graph is to be trained, see `prepare_graph`.

    Raises SettingError where the model cannot take the batch of the deployment, ExportError where it cannot be exported;
    where the settings only guard the speed, either is a warning.
    """
    if not measures(settings):
        return MeasuredChoice({})
    search = partial(_searched_choice, model, example, settings, by_ranges, seconds, trains)
    return unless_guarding(settings, type(model).__name__, search) or MeasuredChoice({})


def _searched_choice(
    model: nn.Module, example: Inputs, settings: CalibratedSettings, by_ranges: ByRanges | None, seconds: float, trains: bool
) -> MeasuredChoice:
    began = time.perf_counter()
    target, skip, deployment = settings.target, settings.skip, settings.deployment
    captured, origin, _ = prepare_graph(model, example, target, skip, settings.dynamic, trains=trains, bits=settings.bits)
    placement, _ = placed_by_ranges(captured, target, skip, {}, settings.bits, by_ranges)
    if not placement.integer:
        return MeasuredChoice({})

    def runs(floating: Floating) -> bool:
        return bool(place_quantizers(captured.module.graph, target, skip=skip, floating=floating).integer)

    with tempfile.TemporaryDirectory() as folder:
        variants = _Variants(captured, origin, settings, by_ranges, Path(folder), seconds)
        contenders: list[Floating] = [{}]
        *times, float_ms = variants.measure(contenders, beside_float=True)
        variants.seconds = min(seconds, max(LEAST_SECONDS, ENOUGH_RUNS * float_ms / 1000))
        if settings.choice == "measure" or times[0] > (1 - WORTHWHILE) * float_ms:
            parts = candidate_parts(captured, placement)
            if placement.lookups and times[0] > (1 - WORTHWHILE) * float_ms:  # whose integers are for the size, as a rule
                parts["lookups in rounded tables"] = list(placement.lookups)
            best = choose_floating(parts, variants.measure)
            for floating in (best.floating, *(dict.fromkeys(nodes, "predicted") for nodes in variants.predicted(placement))):
                if runs(floating) and all(set(floating) != set(other) for other in contenders):
                    contenders.append(floating)
            *times, float_ms = variants.measure(contenders, beside_float=True)
    ms, chosen = min(zip(times, contenders, strict=True), key=lambda pair: pair[0])
    if ms >= MIN_GAIN * times[0]:
        ms, chosen = times[0], contenders[0]
    record = MeasuredPlacement(
        threads=deployment.threads,
        batch=deployment.batch,
        milliseconds=ms,
        float_milliseconds=float_ms,
        integer_milliseconds=times[0],
        floating=sum(name in placement.integer for name in chosen),
        files=len(variants.files) + 1,
        seconds=time.perf_counter() - began,
    )
    log.info("%s: %s", origin.float_class, record)
    if ms >= MIN_GAIN * float_ms:
        log.warning(
            "%s: int8 is no faster than float here (%.3f ms against %.3f ms at %s)", origin.float_class, ms, float_ms, deployment
        )
    told = f"measured: the model takes {ms:.3f} ms with this and {len(chosen) - 1} other operators in float, not {times[0]:.3f}"
    return MeasuredChoice({name: told if why == "predicted" else why for name, why in chosen.items()}, record)


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
        self,
        captured: Captured,
        origin: Origin,
        settings: CalibratedSettings,
        by_ranges: ByRanges | None,
        folder: Path,
        seconds: float,
    ) -> None:
        self.captured, self.origin, self.target, self.skip = captured, origin, settings.target, settings.skip
        self.bits, self.by_ranges = settings.bits, by_ranges
        self.folder, self.seconds, self.deployment = folder, seconds, settings.deployment
        self.files: dict[frozenset[str], Path] = {}
        self.float_file = export_onnx(captured.module, folder / "float.onnx", captured.example)
        dims = row_dims(captured.inputs, captured.dynamic)
        self.rows = rows_of_batch(captured.example, self.deployment, self._file({}), origin.float_class, dims)

    def measure(self, variants: Sequence[Floating], *, beside_float: bool = False) -> list[float]:
        """Milliseconds of the variants whose given nodes stay float; those of the float model last, where it is asked for."""
        bar = progress_bar(variants, desc="measure placement", unit="part")
        files = [self._file(floating) for floating in bar] + ([self.float_file] if beside_float else [])
        return latency(files, self.rows, threads=self.deployment.threads, seconds=self.seconds)

    def predicted(self, placement: Placement) -> list[tuple[str, ...]]:
        """Operators that should stay float, by the times of the layers."""
        profile = profile_layers(
            self._file({}),
            self.rows,
            against=self.float_file,
            threads=self.deployment.threads,
            seconds=self.seconds,
            runs=MOST_PROFILED,
        )
        return list(predicted_placements(layer_graph(self.captured.module.graph, placement), profile))

    def _file(self, floating: Floating) -> Path:
        nodes = frozenset(floating)
        if nodes not in self.files:
            path = self.folder / f"{len(self.files)}.onnx"
            self.files[nodes] = export_onnx(self._variant(floating), path, self.captured.example)
        return self.files[nodes]

    def _variant(self, floating: Floating) -> nn.Module:
        captured = copy.deepcopy(self.captured)
        placement, _ = placed_by_ranges(captured, self.target, self.skip, floating, self.bits, self.by_ranges)
        if not placement.integer:
            return captured.module
        insert_quantizers_(captured.module, placement, self.target, MinMax, self.bits)
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
