"""Integers of any width in bit planes: what a runtime unpacks is what was stored, and the file is as small as it says."""

from __future__ import annotations

import doctest

import networks
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.export.check.contents import inspect_onnx
from compresskit.export.rewrite import bit_planes
from compresskit.export.rewrite.few_bits import pack_few_bits
from compresskit.quant import Bits, quantize_static, quantize_weights
from compresskit.quant.weight_only import Palette

RANDOM = np.random.default_rng(0)


def stored(*tensors: np.ndarray) -> ir.Model:
    """A model that returns int8 tensors that it stores."""
    initializers = [onnx.numpy_helper.from_array(tensor, f"t{i}") for i, tensor in enumerate(tensors)]
    nodes = [onnx.helper.make_node("Identity", [f"t{i}"], [f"y{i}"]) for i in range(len(tensors))]
    outputs = [onnx.helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.INT8, t.shape) for i, t in enumerate(tensors)]
    graph = onnx.helper.make_graph(nodes, "g", [], outputs, initializers)
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10))


def returned(model: ir.Model) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    found = []
    for level in (onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 3
        found.append(onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, {}))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    return list(found[0])


def integers(bits: int, *shape: int) -> np.ndarray:
    if bits == 1:
        return (2 * RANDOM.integers(0, 2, shape) - 1).astype(np.int8)
    values = RANDOM.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).astype(np.int8)
    values.flat[0] = -(2 ** (bits - 1))
    return values


@pytest.mark.parametrize("bits", range(1, 7))
def test_every_width_is_stored_exactly(bits) -> None:
    tensors = [integers(bits, 64, 33), integers(bits, 7, 11, 13), integers(bits, 4001)]
    model = stored(*tensors)
    pack_few_bits(model, 18)
    for wanted, got in zip(tensors, returned(model), strict=True):
        assert got.dtype == np.int8
        np.testing.assert_array_equal(got, wanted)
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    values = sum(tensor.size for tensor in tensors)
    assert size <= values * bits / 8 + 200


def test_widths_stand_side_by_side() -> None:
    tensors = [integers(bits, 40, 70) for bits in (3, 5, 1, 6, 3, 7, 4, 5, 8)]
    model = stored(*tensors)
    pack_few_bits(model, 18)
    for wanted, got in zip(tensors, returned(model), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_large_tensors_are_unpacked_in_groups(monkeypatch) -> None:
    monkeypatch.setattr(bit_planes, "MOST_TOGETHER", 3000)
    tensors = [integers(3, 2000), integers(3, 900), integers(3, 5000), integers(3, 100)]
    model = stored(*tensors)
    pack_few_bits(model, 18)
    assert sum(name.startswith("planes") for name in model.graph.initializers) == 3
    for wanted, got in zip(tensors, returned(model), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_what_saves_less_than_it_costs_stays(monkeypatch) -> None:
    model = stored(integers(3, 200), integers(5, 300), integers(8, 5000))
    pack_few_bits(model, 18)
    assert {v.const_value.dtype for v in model.graph.initializers.values()} == {ir.DataType.INT8}
    model = stored(integers(3, 200))
    pack_few_bits(model, 21)
    assert {v.const_value.dtype for v in model.graph.initializers.values()} == {ir.DataType.INT4}


def test_the_narrowest_width() -> None:
    assert doctest.testmod(bit_planes).failed == 0
    assert bit_planes.bits_needed(np.array([0, 0])) == 2
    for bits in range(3, 9):  # one more than fits in a bit less
        assert bit_planes.bits_needed(np.array([0, 2 ** (bits - 2)])) == bits
        assert bit_planes.bits_needed(np.array([-(2 ** (bits - 2)) - 1, 0])) == bits


def test_files_of_odd_widths_run_in_integers_and_say_what_they_store(tmp_path) -> None:
    model, x = build(networks.WideChain), image(16)
    sizes = {}
    for bits in (8, 5, 3):
        quantized = quantize_static(model, [x], bits=Bits(weights=bits))
        path = ck.export_onnx(quantized, tmp_path / f"{bits}.onnx", x)
        assert ck.verify_onnx(path, quantized, [x, image(7)]).passed
        assert ck.audit(path).integer_fraction == 1.0
        sizes[bits] = path.stat().st_size
        rows = {layer.weight: layer for layer in inspect_onnx(path).layers}
        assert rows["weight_b_0_weight"].dtype == f"int{bits}"
        assert rows["weight_b_0_weight"].shape == (64, 32, 3, 3)
        assert rows["weight_b_0_weight"].scales == 64
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    for bits in (5, 3):
        assert sizes[bits] <= sizes[8] - weights * (8 - bits) // 8 + 1000


def test_the_lowest_opset_stores_plain_int8(tmp_path) -> None:
    quantized = quantize_static(build(networks.WideChain), [image(16)], bits=Bits(weights=3))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", image(2), opset="lowest")
    file = onnx.load(path)
    assert file.opset_import[0].version == 13
    assert "GreaterOrEqual" not in {node.op_type for node in file.graph.node}
    assert ck.verify_onnx(path, quantized, [image(3)]).passed


def test_planes_of_an_older_file_run_in_the_kernels_of_8_bits(tmp_path) -> None:
    torch.manual_seed(0)
    quantized = quantize_static(build(networks.WideChain), [image(16)], bits=Bits(weights=2))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", image(2), opset=18)
    assert "GreaterOrEqual" in {node.op_type for node in onnx.load(path).graph.node}
    assert ck.audit(path).integer_fraction == 1.0
    assert ck.verify_onnx(path, quantized, [image(3)]).passed


def shifted(file: onnx.ModelProto) -> onnx.ModelProto:
    """The file as earlier versions wrote its bit planes."""
    makers = {name: node for node in file.graph.node for name in node.output}
    readers = {name: node for node in file.graph.node for name in node.input}
    one, places = np.uint8(1), np.arange(8, dtype=np.uint8)
    file.graph.initializer.extend([onnx.numpy_helper.from_array(one, "one"), onnx.numpy_helper.from_array(places, "places")])
    for node in [node for node in file.graph.node if node.op_type == "Mod"]:
        early, compared = makers[node.input[0]], readers[node.output[0]]
        early.CopyFrom(onnx.helper.make_node("BitShift", [early.input[0], "places"], early.output, direction="RIGHT"))
        readers[compared.output[0]].input[0] = node.output[0]
        node.CopyFrom(onnx.helper.make_node("BitwiseAnd", [node.input[0], "one"], node.output))
        file.graph.node.remove(compared)
    onnx.checker.check_model(file, full_check=True)
    return file


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_planes_of_earlier_files_are_known(bits, tmp_path) -> None:
    """A BitShift takes the bits apart there."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 190), torch.nn.ReLU(), torch.nn.Linear(190, 70)).eval()
    x = torch.randn(5, 40)
    quantized = quantize_weights(model, x, scheme=Palette(bits=bits))
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    before = onnx.load(path)
    assert "BitShift" not in {node.op_type for node in before.graph.node}
    onnx.save(shifted(before), early := tmp_path / "early.onnx")
    assert ck.verify_onnx(early, quantized, [x]).passed
    rows, wanted = inspect_onnx(early).layers, inspect_onnx(path).layers
    assert [layer.dtype for layer in rows] == [f"int{bits} palette"] * 2
    assert rows == wanted
