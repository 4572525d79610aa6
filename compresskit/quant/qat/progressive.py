"""Progressive bits: training passes wider formats before the last ones (Zhuang et al., arXiv 1711.00205)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from compresskit.base.errors import SettingError
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import ActivationQuantizer, WeightQuantizer
from compresskit.quant.numerics.scheme import Scheme

PASSED = 0.5  # fraction of the training in which the wider formats are passed


def check_progressive(widths: object, where: str) -> None:
    """Raise SettingError, which begins with `where`, for anything but falling whole numbers of 2 to 8."""
    good = isinstance(widths, tuple) and all(type(width) is int and 2 <= width <= 8 for width in widths)
    if not good or list(widths) != sorted(set(widths), reverse=True):  # type: ignore[call-overload]
        raise SettingError(f"{where}(progressive=...): wanted falling whole numbers of 2..8, such as (8, 4), got {widths!r}")


class ProgressiveBits:
    """Gives the quantizers of a model in training more bits than their last, fewer in turn; `step_` after each optimizer step.

    quantized: a model in training, of `prepare_qat`.
    widths: bits of weights and activations, falling; each counts for an equal part of the first half of the training. A
        quantizer never has fewer bits than its last.

    Raises SettingError where every quantizer has as many bits already.
    """

    def __init__(self, quantized: Quantized, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        kinds = (ActivationQuantizer, WeightQuantizer)
        self.last: list[tuple[Any, Scheme]] = [(q, q.scheme) for q in quantized.quantizers() if isinstance(q, kinds)]
        least = min(scheme.bits for _, scheme in self.last)
        if least >= max(self.widths):
            raise SettingError(
                f"QAT(progressive={self.widths}): nothing has fewer bits than {max(self.widths)}, the least is {least}; pass"
                " bits= with fewer, or leave progressive out"
            )

    def step_(self, done: float) -> None:
        """Take the formats of a fraction of the training, in [0, 1]; nothing changes between two widths."""
        part = int(done / PASSED * len(self.widths))
        width = self.widths[part] if part < len(self.widths) else 0
        for quantizer, scheme in self.last:
            bits = max(scheme.bits, width)
            if bits != quantizer.scheme.bits:
                _change_(quantizer, scheme if bits == scheme.bits else replace(scheme, bits=bits))

    def resume_state(self) -> list[int]:
        """The bits of all quantizers, for a checkpoint."""
        return [quantizer.scheme.bits for quantizer, _ in self.last]

    def resume_from_(self, state: Any) -> None:
        """Restore what `resume_state` returned; the scales are in the model's own state."""
        for (quantizer, scheme), bits in zip(self.last, state, strict=True):
            quantizer.scheme = replace(scheme, bits=bits)


@torch.no_grad()
def _change_(quantizer: ActivationQuantizer | WeightQuantizer, scheme: Scheme) -> None:
    """Take another format, in place; a learned scale changes as its first value would (1902.08153, section 2.1)."""
    before, quantizer.scheme = quantizer.scheme, scheme
    if quantizer.ratio is not None:
        quantizer.scale.mul_(_first_scale(scheme) / _first_scale(before))
        if isinstance(quantizer, ActivationQuantizer):
            middle = quantizer.zero_point.float() * scheme.high / before.high
            quantizer.zero_point.copy_(middle.round())
    elif isinstance(quantizer, ActivationQuantizer):
        quantizer.freeze_range_()


def _first_scale(scheme: Scheme) -> float:
    """The first value of a learned scale, for values of mean size 1."""
    return 1.0 if scheme.binary else 2 / scheme.high**0.5
