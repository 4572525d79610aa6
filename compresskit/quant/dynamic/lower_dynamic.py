"""Lower a dynamically quantized graph to ONNX's operators: weights stored as integers, DynamicQuantizeLinear, MatMulInteger."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx

from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import free_name, get_tensor
from compresskit.quant.dynamic.placement_dynamic import DYNAMIC_KINDS
from compresskit.quant.numerics.dynamic_quantizers import DynamicActivation, LstmQuantizer, RowQuantizer
from compresskit.quant.numerics.quantizers import Quantizer, WeightQuantizer, deployed_weight


def deploy_dynamic(body: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a dynamically quantized graph in ONNX's terms."""
    shared = {id(tensor): tensor for tensor in (*body.parameters(), *body.buffers())}  # only read here: a copy would be dropped
    body = copy.deepcopy(body, shared).eval()  # type: ignore[arg-type]
    _DynamicLowering(body).run()
    body.graph.eliminate_dead_code()
    for node in reversed(list(body.graph.nodes)):
        if node.op in ("get_attr", "call_module") and not node.users:
            body.graph.erase_node(node)
    body.graph.lint()
    body.recompile()
    body.delete_all_unused_submodules()
    return body


class _DynamicLowering:
    def __init__(self, body: fx.GraphModule) -> None:
        self.body, self.graph = body, body.graph
        self.tables: dict[tuple[str, int], tuple[Node, Node, Node | None]] = {}
        self.rounded: dict[Node, tuple[Node, Node, Node]] = {}
        self.first = next(iter(body.graph.nodes))

    def run(self) -> None:
        nodes = list(self.graph.nodes)
        looked_up = {str(node.args[1].target) for node in nodes if self._calls(node, RowQuantizer)}
        for node in nodes:
            if self._calls(node, RowQuantizer):
                self._rows(node)
            elif self._calls(node, LstmQuantizer):
                self._lstm(node)
            elif DYNAMIC_KINDS.get(node.target) in ("linear", "matmul") and self._is_rounded(node):
                self._product(node, looked_up)
            elif DYNAMIC_KINDS.get(node.target) == "conv" and self._is_rounded(node):
                self._conv(node)
        for node in [n for n in self.graph.nodes if self._calls(n, WeightQuantizer) and n.users]:
            quantizer = self._module(node)
            self.body.add_submodule(node.target, deployed_weight(quantizer, get_tensor(self.body, node.args[0].target)))
            node.args = ()

    def _module(self, node: Node) -> Any:
        return self.body.get_submodule(node.target)

    def _calls(self, node: Node, kind: type[Quantizer]) -> bool:
        return node.op == "call_module" and isinstance(self._module(node), kind)

    def _is_rounded(self, node: Node) -> bool:
        return any(self._calls(a, DynamicActivation) for a in node.args if isinstance(a, fx.Node))

    def _buffer(self, name: str, values: Tensor) -> Node:
        name = free_name(self.body, name.replace(".", "_"))
        self.body.register_buffer(name, values)
        with self.graph.inserting_before(self.first):
            return self.graph.get_attr(name)

    def _table(self, quantizer: WeightQuantizer, name: str, axis: int, *, transposed: bool) -> tuple[Node, Node, Node | None]:
        """Store a weight; returns its integers (outputs last, if `transposed`), scale, and zero point (None where it is 0)."""
        key = (name, axis if not transposed else axis + 2)
        if key not in self.tables:
            weight = get_tensor(self.body, name).detach()
            scale, zero_point = quantizer.qparams(weight)
            integers = quantizer.integers(weight)
            integers = integers.movedim(axis, -1).contiguous() if transposed else integers
            points = (
                None if not zero_point.any() else self._buffer(f"{name}.zero_{len(self.tables)}", zero_point.to(integers.dtype))
            )
            integer = self._buffer(f"{name}.integers_{len(self.tables)}", integers)
            self.tables[key] = (integer, self._buffer(f"{name}.scale_{len(self.tables)}", scale.detach().clone()), points)
        return self.tables[key]

    def _quantized(self, rounding: Node) -> tuple[Node, Node, Node]:
        """Integers, scale and zero point of an activation, computed once for all operators that read it."""
        if rounding not in self.rounded:
            with self.graph.inserting_after(rounding):
                pair = self.graph.call_function(torch.ops.compresskit.dynamic_quantize.default, (rounding.args[0],))
            parts = []
            place = pair
            for i in range(3):
                with self.graph.inserting_after(place):
                    place = self.graph.call_function(operator.getitem, (pair, i))
                parts.append(place)
            self.rounded[rounding] = (parts[0], parts[1], parts[2])
        return self.rounded[rounding]

    def _product(self, node: Node, looked_up: set[str]) -> None:
        x, weight, bias, axis = _operands(node)
        quantizer, name = self._module(weight), str(weight.args[0].target)
        tied = name in looked_up and axis == 0  # one table for both; ONNX Runtime transposes it once, when it loads the file
        q, scale, zero_point = self._quantized(x)
        integers, steps, points = self._table(quantizer, name, axis, transposed=not tied)
        with self.graph.inserting_before(node):
            matrix = self.graph.call_function(aten.t.default, (integers,)) if tied else integers
            call = (q, matrix, zero_point, points)
            total = self.graph.call_function(torch.ops.compresskit.matmul_integer.default, call)
            self._finish(node, total, scale, steps, bias)

    def _conv(self, node: Node) -> None:
        x, weight, *others = node.args
        bias, rest = (others[0] if others else None), others[1:]
        spatial = node.meta["val"].ndim - 2
        given = [*rest, *[[1] * spatial, [0] * spatial, [1] * spatial, 1][len(rest) :]]
        given = [list(v) * (spatial if len(v) == 1 else 1) if isinstance(v, list | tuple) else v for v in given]
        quantizer, name = self._module(weight), str(weight.args[0].target)
        q, scale, zero_point = self._quantized(x)
        integers, steps, _ = self._table(quantizer, name, 0, transposed=False)
        with self.graph.inserting_before(node):
            total = self.graph.call_function(torch.ops.compresskit.conv_integer.default, (q, integers, zero_point, *given))
            shape = [-1, *[1] * spatial]
            if quantizer.scheme.per_channel:
                steps = self.graph.call_function(aten.reshape.default, (steps, shape))
            bias = None if bias is None else self.graph.call_function(aten.reshape.default, (bias, shape))
            self._finish(node, total, scale, steps, bias)

    def _finish(self, node: Node, total: Node, scale: Node, steps: Node, bias: Node | None) -> None:
        """int32 sums to fp32. In just this form ONNX Runtime makes one kernel of it."""
        wide = self.graph.call_function(aten._to_copy.default, (total,), {"dtype": torch.float32})
        step = self.graph.call_function(aten.mul.Tensor, (scale, steps))
        result = self.graph.call_function(aten.mul.Tensor, (wide, step))
        if bias is not None:
            result = self.graph.call_function(aten.add.Tensor, (result, bias))
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _rows(self, node: Node) -> None:
        lookup, table = node.args
        ids, quantizer = lookup.args[1], self._module(node).table
        integers, steps, points = self._table(quantizer, str(table.target), 0, transposed=False)
        with self.graph.inserting_before(node):
            rows = self.graph.call_function(aten.embedding.default, (integers, ids))
            rows = self.graph.call_function(aten._to_copy.default, (rows,), {"dtype": torch.float32})
            if points is not None:
                rows = self.graph.call_function(aten.sub.Tensor, (rows, self._of_rows(points, ids, quantizer, wide=True)))
            result = self.graph.call_function(aten.mul.Tensor, (rows, self._of_rows(steps, ids, quantizer)))
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _of_rows(self, numbers: Node, ids: Node, quantizer: WeightQuantizer, *, wide: bool = False) -> Node:
        """The scale or zero point of each row that is looked up, (..., 1); or the one of the table."""
        if quantizer.scheme.per_channel:
            column = self.graph.call_function(aten.unsqueeze.default, (numbers, 1))
            numbers = self.graph.call_function(aten.embedding.default, (column, ids))
        return self.graph.call_function(aten._to_copy.default, (numbers,), {"dtype": torch.float32}) if wide else numbers

    def _lstm(self, node: Node) -> None:
        quantizer = self._module(node)
        x, state, nodes, has_biases, layers, _, _, bidirectional, batch_first = node.args
        settings = (has_biases, layers, bidirectional)
        weights = quantizer.effective([get_tensor(self.body, n.target).detach() for n in nodes], *settings)
        deployed = []
        for i, (weight, old) in enumerate(zip(weights, nodes, strict=True)):
            if not quantizer.is_matrix(i, weights, *settings):
                same = weight.shape == get_tensor(self.body, old.target).shape  # else a projection is in it
                deployed.append(old if same else self._buffer(f"{node.target}_{i}", weight))
                continue
            name = free_name(self.body, f"{node.target}_{i}")
            self.body.add_submodule(name, deployed_weight(quantizer.matrix, weight))
            with self.graph.inserting_before(node):
                deployed.append(self.graph.call_module(name))
        call = (x, list(state), deployed, has_biases, layers, bidirectional, batch_first, sorted(quantizer.floating))
        node.op, node.target, node.args = "call_function", torch.ops.compresskit.dynamic_lstm.default, call


def _operands(node: Node) -> tuple[Node, Node, Node | None, int]:
    """(input, weight, bias, dimension of the weight with its outputs) of a linear layer or product."""
    given = [*node.args, None]
    if node.target is aten.addmm.default:
        return given[1], given[2], given[0], 1
    if node.target is aten.linear.default:
        return given[0], given[1], given[2], 0
    return given[0], given[1], None, 1
