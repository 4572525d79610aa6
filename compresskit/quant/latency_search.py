"""Measured placement: leave in float what runs faster in float on this machine.

The rules of a target say what usually pays. Here each part of the quantized graph is taken back to float in turn, the file
of every variant is timed beside the others in ONNX Runtime, and what helps is kept.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from tqdm import tqdm

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

WORTH = 0.98  # of the latency before: a part goes back to float only for more than the noise of the measurement


def slower_in_integers(
    model: nn.Module,
    example: Inputs,
    target: Target,
    *,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
    seconds: float = 1.0,
) -> dict[str, str]:
    """Operators (by node of the captured graph) that should stay float on this machine, each with the measured reason.

    Every part (see `parts`) is timed in float for `seconds`, at batch 1 on one thread, in turn with the whole in integers; those
    that make the file at least 2 % faster go back to float together, or the best of them alone where that is faster still. Logs a
    warning where the result is no faster than the float model's own file; where nothing is worth it in integers all stays in
    integers. Writes to a temporary folder only.
    """
    captured, origin, _ = prepare_graph(model, example, target, skip, dynamic)
    placement = place_quantizers(captured.module.graph, target, skip=skip)
    if not placement.integer:
        return {}
    row = first_rows(example, 1)
    choices = parts(captured, placement)
    with tempfile.TemporaryDirectory() as folder:

        def write(number: int, floating: Mapping[str, str]) -> Path:
            variant = _variant(captured, origin, target, skip, floating)
            return export_onnx(variant, Path(folder) / f"{number}.onnx", captured.example)

        bar = tqdm(choices.items(), desc="measure placement", disable=None, leave=False, unit="part")
        files = [write(0, {}), *(write(i, dict.fromkeys(nodes, "tried")) for i, (_, nodes) in enumerate(bar, 1))]
        whole, *times = latency(files, row, seconds=seconds)
        helpful = sorted((t, name) for name, t in zip(choices, times, strict=True) if t < WORTH * whole)
        chosen: dict[str, str] = {}
        best = whole
        if helpful:  # what helps alone may not help together
            several = _reasons(choices, helpful, whole)
            chosen = _reasons(choices, helpful[:1], whole)
            alone, best = files[1 + list(choices).index(helpful[0][1])], helpful[0][0]
            together, again = latency([write(len(files), several), alone], row, seconds=seconds)
            chosen, best = (several, together) if together <= again else (chosen, again)
        if not place_quantizers(captured.module.graph, target, skip=skip, floating=chosen).integer:
            chosen, best = {}, whole  # nothing of it would be quantized; the warning below says that it does not pay
        floats = latency([export_onnx(captured.module, Path(folder) / "float.onnx", captured.example)], row, seconds=seconds)[0]
    if best >= WORTH * floats:
        log.warning(
            "%s: int8 is no faster than float here (%.3f ms against %.3f ms at batch 1, one thread)",
            origin.float_class,
            best,
            floats,
        )
    return chosen


def _variant(captured: Captured, origin: Origin, target: Target, skip: tuple[str, ...], floating: Mapping[str, str]) -> nn.Module:
    copied = copy.deepcopy(captured)
    placement = place_quantizers(copied.module.graph, target, skip=skip, floating=floating)
    if not placement.integer:
        return copied.module
    insert_quantizers_(copied.module, placement, target, MinMax)
    quantized = Quantized(copied, target, placement, origin)
    quantized.calibrate_([captured.example])  # its time does not hang on the ranges
    return quantized.eval()


def _reasons(choices: Mapping[str, list[str]], helpful: list[tuple[float, str]], whole: float) -> dict[str, str]:
    return {
        node: f"measured: with {name} in float the model takes {time:.3f} ms, not {whole:.3f}"
        for time, name in helpful
        for node in choices[name]
    }


def parts(captured: Captured, placement: Placement) -> dict[str, list[str]]:
    """What is worth trying in float, by name: each kind of operator, and each group of regions that look the same.

    A region is a set of integer operators that hand integers to each other; regions of the same operators with the same
    shapes (the blocks of a transformer, say) are tried together.
    """
    graph = captured.module.graph
    nodes = {node.name: node for node in graph.nodes}
    groups: dict[str, list[str]] = {}
    for name, kind in placement.integer.items():
        deep = kind == "conv" and is_depthwise(captured.module, nodes[name])
        groups.setdefault("depthwise convolutions" if deep else f"every {kind}", []).append(name)
    alike: dict[str, list[list[str]]] = {}
    for region in _regions(nodes, placement):
        operators = Counter(f"{placement.integer[n]} {captured.shapes.get(n, ())[1:]}" for n in region)
        alike.setdefault(str(sorted(operators.items())), []).append(region)
    for regions in alike.values():
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
