"""Matrices of one model in several forms: dynamic int8, blocks whose products run in integers, float."""

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
from compresskit.graph.capture import Captured, Dynamic
from compresskit.graph.interpreter import ValueOf, execute, run_graph
from compresskit.graph.normalize import Node
from compresskit.graph.surgery import get_tensor
from compresskit.quant.dynamic.insert_dynamic import DynamicallyQuantized, DynamicOrigin, insert_dynamic_
from compresskit.quant.dynamic.lower_dynamic import deploy_dynamic
from compresskit.quant.dynamic.placement_dynamic import DEFAULT, place_dynamic
from compresskit.quant.numerics.block_grid import BlockQuantizer, Blocks, Rows, nearest
from compresskit.quant.numerics.operators import PRODUCTS
from compresskit.quant.numerics.quantizers import WeightQuantizer
from compresskit.quant.numerics.scheme import Scheme
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.channel_scaling import weight_of
from compresskit.quant.passes.prepare_graph import prepare_graph
from compresskit.quant.weight_only.storage import NBITS_INT8, ROW, deploy_weights, insert_inputs_
from compresskit.quant.weight_only.weight_model import insert_blocks_
from compresskit.quant.weight_only.weight_plan import weights_of


@dataclass(frozen=True, kw_only=True)
class MatrixForm:
    """What a matrix is stored as, and how its products are computed: `dynamic` int8, in `blocks`, or in float."""

    dynamic: bool = False
    blocks: Blocks | None = None

    def __str__(self) -> str:
        return "dynamic int8" if self.dynamic else "float" if self.blocks is None else str(self.blocks)


FLOAT, INT8 = MatrixForm(), MatrixForm(dynamic=True)
#: From the most accurate to the least; 4 bits are for products whose time goes into reading the matrix.
FORMS = (
    FLOAT,
    MatrixForm(blocks=Blocks(bits=8, block=32)),
    MatrixForm(blocks=Blocks(bits=8, block=128)),
    INT8,
    MatrixForm(blocks=Blocks(bits=4, block=32)),
)


def rounded(weight: Tensor, axis: int, form: MatrixForm, scheme: Scheme) -> Tensor:
    """A weight as the form stores it; `axis` is its dimension of inputs."""
    if form.blocks is not None:
        return nearest(Rows(weight.movedim(axis, 1), form.blocks, None, _no_data))[0].movedim(1, axis)
    if not form.dynamic:
        return weight
    quantizer = WeightQuantizer(scheme, 1 - axis, weight.shape[1 - axis])
    quantizer.enabled = True
    return quantizer(weight)  # type: ignore[no-any-return]


def _no_data() -> Tensor:
    raise AssertionError("rounding to nearest looks at no data")


def input_of(x: Tensor, form: MatrixForm) -> Tensor:
    """What reads the matrix, as the form rounds it."""
    if form.blocks is not None:
        return rounded_blocks(x, form.blocks.block or ROW)
    return round_dynamically(x) if form.dynamic else x


def run_in_forms(module: fx.GraphModule, inputs: Sequence[Any], forms: Mapping[str, MatrixForm], scheme: Scheme) -> Any:
    """Run a float graph with some of its products, by node, as their forms compute them."""

    def compute(node: Node, value_of: ValueOf) -> Any:
        form = forms.get(node.name, FLOAT)
        if form == FLOAT:
            return execute(module, node, value_of)
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        place, weight, axis = PRODUCTS[node.target]
        given = list(args)
        given[place], given[weight] = input_of(given[place], form), rounded(given[weight], axis, form, scheme)
        return node.target(*given, **kwargs)

    return run_graph(module, inputs, compute=compute)


@dataclass(frozen=True, kw_only=True)
class MixedOrigin(DynamicOrigin):
    """What a model with matrices in several forms was made from. forms: node of each product -> its form."""

    forms: Mapping[str, MatrixForm] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        return super().to_json() | {"mixed": {name: asdict(form) for name, form in self.forms.items()}}


class Mixed(DynamicallyQuantized):
    """A dynamically quantized model some of whose matrices lie on the grids of blocks, or stay float."""

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: MatMulInteger and MatMulNBits, side by side."""
        return deploy_weights(deploy_dynamic(self.converted().body), NBITS_INT8)


def build_mixed(
    model: nn.Module,
    example: Inputs,
    target: Target,
    forms: Mapping[str, MatrixForm],
    *,
    operators: tuple[str, ...] = DEFAULT,
    skip: tuple[str, ...] = (),
    dynamic: Dynamic = (0,),
) -> Mixed:
    """A quantized copy of a model with the given form for each product, by node of its graph; other operators dynamically."""
    captured, plain, _ = prepare_graph(model, example, replace(target, operators={}), skip, dynamic)
    origin = MixedOrigin(
        float_class=plain.float_class, structure=plain.structure, skip=plain.skip, operators=tuple(operators), forms=dict(forms)
    )
    return _assembled(captured, origin, target, forms, operators, skip).train(model.training)


def _assembled(
    captured: Captured,
    origin: MixedOrigin,
    target: Target,
    forms: Mapping[str, MatrixForm],
    operators: tuple[str, ...],
    skip: tuple[str, ...],
) -> Mixed:
    body = captured.module
    nodes = {node.name: node for node in body.graph.nodes}
    if odd := [name for name in forms if name not in nodes or weight_of(nodes[name]) is None]:
        raise CheckpointError(f"the record names {odd[0]}, which is no product by a constant in this model's graph")
    kept = {name: f"in the form {form}" for name, form in forms.items() if not form.dynamic}
    placement = place_dynamic(body, target, operators=operators, skip=skip, floating=kept)
    insert_dynamic_(captured, placement, target)
    chosen = {}
    for name, form in forms.items():
        found = weight_of(nodes[name])
        if form.blocks is not None and found is not None:
            chosen[found[0]] = form.blocks
    insert_blocks_(body, [w for w in weights_of(body) if w.name in chosen], chosen)
    mixed = Mixed(captured, target, placement, origin)
    with torch.no_grad():
        for node in [n for n in body.graph.nodes if n.op == "call_module" and n.args and n.args[0].op == "get_attr"]:
            name, quantizer = str(node.args[0].target), body.get_submodule(node.target)
            if name in chosen and isinstance(quantizer, BlockQuantizer):
                weight = get_tensor(body, name)
                values, scale, zero_point = nearest(Rows(quantizer.rows(weight), chosen[name], None, _no_data))
                quantizer.set_(scale, zero_point)
                weight.copy_(quantizer.weight(values))
    insert_inputs_(body)
    mixed.enable_()
    return mixed


def rebuild_mixed(
    model: nn.Module, example: Inputs, origin: dict[str, Any], target: Target, *, skip: tuple[str, ...], dynamic: Dynamic
) -> Mixed:
    """The mixed model of a record again; its values still have to be loaded. Raises CheckpointError for a foreign record."""
    try:
        forms = {
            str(name): MatrixForm(dynamic=bool(form["dynamic"]), blocks=form["blocks"] and Blocks(**form["blocks"]))
            for name, form in origin["mixed"].items()
        }
        operators = tuple(str(kind) for kind in origin["dynamically"]["operators"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not the record of a mixed model: {type(error).__name__} {error}") from None
    return build_mixed(model, example, target, forms, operators=operators, skip=skip, dynamic=dynamic)
