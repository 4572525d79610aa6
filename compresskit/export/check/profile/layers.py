"""Profile ONNX files in ONNX Runtime, layer by layer: milliseconds, in integers or not, conversions, and why a layer is slow.

profile_layers(int8, fp32): the files run in turn, with and without the runtime's profiler; kernels are summed by layer.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compresskit.base.errors import SettingError
from compresskit.base.inputs import AnyInputs
from compresskit.base.settings import check_timing
from compresskit.export.check.profile.file_layers import BEFORE, FileLayer, kind_of, match_layers, optimized_layers
from compresskit.export.check.profile.kernels import MOST_EVENTS, Kernel, ProfiledFile, ProfilerCost, profiler_cost, run_in_turn
from compresskit.export.check.profile.optimized_graph import INTEGER_KERNELS

#: Operators that only change how values are stored.
CONVERSIONS = frozenset("QuantizeLinear DequantizeLinear DynamicQuantizeLinear ReorderInput ReorderOutput Cast".split())
FEW_CHANNELS = 16  # kernels compute so many at once
MOST_NAMED = 3  # operators
USUAL_SCALE = (0.8, 1.25)  # outside of it the factor is printed
INPUTS = "(inputs)"  # name of what comes before the first layer
WORST = 5  # layers that are named as eating the gain


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Time of one layer in one file.

    milliseconds: of all its kernels. head: of the kernel with the weight; conversions: of kernels that only change how values are
    stored (QuantizeLinear, DequantizeLinear, reorders, transposes that the runtime inserted); the rest is of other operators.
    floats: the operators that compute in float -> milliseconds. integer: whether any kernel computes in integers.
    operators: that ran, conversions included.
    """

    milliseconds: float = 0.0
    head: float = 0.0
    conversions: float = 0.0
    floats: dict[str, float] = field(default_factory=dict)
    integer: bool = False
    operators: tuple[str, ...] = ()

    @property
    def in_integers(self) -> str:
        """One of "yes", "partly", "no", and "-" where nothing is computed."""
        return ("partly" if self.floats else "yes") if self.integer else "no" if self.floats else "-"


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer:
    """One layer of the model in a file and, where there is one to compare with, in the other.

    name: of the module or node; `INPUTS` for what comes before the first layer. this, other: None where the file has no such
    layer. cause: why it is not faster than in the other file, where it takes no time if it has no such layer; "" where it is, or
    where there is no other file. place: its number among the layers of the file; None for `INPUTS`, and for a layer that only the
    other file has.
    """

    name: str
    this: LayerTime | None
    other: LayerTime | None = None
    cause: str = ""
    place: int | None = None

    @property
    def lost(self) -> float:
        """Milliseconds that the layer takes longer than in the other file; negative where it takes less."""
        return (self.this.milliseconds if self.this else 0.0) - (self.other.milliseconds if self.other else 0.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a file goes; prints as a table.

    Attributes:
        path: of the file. against: of the one that it is compared with, "" for none.
        threads: of ONNX Runtime. rows: size of the first dimension of the first input.
        milliseconds: median latency without the profiler. outside: of it, what no kernel accounts for: calling the runtime,
            handing over between kernels. The times of the layers and this sum to the latency.
        scale: factor from the profiler's times to those shown, near 1 on a machine that does nothing else.
        against_milliseconds, against_outside: the same of the other file; None where there is none.
        layers: in the order of the file.
    """

    path: str
    against: str
    threads: int
    rows: int
    milliseconds: float
    outside: float
    scale: float
    against_milliseconds: float | None = None
    against_outside: float | None = None
    layers: tuple[ProfiledLayer, ...] = ()

    @property
    def eating(self) -> tuple[ProfiledLayer, ...]:
        """The layers that take at least as long as in the other file, the worst first."""
        return tuple(sorted((layer for layer in self.layers if layer.cause), key=lambda layer: -layer.lost))

    def __str__(self) -> str:
        both = self.against_milliseconds is not None
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        lines = [f"latency {self.milliseconds:.3f} ms with {threads}, {self.rows} at a time"]
        if self.against_milliseconds:
            ratio = self.milliseconds / self.against_milliseconds
            lines[0] += f"; {self.against} {self.against_milliseconds:.3f} ms ({ratio:.2f}x)"
        rows = [
            (
                "layer",
                *(("other ms",) if both else ()),
                "ms",
                "conversions",
                "in integers",
                "why not faster" if both else "in float",
            )
        ]
        for layer in self.layers:
            this = layer.this or LayerTime()
            other = (_shown(layer.other.milliseconds if layer.other else None),) if both else ()
            why = layer.cause if both else ", ".join(this.floats)
            conversions = _shown(this.conversions or None)
            rows.append(
                (layer.name, *other, _shown(this.milliseconds if layer.this else None), conversions, this.in_integers, why)
            )
        ends = ("", "", "")
        rows.append(("outside of kernels", *((_shown(self.against_outside),) if both else ()), _shown(self.outside), *ends))
        rows.append(("sum", *((_shown(self.against_milliseconds),) if both else ()), _shown(self.milliseconds), *ends))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        numbers = range(1, 3 + both)
        for row in rows:
            cells = (
                cell.rjust(w) if i in numbers else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  " + "  ".join(cells).rstrip())
        if not USUAL_SCALE[0] < self.scale < USUAL_SCALE[1]:
            lines.append(f"  the profiler's times were multiplied by {self.scale:.2f} to sum to the latency")
        if both:
            worst = [f"{layer.name} {layer.lost:+.3f} ms ({layer.cause})" for layer in self.eating[:WORST]]
            if worst:
                lines.append(f"  eat the gain: {'; '.join(worst)}")
            else:
                slower = self.milliseconds > (self.against_milliseconds or math.inf)
                lines.append(f"  every layer is faster than in the other file{', what is outside of kernels is not' * slower}")
        return "\n".join(lines)


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def profile_layers(
    path: str | Path,
    inputs: AnyInputs,
    *,
    against: str | Path | None = None,
    threads: int = 1,
    seconds: float = 1.0,
    runs: int | None = None,
) -> Profile:
    """Measure where the time of a file goes, beside a second file of the same network.

    Args:
        path: of the file. against: of the other one, usually of the float model.
        inputs: what both files run on.
        threads: of ONNX Runtime.
        seconds: time to measure each file, half of it with the profiler. runs: at most so many, of which `ROUNDS` are the least.

    Raises SettingError for a setting out of range, or where the files have no layer in common; ExportError where a file does not
    load or run.
    """
    check_timing(threads, seconds, "audit(profile=True)")
    paths = [path] if against is None else [path, against]
    with tempfile.TemporaryDirectory() as folder:
        files = [ProfiledFile(p, inputs, threads, Path(folder) / str(i)) for i, p in enumerate(paths)]
        run_in_turn(files, seconds, MOST_EVENTS if runs is None else runs)
        cost = profiler_cost(Path(folder))
        times = [_layer_times(file, cost) for file in files]
    outside = [file.milliseconds - sum(t.milliseconds for t in found.values()) for file, found in zip(files, times, strict=True)]
    this, other = files[0], files[-1]
    if against is None:
        names = {BEFORE: INPUTS} | {i: layer.name for i, layer in enumerate(this.layers)}
        layers = [ProfiledLayer(name=names[i], this=times[0][i], place=None if i < 0 else i) for i in sorted(times[0])]
    else:
        layers = _side_by_side(this, other, times)
    return Profile(
        path=str(path),
        against="" if against is None else str(against),
        threads=threads,
        rows=this.rows,
        milliseconds=this.milliseconds,
        outside=outside[0],
        scale=this.scale,
        against_milliseconds=None if against is None else other.milliseconds,
        against_outside=None if against is None else outside[1],
        layers=tuple(layers),
    )


def _side_by_side(this: ProfiledFile, other: ProfiledFile, times: Sequence[dict[int, LayerTime]]) -> list[ProfiledLayer]:
    pairs = match_layers(this.layers, other.layers)
    if this.layers and other.layers and not any(i is not None and j is not None for i, j in pairs):
        raise SettingError(
            f"audit(against=...): {this.path} and {other.path} have no layer in common: wanted two files of one network"
        )
    own, their = times[0].get(BEFORE), times[1].get(BEFORE)
    rows = [ProfiledLayer(name=INPUTS, this=own, other=their, cause=slow_cause(None, own, their))]
    for i, j in pairs:
        layers = [files.layers[k] for files, k in ((other, j), (this, i)) if k is not None]
        name = next((layer.name for layer in layers if layer.name != layer.node), layers[0].name)
        own = None if i is None else times[0].get(i)
        their = None if j is None else times[1].get(j)
        rows.append(ProfiledLayer(name=name, this=own, other=their, cause=slow_cause(layers[-1], own, their), place=i))
    return [row for row in rows if row.this or row.other]


def slow_cause(layer: FileLayer | None, this: LayerTime | None, other: LayerTime | None) -> str:
    """Why a layer is no faster than in the other file: the part of it that grew most; "" where it is faster.

    layer: None for what comes before the first. other: None where the other file has none, which takes no time.
    """
    alone, other = other is None, other or LayerTime()
    if this is None or this.milliseconds < other.milliseconds or this == other or (alone and not this.milliseconds):
        return ""
    grown = {
        "conversion": this.conversions - other.conversions,
        "kernel": this.head - other.head,
        "others": (this.milliseconds - this.conversions - this.head) - (other.milliseconds - other.conversions - other.head),
    }
    part = max(grown, key=lambda name: grown[name])
    if part == "conversion":
        kinds = ", ".join(kind for kind in this.operators if kind in CONVERSIONS or kind == "Transpose")
        return f"conversions{'' if layer else ' of the inputs'}: {kinds}"
    if alone and layer is not None:
        return "a layer that the other file does not have"
    if part == "others" or layer is None:
        floating = [k for k in sorted(this.floats, key=lambda k: -this.floats[k]) if layer is None or k != layer.kind]
        if floating:
            return f"no integer kernel: {', '.join(floating[:MOST_NAMED])}"
        more = [kind for kind in this.operators if kind not in CONVERSIONS and kind not in other.operators]
        return f"operators of their own: {', '.join(more)}" if more else "other operators"
    if layer.kind in this.floats:
        return f"in float: {layer.kind}"
    if layer.depthwise:
        return "depthwise kernel"
    if 0 < layer.fewest_channels < FEW_CHANNELS:
        return f"few {'channels' if layer.kind in ('Conv', 'ConvTranspose') else 'features'}: {layer.fewest_channels}"
    return "integer kernel"


def _layer_times(file: ProfiledFile, cost: ProfilerCost) -> dict[int, LayerTime]:
    """Index of the layer -> its time, read from the profile."""
    of_node = optimized_layers(file.source, file.layers, file.optimized)
    written = {node.name for node in file.source.node}
    kernels, taken = file.kernel_times(cost)
    members: dict[int, list[tuple[str, Kernel]]] = defaultdict(list)
    for name, kernel in kernels.items():
        members[of_node[name]].append((name, kernel))
    times = {}
    for index, some in members.items():
        kind = file.layers[index].kind if index >= 0 else ""
        heads, conversions, floats = 0.0, 0.0, defaultdict[str, float](float)
        for name, kernel in some:
            ms, operator = taken[name], kind_of(kernel.operator)
            if operator in CONVERSIONS or (operator == "Transpose" and name not in written):
                conversions += ms
                continue
            if operator == kind:
                heads += ms
            if kernel.floating and kernel.operator not in INTEGER_KERNELS:
                floats[operator] += ms
        operators = dict.fromkeys(kind_of(kernel.operator) for _, kernel in some)
        computed = [k for _, k in some if kind_of(k.operator) not in CONVERSIONS]
        times[index] = LayerTime(
            milliseconds=sum(taken[name] for name, _ in some),
            head=heads,
            conversions=conversions,
            floats=dict(floats),
            integer=any(k.operator in INTEGER_KERNELS or (k.narrow and not k.floating) for k in computed),
            operators=tuple(operators),
        )
    return times
