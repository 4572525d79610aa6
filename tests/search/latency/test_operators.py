"""Nodes of optimized graphs as operators: their work, bytes, and what tells their kernels apart."""

from __future__ import annotations

import json

import pytest
from onnx import helper

from compresskit.export.check.profile.kernels import Kernel
from compresskit.search.latency.operators import Operator, operator_of


def made_of(kind, reads, written, stored, *, seen=None, **attributes) -> Operator:
    """A node with inputs of these shapes. stored: names of constants. seen: inputs that the profiler shows."""
    node = helper.make_node(kind, list(reads), ["y"], **attributes)
    typed = {name: ("float", shape) for name, shape in reads.items()}
    kernel = Kernel(kind, tuple(typed[name] for name in seen or reads), (("float", written),))
    return operator_of(node, kernel, {name: typed[name] for name in stored})


@pytest.mark.parametrize(
    ("made", "macs"),
    [
        (
            made_of("ConvTranspose", {"x": (2, 8, 5, 5), "w": (8, 3, 2, 2)}, (2, 3, 10, 10), "w", strides=[2, 2]),
            2 * 25 * 8 * 3 * 4,
        ),
        (made_of("Conv", {"x": (2, 8, 5, 5), "w": (16, 4, 3, 3)}, (2, 16, 5, 5), "w", group=2), 2 * 25 * 16 * 4 * 9),
        (made_of("MatMulNBits", {"x": (1, 4, 32), "w": (16, 1, 16)}, (1, 4, 16), "w"), 4 * 32 * 16),
        (made_of("LSTM", {"x": (7, 2, 6), "w": (1, 20, 6), "r": (1, 20, 5)}, (7, 1, 2, 5), "wr"), 7 * 2 * 20 * (6 + 5)),
        (made_of("Relu", {"x": (2, 8)}, (2, 8), ""), 0),
    ],
)
def test_the_work_of_an_operator(made, macs) -> None:
    assert made.macs == macs


@pytest.mark.parametrize(
    ("kind", "macs"), [("DeformConv", 36 * 4 * 27), ("NhwcFusedConv", 36 * 4 * 27), ("ConvOfAnotherRuntime", 0)]
)
def test_a_convolution_of_any_name_is_an_operator(kind, macs) -> None:
    made = made_of(kind, {"x": (1, 3, 8, 8), "w": (4, 3, 3, 3), "o": (1, 18, 6, 6)}, (1, 4, 6, 6), "w")
    assert (made.stored, made.macs) == (4 * 4 * 27, macs)


def test_grouped_convolutions_are_aligned_by_all_channels_that_they_read() -> None:
    made = made_of("Conv", {"x": (1, 16, 5, 5), "w": (24, 2, 3, 3)}, (1, 24, 5, 5), "w", group=8)
    assert (made.kind, made.alignment) == ("Conv float grouped", (16, 8))


@pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [("Conv", (1, 8, 5, 6), {}), ("Conv", (1, 5, 6, 8), {"channels_last": 1}), ("NhwcFusedConv", (1, 5, 6, 8), {})],
)
def test_positions_of_an_image_are_told_in_either_layout(kind, shape, settings) -> None:
    made = made_of(kind, {"x": shape, "w": (8, 8, 3, 3)}, shape, "w", **settings)
    assert [5, 6] in json.loads(made.form)


@pytest.mark.parametrize("seen", ["xwbz", "xbz"])
def test_what_a_layer_adds_is_found_whether_or_not_its_weight_was_packed(seen) -> None:
    shapes = {"x": (1, 8, 5, 5), "w": (4, 8, 1, 1), "b": (4,), "z": (1, 4, 5, 5)}
    made = made_of("FusedConv", shapes, (1, 4, 5, 5), "wb", seen=seen)
    assert (made.read, made.stored) == (4 * (8 * 25 + 4 * 25), 4 * (32 + 4))
