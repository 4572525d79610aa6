"""Diagnose a quantized model: the noise of each operator, its causes, why operators stay float, how much runs in integers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs, batch_size
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.differences import without_fills
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, mode
from compresskit.metrics import decibels
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.calibration.rows import channel_dims, channel_sums
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.saturation import can_overflow
from compresskit.quant.numerics.scheme import to_integers
from compresskit.quant.numerics.targets import saturating_matmul
from compresskit.quant.passes.coverage import Coverage
from compresskit.quant.passes.insert import quantizer_of
from compresskit.quant.passes.prepare_graph import prepare_graph

log = logging.getLogger(__name__)

OUTLIERS = 8.0  # times that the range is wider than 99.9 % of the values
UNEVEN = 16.0  # times that the range is wider than the values of the middle channel
MOST = 0.999  # of the values
LOW_DECIBELS = 25.0  # of a layer's weights or input alone, below which it is named
NAMED = 3  # layers that are named for their noise
LOW_CHANNEL, HIGH_WHOLE = 10.0, 20.0  # dB of channels of an output that are named, where the whole output has more than the other
SHOWN_CHANNELS = 8  # that are named by their numbers
APART = (
    "one scale serves channels of very different size: return small ones as an output of their own, let a layer of their own"
    " compute them, or leave the layer float that makes them (skip=)"
)


@dataclass(frozen=True, kw_only=True)
class OperatorNoise:
    """The quantization noise of one operator. Noise is a signal-to-quantization-noise ratio (SQNR) in dB; larger is better.

    name: of its node. layer: dotted name of its module. runs: "integer", or "float: " and the reason.
    parameters, macs: how many it has; 0 where it is no layer.
    sqnr: of its result in the quantized model, with the noise of all operators before it.
    weights: of its result if only its own weight and bias were rounded; None where it has none.
    activations: of its result if only its own input was rounded; None where its input is not rounded.
    saturated: fraction of its sums that overflow int16 on x86 without VNNI; None where the target's weights are such that none
        can.
    """

    name: str
    layer: str
    runs: str
    parameters: int
    macs: int
    sqnr: float
    weights: float | None = None
    activations: float | None = None
    saturated: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of rounding errors.

    layer: dotted name of the module, or of the value; "output" of the model, with its number where there are several.
    cause: "lost channels" of an output, "outliers", "uneven channels", "dead channels", "weights" or "activations".
    text: what was measured. remedy: what to try.
    """

    layer: str
    cause: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.text}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`; prints as a table.

    rows: the noise of each operator. coverage: how much of the model runs in integers.
    sqnr: of the model's output, in dB. samples: how many rows it was measured on.
    findings: causes of the noise, in words; see `Finding`.
    """

    rows: tuple[OperatorNoise, ...]
    coverage: Coverage
    sqnr: float
    samples: int
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        head = ("operator", "layer", "runs", "params", "MACs", "SQNR dB", "weights", "activations", "saturated")
        table = [head, *(_table_cells(row) for row in self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))).rstrip()
            for cells in table
        ]
        found = [f"* {finding}" for finding in self.findings]
        return "\n".join([f"output {self.sqnr:.1f} dB on {self.samples} samples; {self.coverage}", *lines, *found])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record; an infinite SQNR (no noise) becomes None."""
        rows = [{k: None if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(r).items()} for r in self.rows]
        sqnr = None if math.isinf(self.sqnr) else self.sqnr
        record = {"sqnr": sqnr, "samples": self.samples, "coverage": self.coverage.to_json(), "rows": rows}
        return record | {"findings": [asdict(finding) for finding in self.findings]}


def _table_cells(row: OperatorNoise) -> tuple[str, ...]:
    numbers = [row.sqnr, row.weights, row.activations]
    costs = [f"{n:,}" if n else "" for n in (row.parameters, row.macs)]
    saturated = "" if row.saturated is None else f"{row.saturated:.2%}"
    return (row.name, row.layer, row.runs, *costs, *("" if n is None else f"{n:.1f}" for n in numbers), saturated)


def diagnose(quantized: Quantized, batches: Batches, *, model: nn.Module | None = None) -> Diagnosis:
    """Compare a quantized model with its float model, operator by operator.

    Args:
        quantized: a calibrated or trained model.
        batches: an iterable of inputs, or one batch.
        model: the float model it was made from; None compares with the quantized model's own weights, unrounded. With `model`,
            changes of the weights by training count as noise of the weights. It is ignored, with a warning, where smoothing moved
            weights (`quantize_static` does so with transformers).

    Raises DataError where there is no batch; ModelError where `model` is another model.
    """
    if not isinstance(quantized, Quantized):
        raise ModelError(f"diagnose: wanted a quantized model, got {type(quantized).__name__}, as of quantize_static")
    quantized = quantized.converted()
    first, data = first_and_all(batches, "diagnose")
    float_weights = None
    if model is not None and quantized.origin.smoothed:
        log.warning("diagnose: smoothing moved weights of this model; the comparison is with its own weights, unrounded")
    elif model is not None:
        captured, _, _ = prepare_graph(
            model, quantized.example, quantized.prepared_for, quantized.origin.skip, merges=quantized.origin.merges
        )
        float_weights = {name: value.detach() for name, value in captured.module.named_parameters()}
    meter = _NoiseMeter(quantized)
    with mode(quantized, training=False):
        samples = sum(meter.add(inputs, float_weights, saturation=inputs is first) for inputs in data)
    return meter.report(samples)


class _ActivationSpread:
    """What the values of one activation look like against the range of its quantizer, over batches."""

    def __init__(self, quantizer: ActivationQuantizer) -> None:
        self.quantizer = quantizer
        self.channels: Tensor | None = None
        self.middle: list[float] = []

    def add(self, values: Tensor) -> None:
        """See the float values of a batch, (N, channels, ...), or (N, tokens, channels)."""
        if values.ndim < 2 or not values.numel():
            return
        sizes = values.detach().abs().movedim(-1 if values.ndim == 3 else 1, 0).flatten(1)
        largest = sizes.amax(1)
        self.channels = largest if self.channels is None or len(self.channels) != len(largest) else self.channels.maximum(largest)
        flat = sizes.flatten()
        flat = flat[flat > 0]  # zero is exact in every format
        if len(flat):
            self.middle.append(float(flat.kthvalue(max(1, math.ceil(MOST * len(flat)))).values))

    def findings(self, name: str) -> list[Finding]:
        """What is wrong with the range; nothing for most activations."""
        if self.channels is None or not self.middle:
            return []
        scheme, zero = self.quantizer.scheme, self.quantizer.zero_point
        reach = float(self.quantizer.scale) * max(scheme.high - int(zero), int(zero) - scheme.low)
        found = []
        dead = self.channels == 0
        if bool(dead.any()):
            which = torch.nonzero(dead).flatten().tolist()
            some = ", ".join(map(str, which[:4])) + ", ..." * (len(which) > 4)
            text = f"{len(which)} of {len(dead)} channels are always 0 ({some})"
            found.append(Finding(layer=name, cause="dead channels", text=text, remedy="Prune removes them without a loss"))
        alive = self.channels[~dead]
        middle_channel, most = float(alive.median()), max(self.middle)
        if len(alive) > 1 and reach > UNEVEN * middle_channel:
            widest = int(self.channels.argmax())
            text = f"its range is {reach / middle_channel:.0f} times that of its middle channel (channel {widest})"
            remedy = 'equalize_ before quantizing, or effort="balanced", evens channels out'
            found.append(Finding(layer=name, cause="uneven channels", text=text, remedy=remedy))
        elif reach > OUTLIERS * most:
            text = f"99.9 % of its values use 1/{reach / most:.0f} of its range"
            remedy = 'observer=HistogramMSE or Percentile clips outliers, effort="balanced" chooses'
            found.append(Finding(layer=name, cause="outliers", text=text, remedy=remedy))
        return found


class _ChannelNoise:
    """Sums of squares of signal and noise of one output, for each of its channels: dimension 1, or the last one."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor | None] = {}  # dimension -> (2, channels); None where their number varies

    def add(self, clean: Tensor, noisy: Tensor) -> None:
        """See a batch in float and rounded."""
        clean, noisy = without_fills(clean.double(), noisy.double())
        for place in channel_dims(clean):
            pair = (clean.square(), (clean - noisy).square())
            new = torch.stack([channel_sums(squares, place) for squares in pair]).cpu()
            old = self.sums.get(place, torch.zeros_like(new))
            self.sums[place] = old + new if old is not None and old.shape == new.shape else None

    def findings(self, name: str) -> list[Finding]:
        """The channels that are lost although the whole output is not: the others are so much larger that it does not show."""
        for place, sums in self.sums.items():
            whole = None if sums is None else decibels(*sums.sum(1).tolist())
            if sums is None or whole is None or whole <= HIGH_WHOLE:
                continue
            each = [decibels(signal, noise) if signal else math.inf for signal, noise in sums.T.tolist()]
            if low := [i for i, value in enumerate(each) if value < LOW_CHANNEL]:
                text = (
                    f"{len(low)} of {len(each)} channels ({channel_numbers(low)}) keep less than {LOW_CHANNEL:.0f} dB,"
                    f" {min(each):.1f} at worst, beside {whole:.1f} dB of the whole"
                )
                text += "" if place == 1 else f", along dimension {place}"
                return [Finding(layer=name, cause="lost channels", text=text, remedy=APART)]
        return []


def _noise_findings(rows: list[tuple[str, float | None, float | None]]) -> list[Finding]:
    """Name the layers whose own rounding makes most noise. rows: (layer, dB of its weights alone, dB of its input alone)."""
    causes = [
        (value, layer, cause)
        for layer, weights, activations in rows
        for value, cause in ((weights, "weights"), (activations, "activations"))
        if value is not None and value < LOW_DECIBELS
    ]
    remedies = {
        "weights": "more bits for it (bits=), adaround_, or QAT",
        "activations": "another range (observer=), more bits for it (bits=), or leave it float (skip=)",
    }
    what = {"weights": "rounding its weights alone", "activations": "rounding its input alone"}
    return [
        Finding(layer=layer, cause=cause, text=f"{what[cause]} leaves {value:.1f} dB", remedy=remedies[cause])
        for value, layer, cause in sorted(causes)[:NAMED]
    ]


class _NoiseMeter:
    """Sums of squares of signal and noise, for each operator and source of noise."""

    def __init__(self, quantized: Quantized) -> None:
        self.quantized, self.body, self.placement = quantized, quantized.body, quantized.placement
        self.named = {**self.placement.integer, **self.placement.floating}
        self.power: dict[tuple[str, str], list[float]] = {}  # (operator, source) -> [signal, noise]
        self.saturated: dict[str, float] = {}
        self.spreads: dict[ActivationQuantizer, _ActivationSpread] = {}
        self.channels: dict[int, _ChannelNoise] = {}  # by the number of the output

    def add(self, inputs: Inputs, float_weights: dict[str, Tensor] | None, *, saturation: bool) -> int:
        """Run one batch; returns its number of rows. saturation: whether to count saturated sums on it."""
        target = self.quantized.target
        saturates = saturation and not target.saturates and can_overflow(target.weights, target.activations)

        def visit(node: Node, pair: Pair, pair_of: Callable[[Node], Pair]) -> None:
            if node.op == "output":
                outputs = zip(*(pytree.tree_leaves(side) for side in pair), strict=True)
                tensors = [(a, b) for a, b in outputs if isinstance(a, Tensor)]  # an output may be None, or a number
                for i, (a, b) in enumerate([(a, b) for a, b in tensors if a.is_floating_point()] or tensors):
                    self._add("", "all", a, b)
                    self.channels.setdefault(i, _ChannelNoise()).add(a, b)
            elif node.name in self.named and isinstance(pair[0], Tensor):
                self._add(node.name, "all", *pair)
                if self.named[node.name] in ("conv", "linear"):
                    self._add_sources(node, pair, pair_of)
                    if saturates:
                        self._count_saturated(node, pair_of)
            elif node.op == "call_module" and isinstance(module := self.body.get_submodule(node.target), ActivationQuantizer):
                self.spreads.setdefault(module, _ActivationSpread(module)).add(pair[0])

        run_float_and_quantized(self.body, inputs, visit, float_weights)
        return batch_size(inputs)

    def _add(self, name: str, source: str, clean: Tensor, noisy: Tensor) -> None:
        total = self.power.setdefault((name, source), [0.0, 0.0])
        clean, noisy = without_fills(clean.double(), noisy.double())
        total[0] += float(clean.square().sum())
        total[1] += float((clean - noisy).square().sum())

    def _add_sources(self, node: Node, pair: Pair, pair_of: Callable[[Node], Pair]) -> None:
        """Compute a layer on float inputs with only its weights rounded, and with only its input rounded."""
        x, *parameters = (pair_of(a) if isinstance(a, fx.Node) else (a, a) for a in node.args[:3])
        rest = node.args[3:]
        rounded = [p[1] for p in parameters]
        self._add(node.name, "weights", pair[0], node.target(x[0], *rounded, *rest))
        quantizer = quantizer_of(self.body, node.args[0])
        if quantizer is not None:
            self._add(node.name, "activations", pair[0], node.target(quantizer(x[0]), *(p[0] for p in parameters), *rest))

    def _count_saturated(self, node: Node, pair_of: Callable[[Node], Pair], positions: int = 512) -> None:
        """Find the fraction of sums that come out wrong, on some positions of one sample."""
        quantizer = quantizer_of(self.body, node.args[0])
        rounding = self.body.get_submodule(node.args[1].target) if node.args[1].op == "call_module" else None
        grouped = node.target is not aten.linear.default and len(node.args) > 6 and node.args[6] != 1
        if not isinstance(quantizer, ActivationQuantizer) or not isinstance(rounding, WeightQuantizer) or grouped:
            return
        columns = _columns(node, _integers(quantizer, pair_of(node.args[0])[1][:1]), quantizer)
        if columns is None:
            return
        weight = get_tensor(self.body, str(parameter_name(node.args[1].args[0])))
        integers = to_integers(weight, *rounding.qparams(weight), rounding.scheme, rounding.axis)
        flat = integers if integers.ndim == 2 else integers.flatten(2).transpose(1, 2).flatten(1)
        columns = columns[:positions]
        exact = (columns.double() @ flat.double().T).long()
        self.saturated[node.name] = float((saturating_matmul(columns, flat).long() != exact).double().mean())

    def report(self, samples: int) -> Diagnosis:
        """The noise of all operators in dB."""
        rows = []
        for node in self.body.graph.nodes:
            if (node.name, "all") not in self.power:
                continue
            cost = self.placement.costs.get(node.name)
            parts = {s: self._db(node.name, s) for s in ("weights", "activations") if (node.name, s) in self.power}
            in_integers = node.name in self.placement.integer
            rows.append(
                OperatorNoise(
                    name=node.name,
                    layer=module_path(node),
                    runs="integer" if in_integers else f"float: {self.placement.floating[node.name]}",
                    parameters=cost.parameters if cost else 0,
                    macs=cost.macs if cost else 0,
                    sqnr=self._db(node.name, "all"),
                    saturated=self.saturated.get(node.name),
                    **parts,
                )
            )
        noisy = _noise_findings([(row.layer or row.name, row.weights, row.activations) for row in rows])
        several = len(self.channels) > 1
        lost = [f for i, seen in self.channels.items() for f in seen.findings(f"output {i}" if several else "output")]
        spread = [finding for quantizer, seen in self.spreads.items() for finding in seen.findings(quantizer.label)]
        return Diagnosis(
            rows=tuple(rows),
            coverage=self.placement.coverage,
            sqnr=self._db("", "all"),
            samples=samples,
            findings=(*lost, *noisy, *spread),
        )

    def _db(self, name: str, source: str) -> float:
        return decibels(*self.power[name, source])


def channel_numbers(channels: Sequence[int]) -> str:
    """The numbers of channels, the first ones of many."""
    return ", ".join(map(str, channels[:SHOWN_CHANNELS])) + ", ..." * (len(channels) > SHOWN_CHANNELS)


def _integers(quantizer: ActivationQuantizer, x: Tensor) -> Tensor:
    return to_integers(x, quantizer.scale, quantizer.zero_point, quantizer.scheme)


def _columns(node: Node, x: Tensor, quantizer: ActivationQuantizer) -> Tensor | None:
    """The integers that a layer multiplies with its weights, (positions, K) uint8; in the runtime's order, channels last."""
    if x.dtype != torch.uint8:
        return None
    if node.target is aten.linear.default:
        return x.reshape(-1, x.shape[-1])
    if node.target is not aten.conv2d.default:
        return None
    given = [*node.args[3:], *[[1, 1], [0, 0], [1, 1]][len(node.args[3:]) :]]
    stride, padding, dilation = given[:3]
    across = [p for side in reversed(padding) for p in (side, side)]
    x = F.pad(x.float(), across, value=float(quantizer.zero_point))
    unfolded = F.unfold(x, _kernel(node), dilation=dilation, stride=stride)
    by_channel = unfolded.unflatten(1, (x.shape[1], -1))  # (N, C, positions of the kernel, L)
    return by_channel.permute(0, 3, 2, 1).flatten(2).flatten(0, 1).to(torch.uint8)


def _kernel(node: Node) -> tuple[int, ...]:
    weight = node.args[1].args[0] if node.args[1].op == "call_module" else node.args[1]
    module = node.graph.owning_module
    name = parameter_name(weight)
    assert name is not None
    return tuple(module.get_parameter(name).shape[2:])
