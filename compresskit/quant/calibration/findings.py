"""Say in words why a quantized model loses accuracy: outliers, channels of different size, dead channels, coarse weights.

An activation has one scale for all of its values. The share of that range which most values use, and which the middle channel
uses, tells what the scale was spent on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compresskit.quant.numerics.quantizers import ActivationQuantizer

OUTLIERS = 8.0  # times that the range is wider than 99.9 % of the values
UNEVEN = 16.0  # times that the range is wider than the values of the middle channel
MOST = 0.999  # of the values
LOW_DECIBELS = 25.0  # of a layer's weights or input alone, below which it is named
NAMED = 3  # layers that are named for their noise


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of rounding errors.

    layer: dotted name of the module, or of the value. cause: "outliers", "uneven channels", "dead channels", "weights" or
        "activations". text: what was measured. remedy: what to try.
    """

    layer: str
    cause: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.text}; {self.remedy}"


class ActivationSpread:
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


def noisy_layers(rows: list[tuple[str, float | None, float | None]]) -> list[Finding]:
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
