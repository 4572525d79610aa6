"""Histograms of what a training computes with: weights, activations and the gradients of both, beside the range of fp16.

found = histograms(model, batches, loss=F.cross_entropy, steps=8)
print(found)                                        # fraction of zeros, and of values that fp16 would lose, by kind and layer
Path("histograms.svg").write_text(found.svg())      # a row for each layer, a column for each power of two
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError, SettingError

#: Between 2^-24 and 2^-14 fp16 has fewer than 11 bits; below 2^-24 a value becomes 0; the largest is 65504.
FP16_SMALLEST_EXPONENT, FP16_NORMAL_EXPONENT, FP16_LARGEST = -24, -14, 65504.0
WEIGHTS, WEIGHT_GRADIENTS = "weights", "weight gradients"
ACTIVATIONS, ACTIVATION_GRADIENTS = "activations", "activation gradients"
KINDS = (WEIGHTS, WEIGHT_GRADIENTS, ACTIVATIONS, ACTIVATION_GRADIENTS)
LOWEST_EXPONENT = -149  # of fp32; smaller float64 values count there
MOST_LAYERS = 10  # of a kind that `Histograms` prints by name


@dataclass(kw_only=True)
class ValueCounts:
    """Counts of the values of one kind, in one layer or in all.

    Attributes:
        values, zeros, not_finite: how many there are, how many of them are 0, and how many are infinite or nan.
        exponents: binary exponent e of 2^e <= |value| < 2^(e+1) -> how many finite values other than 0 have it.
        below, subnormal, above: how many are no 0 and smaller than 2^-24, which fp16 turns into 0; lie in [2^-24, 2^-14), where
            fp16 has fewer bits; are larger than 65504, which fp16 turns into infinity.
        largest: the largest finite magnitude.
    """

    values: int = 0
    zeros: int = 0
    not_finite: int = 0
    exponents: dict[int, int] = field(default_factory=dict)
    below: int = 0
    subnormal: int = 0
    above: int = 0
    largest: float = 0.0

    def add_(self, values: Tensor) -> None:
        """Count the values of a floating tensor."""
        magnitude = values.detach().abs().flatten()
        finite = magnitude[torch.isfinite(magnitude)]
        found = finite[finite > 0]
        found = found if found.dtype == torch.float64 else found.float()
        self.values += magnitude.numel()
        self.zeros += finite.numel() - found.numel()
        self.not_finite += magnitude.numel() - finite.numel()
        if found.numel():
            # frexp gives a mantissa in [0.5, 1), so that its exponent is one more than the usual one.
            bins, counts = (torch.frexp(found)[1] - 1).clamp(min=LOWEST_EXPONENT).unique(return_counts=True)
            above = int((found > FP16_LARGEST).sum())
            self._add_counts(dict(zip(bins.tolist(), counts.tolist(), strict=True)), above, found.max().item())

    def merge_(self, other: ValueCounts) -> None:
        """Add the counts of another layer."""
        self.values += other.values
        self.zeros += other.zeros
        self.not_finite += other.not_finite
        self._add_counts(other.exponents, other.above, other.largest)

    def _add_counts(self, exponents: Mapping[int, int], above: int, largest: float) -> None:
        for exponent, count in exponents.items():
            self.exponents[exponent] = self.exponents.get(exponent, 0) + count
            self.below += count if exponent < FP16_SMALLEST_EXPONENT else 0
            self.subnormal += count if FP16_SMALLEST_EXPONENT <= exponent < FP16_NORMAL_EXPONENT else 0
        self.above += above
        self.largest = max(self.largest, largest)

    def fractions(self) -> dict[int, float]:
        """Exponent -> fraction of the finite values other than 0 that have it, with rising exponents."""
        total = max(1, sum(self.exponents.values()))
        return {exponent: count / total for exponent, count in sorted(self.exponents.items())}

    def row(self, name: str) -> str:
        """One line: the name and, in per cent of all values, zeros, below, subnormal and above; the range of exponents."""
        parts = (100 * part / max(1, self.values) for part in (self.zeros, self.below, self.subnormal, self.above))
        span = f"2^{min(self.exponents)} .. 2^{max(self.exponents)}" if self.exponents else "-"
        odd = f"; {self.not_finite} not finite" if self.not_finite else ""
        return f"{name[-36:]:<36}{self.values:>12,}" + "".join(f"{part:>10.2f}%" for part in parts) + f"  {span}{odd}"


@dataclass(frozen=True, kw_only=True)
class Histograms:
    """Counts of weights, activations and their gradients, by kind and layer; prints as a table.

    Attributes:
        counts: kind ("weights", "weight gradients", "activations", "activation gradients") -> name of a module -> its counts,
            in the order of the model. The name of the model itself is "".
        steps: how many batches were seen.
    """

    counts: Mapping[str, Mapping[str, ValueCounts]]
    steps: int

    def of_kind(self, kind: str) -> ValueCounts:
        """The counts of all layers together."""
        if kind not in self.counts:
            raise SettingError(f"of_kind({kind!r}): wanted one of {', '.join(map(repr, KINDS))}")
        total = ValueCounts()
        for counts in self.counts[kind].values():
            total.merge_(counts)
        return total

    def table(self) -> str:
        """All layers of all kinds."""
        return "\n".join([_HEADER, *(line for kind in KINDS for line in self._lines(kind, list(self.counts[kind])))])

    def __str__(self) -> str:
        lines = [f"{self.steps} steps; fp16 holds 2^-24 (with all bits: 2^-14) to 65504", _HEADER]
        for kind in KINDS:
            lost = {name: (c.below + c.above + c.not_finite) / max(1, c.values) for name, c in self.counts[kind].items()}
            worst = sorted((name for name in lost if lost[name] > 0), key=lambda name: -lost[name])
            lines += self._lines(kind, worst[:MOST_LAYERS])
            lines += [f"  and {len(worst) - MOST_LAYERS} layers more; table() has all"] if len(worst) > MOST_LAYERS else []
        return "\n".join(lines)

    def _lines(self, kind: str, names: Iterable[str]) -> list[str]:
        layers = self.counts[kind]
        return [self.of_kind(kind).row(kind), *(layers[name].row(f"  {name or '(the model)'}") for name in names)]

    def svg(self) -> str:
        """A picture: for each kind a panel with a row a layer and a column a power of two; darker is more.

        The first column is the fraction of zeros; lines mark the limits of fp16.
        """
        exponents = [e for layers in self.counts.values() for counts in layers.values() for e in counts.exponents]
        low, high = min([FP16_SMALLEST_EXPONENT - 4, *exponents]), max([17, *exponents])
        left, cell, row = 250, 9, 13
        width = left + cell * (high - low + 4) + 20
        parts, y = [], 10
        for kind in KINDS:
            y += 24
            parts.append(f'<text x="10" y="{y - 8}" font-weight="bold">{kind}</text>')
            top = y
            for name, counts in self.counts[kind].items():
                label = name or "(the model)"
                parts.append(f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{escape(label[-40:])}</text>')
                shares = {low - 2: counts.zeros / max(1, counts.values)} | counts.fractions()
                for exponent, share in shares.items():
                    what = "zeros" if exponent == low - 2 else f"2^{exponent}"
                    parts.append(
                        f'<rect x="{left + cell * (exponent - low + 2)}" y="{y}" width="{cell}" height="{row - 1}" fill="#1f5fa8"'
                        f' fill-opacity="{share**0.5:.3f}"><title>{escape(label)}, {what}: {share:.2%}</title></rect>'
                    )
                y += row
            for limit in (FP16_SMALLEST_EXPONENT, FP16_NORMAL_EXPONENT, 16):
                x = left + cell * (limit - low + 2)
                parts.append(f'<path d="M{x} {top} V{y}" stroke="#c0392b"/>')
                parts.append(f'<text x="{x}" y="{y + 11}" text-anchor="middle" fill="#c0392b">2^{limit}</text>')
            parts.append(f'<text x="{left}" y="{y + 11}">0</text>')
            y += 16
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 10}" font-family="sans-serif" font-size="10">'
        title = "<title>Histograms of binary exponents by kind and layer; red lines: the range of fp16</title>"
        back = f'<rect width="{width}" height="{y + 10}" fill="white"/>'
        return "\n".join([head, title, back, *parts, "</svg>"])


_HEADER = f"{'':<36}{'values':>12}{'zeros':>11}{'below':>11}{'subnormal':>11}{'above':>11}  range"


class Collector:
    """Counts values by kind and layer; its hooks are on a model only inside `watching`."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, dict[str, ValueCounts]] = {kind: {} for kind in KINDS}
        self._layers = {m: n for n, m in model.named_modules() if m._parameters or not list(m.children())}

    def add_(self, kind: str, layer: str, values: Tensor) -> None:
        """Count the values of a tensor."""
        self.counts[kind].setdefault(layer, ValueCounts()).add_(values)

    def add_parameters_(self, kind: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Count parameters, or their gradients, given by the parameters' names."""
        for name, values in tensors:
            self.add_(kind, name.rpartition(".")[0], values)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what the modules return, and the gradients of that, while the block runs.

        Modules with parameters of their own or without submodules are watched.
        """

        def record(module: nn.Module, _inputs: Any, output: Any) -> None:
            for value in pytree.tree_leaves(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.add_(ACTIVATIONS, self._layers[module], value)
                    if value.requires_grad:
                        value.register_hook(partial(self.add_, ACTIVATION_GRADIENTS, self._layers[module]))

        handles = [module.register_forward_hook(record) for module in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def result(self, steps: int) -> Histograms:
        """What was counted, in the order of the model's layers."""
        order = {name: i for i, name in enumerate(self._layers.values())}
        ordered = {kind: dict(sorted(self.counts[kind].items(), key=lambda item: order[item[0]])) for kind in KINDS}
        return Histograms(counts=ordered, steps=steps)


def histograms(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    steps: int = 8,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Histograms:
    """Count the magnitudes of weights, activations and their gradients over some batches; the model is not changed.

    It shows which values fp16 would lose, where they are, and what a loss scale has to move (Micikevicius et al., 1710.03740,
    figure 3). Biases count as weights. What a half model computes is counted as it is: give the fp32 model.

    Args:
        model: a model in train mode as it will be trained, on its device.
        batches: tensors, tuples of positional inputs or mappings of keyword inputs. With a loss, the last entry of a tuple is
            its target, and of a mapping the whole of it is.
        loss: `(output, target) -> scalar`; None for the mean square of all outputs.
        steps: how many batches to read.
        optimizer: `(parameters) -> optimizer`, which trains a copy between the batches; None keeps the weights as they are.

    Raises:
        SettingError: no batch, a batch without a target, or a loss that is not one floating number.
        ModelError: the model does not run on a batch, or nothing in it has a gradient.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise SettingError(f"histograms(steps=...): wanted a whole number >= 1, got {steps!r}")
    model = copy.deepcopy(model)
    collector, seen = Collector(model), 0
    made = None if optimizer is None else optimizer(model.parameters())
    with torch.random.fork_rng(list({p.device for p in model.parameters() if p.is_cuda})):  # dropout draws numbers
        for batch in itertools.islice(batches, steps):
            args, kwargs, target = split_batch(batch, has_target=loss is not None)
            if made is not None or not seen:
                collector.add_parameters_(WEIGHTS, model.named_parameters())
            model.zero_grad()
            with collector.watching():
                chosen = None if loss is None else partial(_with_target, loss, target)
                scalar_loss(model, args, kwargs, chosen, "histograms").backward()  # type: ignore[no-untyped-call]
            grads = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            collector.add_parameters_(WEIGHT_GRADIENTS, grads)
            if made is not None:
                made.step()
            seen += 1
    if not seen:
        raise SettingError("histograms(batches=...): there is no batch in it")
    return collector.result(seen)


def _with_target(loss: Callable[[Any, Any], Tensor], target: Any, output: Any) -> Tensor:
    return loss(output, target)


def split_batch(batch: Any, *, has_target: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional inputs, keyword inputs and target of a batch.

    A mapping holds keyword inputs, and is the target itself; a tuple or list holds positional ones and, with `has_target`, the
    target last; else there is one input.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    if not has_target:
        return args, {}, None
    if len(args) < 2:
        raise SettingError(f"batches: with a loss, wanted (inputs..., target) or a mapping, got {type(batch).__name__}")
    return args[:-1], {}, args[-1]


def scalar_loss(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None, where: str
) -> Tensor:
    """The loss of a model's output: a scalar that depends on its parameters; None takes the mean square of all outputs.

    Raises ModelError where the model does not run or has no gradients, SettingError for a loss of another kind; both messages
    begin with `where`.
    """
    try:
        output = model(*args, **kwargs)
    except Exception as error:
        raise ModelError(f"{where}: {type(model).__name__} does not run on the example: {error}; give it as one batch") from error
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{where}: {_NO_GRADIENTS}")
    return output_loss(output, loss, where)


_NO_GRADIENTS = "no output depends on a parameter with requires_grad; there are no gradients to look at"


def output_loss(output: Any, loss: Callable[[Any], Tensor] | None, where: str) -> Tensor:
    """The loss of an output; None takes the mean square of all outputs. Raises as `scalar_loss`."""
    leaves = [o for o in pytree.tree_leaves(output) if isinstance(o, Tensor) and o.requires_grad]
    if not leaves:
        raise ModelError(f"{where}: {_NO_GRADIENTS}")
    if loss is None:
        return torch.stack([o.float().square().mean() for o in leaves]).sum()
    try:
        total: Any = loss(output)
    except Exception as error:
        raise SettingError(f"{where}: loss fails on the model's output: {error}") from error
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
        got = f"{total.dtype} {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise SettingError(f"{where}: loss must return one floating number that depends on the output, got {got}")
    return total
