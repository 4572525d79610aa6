"""Build a dynamically quantized model: insert quantizers of weights and of product inputs into a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError, ModelError
from compresskit.base.task import Inputs, shapes_of
from compresskit.graph.capture import Captured, Dynamic, parameter_name
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.dynamic.lower_dynamic import deploy_dynamic
from compresskit.quant.dynamic.placement_dynamic import (
    DEFAULT_OPERATORS,
    float_layers,
    place_dynamic,
    recurrent_weights,
    stored_product,
)
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.dynamic_quantizers import DynamicActivation, LstmQuantizer, RowQuantizer
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.saturation import PairPacking, can_overflow
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import X86, Target
from compresskit.quant.passes.insert import round_rows_
from compresskit.quant.passes.placement import Placement
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph
from compresskit.quant.passes.quantizer_names import add_quantizer_, stored_name


@dataclass(frozen=True, kw_only=True)
class DynamicOrigin(Origin):
    """What a dynamically quantized model was made from.

    weights: number format of the weights; None for the target's.
    operators: kinds of operators that were quantized.
    """

    weights: Scheme | None = None
    operators: tuple[str, ...] = DEFAULT_OPERATORS

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        weights = None if self.weights is None else asdict(self.weights)
        return super().to_json() | {"dynamically": {"weights": weights, "operators": list(self.operators)}}


class DynamicallyQuantized(Quantized):
    """A model whose weights are stored in integers, and the inputs of whose products are rounded at run time.

    It is called like the float model it was made from. `placement` lists what runs in integers, and why the rest does not.
    """

    @property
    def opset(self) -> int:
        """Version of the ONNX operator set. 23 has Attention as one operator, for which ONNX Runtime has a kernel on x86.

        A target with an older opset than that of the library's own keeps it.
        """
        return max(23, self.target.opset) if self.target.tuned and self.target.opset >= X86.opset else self.target.opset

    @property
    def prepared_for(self) -> Target:
        """The target by whose operators its graph was rewritten: products are quantized as they are."""
        return replace(self.target, operators={})

    def check_inputs(self, inputs: Inputs) -> None:
        super().check_inputs(inputs)
        if any(0 in shape for shape in shapes_of(inputs)):
            raise DataError(
                f"quantized {self.float_class}: an input has no elements, got {shapes_of(inputs)}; a batch needs at least one"
                " row, a sequence one step"
            )
        for given, wanted in zip(pytree.tree_leaves(inputs), pytree.tree_leaves(self.example), strict=False):
            if isinstance(given, Tensor) and given.is_floating_point() != wanted.is_floating_point():
                raise DataError(f"quantized {self.float_class}: wanted {wanted.dtype} inputs, got {given.dtype}")

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: integers stored, DynamicQuantizeLinear and MatMulInteger."""
        self.check_weights()
        return deploy_dynamic(self.converted().body)


def build_dynamic(
    model: nn.Module,
    example: Inputs,
    target: Target,
    *,
    weights: Scheme | None = None,
    operators: tuple[str, ...] = DEFAULT_OPERATORS,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
    dynamic: Dynamic = (0,),
    merges: Sequence[MergedLayer] | None = None,
) -> DynamicallyQuantized:
    """Capture a float model, decide what is quantized, and insert the quantizers.

    Args:
        example: inputs that capture the model.
        floating: nodes of the graph that stay float, and layers of an LSTM ("lstm.0"), each with its reason.
        merges: see `prepare_graph`.
        The others: as in `quantize_dynamic`.

    Raises ModelError where nothing of the model can be quantized; the message gives the reason for each operator.
    """
    captured, plain, _ = prepare_graph(model, example, replace(target, operators={}), skip, dynamic, merges=merges)
    fields = vars(plain) | {"floating": dict(floating or {})}
    origin = DynamicOrigin(**fields, weights=weights, operators=tuple(operators))
    placement = place_dynamic(captured.module, target, operators=operators, skip=skip, floating=floating)
    if not placement.integer and not placement.carried:
        raise ModelError(f"{type(model).__name__}: nothing of it can be quantized dynamically:\n{placement}")
    insert_dynamic_quantizers_(captured, placement, target, weights)
    quantized = DynamicallyQuantized(captured, target, placement, origin).train(model.training)
    quantized.enable_()
    return quantized


