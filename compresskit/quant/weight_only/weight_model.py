"""The model that weight-only quantization returns, the passes that build its graph, and how it is rebuilt from a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import CheckpointError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, Dynamic
from compresskit.graph.layers.merging import MergedLayer
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import AS_SAVED, free_name, get_tensor
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.block_grid import BlockQuantizer, BlockScheme, MatrixQuantizer
from compresskit.quant.numerics.palette import Palette, WeightScheme, matrix_quantizer
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import layer_costs
from compresskit.quant.passes.placement import Placement
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph
from compresskit.quant.passes.quantizer_names import add_quantizer_, stored_name
from compresskit.quant.weight_only.storage import WeightStorage, deploy_weights, insert_input_quantizers_
from compresskit.quant.weight_only.weight_plan import GraphWeight, WeightPlan, weights_of

#: The target of weight-only models: no operator runs in integers; DequantizeLinear with a block size needs opset 21.
WEIGHT_ONLY = Target(name="WEIGHTS", operators={}, opset=21)


@dataclass(frozen=True, kw_only=True)
class WeightOrigin(Origin):
    """What a model with rounded weights was made from.

    weights: name of each rounded weight -> its number format.
    storage: how the ONNX file stores them.
    scaled: names of the values that are divided at run time (AWQ).
    """

    weights: Mapping[str, WeightScheme]
    storage: WeightStorage
    scaled: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        weights = {name: asdict(scheme) for name, scheme in self.weights.items()}
        return super().to_json() | {"weights": weights, "storage": asdict(self.storage), "scaled": list(self.scaled)}


class WeightQuantized(Quantized):
    """A model with rounded weights and float activations. It trains like any module, rounded weights in steps of their grid.

    plan: how each weight is stored, and why others stay float; prints as a table.
    storage: how the ONNX file stores rounded weights.
    """

    origin: WeightOrigin

    def __init__(self, captured: Captured, origin: WeightOrigin) -> None:
        costs = layer_costs(captured.module.graph)
        placement = Placement(target=WEIGHT_ONLY.name, floating=dict.fromkeys(costs, "products are in float"), costs=costs)
        super().__init__(captured, WEIGHT_ONLY, placement, origin)
        self.storage, self.plan = origin.storage, WeightPlan()
        self.exact = not self.storage.int8_inputs

    def keep_masked_(self) -> None:
        """Let no weight that a pruning mask keeps be rounded to zero; see `Quantized.keep_masked_`."""
        if (masks := masks_of(self.body)) is None:
            return
        for name, quantizer in matrix_quantizers(self.body).items():
            if name in masks.masks:
                with torch.no_grad():
                    quantizer.keep_nonzero_(get_tensor(self.body, name), masks.masks[name])

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: rounded weights stored as integers."""
        self.check_weights()
        return deploy_weights(self.body, self.storage)


def capture_for_weights(
    model: nn.Module,
    example: Inputs,
    skip: tuple[str, ...],
    dynamic: Dynamic,
    *,
    overridden: Collection[str] = (),
    merges: Sequence[MergedLayer] | None = None,
) -> tuple[Captured, Origin]:
    """Capture a float model as the graph whose weights are rounded.

    overridden: names of the weights that have a number format of their own. merges: see `prepare_graph`.
    """
    apart = [name.rpartition(".")[0] for name in overridden]
    captured, origin, _ = prepare_graph(model, example, WEIGHT_ONLY, skip, dynamic, apart=apart, merges=merges)
    return captured, origin


