"""A model whose weight matrices have different precisions: dynamic int8, blocks of 8 or 4 bits with int8 inputs, or float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import CheckpointError
from compresskit.base.task import Inputs
from compresskit.export.ops.blocks import rounded_blocks
from compresskit.export.ops.quantize import round_dynamically
from compresskit.graph.capture import Dynamic
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import AS_SAVED, get_tensor
from compresskit.quant.dynamic.insert_dynamic import DynamicallyQuantized, DynamicOrigin, insert_dynamic_quantizers_
from compresskit.quant.dynamic.lower_dynamic import deploy_dynamic
from compresskit.quant.dynamic.placement_dynamic import DEFAULT_OPERATORS, place_dynamic
from compresskit.quant.numerics.block_grid import BlockScheme, WeightMatrix, round_to_nearest
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.saturation import PairPacking, can_overflow
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.channel_scaling import weight_of
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.weight_only.storage import MATMUL_NBITS_INT8, ROW_BLOCK, deploy_weights, insert_input_quantizers_
from compresskit.quant.weight_only.weight_model import block_quantizers, insert_matrix_quantizers_
from compresskit.quant.weight_only.weight_plan import weights_of


@dataclass(frozen=True, kw_only=True)
class MatrixPrecision:
    """How products by one weight matrix are computed: in dynamic int8, in blocks of `scheme` with int8 inputs, or in float."""

    int8: bool = False
    scheme: BlockScheme | None = None

    def __str__(self) -> str:
        return "dynamic int8" if self.int8 else "float" if self.scheme is None else str(self.scheme)


FLOAT, INT8 = MatrixPrecision(), MatrixPrecision(int8=True)
#: Candidates, from the most accurate to the least. 4 bits pay for products whose time goes into reading the matrix.
PRECISIONS = (
    FLOAT,
    MatrixPrecision(scheme=BlockScheme(bits=8, block_size=32)),
    MatrixPrecision(scheme=BlockScheme(bits=8, block_size=128)),
    INT8,
    MatrixPrecision(scheme=BlockScheme(bits=4, block_size=32)),
)


def rounded_weight(weight: Tensor, axis: int, precision: MatrixPrecision, target: Target) -> Tensor:
    """Round a weight to a precision.

    Args:
        axis: its dimension of inputs.
        target: where it will run; it has the grid of dynamic int8 weights.
    """
    if precision.scheme is not None:
        matrix = WeightMatrix(weight.movedim(axis, 1), precision.scheme, None, _no_data)
        return round_to_nearest(matrix)[0].movedim(1, axis)
    if not precision.int8:
        return weight
    packing = PairPacking() if target.saturates and can_overflow(target.weights, Scheme()) else None
    quantizer = WeightQuantizer(target.weights, 1 - axis, weight.shape[1 - axis], packing)
    quantizer.enabled = True
    return quantizer(weight)  # type: ignore[no-any-return]


def _no_data() -> Tensor:
    raise AssertionError("rounding to nearest uses no data")


def rounded_input(x: Tensor, precision: MatrixPrecision) -> Tensor:
    """Round the input of a product to the precision of its matrix."""
    if precision.scheme is not None:
        return rounded_blocks(x, precision.scheme.block_size or ROW_BLOCK)
    return round_dynamically(x) if precision.int8 else x


def run_with_precisions(
    module: fx.GraphModule, inputs: Sequence[Any], precisions: Mapping[str, MatrixPrecision], target: Target
) -> Any:
    """Run a float graph with some of its products in other precisions, without building the quantized model.

    Args:
        inputs: positional, as `run_graph` takes them.
        precisions: node of a product -> its precision; products that are not named stay float.
        target: as in `rounded_weight`.
    """

    def compute(node: Node, value_of: ValueOf) -> Any:
        precision = precisions.get(node.name, FLOAT)
        if precision == FLOAT:
            return execute(module, node, value_of)
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        x, weight, axis = PRODUCTS[node.target]
        operands = list(args)
        operands[x] = rounded_input(operands[x], precision)
        operands[weight] = rounded_weight(operands[weight], axis, precision, target)
        return node.target(*operands, **kwargs)

    return run_graph(module, inputs, compute=compute)


@dataclass(frozen=True, kw_only=True)
class MixedOrigin(DynamicOrigin):
    """What a model of mixed precision was made from. precisions: node of each product -> its precision."""

    precisions: Mapping[str, MatrixPrecision] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return super().to_json() | {"mixed": {name: asdict(precision) for name, precision in self.precisions.items()}}


class MixedQuantized(DynamicallyQuantized):
    """A dynamically quantized model some of whose weight matrices are rounded in blocks, or stay float."""

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: MatMulInteger and MatMulNBits, side by side."""
        self.check_weights()
        return deploy_weights(deploy_dynamic(self.converted().body), MATMUL_NBITS_INT8)


