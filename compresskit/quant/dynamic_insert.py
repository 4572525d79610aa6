"""Dynamic quantization on a captured graph: what rounds weights and, at run time, the inputs of products with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.errors import DataError, ModelError
from compresskit.export.lstm import simulate
from compresskit.export.ops import round_dynamically
from compresskit.graph import Captured, Dynamic, parameter_name
from compresskit.normalize import Node
from compresskit.quant.dynamic_deploy import deploy_dynamic
from compresskit.quant.dynamic_place import DEFAULT, layer_of, matrices, place_dynamic
from compresskit.quant.insert import Quantized, lower
from compresskit.quant.placement import Placement
from compresskit.quant.quantizer import Quantizer, WeightQuantizer
from compresskit.quant.scheme import Scheme
from compresskit.quant.targets import Target
from compresskit.recurrent import OPERATORS, cells
from compresskit.surgery import get_tensor
from compresskit.task import Inputs, shapes_of


class DynamicActivation(Quantizer):
    """Rounds an activation to the uint8 grid over the range that it has right then. label: for messages."""

    def __init__(self, label: str = "") -> None:
        super().__init__()
        self.label = label

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        if x.numel() == 0:
            raise DataError(f"{self.label}: its input has no elements, {tuple(x.shape)}, and so no range to round it to")
        return round_dynamically(x)


class RowQuantizer(Quantizer):
    """Rounds looked-up rows of a table: (rows of it, the table) to the rows as they are stored."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.table = WeightQuantizer(scheme, 0, 1)
        self.table.enabled = True

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        if not self.enabled:
            return rows
        if not self.table.scheme.per_channel:
            scale, zero_point = self.table.numbers(table)
            low, high = self.table.scheme.low, self.table.scheme.high
            steps = (torch.round(rows.detach() * scale.reciprocal()) + zero_point).clamp(low, high) - zero_point
            return rows + (steps * scale - rows).detach()
        flat = rows.reshape(-1, rows.shape[-1])  # each row has its own scale, so those that were looked up are enough
        return self.table(flat).reshape(rows.shape)


