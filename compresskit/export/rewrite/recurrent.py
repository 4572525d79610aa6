"""Recurrent layers of an ONNX graph (onnx-ir): one `compresskit::Recurrent` becomes LSTM, GRU or RNN nodes, one for each layer.

    weights in fp32                     -> LSTM, GRU, RNN
    weights in int8, an LSTM            -> com.microsoft.DynamicQuantizeLSTM, which multiplies in integers
    weights in int8, a GRU or an RNN    -> Cast and Mul, which ONNX Runtime computes once, when it loads the file; then GRU, RNN

Gate order: torch's LSTM has input, forget, cell, output, ONNX's has input, output, forget, cell; torch's GRU has reset, update,
new, ONNX's has update, reset, new. A projected LSTM has no operator in ONNX. With h' = o * tanh(c) before the projection P,

    gates = W x + R (P h') = W x + (R P) h'

is an LSTM of full width, whose outputs are projected behind it (a given first state h is P h' for h' = pinv(P) h).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compresskit.base.errors import ExportError
from compresskit.export.ops.translations import DOMAIN
from compresskit.export.rewrite.common import constant
from compresskit.graph.recurrent import GATES, Cell, recurrent_cells

ORDER = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2], "rnn_tanh": [0], "rnn_relu": [0]}
ONNX_OPERATORS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
RUNTIME = "com.microsoft"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A stored weight: fp32 or fp16 values, or integers with a scale and a zero point, each a scalar or one per row."""

    values: np.ndarray
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None


def write_recurrent(model: ir.Model) -> None:
    """Replace every recurrent layer of a graph with ONNX operators, in place."""
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "Recurrent":
            _Writer(model, node).run()
    model.graph.opset_imports.pop(DOMAIN, None)


