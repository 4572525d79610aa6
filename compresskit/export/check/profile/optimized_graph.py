"""The graph of an ONNX file and what ONNX Runtime makes of it: integer kernels, fused graphs, shapes, multiply-accumulates."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compresskit.base.errors import ExportError, runtime_message
from compresskit.measure import runtime_path

#: ONNX Runtime's integer kernels, and the operator that each replaces.
INTEGER_KERNELS = {
    "QLinearConv": "Conv",
    "ConvInteger": "Conv",
    "QGemm": "Gemm",
    "QLinearMatMul": "MatMul",
    "MatMulInteger": "MatMul",
    "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
    "QLinearAdd": "Add",
    "QLinearMul": "Mul",
    "QLinearConcat": "Concat",
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "QLinearSigmoid": "Sigmoid",
    "QLinearLeakyRelu": "LeakyRelu",
    "QLinearSoftmax": "Softmax",
    "DynamicQuantizeLSTM": "LSTM",
}
#: Operators that run on any type; they count as integer where their input is 8 bits wide.
ANY_TYPE = frozenset(
    "MaxPool Concat Reshape Transpose Slice Pad Flatten Split Gather Squeeze Unsqueeze Expand Resize DepthToSpace SpaceToDepth"
    " Identity Tile Clip".split()
)
#: Index of the weight among the inputs, for float and integer kernels.
WEIGHT = {
    "DynamicQuantizeMatMul": 1,
    "Conv": 1,
    "FusedConv": 1,
    "NhwcFusedConv": 1,
    "DeformConv": 1,
    "Gemm": 1,
    "FusedGemm": 1,
    "MatMul": 1,
    "FusedMatMul": 1,
    "ConvTranspose": 1,
}
WEIGHT |= {"QLinearConv": 3, "QGemm": 3, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1, "ConvInteger": 1, "MatMulInteger": 1}
RECURRENT_OPERATORS = frozenset({"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"})
FUSED = {"FusedConv": "Conv", "NhwcFusedConv": "Conv", "FusedGemm": "Gemm", "FusedMatMul": "MatMul", "MatMulNBits": "MatMul"}


def all_nodes(graph: Any) -> Iterator[Any]:
    """Every operator of a graph, those inside its operators (If, Loop) included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from all_nodes(inner)


def all_graphs(graph: Any) -> Iterator[Any]:
    """The graph and those inside its operators."""
    yield graph
    for node in all_nodes(graph):
        for attribute in node.attribute:
            yield from (inner for inner in (attribute.g, *attribute.graphs) if inner.node)


