"""Oscillations of weights in training with few bits (Nagel et al., arXiv 2203.11086): damp them, or freeze what oscillates.

A weight near the middle of two steps is rounded up and down in turn. BatchNorm statistics then never belong to the weights, and
the last of many states is not the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compresskit.base.errors import CheckpointError, SettingError
from compresskit.base.objective import Losses, LossFunction, Objective, Wrapper, as_objective
from compresskit.base.settings import check_field_types
from compresskit.base.task import Task
from compresskit.graph.surgery import get_tensor
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.scheme import channelwise
from compresskit.quant.passes.unfold_batchnorm import UnfoldedLayer

LEAST_FACTOR = 1e-8  # of BatchNorm, below which a weight is not written back through it


@dataclass(frozen=True, kw_only=True)
class Oscillations:
    """What is done about weights that oscillate between two steps; by default nothing.

    damping: weight of a loss that draws weights to the middle of their step, at the end of the training; it rises from 0 along a
        cosine. The paper's values are 1e-4 to 1e-2.
    freezing: frequency of oscillations, per training step, above which a weight is fixed to its mean step, such as 0.02; None
        for never.
    momentum: of the moving averages of frequencies and steps.

    Raises SettingError for settings out of range.
    """

    damping: float = 0.0
    freezing: float | None = None
    momentum: float = 0.01

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.damping < 0:
            raise SettingError(f"Oscillations(damping=...): wanted a number >= 0, got {self.damping}")
        if self.freezing is not None and not 0 < self.freezing < 1:
            raise SettingError(f"Oscillations(freezing=...): wanted a frequency between 0 and 1, got {self.freezing}")
        if not 0 < self.momentum <= 1:
            raise SettingError(f"Oscillations(momentum=...): wanted a number in (0, 1], got {self.momentum}")


@dataclass(frozen=True)
class LatentWeight:
    """A parameter that is rounded while it is trained: `quantizer` gets `parameter` times `factor`.

    factor: of the BatchNorm and the scales around the layer, of as many dimensions as the weight, or None.
    """

    name: str
    quantizer: WeightQuantizer
    parameter: Tensor
    factor: Tensor | None

    def rounded_value(self) -> Tensor:
        """The tensor that is rounded; gradients reach the parameter alone."""
        if self.factor is None:
            return self.parameter.float()
        return self.parameter.float() * self.factor

    def write_(self, value: Tensor, where: Tensor) -> None:
        """Set the parameter such that the rounded tensor has these values where a mask is True."""
        if self.factor is not None:
            able = self.factor.abs() > LEAST_FACTOR
            value = value / torch.where(able, self.factor, 1.0)
            where = where & able
        self.parameter.copy_(torch.where(where, value.to(self.parameter.dtype), self.parameter))


def latent_weights(quantized: Quantized) -> Iterator[LatentWeight]:
    """Every weight of a model in training that is rounded, once."""
    seen: set[int] = set()
    for node in quantized.body.graph.nodes:
        module = quantized.body.get_submodule(node.target) if node.op == "call_module" else None
        name, factor, quantizer = None, None, None
        if isinstance(module, WeightQuantizer):
            name, quantizer = str(node.args[0].target), module
        elif isinstance(module, UnfoldedLayer) and (found := module.rounding_of(node)[0]) is not None:
            name, quantizer, factor = str(node.args[1].target), found, module.scaling_at(quantized.body, node)
        if name is not None and quantizer is not None and id(quantizer) not in seen:
            seen.add(id(quantizer))
            yield LatentWeight(name, quantizer, get_tensor(quantized.body, name), factor)


def damping_loss(quantized: Quantized) -> Tensor:
    """Sum of (w - round(w))^2 over the weights inside their range, a scalar; its gradient draws weights to their step."""
    total = torch.zeros((), device=next(quantized.parameters()).device)
    for weight in latent_weights(quantized):
        quantizer, value = weight.quantizer, weight.rounded_value()
        scale = channelwise(quantizer.qparams(value.detach())[0].detach(), value, quantizer.axis)
        steps = quantizer.steps(value.detach(), scale.reshape(-1) if scale.ndim else scale)
        inside = torch.minimum(torch.maximum(value, quantizer.scheme.low * scale), quantizer.scheme.high * scale)
        total = total + (inside - steps * scale).square().sum()
    return total


@dataclass(frozen=True, kw_only=True)
class Damped(Wrapper):
    """An objective with `damping_loss` added, which rises from 0 to `damping` along a cosine."""

    objective: Objective
    quantized: Quantized
    damping: float
    done: list[float]

    def bind(self, model: Any, task: Task) -> Damped:
        """Bind the inner objective."""
        return replace(self, objective=self.objective.bind(model, task))

    def __call__(self, model: Callable[..., Any], batch: Any) -> Losses:
        losses = self.objective(model, batch)
        strength = self.damping * (1 - math.cos(math.pi * self.done[0])) / 2
        return {**losses, "oscillations": strength * damping_loss(self.quantized)}

    def advance(self, done: float) -> None:
        """Set the fraction of the training that is done, which the strength follows."""
        self.done[0] = done
        self.objective.advance(done)


def damped(objective: Objective | LossFunction, quantized: Quantized, damping: float) -> Damped:
    """Return an objective with `damping` times `damping_loss` added at the end of the training, less before."""
    return Damped(objective=as_objective(objective), quantized=quantized, damping=damping, done=[0.0])


class FreezeOscillating:
    """Fixes weights that oscillate too often to their mean step (section 4.3 of the paper); `step_` after each optimizer step.

    quantized: a model in training, of `prepare_qat`.
    threshold: frequency of oscillations, per step, above which a weight is fixed.
    momentum: of the moving averages.

    An oscillation is a change of the rounded integer in the direction opposite to its last change.
    """

    def __init__(self, quantized: Quantized, threshold: float, momentum: float = 0.01) -> None:
        self.quantized, self.threshold, self.momentum = quantized, threshold, momentum
        self.states: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step_(self) -> None:
        """Take note of what changed, fix what oscillates, and hold what is fixed."""
        for weight in latent_weights(self.quantized):
            value = weight.rounded_value()
            scale = weight.quantizer.qparams(value)[0].detach()
            steps = weight.quantizer.steps(value, scale)
            if weight.name not in self.states:
                self.states[weight.name] = _first_state(steps)
                continue
            state = self.states[weight.name]
            _follow_(state, steps, self.momentum)
            fresh = (state["frequency"] > self.threshold) & ~state["frozen"]
            state["fixed"] = torch.where(fresh, state["mean"].round(), state["fixed"])
            state["frozen"] = state["frozen"] | fresh
            if bool(state["frozen"].any()):
                weight.write_(state["fixed"] * channelwise(scale, value, weight.quantizer.axis), state["frozen"])

    def fraction(self) -> float:
        """The fraction of all weights that is fixed."""
        counts = [(int(state["frozen"].sum()), state["frozen"].numel()) for state in self.states.values()]
        return sum(frozen for frozen, _ in counts) / max(1, sum(size for _, size in counts))

    def resume_state(self) -> Any:
        """State of all weights, for a checkpoint."""
        return {name: dict(state) for name, state in self.states.items()}

    def resume_from_(self, state: Any) -> None:
        """Restore what `resume_state` returned."""
        known = {weight.name: weight.parameter for weight in latent_weights(self.quantized)}
        if wrong := [name for name in state if name not in known or known[name].shape != state[name]["frozen"].shape]:
            raise CheckpointError(f"oscillations: the state of {wrong[0]!r} belongs to another model")
        self.states = {name: {key: value.to(known[name].device) for key, value in of.items()} for name, of in state.items()}


def _first_state(steps: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros_like(steps)
    names = ("direction", "frequency", "fixed")
    frozen = torch.zeros_like(steps, dtype=torch.bool)
    return {"steps": steps, "mean": steps.clone(), "frozen": frozen, **{name: zeros.clone() for name in names}}


def _follow_(state: dict[str, Tensor], steps: Tensor, momentum: float) -> None:
    """Update the moving averages with new steps."""
    change = (steps - state["steps"]).sign()
    moved = change != 0
    oscillated = moved & (change == -state["direction"])
    state["frequency"] = state["frequency"].lerp(oscillated.float(), momentum)
    state["mean"] = state["mean"].lerp(steps, momentum)
    state["direction"] = torch.where(moved, change, state["direction"])
    state["steps"] = steps
