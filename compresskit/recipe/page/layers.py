"""Charts and rows of a report by layer: channels, zeros, quantization noise, what stays float, and milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compresskit.measure.charts import Chart, Series, draw

FEWEST_ZEROS = 0.005  # fraction of a layer's values from which zeros are drawn
LEAST_TIME = 0.0005  # milliseconds that are shown as more than nothing
SLOWEST = 12  # layers of a file whose milliseconds a page lists
Details = Mapping[str, Mapping[str, Any]]  # stage -> its details.json
Times = Mapping[str, Mapping[str, Any]]  # stage -> where its latency goes, see `compresskit.recipe.details.layer_times`


def layer_charts(details: Details) -> list[Chart]:
    """Output channels, zeros and SQNR of each layer, a line for each stage; layers in the order of the model."""
    charts = []
    channels = _series(details, _layers, lambda layer: layer["shape"][0])
    if channels:
        charts.append(_chart("Channels by layer", "output channels", channels))
    zeros = _series(details, _layers, _zero_fraction)
    if any(y >= FEWEST_ZEROS for one in zeros for _, y in one.points):
        charts.append(_chart("Zeros by layer", "fraction of the weights that is 0", zeros))
    noise = _series(details, _noisy_layers, lambda layer: layer.get("sqnr"))
    if noise:
        charts.append(_chart("Quantization noise by layer", "SQNR, dB; larger is better", noise))
    return charts


def layer_rows(details: Details) -> list[list[str]]:
    """A row for each layer of the last stage: its name, shape, zeros, how it runs and its noise."""
    if not details:
        return []
    last = list(details.values())[-1]
    noise = {str(layer.get("layer")): layer for layer in _noisy_layers(last)}
    rows = []
    for layer in _layers(last):
        name = str(layer.get("name"))
        found = noise.get(name, {})
        sqnr = found.get("sqnr")
        shape = " x ".join(map(str, layer["shape"]))
        rows.append(
            [name, shape, f"{_zero_fraction(layer):.1%}", str(found.get("runs", "")), f"{sqnr:.1f}" if _is_figure(sqnr) else ""]
        )
    return rows


def floating_layers(details: Details) -> list[str]:
    """A sentence for each layer that a quantized stage left float, with the reason."""
    return [
        f"{stage}: {layer.get('layer')}: {layer['runs']}"
        for stage, found in details.items()
        for layer in _noisy_layers(found)
        if isinstance(layer.get("runs"), str) and layer["runs"].startswith("float")
    ]


def named_times(times: Times, details: Details) -> Times:
    """The times with the dotted names of layers; the file of a quantized model calls `layer1.0` layer1_0."""
    dotted = {name.replace(".", "_"): name for entry in details.values() for name in map(_layer_name, _layers(entry))}
    return {
        stage: {**entry, "layers": [{**t, "name": dotted.get(_layer_name(t), _layer_name(t))} for t in _timed_layers(entry)]}
        for stage, entry in times.items()
    }


def time_charts(times: Times) -> list[Chart]:
    """Milliseconds of each layer, a line for each stage; empty where they are not known."""
    found = _series(times, _timed_layers, lambda layer: layer["milliseconds"])
    return [_chart("Milliseconds by layer", "milliseconds for one sample", found)] if found else []


def time_rows(times: Times) -> list[list[str]]:
    """Where the last file's latency goes: a row for each slow layer, with ms, share, conversions, in integers; then the rest."""
    if not times:
        return []
    entry = list(times.values())[-1]
    layers, whole = _timed_layers(entry), entry.get("milliseconds", 0)
    if not layers or not _is_figure(whole) or whole <= 0:
        return []
    slowest = sorted(layers, key=lambda layer: -layer["milliseconds"])[:SLOWEST]
    rows = []
    for layer in slowest:
        conversions = layer.get("conversions")
        shown = f"{conversions:.3f}" if _is_figure(conversions) and conversions else ""
        time = layer["milliseconds"]
        rows.append([_layer_name(layer), f"{time:.3f}", f"{time / whole:.0%}", shown, str(layer.get("in_integers", ""))])
    outside = entry.get("outside")
    others = sum(layer["milliseconds"] for layer in layers) - sum(layer["milliseconds"] for layer in slowest)
    ends = [("all other layers", others), ("outside of layers: calling the runtime", outside if _is_figure(outside) else 0.0)]
    return rows + [[name, f"{time:.3f}", f"{time / whole:.0%}", "", ""] for name, time in ends if time >= LEAST_TIME]


def _timed_layers(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = entry.get("layers")
    if not isinstance(found, list):
        return []
    return [layer for layer in found if isinstance(layer, dict) and _is_figure(layer.get("milliseconds"))]


def _chart(title: str, axis: str, series: list[Series]) -> Chart:
    return draw(title, "layer, in the order of the model", axis, series, lines=True)


def _series(
    details: Details, layers: Callable[[Mapping[str, Any]], list[Mapping[str, Any]]], value: Callable[[Mapping[str, Any]], Any]
) -> list[Series]:
    found = []
    for stage, entry in details.items():
        points = [(float(i), value(layer), _layer_name(layer)) for i, layer in enumerate(layers(entry), 1)]
        points = [point for point in points if _is_figure(point[1])]
        if points:
            found.append(Series(stage, [(x, float(y)) for x, y, _ in points], [f"{stage}, {name}" for *_, name in points]))
    return found


def _layer_name(layer: Mapping[str, Any]) -> str:
    return str(layer.get("name", layer.get("layer", "layer")))


def _zero_fraction(layer: Mapping[str, Any]) -> float:
    count = 1
    for size in layer["shape"]:
        count *= size
    return float(layer.get("zeros", 0)) / max(1, count)


def _layers(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The layers of a stage, as far as they are whole."""
    found = entry.get("layers")
    return [layer for layer in found if _is_whole(layer)] if isinstance(found, list) else []


def _is_whole(layer: Any) -> bool:
    if not isinstance(layer, dict) or not _is_figure(layer.get("zeros", 0)):
        return False
    shape = layer.get("shape")
    return isinstance(shape, list) and bool(shape) and all(isinstance(size, int) and size >= 0 for size in shape)


def _noisy_layers(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    noise = entry.get("noise")
    found = noise.get("layers") if isinstance(noise, dict) else None
    return [layer for layer in found if isinstance(layer, dict)] if isinstance(found, list) else []


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