def insert_matrix_quantizers_(body: fx.GraphModule, weights: Sequence[GraphWeight], schemes: Mapping[str, WeightScheme]) -> None:
    """Insert a quantizer, still switched off, after every read of the given weights.

    schemes: name of each weight -> its number format.
    """
    for weight in weights:
        shape = tuple(get_tensor(body, weight.name).shape)
        path = add_quantizer_(body, stored_name(weight.name), matrix_quantizer(schemes[weight.name], shape, weight.axis))
        for node in [n for n in body.graph.nodes if n.op == "get_attr" and n.target == weight.name]:
            with body.graph.inserting_after(node):
                rounded = body.graph.call_module(path, (node,))
            rounded.meta = dict(node.meta)
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, new=rounded: user is not new)
    body.graph.lint()
    body.recompile()


def matrix_quantizers(body: fx.GraphModule) -> dict[str, MatrixQuantizer]:
    """Name of each weight that is rounded -> its quantizer."""
    calls = [node for node in body.graph.nodes if node.op == "call_module" and node.args[0].op == "get_attr"]
    modules = {str(node.args[0].target): body.get_submodule(node.target) for node in calls}
    return {name: module for name, module in modules.items() if isinstance(module, MatrixQuantizer)}


def block_quantizers(body: fx.GraphModule) -> dict[str, BlockQuantizer]:
    """Name of each weight that is rounded in blocks -> its quantizer."""
    return {name: module for name, module in matrix_quantizers(body).items() if isinstance(module, BlockQuantizer)}


def insert_division_(body: fx.GraphModule, value: Node, factor: Tensor) -> None:
    """Divide a value of the graph by `factor` (channels,), stored as a buffer, before any operator reads it."""
    name = free_name(body, f"scaled_{value.name}")
    body.register_buffer(name, factor.reciprocal())
    with body.graph.inserting_after(value):
        buffer = body.graph.get_attr(name)
    buffer.meta["val"] = value.meta["val"].new_empty(factor.shape)
    with body.graph.inserting_after(buffer):
        product = body.graph.call_function(aten.mul.Tensor, (value, buffer))
    product.meta = dict(value.meta)
    value.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    body.recompile()


def _scheme_of(record: Mapping[str, Any]) -> WeightScheme:
    """The number format that a record of its fields is of."""
    return Palette(**record) if "group_size" in record else BlockScheme(**record)


def rebuild_weights(
    model: nn.Module,
    example: Inputs,
    saved: dict[str, Any],
    plan: Any,
    *,
    skip: tuple[str, ...],
    dynamic: Dynamic,
    merges: Sequence[MergedLayer],
) -> WeightQuantized:
    """Rebuild a weight-only model from a float model of the same class; its tensors still have to be loaded.

    Args:
        saved: the record of its `WeightOrigin`.
        plan: the record of its `WeightPlan`.

    Raises CheckpointError where the record is of another model.
    """
    captured, origin = capture_for_weights(model, example, skip, dynamic, merges=merges)
    try:
        schemes = {str(name): _scheme_of(fields) for name, fields in saved["weights"].items()}
        storage, scaled = WeightStorage(**saved["storage"]), tuple(str(name) for name in saved["scaled"])
        weight_plan = WeightPlan.from_json(plan)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"not the record of rounded weights: {type(error).__name__} {error}; save the model again"
        ) from None
    nodes = {node.name: node for node in captured.module.graph.nodes}
    weights = {weight.name: weight for weight in weights_of(captured.module)}
    if unknown := [name for name in schemes if name not in weights] + [name for name in scaled if name not in nodes]:
        raise CheckpointError(
            f"{type(model).__name__}: the record names {unknown[0]}, which this model's graph does not have; {AS_SAVED}"
        )
    insert_matrix_quantizers_(captured.module, [weights[name] for name in weights if name in schemes], schemes)
    for name in scaled:
        ones = torch.ones(int(nodes[name].meta["val"].shape[-1]), dtype=torch.float32)
        insert_division_(captured.module, nodes[name], ones)
    if storage.int8_inputs:
        insert_input_quantizers_(captured.module)
    quantized = WeightQuantized(captured, WeightOrigin(**vars(origin), weights=schemes, storage=storage, scaled=scaled))
    quantized.plan = weight_plan
    return quantized