def build_mixed(
    model: nn.Module,
    example: Inputs,
    target: Target,
    precisions: Mapping[str, MatrixPrecision],
    *,
    operators: tuple[str, ...] = DEFAULT_OPERATORS,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    dynamic: Dynamic = (0,),
    merges: Sequence[MergedLayer] | None = None,
) -> MixedQuantized:
    """Return a quantized copy of a float model with the given precision for each product.

    Args:
        precisions: node of a product, in the graph of the model -> its precision.
        operators: kinds of the other operators that are quantized dynamically, as in `quantize_dynamic`.
        floating: other nodes of the graph, and layers of an LSTM, that stay float, each with its reason.
        merges: see `prepare_graph`.

    Raises CheckpointError where a name is not a product by a constant in the graph.
    """
    captured, plain, _ = prepare_graph(model, example, replace(target, operators={}), skip, dynamic, merges=merges)
    fields = vars(plain) | {"floating": dict(floating or {})}
    origin = MixedOrigin(**fields, operators=tuple(operators), precisions=dict(precisions))
    body = captured.module
    nodes = {node.name: node for node in body.graph.nodes}
    if unknown := [name for name in precisions if name not in nodes or weight_of(nodes[name]) is None]:
        raise CheckpointError(
            f"the record names {unknown[0]}, which is no product by a constant in this model's graph; {AS_SAVED}"
        )
    not_int8 = {name: f"in the form {precision}" for name, precision in precisions.items() if not precision.int8}
    placement = place_dynamic(body, target, operators=operators, skip=skip, floating={**origin.floating, **not_int8})
    insert_dynamic_quantizers_(captured, placement, target)
    schemes = {}
    for name, precision in precisions.items():
        weight = weight_of(nodes[name])
        if precision.scheme is not None and weight is not None:
            schemes[weight[0]] = precision.scheme
    insert_matrix_quantizers_(body, [w for w in weights_of(body) if w.name in schemes], schemes)
    mixed = MixedQuantized(captured, target, placement, origin)
    with torch.no_grad():
        for name, quantizer in block_quantizers(body).items():
            tensor = get_tensor(body, name)
            values, scale, zero_point = round_to_nearest(WeightMatrix(quantizer.rows(tensor), schemes[name], None, _no_data))
            quantizer.set_grid_(scale, zero_point)
            tensor.copy_(quantizer.weight(values))
    insert_input_quantizers_(body)
    mixed.enable_()
    return mixed.train(model.training)


def rebuild_mixed(
    model: nn.Module,
    example: Inputs,
    saved: dict[str, Any],
    target: Target,
    *,
    skip: tuple[str, ...],
    floating: Mapping[str, str],
    dynamic: Dynamic,
    merges: Sequence[MergedLayer],
) -> MixedQuantized:
    """Rebuild a model of mixed precision from a float model of the same class; its tensors still have to be loaded.

    saved: the record of its `MixedOrigin`. Raises CheckpointError for the record of another model.
    """
    try:
        precisions = {
            str(name): MatrixPrecision(int8=bool(fields["int8"]), scheme=fields["scheme"] and BlockScheme(**fields["scheme"]))
            for name, fields in saved["mixed"].items()
        }
        operators = tuple(str(kind) for kind in saved["dynamically"]["operators"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not the record of a mixed model: {type(error).__name__} {error}; save the model again") from None
    return build_mixed(
        model, example, target, precisions, operators=operators, skip=skip, floating=floating, dynamic=dynamic, merges=merges
    )