def insert_dynamic_quantizers_(captured: Captured, placement: Placement, target: Target, weights: Scheme | None = None) -> None:
    """Insert quantizers into a captured graph. weights: number format of the weights; None for the target's."""
    body, scheme = captured.module, target.weights if weights is None else weights
    # A scale for each channel costs up to 5 % of the latency and gains at most 0.4 dB (benchmarks/quantize_dynamic.md).
    recurrent = replace(scheme, per_channel=False) if weights is None else weights
    nodes = {node.name: node for node in body.graph.nodes}
    rounded: dict[Node, Node] = {}
    for point in placement.points:
        name = add_quantizer_(body, point.node, DynamicActivation())
        with body.graph.inserting_after(nodes[point.node]):
            rounded[nodes[point.node]] = body.graph.call_module(name, (nodes[point.node],))
    stored: dict[tuple[str, int], str] = {}
    kinds = {nodes[name]: kind for name, kind in {**placement.integer, **placement.carried}.items()}
    for node, kind in kinds.items():
        if kind == "embedding":
            continue
        if kind == "lstm":
            form = _symmetric(recurrent)
            pairs = target.saturates and can_overflow(form, Scheme())
            lstm = LstmQuantizer(form, fit_pairs=pairs, floating=float_layers(node, placement.floating))
            node.op, node.target = "call_module", add_quantizer_(body, node.name, lstm)
        elif kind in ("gru", "rnn"):
            for weight in recurrent_weights(node):
                if get_tensor(body, str(parameter_name(weight))).ndim == 2:
                    _round_weight(body, node, weight, (0, scheme), stored)
        else:
            operands = stored_product(node)
            assert operands is not None
            grid = (operands.axis, _symmetric(scheme) if kind == "conv" else scheme)
            quantizer = _round_weight(body, node, operands.weight, grid, stored)
            if kind != "conv" and target.saturates and can_overflow(scheme, Scheme()):  # ConvInteger adds no pairs
                quantizer.packing = PairPacking()
            node.replace_input_with(operands.x, rounded[operands.x])
    for node in [n for n, kind in kinds.items() if kind == "embedding"]:  # last: the quantizers of products read them
        product = stored.get((str(parameter_name(node.args[0])), 0))
        shared = None if product is None else body.get_submodule(product)
        packing = shared.packing if isinstance(shared, WeightQuantizer) else None  # of a product that reads the same table
        round_rows_(body, [node], RowQuantizer(scheme, packing))
    body.graph.lint()
    body.recompile()


def _symmetric(scheme: Scheme) -> Scheme:
    """ConvInteger and DynamicQuantizeLSTM take weights with zero point 0 only."""
    return replace(scheme, signed=True, symmetric=True)


def _round_weight(
    body: fx.GraphModule, node: Node, weight: Node, grid: tuple[int, Scheme], weights: dict[tuple[str, int], str]
) -> WeightQuantizer:
    """Round a weight that a node reads. grid: dimension of outputs, number format. weights: (name, dimension) of a weight -> name
    of its quantizer, which is returned.
    """
    stored, (axis, scheme) = str(parameter_name(weight)), grid
    if (stored, axis) not in weights:
        made = WeightQuantizer(scheme, axis, get_tensor(body, stored).shape[axis])
        weights[stored, axis] = add_quantizer_(body, stored_name(f"{axis}.{stored}"), made)
    with body.graph.inserting_before(node):
        node.replace_input_with(weight, body.graph.call_module(weights[stored, axis], (weight,)))
    quantizer = body.get_submodule(weights[stored, axis])
    assert isinstance(quantizer, WeightQuantizer)
    return quantizer
