"""Why is this layer float, and why did accuracy drop: how much noise each operator adds, and how much of the model is integer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.inputs import Batches, first_and_all
from compresskit.base.task import Inputs, batch_size
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, mode
from compresskit.quant.calibration.paired_run import Pair, rounding_of, run_pairs
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import to_integers
from compresskit.quant.numerics.targets import saturating_matmul
from compresskit.quant.passes.coverage import Coverage
from compresskit.quant.passes.prepare_graph import prepare_graph

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operator. Noise in dB below the signal (SQNR), larger = better.

    sqnr: of its result in the quantized model, all that came before included.
    weights, activations: of its result if only its own weights (and bias), or only its own input, were rounded; None where it
        has no weight or is not rounded.
    saturated: share of its sums that int16 would spoil, on a target where products are added in pairs.
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
class Diagnosis:
    """What `diagnose` found; prints as a table. sqnr: of the model's output, in dB."""

    rows: tuple[Row, ...]
    coverage: Coverage
    sqnr: float
    samples: int

    def __str__(self) -> str:
        head = ("operator", "layer", "runs", "params", "MACs", "SQNR dB", "weights", "activations", "saturated")
        table = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(cells[i]) for cells in table) for i in range(len(head))]
        lines = [
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))).rstrip()
            for cells in table
        ]
        return "\n".join([f"output {self.sqnr:.1f} dB on {self.samples} samples; {self.coverage}", *lines])

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record; an infinite SQNR, where nothing is lost, is None."""
        rows = [{k: None if isinstance(v, float) and math.isinf(v) else v for k, v in asdict(r).items()} for r in self.rows]
        sqnr = None if math.isinf(self.sqnr) else self.sqnr
        return {"sqnr": sqnr, "samples": self.samples, "coverage": self.coverage.to_json(), "rows": rows}


def _cells(row: Row) -> tuple[str, ...]:
    numbers = [row.sqnr, row.weights, row.activations]
    costs = [f"{n:,}" if n else "" for n in (row.parameters, row.macs)]
    saturated = "" if row.saturated is None else f"{row.saturated:.2%}"
    return (row.name, row.layer, row.runs, *costs, *("" if n is None else f"{n:.1f}" for n in numbers), saturated)


def diagnose(quantized: Quantized, batches: Batches, *, model: nn.Module | None = None) -> Diagnosis:
    """Compare a quantized model with the float one, operator by operator.

    batches: an iterable of inputs, or one batch.
    model: the float model it came from; None takes the quantized model's own weights, unrounded. What training changed counts
        among the weights. Not taken where `smooth_` moved weights on the way (`quantize_static` does so with transformers).

    Raises DataError where there is no batch; ModelError where `model` is another model.
    """
    quantized = quantized.converted()
    first, every = first_and_all(batches, "diagnose")
    weights = None
    if model is not None and quantized.origin.smoothed:
        log.warning("diagnose: smoothing moved weights of this model; the comparison is with its own weights, unrounded")
    elif model is not None:
        captured, _, _ = prepare_graph(model, quantized.example, quantized.target, quantized.origin.skip)
        weights = {name: value.detach() for name, value in captured.module.named_parameters()}
    noise = _Noise(quantized)
    with mode(quantized, training=False):
        samples = sum(noise.take(inputs, weights, saturation=inputs is first) for inputs in every)
    return noise.report(samples)


class _Noise:
    """Sums of squares of signal and noise, for each operator and source of noise."""

    def __init__(self, quantized: Quantized) -> None:
        self.quantized, self.body, self.placement = quantized, quantized.body, quantized.placement
        self.named = {**self.placement.integer, **self.placement.floating}
        self.power: dict[tuple[str, str], list[float]] = {}
        self.saturated: dict[str, float] = {}

    def take(self, inputs: Inputs, weights: dict[str, Tensor] | None, *, saturation: bool = False) -> int:
        """Run one batch; returns its rows."""
        spoils = saturation and self.quantized.target.saturates and self.quantized.target.weights.bits == 8

        def look(node: Node, pair: Pair, value: Callable[[Node], Pair]) -> None:
            if node.op == "output":
                for a, b in zip(*(torch.utils._pytree.tree_leaves(side) for side in pair), strict=True):
                    self._add("", "all", a, b)
            elif node.name in self.named and isinstance(pair[0], Tensor):
                self._add(node.name, "all", *pair)
                if self.named[node.name] in ("conv", "linear"):
                    self._split(node, pair, value)
                    if spoils:
                        self._saturation(node, value)

        run_pairs(self.body, inputs, look, weights)
        return batch_size(inputs)

    def _add(self, name: str, source: str, clean: Tensor, noisy: Tensor) -> None:
        total = self.power.setdefault((name, source), [0.0, 0.0])
        total[0] += float(clean.double().square().sum())
        total[1] += float((clean.double() - noisy.double()).square().sum())

    def _split(self, node: Node, pair: Pair, value: Callable[[Node], Pair]) -> None:
        """The layer on clean inputs with its own weights rounded, and with its own input rounded."""
        x, *parameters = (value(a) if isinstance(a, torch.fx.Node) else (a, a) for a in node.args[:3])
        rest = node.args[3:]
        rounded = [p[1] for p in parameters]
        self._add(node.name, "weights", pair[0], node.target(x[0], *rounded, *rest))
        quantizer = rounding_of(self.body, node.args[0])
        if quantizer is not None:
            self._add(node.name, "activations", pair[0], node.target(quantizer(x[0]), *(p[0] for p in parameters), *rest))

    def _saturation(self, node: Node, value: Callable[[Node], Pair], rows: int = 512) -> None:
        """The share of sums that come out wrong, on some positions of one sample."""
        quantizer = rounding_of(self.body, node.args[0])
        rounding = self.body.get_submodule(node.args[1].target) if node.args[1].op == "call_module" else None
        grouped = node.target is not aten.linear.default and len(node.args) > 6 and node.args[6] != 1
        if not isinstance(quantizer, ActivationQuantizer) or not isinstance(rounding, WeightQuantizer) or grouped:
            return
        columns = _columns(node, _integers(quantizer, value(node.args[0])[1][:1]), quantizer)
        if columns is None:
            return
        weight = get_tensor(self.body, str(parameter_name(node.args[1].args[0])))
        integers = to_integers(weight, *rounding.qparams(weight), rounding.scheme, rounding.axis)
        flat = integers if integers.ndim == 2 else integers.flatten(2).transpose(1, 2).flatten(1)
        columns = columns[:rows]
        exact = (columns.double() @ flat.double().T).long()
        self.saturated[node.name] = float((saturating_matmul(columns, flat).long() != exact).double().mean())

    def report(self, samples: int) -> Diagnosis:
        """All of it in dB."""
        rows = []
        for node in self.body.graph.nodes:
            if (node.name, "all") not in self.power:
                continue
            cost = self.placement.costs.get(node.name)
            parts = {s: self._db(node.name, s) for s in ("weights", "activations") if (node.name, s) in self.power}
            in_integers = node.name in self.placement.integer
            rows.append(
                Row(
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
        return Diagnosis(rows=tuple(rows), coverage=self.placement.coverage, sqnr=self._db("", "all"), samples=samples)

    def _db(self, name: str, source: str) -> float:
        signal, noise = self.power[name, source]
        if noise == 0:
            return math.inf
        return 10 * math.log10(max(signal, 1e-300) / noise)


def _integers(quantizer: ActivationQuantizer, x: Tensor) -> Tensor:
    return to_integers(x, quantizer.scale, quantizer.zero_point, quantizer.scheme)


def _columns(node: Node, x: Tensor, quantizer: ActivationQuantizer) -> Tensor | None:
    """What a layer multiplies with its weights, (positions, K) uint8; as the runtime has it, channels of a position together."""
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