def optimized_model(path: str | Path) -> Any:
    """A file after ONNX Runtime's fusions, before it chooses memory layouts for this machine."""
    import onnx
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        # Weights in another file: a file past 2 GB could not be written otherwise, and only the shapes of the weights are read.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        try:
            ort.InferenceSession(runtime_path(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportError(f"{path}: ONNX Runtime cannot load it: {runtime_message(error)}") from error
        return onnx.load(options.optimized_model_filepath, load_external_data=False)


def narrow_values(graph: Any, types: tuple[int, ...]) -> set[str]:
    """Names of values that are 8 bits wide."""
    names = {v.name for g in all_graphs(graph) for v in g.value_info if v.type.tensor_type.elem_type in types}
    for node in all_nodes(graph):
        integer = node.op_type == "QuantizeLinear" or node.op_type.startswith("QLinear")
        if integer or (node.op_type in ANY_TYPE and node.input[0] in names):
            names.update(node.output)
    return names


def fix_dimensions_(graph: Any, size: int, names: Mapping[str, int] | None = None) -> tuple[int, dict[str, int]]:
    """Set the dimensions of the inputs that vary to numbers: 1 for the first of each, `size` for others, or what `names` says.

    Other values get the numbers of dimensions with the same name, and lose the dimensions that are computed from them.

    Returns:
        The first dimension of the first input, and a number for the name of each dimension.
    """
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [v for v in graph.input if v.name not in stored]
    numbers = dict(names or {})
    for value in inputs:
        for i, d in enumerate(value.type.tensor_type.shape.dim):
            if not d.HasField("dim_value"):
                d.dim_value = numbers.setdefault(d.dim_param, size if i else 1) if d.dim_param else size if i else 1
    for inner in all_graphs(graph):
        for value in (*inner.value_info, *inner.output):
            for d in value.type.tensor_type.shape.dim:
                if d.dim_param in numbers:
                    d.dim_value = numbers[d.dim_param]
                elif not d.HasField("dim_value"):
                    d.Clear()
    first = [d.dim_value for value in inputs[:1] for d in value.type.tensor_type.shape.dim]
    return max(first[0], 1) if first else 1, numbers


def inferred_graph(model: Any) -> Any:
    """The graph of a file with the shapes and types of its values, as far as onnx knows them."""
    import onnx

    return onnx.shape_inference.infer_shapes(model, data_prop=True).graph


def value_shapes(graph: Any) -> dict[str, list[int]]:
    """Value name -> shape, where every size is known, of an inferred graph."""
    values = (v for inner in all_graphs(graph) for v in (*inner.value_info, *inner.output, *inner.input))
    kinds = ((v.name, v.type.tensor_type) for v in values if v.type.tensor_type.HasField("shape"))
    return {name: [d.dim_value for d in kind.shape.dim] for name, kind in kinds if all(d.dim_value for d in kind.shape.dim)}


def value_types(graph: Any) -> dict[str, str]:
    """Value name -> name of its elements' type, such as "UINT8", where it is known, of an inferred graph; constants included."""
    import onnx

    kind, graphs = onnx.TensorProto.DataType.Name, list(all_graphs(graph))
    stored = {tensor.name: kind(tensor.data_type) for inner in graphs for tensor in inner.initializer}
    values = (v for inner in graphs for v in (*inner.value_info, *inner.output, *inner.input))
    return {v.name: kind(v.type.tensor_type.elem_type) for v in values if v.type.tensor_type.elem_type} | stored


def constant_shapes(graph: Any) -> dict[str, list[int]]:
    """Shapes of all constants, also behind DequantizeLinear, Cast, Transpose, and what decodes integers (Sub, Mul)."""
    shapes = {i.name: list(i.dims) for inner in all_graphs(graph) for i in inner.initializer}
    for node in all_nodes(graph):
        shape = shapes.get(node.input[0]) if node.input else None
        if shape is None:
            continue
        decodes = node.op_type in ("Sub", "Mul") and all(name in shapes for name in node.input)
        if decodes or node.op_type in ("DequantizeLinear", "Cast", "Identity"):
            shapes[node.output[0]] = shape
        elif node.op_type == "Transpose":
            order = next((list(a.ints) for a in node.attribute if a.name == "perm"), list(range(len(shape)))[::-1])
            shapes[node.output[0]] = [shape[i] for i in order]
    return shapes


def node_macs(node: Any, weights: dict[str, list[int]], shapes: dict[str, list[int]], size: int) -> int:
    """Multiply-accumulates for the whole batch of a convolution or matrix product by a constant, else 0."""
    if node.op_type == "MatMulNBits":  # weights in integers, products in float; stored packed
        sizes = {a.name: a.i for a in node.attribute}
        return sizes["K"] * sizes["N"] * _row_count(node, shapes)
    if node.op_type in RECURRENT_OPERATORS:  # every matrix once for each step
        steps, batch = (shapes.get(node.input[0]) or [size, 1])[:2]
        return steps * batch * sum(math.prod(weights.get(name, [0])) for name in node.input[1:3])
    place = WEIGHT.get(node.op_type)
    weight = None if place is None or len(node.input) <= place else weights.get(node.input[place])
    if weight is None:
        return 0
    if "Conv" in node.op_type:
        read = node.op_type == "ConvTranspose"  # it multiplies each value that it reads, others each that they write
        out = shapes.get(node.input[0] if read else node.output[0], [0])
        return math.prod(weight) * out[0] * math.prod(out[2:])
    return math.prod(weight[-2:]) * _row_count(node, shapes)


def _row_count(node: Any, shapes: dict[str, list[int]]) -> int:
    """Number of rows that a matrix product takes or, with a batch of matrices, gives; 0 where no shape is known."""
    out = shapes.get(node.output[0]) or shapes.get(node.input[0]) or [0, 0]
    return math.prod(out[:-1])
