"""More bits for the layers whose weights make most of the noise."""

from __future__ import annotations

from dataclasses import replace

from compresskit.base.task import Inputs
from compresskit.quant.calibration.layer_outputs import integer_layers
from compresskit.quant.calibration.rounding_noise import rounding_noise
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.bit_widths import Bits, bits_of_layer

WIDEST = 8


def widened_bits(quantized: Quantized, inputs: Inputs, share: float) -> tuple[dict[str, Bits], list[str]]:
    """Give 8 bits to the layers that make most of the noise which rounding weights to fewer bits adds to the outputs.

    Args:
        quantized: a calibrated model. inputs: a batch to estimate the noise on.
        share: of that noise, in 0..1, that is to go.

    Returns the bits of the whole model for `bits=`, and the dotted names of the layers that were widened, the noisiest first.
    """
    noise, paths = rounding_noise(quantized, inputs), quantized.placement.layers
    narrow: dict[str, float] = {}
    for layer in integer_layers(quantized):
        if layer.quantizer.scheme.bits < WIDEST:
            path = paths[layer.node.name]
            narrow[path] = narrow.get(path, 0.0) + noise.get(layer.node, 0.0)
    total, names, gone = sum(narrow.values()), list[str](), 0.0
    for path in sorted(narrow, key=lambda name: -narrow[name]):
        if gone >= share * total:
            break
        names.append(path)
        gone += narrow[path]
    bits = quantized.origin.bits
    given = {"": bits} if isinstance(bits, Bits) else dict(bits)
    return given | {path: replace(bits_of_layer(bits, path), weights=WIDEST) for path in names}, names
