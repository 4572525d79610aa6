"""Predicted placements: the minimum cut, and the graph of layers that it cuts."""

from __future__ import annotations

import itertools
import random

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.export.check.profile.layers import INPUTS, LayerTime, Profile, ProfiledLayer, profile_layers
from compresskit.quant import X86
from compresskit.quant.measured_placement.placement_model import LayerGraph, cheapest_division, layer_graph, predicted_placements
from compresskit.quant.passes.placement import place_quantizers
from compresskit.quant.passes.prepare_graph import prepare_graph


def total(division, integer, floating, edges) -> float:
    layers = sum(integer[i] if i in division else floating[i] for i in range(len(integer)))
    return layers + sum(cost for (a, b), cost in edges.items() if (a in division) != (b in division))


@pytest.mark.parametrize("seed", range(20))
def test_no_division_is_cheaper_than_the_minimum_cut(seed) -> None:
    """Against all divisions of eight layers; -1 is an input in float."""
    draw = random.Random(seed)
    integer, floating = ([draw.random() for _ in range(8)] for _ in range(2))
    edges = {(a, b): draw.random() / 2 for a in range(-1, 8) for b in range(a + 1, 8) if draw.random() < 0.4}
    fixed = draw.sample(range(8), 2)
    free = [i for i in range(8) if i not in fixed]
    every = [set(some) for k in range(7) for some in itertools.combinations(free, k)]
    found = cheapest_division(integer, floating, edges, fixed)
    assert not found & set(fixed)
    best = min(total(division, integer, floating, edges) for division in every)
    assert total(found, integer, floating, edges) == pytest.approx(best)


def test_conversions_keep_neighbours_together() -> None:
    """The middle layer alone would be faster in float by 1 ms; converting to float and back takes more."""
    integer, floating = [1.0, 3.0, 1.0], [4.0, 2.0, 4.0]
    assert cheapest_division(integer, floating, {(0, 1): 0.4, (1, 2): 0.4}) == {0, 2}
    assert cheapest_division(integer, floating, {(0, 1): 0.6, (1, 2): 0.6}) == {0, 1, 2}
    assert cheapest_division(integer, floating, {(-1, 0): 9.0, (0, 1): 9.0, (1, 2): 9.0}) == set()


@pytest.mark.parametrize("kind", [networks.Residual, networks.Depthwise, networks.Tokens])
def test_layers_are_numbered_as_those_of_the_file(kind, tmp_path) -> None:
    captured, _, _ = prepare_graph(build(kind), image(4), X86)
    placement = place_quantizers(captured.module.graph, X86)
    graph = layer_graph(captured.module.graph, placement)
    profile = profile_layers(ck.export_onnx(captured.module, tmp_path / "f.onnx", captured.example), image(1), seconds=0.02)
    places = [layer.place for layer in profile.layers if layer.place is not None]
    assert max(places) < len(graph.members)
    heads = [name for name, cost in placement.costs.items() if cost.parameters]
    assert len(graph.members) == len(heads)
    assert {name for some in graph.members for name in some} <= set(placement.integer)
    pairs = [(start, end) for start, end in graph.sizes if start >= 0]
    assert all(start < end for start, end in pairs)
    assert (-1, 0) in graph.sizes


def profile(times: list[tuple[float, float]], conversions: float = 0.0) -> Profile:
    """Of a file whose layers take so long in integers and in float."""
    rows = [
        ProfiledLayer(name=str(i), place=i, this=LayerTime(milliseconds=a), other=LayerTime(milliseconds=b))
        for i, (a, b) in enumerate(times)
    ]
    first = ProfiledLayer(name=INPUTS, this=LayerTime(milliseconds=conversions, conversions=conversions))
    return Profile(
        path="q", against="f", threads=1, rows=2, milliseconds=1.0, outside=0.0, scale=1.0, layers=(first, *rows)
    )  # fmt: skip


def test_slow_layers_are_predicted_in_float_with_all_that_belongs_to_them() -> None:
    graph = LayerGraph((("conv",), ("conv_1", "add"), ("linear",)), {(-1, 0): 100, (0, 1): 100, (1, 2): 10})
    times = [(1.0, 2.0), (3.0, 1.0), (1.0, 2.0)]
    predictions = list(predicted_placements(graph, profile(times, conversions=0.2)))  # a conversion of 100 values takes 0.2 ms
    assert predictions[0] == ("conv_1", "add")
    assert predictions[-1] == ("conv", "conv_1", "add")  # ten times as much: the inputs are not worth it any more
    assert list(predicted_placements(graph, profile(times[:1] * 5))) == []  # a file with more layers than the graph
    missing = ProfiledLayer(name="x", place=2, this=LayerTime(milliseconds=1.0))
    other = profile(times[:2])
    odd = Profile(**{**vars(other), "layers": (*other.layers, missing)})
    assert list(predicted_placements(graph, odd)) == []


def test_where_all_layers_are_faster_in_float_the_one_that_loses_least_is_left() -> None:
    """A network a quarter as wide was left in integers as a whole, since nothing else was predicted, slower than float."""
    graph = LayerGraph((("conv",), ("conv_1", "add"), ("linear",), ()), {(-1, 0): 100, (0, 1): 100, (1, 2): 10, (2, 3): 1})
    times = [(2.0, 1.0), (3.0, 1.0), (1.1, 1.0), (1.0, 1.0)]
    predictions = list(predicted_placements(graph, profile(times, conversions=0.2)))
    assert set(predictions) == {("conv", "conv_1", "add")}


class ReadTwice(nn.Module):
    """The second layer reads the first, and so does the sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.b(x) + x


def test_one_conversion_serves_all_that_reads_a_value_in_a_layer() -> None:
    captured, _, _ = prepare_graph(ReadTwice().eval(), (torch.randn(4, 3, 8, 8),), X86)
    graph = layer_graph(captured.module.graph, place_quantizers(captured.module.graph, X86))
    assert dict(graph.sizes) == {(-1, 0): 3 * 64, (0, 1): 8 * 64}
