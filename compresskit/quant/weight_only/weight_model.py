"""The model that weight-only quantization makes, how its graph is put together, and how it is built again from a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compresskit.base.errors import CheckpointError
from compresskit.base.task import Inputs
from compresskit.graph.capture import Captured, Dynamic, parameter_name
from compresskit.graph.masks import masks_of
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.block_grid import BlockQuantizer, Blocks
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import layer_costs
from compresskit.quant.passes.placement import Placement
from compresskit.quant.passes.prepare_graph import Origin, prepare_graph
from compresskit.quant.weight_only.storage import Form, deploy_weights, insert_inputs_
from compresskit.quant.weight_only.weight_plan import Weight, WeightPlan, weights_of

#: Where it runs: products in float; a block size needs opset 21.
WEIGHTS = Target(name="WEIGHTS", operators={}, opset=21)


@dataclass(frozen=True, kw_only=True)
class WeightOrigin(Origin):
    """What a model with rounded weights was made from.

    weights: name of each rounded matrix -> its blocks. form: how the file holds them.
    scaled: names of the values that are divided at run time (AWQ).
    """

    weights: Mapping[str, Blocks]
    form: Form
    scaled: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON-ready record."""
        weights = {name: asdict(blocks) for name, blocks in self.weights.items()}
        return super().to_json() | {"weights": weights, "form": asdict(self.form), "scaled": list(self.scaled)}


class WeightQuantized(Quantized):
    """A model whose matrices lie on grids; everything else is float. It trains like any module, matrices in steps of the grids.

    `plan` says what each matrix is stored as, and why others are float; `form` how the file holds them.
    """

    origin: WeightOrigin

    def __init__(self, captured: Captured, origin: WeightOrigin) -> None:
        kept = dict.fromkeys(layer_costs(captured.module.graph), "products are in float")
        placement = Placement(target=WEIGHTS.name, floating=kept, costs=layer_costs(captured.module.graph))
        super().__init__(captured, WEIGHTS, placement, origin)
        self.form, self.plan = origin.form, WeightPlan()
        self.exact = not self.form.integers  # the file, as it is written, computes what the model does

    def blocked(self) -> dict[str, BlockQuantizer]:
        """Name of each rounded matrix -> its quantizer."""
        calls = [node for node in self.body.graph.nodes if node.op == "call_module"]
        found = {
            str(node.args[0].target): self.body.get_submodule(node.target) for node in calls if node.args[0].op == "get_attr"
        }
        return {name: part for name, part in found.items() if isinstance(part, BlockQuantizer)}

    def keep_masked_(self) -> None:
        """Let no weight that a mask keeps round to zero; see `Quantized.keep_masked_`."""
        masks = masks_of(self.body)
        for name, quantizer in self.blocked().items() if masks is not None else ():
            if masks is not None and name in masks.masks:
                with torch.no_grad():
                    quantizer.keep_nonzero_(get_tensor(self.body, name), masks.masks[name])

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms, matrices stored as integers."""
        return deploy_weights(self.body, self.form)


def lower_weights(model: nn.Module, example: Inputs, skip: tuple[str, ...], dynamic: Dynamic) -> tuple[Captured, Origin]:
    """A float model as the graph whose matrices are rounded, and what it came from; x @ W.T stands there as a linear layer."""
    captured, origin, _ = prepare_graph(model, example, WEIGHTS, skip, dynamic)
    graph = captured.module.graph
    for node in list(graph.nodes):
        if node.target not in (aten.matmul.default, aten.mm.default) or not isinstance(node.args[1], fx.Node):
            continue
        turned = node.args[1]
        source = turned.args[0] if turned.target in _TURNS else None
        name = parameter_name(source)
        if name is not None and get_tensor(captured.module, name).ndim == 2:
            node.target, node.args = aten.linear.default, (node.args[0], source)
    graph.eliminate_dead_code()
    captured.module.recompile()
    return captured, origin


def weight_origin(plain: Origin, *, weights: Mapping[str, Blocks], form: Form, scaled: tuple[str, ...]) -> WeightOrigin:
    """The origin of a prepared graph with what was done to its weights."""
    return WeightOrigin(
        float_class=plain.float_class, structure=plain.structure, skip=plain.skip, weights=weights, form=form, scaled=scaled
    )


_TURNS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default})  # of two dimensions


def insert_blocks_(body: fx.GraphModule, weights: Sequence[Weight], chosen: Mapping[str, Blocks]) -> None:
    """Put a quantizer, still switched off, behind every read of the chosen weights."""
    if "quantizers" not in body._modules:
        body.add_submodule("quantizers", nn.Module())
    for weight in weights:
        path = "quantizers.weight_" + weight.name.replace(".", "_")
        shape = tuple(get_tensor(body, weight.name).shape)
        body.add_submodule(path, BlockQuantizer(chosen[weight.name], shape, weight.axis))
        for node in [n for n in body.graph.nodes if n.op == "get_attr" and n.target == weight.name]:
            with body.graph.inserting_after(node):
                rounded = body.graph.call_module(path, (node,))
            rounded.meta = dict(node.meta)
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, mine=rounded: user is not mine)
    body.graph.lint()
    body.recompile()


def insert_factor_(body: fx.GraphModule, base: Node, factor: Tensor) -> None:
    """Divide a value by `factor` (channels,), a buffer, before anything reads it."""
    name = f"scaled_{base.name}"
    body.register_buffer(name, factor.reciprocal())
    with body.graph.inserting_after(base):
        buffer = body.graph.get_attr(name)
    buffer.meta["val"] = base.meta["val"].new_empty(factor.shape)
    with body.graph.inserting_after(buffer):
        product = body.graph.call_function(aten.mul.Tensor, (base, buffer))
    product.meta = dict(base.meta)
    base.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
    body.recompile()


def rebuild_weights(
    model: nn.Module, example: Inputs, origin: dict[str, Any], plan: Any, *, skip: tuple[str, ...], dynamic: Dynamic
) -> WeightQuantized:
    """The quantized model of a record again, from a float model of the same class; its values still have to be loaded.

    Raises CheckpointError where the record is of another model.
    """
    captured, fresh = lower_weights(model, example, skip, dynamic)
    try:
        chosen = {str(name): Blocks(**given) for name, given in origin["weights"].items()}
        form, scaled = Form(**origin["form"]), [str(name) for name in origin["scaled"]]
        found = WeightPlan.from_json(plan)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not the record of rounded weights: {type(error).__name__} {error}") from None
    nodes = {node.name: node for node in captured.module.graph.nodes}
    weights = {weight.name: weight for weight in weights_of(captured.module)}
    if odd := [name for name in chosen if name not in weights] + [name for name in scaled if name not in nodes]:
        raise CheckpointError(f"{type(model).__name__}: the record names {odd[0]}, which this model's graph does not have")
    insert_blocks_(captured.module, [weights[name] for name in weights if name in chosen], chosen)
    for name in scaled:
        channels = int(nodes[name].meta["val"].shape[-1])
        insert_factor_(captured.module, nodes[name], torch.ones(channels))
    if form.integers:
        insert_inputs_(captured.module)
    quantized = WeightQuantized(captured, weight_origin(fresh, weights=chosen, form=form, scaled=tuple(scaled)))
    quantized.plan = found
    return quantized