class _Writer:
    def __init__(self, model: ir.Model, node: ir.Node) -> None:
        self.model, self.graph, self.node = model, model.graph, node
        self.kind = node.attributes.get_string("kind", "")
        flags = ("has_biases", "layers", "bidirectional", "batch_first", "integer")
        self.has_biases, self.layers, self.both, self.batch_first, self.integer = (node.attributes.get_int(f, 0) for f in flags)
        self.nodes: list[ir.Node] = []
        self.count = 2 if self.both else 1

    def run(self) -> None:
        states = 2 if self.kind == "lstm" else 1
        x, given = self.node.inputs[0], list(self.node.inputs[1 : 1 + states])
        weights = list(self.node.inputs[1 + states :])
        last: list[list[ir.Value]] = [[], []]
        if self.batch_first:
            x = self._add("Transpose", [x], perm=[1, 0, 2])
        layers = recurrent_cells(weights, bool(self.has_biases), self.layers, bool(self.both))
        for i, layer in enumerate(layers):
            projection = self._projection(layer)
            first = [None if _is_zero(v) else self._part(v, i, projection if j == 0 else None) for j, v in enumerate(given)]
            y, *ends = self._layer(x, layer, first)
            if projection is not None:
                turned = self._constant(projection.transpose(0, 2, 1))
                y, ends[0] = self._add("MatMul", [y, turned]), self._add("MatMul", [ends[0], turned])
            # (steps, directions, rows, width) to (steps, rows, directions * width), rows first behind the last layer
            rows_first = self.batch_first and i == len(layers) - 1
            x = self._joined(y, rows_first=bool(rows_first))
            for store, end in zip(last, ends, strict=False):
                store.append(end)
        assert x is not None
        results = [x, *(self._concatenated(values) for values in last if values)]
        self._replace(results)

    def _layer(self, x: ir.Value | None, layer: list[Cell], first: list[ir.Value | None]) -> list[ir.Value]:
        """One layer's outputs (steps, directions, rows, width) and last states (directions, rows, width)."""
        direct = [self._matrix(cell.input) for cell in layer]
        back = [self._recurrent(cell) for cell in layer]
        width = direct[0].values.shape[0] // GATES[self.kind]
        biases = None
        if self.has_biases:
            parts = [np.concatenate([self._gates(self._matrix(b).values) for b in cell.biases]) for cell in layer]
            biases = self._constant(np.stack(parts))
        attributes: dict[str, object] = {"hidden_size": width, "direction": "bidirectional" if self.both else "forward"}
        if self.kind == "gru":
            attributes["linear_before_reset"] = 1
        if self.kind == "rnn_relu":
            attributes["activations"] = ["Relu"] * len(layer)
        states = [*first] if any(v is not None for v in first) else []
        if self.integer and all(m.scale is not None for m in (*direct, *back)):
            (w, *w_numbers), (r, *r_numbers) = self._integers(direct), self._integers(back)
            inputs = [x, w, r, biases, None, *(states or [None, None]), None, *w_numbers, *r_numbers]
            self.model.opset_imports[RUNTIME] = 1
            return self._add_many("DynamicQuantizeLSTM", inputs, 3, RUNTIME, attributes)
        inputs = [x, self._decoded(direct), self._decoded(back), biases, None, *states]
        return self._add_many(ONNX_OPERATORS[self.kind], inputs, 3 if self.kind == "lstm" else 2, "", attributes)

    def _recurrent(self, cell: Cell) -> Matrix:
        matrix = self._matrix(cell.recurrent)
        if cell.projection is None or matrix.values.shape[0] == GATES[self.kind] * matrix.values.shape[1]:
            return matrix
        product = matrix.values.astype(np.float64) @ self._matrix(cell.projection).values
        return Matrix(values=product.astype(matrix.values.dtype))

    def _projection(self, layer: list[Cell]) -> np.ndarray | None:
        """(directions, P, H), or None."""
        return None if layer[0].projection is None else np.stack([self._matrix(cell.projection).values for cell in layer])

    def _gates(self, rows: np.ndarray) -> np.ndarray:
        """Rows in ONNX's order of gates."""
        return np.concatenate([np.split(rows, GATES[self.kind])[i] for i in ORDER[self.kind]])

    def _matrix(self, value: ir.Value | None) -> Matrix:
        """The stored matrix of a value, also behind DequantizeLinear."""
        producer = None if value is None else value.producer()
        if producer is not None and producer.op_type == "DequantizeLinear":
            q, scale, zero_point = (constant(v) for v in producer.inputs[:3])
            if q is not None and scale is not None:
                return Matrix(values=q, scale=scale, zero_point=zero_point)
        values = constant(value)
        if values is None:
            raise ExportError(
                f"a weight of a recurrent layer ({self.kind}) is computed while the model runs, which ONNX's operators do not"
                " know; make it a plain parameter first (torch.nn.utils.parametrize.remove_parametrizations)"
            )
        return Matrix(values=values)

    def _integers(self, matrices: list[Matrix]) -> list[ir.Value]:
        """(directions, inputs, 4 H) integers, and their scales and zero points, (directions, 4 H) or (directions,)."""
        values = np.stack([self._gates(m.values).T for m in matrices])
        scales = np.stack([self._spread(m.scale) for m in matrices])
        points = np.stack([self._spread(m.zero_point) for m in matrices])
        return [self._constant(np.ascontiguousarray(v)) for v in (values, scales, points)]

    def _spread(self, numbers: np.ndarray | None) -> np.ndarray:
        assert numbers is not None
        return self._gates(numbers) if numbers.ndim else numbers

    def _decoded(self, matrices: list[Matrix]) -> ir.Value:
        """(directions, gates * H, inputs) fp32. Integers go through Cast and Mul: DequantizeLinear would run every time."""
        values = self._constant(np.stack([self._gates(m.values) for m in matrices]))
        if matrices[0].scale is None:
            return values
        scales, points = (
            np.stack([self._spread(n).reshape(-1, 1) for n in numbers])
            for numbers in zip(*((m.scale, m.zero_point) for m in matrices), strict=True)
        )
        wide = self._add("Cast", [values], to=ir.DataType.FLOAT.value)
        if points.any():
            wide = self._add("Sub", [wide, self._constant(points.astype(np.float32))])
        return self._add("Mul", [wide, self._constant(scales)])

    def _part(self, state: ir.Value | None, layer: int, projection: np.ndarray | None) -> ir.Value | None:
        """The first state of one layer, (directions, rows, width)."""
        if self.layers > 1:
            ends = [np.array([layer * self.count]), np.array([(layer + 1) * self.count]), np.array([0])]
            state = self._add("Slice", [state, *map(self._constant, ends)])
        if projection is None:
            return state
        inverse = np.linalg.pinv(projection.astype(np.float64)).transpose(0, 2, 1).astype(projection.dtype)
        return self._add("MatMul", [state, self._constant(inverse)])

    def _joined(self, y: ir.Value, *, rows_first: bool) -> ir.Value:
        if self.both:
            turned = self._add("Transpose", [y], perm=[2, 0, 1, 3] if rows_first else [0, 2, 1, 3])
            return self._add("Reshape", [turned, self._constant(np.array([0, 0, -1]))])
        flat = self._add("Squeeze", [y, self._constant(np.array([1]))])
        return self._add("Transpose", [flat], perm=[1, 0, 2]) if rows_first else flat

    def _concatenated(self, values: list[ir.Value]) -> ir.Value:
        return values[0] if len(values) == 1 else self._add("Concat", list(values), axis=0)

    def _replace(self, results: list[ir.Value]) -> None:
        old = list(self.node.outputs)[: len(results)]
        for value, result in zip(old, results, strict=True):
            result.shape, result.type = value.shape, value.type or self.node.inputs[0].type  # type: ignore[union-attr]
        rest = [v for v in self.node.outputs[len(results) :] if list(v.uses()) or v.is_graph_output()]
        assert not rest
        ir.convenience.replace_nodes_and_values(self.graph, self.node, [self.node], self.nodes, old, results)

    def _constant(self, array: np.ndarray) -> ir.Value:
        name = f"{self.node.name}.{len(self.nodes)}.{len(self.graph.initializers)}"
        tensor = ir.tensor(array.astype(np.int64) if array.dtype == np.int_ else array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.initializers[name] = value
        return value

    def _add(self, kind: str, inputs: list[ir.Value | None], **attributes: object) -> ir.Value:
        return self._add_many(kind, inputs, 1, "", attributes)[0]

    def _add_many(
        self, kind: str, inputs: list[ir.Value | None], outputs: int, domain: str, attributes: dict[str, object]
    ) -> list[ir.Value]:
        node = ir.node(kind, inputs, attributes, domain=domain, num_outputs=outputs)  # type: ignore[arg-type]
        node.name = f"{self.node.name}.{kind}.{len(self.nodes)}"
        for i, value in enumerate(node.outputs):
            value.name = f"{node.name}.{i}"
        self.nodes.append(node)
        return list(node.outputs)


def _is_zero(value: ir.Value | None) -> bool:
    """Whether a first state is zeros, which the operators take where nothing is given."""
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type in ("Expand", "ConstantOfShape"):
        if producer.op_type == "ConstantOfShape":
            attribute = producer.attributes.get("value")
            return attribute is None or not attribute.as_tensor().numpy().any()
        value = producer.inputs[0]
    array = constant(value)
    return array is not None and not array.any()
