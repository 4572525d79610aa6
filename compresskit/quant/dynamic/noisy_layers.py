"""Find layers of LSTMs whose rounding loses the outputs, and lookups in tables of which it loses columns.

The inputs of an LSTM have one range for all features and steps. Where a few are thousands of times larger than the others, as in
spectrograms that are no logarithms, eight bits over one range leave nothing of the small ones. The layers above read states
between -1 and 1, and lose little. Each row of a table has one range, too, which loses the small of features in their own units.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from compresskit.graph.capture import parameter_name
from compresskit.graph.surgery import get_tensor
from compresskit.quant.dynamic.insert_dynamic import DynamicallyQuantized
from compresskit.quant.effort.samples import LEAST_OF_OUTPUTS, OutputError
from compresskit.quant.measured_placement.uneven_tables import LOSES_COLUMNS, loses_columns, loses_outputs
from compresskit.quant.numerics.dynamic_quantizers import LstmQuantizer

log = logging.getLogger(__name__)

LEAST_OF_LAYER = 1.0  # dB that a layer in float must be worth


def noisy_lstm_layers(
    quantized: DynamicallyQuantized, quality: Callable[[DynamicallyQuantized], float], least: float = LEAST_OF_OUTPUTS
) -> Mapping[str, str]:
    """The layers of LSTMs ("lstm.0") that must stay float for outputs of `least` dB, each with its reason.

    Those go first that are worth most; none where the outputs are as good already. The model is left as it was given.

    quality: the signal-to-noise ratio of a model's outputs in dB.
    """
    layers: dict[str, tuple[LstmQuantizer, int]] = {}
    for node in quantized.body.graph.nodes:
        if node.op == "call_module" and isinstance(lstm := quantized.body.get_submodule(node.target), LstmQuantizer):
            layers |= {f"{node.name}.{i}": (lstm, i) for i in range(node.args[4]) if i not in lstm.floating}
    if not layers or (best := quality(quantized)) >= least:
        return {}
    before = {lstm: lstm.floating for lstm, _ in layers.values()}
    found: dict[str, str] = {}
    while best < least:
        tried = {}
        for name, (lstm, layer) in layers.items():
            if name not in found:
                kept, lstm.floating = lstm.floating, lstm.floating | {layer}
                tried[name] = quality(quantized)
                lstm.floating = kept
        name = max(tried, key=lambda n: tried[n], default="")
        if not name or tried[name] < best + LEAST_OF_LAYER:
            break
        found[name] = (
            f"rounded at run time, the outputs on the example have {best:.1f} dB; with this layer in float {tried[name]:.1f}"
        )
        best = tried[name]
        lstm, layer = layers[name]
        lstm.floating |= {layer}
    for lstm, floating in before.items():
        lstm.floating = floating
    return found


def uneven_lookups(quantized: DynamicallyQuantized, error: OutputError) -> dict[str, str]:
    """The lookups in tables that must stay float, see `measured_placement.uneven_tables`, each with its reason.

    error: of outputs against those of the float model. The quantized model is left as it was given.
    """
    kinds, body = quantized.placement.integer, quantized.body
    lookups = {n.name: str(parameter_name(n.args[0])) for n in body.graph.nodes if kinds.get(n.name) == "embedding"}
    tables = {name: get_tensor(body, name) for name in lookups.values()}
    uneven = {name for name, table in tables.items() if loses_columns(table)}
    if uneven:
        quantized.enable_(False)
        uneven = {name for name in uneven if loses_outputs(tables[name], partial(error.of, quantized))}
        quantized.enable_()
    return {node: LOSES_COLUMNS for node, name in lookups.items() if name in uneven}