class LstmQuantizer(Quantizer):
    """An LSTM in place of torch's operator, with its matrices in integers and its inputs and states rounded at run time.

    The recurrent matrix of a projected one is rounded times the projection, as it is stored (see `export.recurrent`).
    """

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.matrix = WeightQuantizer(scheme, 0, 1)
        self.matrix.enabled = True

    def effective(self, weights: list[Tensor], *settings: Any) -> list[Tensor]:
        """The weights with the recurrent ones times the projection, where there is one."""
        has_biases, layers, bidirectional = settings
        found: list[Tensor] = []
        for layer in cells(weights, has_biases, layers, bidirectional):
            for cell in layer:
                recurrent = cell.recurrent if cell.projection is None else cell.recurrent @ cell.projection
                found += [cell.input, recurrent, *cell.biases, *([] if cell.projection is None else [cell.projection])]
        return found

    def is_matrix(self, place: int, weights: list[Tensor], *settings: Any) -> bool:
        """Whether the weight at that place of the list is stored in integers: neither a bias nor a projection."""
        _, layers, bidirectional = settings
        return place % (len(weights) // (layers * (2 if bidirectional else 1))) < 2

    def forward(
        self,
        x: Tensor,
        state: list[Tensor],
        weights: list[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings = (has_biases, layers, bidirectional)
        if not self.enabled:
            return OPERATORS["lstm"](x, state, weights, has_biases, layers, dropout, train, bidirectional, batch_first)
        whole = self.effective(weights, *settings)
        rounded = [self.matrix(w) if self.is_matrix(i, weights, *settings) else w for i, w in enumerate(whole)]
        return simulate(x, state, rounded, *settings, batch_first)


class DynamicallyQuantized(Quantized):
    """A model whose weights are rounded once, and the inputs of products with them at run time.

    Called like the model it was made from. `placement` says what runs in integers and why the rest does not.
    """

    def _check(self, inputs: Inputs) -> None:
        super()._check(inputs)
        if any(0 in shape for shape in shapes_of(inputs)):
            raise DataError(
                f"quantized {self.origin['class']}: an input has no elements, got {shapes_of(inputs)}; a batch needs at least one"
                " row, a sequence one step"
            )
        for given, wanted in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(self.example), strict=False):
            if isinstance(given, Tensor) and given.is_floating_point() != wanted.is_floating_point():
                raise DataError(f"quantized {self.origin['class']}: wanted {wanted.dtype} inputs, got {given.dtype}")

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: integers stored, DynamicQuantizeLinear and MatMulInteger."""
        return deploy_dynamic(self.settled().body)


def build_dynamic(
    model: nn.Module,
    example: Inputs,
    target: Target,
    *,
    weights: Scheme | None = None,
    operators: tuple[str, ...] = DEFAULT,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    dynamic: Dynamic = (0,),
) -> DynamicallyQuantized:
    """Capture a float model, place and insert what rounds; the arguments are those of `quantize_dynamic`.

    Raises ModelError where nothing of the model can be quantized; the message says why of each operator.
    """
    scheme = target.weights if weights is None else weights
    captured, origin, _ = lower(model, example, replace(target, operators={}), skip, dynamic)
    origin |= {"floating": dict(floating or {}), "dynamically": {"weights": asdict(scheme), "operators": list(operators)}}
    placement = place_dynamic(captured.module, target, operators=operators, skip=skip, floating=floating)
    if not placement.integer and not placement.carried:
        raise ModelError(f"{type(model).__name__}: nothing of it can be quantized dynamically:\n{placement}")
    insert_dynamic_(captured, placement, scheme)
    quantized = DynamicallyQuantized(captured, target, placement, origin).train(model.training)
    quantized.enable_()
    return quantized


def insert_dynamic_(captured: Captured, placement: Placement, scheme: Scheme) -> None:
    """Add what rounds to a captured graph."""
    body = captured.module
    body.add_submodule("quantizers", nn.Module())
    nodes = {node.name: node for node in body.graph.nodes}
    rounded: dict[Node, Node] = {}
    for point in placement.points:
        name = f"quantizers.{point.node}"
        body.add_submodule(name, DynamicActivation(placement.layers.get(point.node, "") or point.node))
        with body.graph.inserting_after(nodes[point.node]):
            rounded[nodes[point.node]] = body.graph.call_module(name, (nodes[point.node],))
    for name, kind in {**placement.integer, **placement.carried}.items():
        node = nodes[name]
        if kind == "embedding":
            _round_rows(body, node, scheme)
        elif kind == "lstm":
            body.add_submodule(f"quantizers.{name}", LstmQuantizer(scheme))
            node.op, node.target = "call_module", f"quantizers.{name}"
        elif kind in ("gru", "rnn"):
            for weight in matrices(node):
                if get_tensor(body, str(parameter_name(weight))).ndim == 2:
                    _round_weight(body, node, weight, 0, scheme)
        else:
            layer = layer_of(node)
            assert layer is not None
            own = replace(scheme, signed=True, symmetric=True) if kind == "conv" else scheme  # ConvInteger knows no other
            _round_weight(body, node, layer.weight, layer.axis, own)
            node.replace_input_with(layer.x, rounded[layer.x])
    body.graph.lint()
    body.recompile()


def _round_weight(body: fx.GraphModule, node: Node, weight: Node, axis: int, scheme: Scheme) -> None:
    values = get_tensor(body, str(parameter_name(weight)))
    name = f"quantizers.weight_{axis}_" + str(parameter_name(weight)).replace(".", "_")
    if not hasattr(body.quantizers, name.rpartition(".")[2]):
        body.add_submodule(name, WeightQuantizer(scheme, axis, values.shape[axis]))
    with body.graph.inserting_before(node):
        node.replace_input_with(weight, body.graph.call_module(name, (weight,)))


def _round_rows(body: fx.GraphModule, node: Node, scheme: Scheme) -> None:
    name = f"quantizers.{node.name}"
    body.add_submodule(name, RowQuantizer(scheme))
    with body.graph.inserting_after(node):
        rows = body.graph.call_module(name, (node, node.args[0]))
    rows.meta = copy.copy(node.meta)
    for reader in [user for user in node.users if user is not rows]:
        reader.replace_input_with(node, rows)
