"""Put quantizers where a placement says, and the quantized model that results: a trainable module and an exportable one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.errors import ModelError
from compresskit.graph import Captured, capture, parameter_name
from compresskit.masks import carry_, masks_of
from compresskit.normalize import Node
from compresskit.quant.deploy import deploy
from compresskit.quant.fold import fold_batchnorm_
from compresskit.quant.observers import Observer
from compresskit.quant.placement import Placement, Point, place
from compresskit.quant.quantizer import (
    ActivationQuantizer,
    BiasQuantizer,
    Quantizer,
    WeightQuantizer,
)
from compresskit.quant.rewrite import rewrite_
from compresskit.quant.targets import Target
from compresskit.surgery import get_tensor, structure
from compresskit.task import Inputs, call_checked


class Quantized(nn.Module):
    """A model whose activations, weights and biases are rounded as the target's runtime rounds them.

    Called like the model it was made from; trains like any module (gradients pass straight through the rounding).
    `placement` says what runs in integers; `deployed()` is the form that is exported, with integers stored.
    """

    def __init__(self, captured: Captured, target: Target, placement: Placement, origin: dict[str, Any]) -> None:
        super().__init__()
        self.body: fx.GraphModule = captured.module
        self.target, self.placement, self.origin = target, placement, origin
        self.example = captured.example

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._check(kwargs or args)
        return self.body(*args, **kwargs)

    def _check(self, inputs: Inputs) -> None:
        """One clear error for a batch of another shape than the model was captured with."""
        wanted = [v for v in pytree.tree_leaves(self.example) if isinstance(v, Tensor)]
        given = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor)]
        if [tuple(v.shape[1:]) for v in wanted] != [tuple(v.shape[1:]) for v in given]:
            raise ModelError(
                f"quantized {self.origin['class']}: wanted inputs {[('N', *v.shape[1:]) for v in wanted]}, got"
                f" {[tuple(v.shape) for v in given]}; it was captured with the shapes of the example"
            )

    def quantizers(self) -> list[Quantizer]:
        """All quantizers, each once."""
        return [q for q in self.body.get_submodule("quantizers").children() if isinstance(q, Quantizer)]

    def activation_quantizers(self) -> list[ActivationQuantizer]:
        """Those of activations."""
        return [q for q in self.quantizers() if isinstance(q, ActivationQuantizer)]

    def calibrate_(self, batches: Iterable[Inputs]) -> None:
        """Find the ranges: run batches unrounded while observers watch, then round from now on."""
        for quantizer in self.quantizers():
            quantizer.enabled = False
        for quantizer in self.activation_quantizers():
            quantizer.observing = True
        with torch.no_grad():
            for inputs in batches:
                call_checked(self, inputs, "calibration data")
        for quantizer in self.activation_quantizers():
            quantizer.observing = False
            quantizer.freeze_range_()
        for node in self.body.graph.nodes:
            rounding = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(rounding, BiasQuantizer):
                rounding.make_room_(get_tensor(self.body, node.args[0].target))
        self.enable_()

    def enable_(self, on: bool = True) -> None:
        """Round, or let everything pass in float."""
        for quantizer in self.quantizers():
            quantizer.enabled = on

    def observe_(self, on: bool, observer: Callable[[], Observer] | None = None) -> None:
        """Let the ranges of activations follow what passes, from a new observer where one is given, or hold still."""
        for quantizer in self.activation_quantizers():
            quantizer.observing = on
            if observer is not None:
                fresh = observer()
                low = (0 - quantizer.zero_point + quantizer.scheme.low) * quantizer.scale
                high = (quantizer.scheme.high - quantizer.zero_point) * quantizer.scale
                fresh.update(torch.stack([low, high]).reshape(1, 2))
                quantizer.observer = fresh

    def settle_(self) -> None:
        """Let no weight that a mask keeps round to zero: it becomes one step of its grid, so that the zeros that are stored are
        those of the masks, no more and no fewer.
        """
        masks = masks_of(self.body)
        if masks is None:
            return
        for node in self.body.graph.nodes:
            rounding = self.body.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(rounding, WeightQuantizer) and (mask := masks.masks.get(str(node.args[0].target))) is not None:
                weight = get_tensor(self.body, node.args[0].target)
                with torch.no_grad():
                    rounding.keep_(weight, mask)

    def deployed(self) -> fx.GraphModule:
        """A copy in ONNX's terms: QuantizeLinear and DequantizeLinear, weights and biases stored as integers."""
        hardsigmoids = [name for name, kind in self.placement.integer.items() if kind == "hardsigmoid"]
        return deploy(self.body, hardsigmoids)


def build(
    model: nn.Module, example: Inputs, target: Target, observer: Callable[[], Observer], *, skip: tuple[str, ...] = ()
) -> Quantized:
    """Capture a float model, fold BatchNorm, place and insert quantizers; the model itself is not changed.

    The result still computes in float: `calibrate_` gives the quantizers their ranges and switches them on.
    """
    if isinstance(model, Quantized):
        raise ModelError("this model is quantized already; quantize the float model it came from")
    origin = {"class": type(model).__name__, "structure": structure(model), "skip": list(skip)}
    captured = capture(copy.deepcopy(model), example)
    body = captured.module
    names = {name: name for node in body.graph.nodes if (name := parameter_name(node)) is not None}
    carry_(model, body, names)
    fold_batchnorm_(body)
    rewrite_(body, target)
    placement = place(body.graph, target, skip=skip)
    if not placement.integer:
        raise ModelError(f"{type(model).__name__}: {target.name} can run none of its operators in integers:\n{placement}")
    insert_(body, placement, target, observer)
    return Quantized(captured, target, placement, origin).train(model.training)


def insert_(body: fx.GraphModule, placement: Placement, target: Target, observer: Callable[[], Observer]) -> None:
    """Add quantizer modules to a captured graph."""
    nodes = {node.name: node for node in body.graph.nodes}
    body.add_submodule("quantizers", nn.Module())
    integer = {nodes[name] for name in (*placement.integer, *placement.carried)}
    shared: dict[int, tuple[str, ActivationQuantizer]] = {}
    behind: dict[Node, ActivationQuantizer] = {}
    for point in placement.points:
        if point.group not in shared:
            name = f"quantizers.{point.node}"
            clamp = _common_clamp([p for p in placement.points if p.group == point.group])
            shared[point.group] = (name, ActivationQuantizer(target.activations, observer(), clamp, point.anchor))
            body.add_submodule(name, shared[point.group][1])
        name, quantizer = shared[point.group]
        new = _insert_behind(body, nodes[point.node], name, point, quantizer, integer)
        behind[new] = quantizer
    for name, kind in placement.integer.items():
        if kind in ("conv", "linear"):
            _insert_weight(body, nodes[name], target, behind)
    body.graph.lint()
    body.recompile()


def _common_clamp(points: list[Point]) -> tuple[float, float | None] | None:
    clamps = {p.clamp for p in points}
    return clamps.pop() if len(clamps) == 1 else None


def _insert_behind(
    body: fx.GraphModule, node: Node, name: str, point: Point, quantizer: ActivationQuantizer, integer: set[Node]
) -> Node:
    readers = [user for user in node.users if point.everywhere or user in integer]
    with body.graph.inserting_after(node):
        new = body.graph.call_module(name, (node,))
    new.meta = {key: node.meta[key] for key in ("val", "nn_module_stack") if key in node.meta}
    for user in readers:
        user.replace_input_with(node, new)
    if point.clamp is not None and quantizer.clamp == point.clamp and len(node.users) == 1:
        # The ends of the grid do the clamp's work.
        new.replace_input_with(node, node.args[0])
        body.graph.erase_node(node)
    return new


def _insert_weight(body: fx.GraphModule, node: Node, target: Target, behind: dict[Node, ActivationQuantizer]) -> None:
    weight = node.args[1]
    name = "quantizers.weight_" + str(parameter_name(weight)).replace(".", "_")
    if not hasattr(body.quantizers, name.rpartition(".")[2]):
        body.add_submodule(name, WeightQuantizer(target.weights, 0, get_tensor(body, str(parameter_name(weight))).shape[0]))
    quantizer = body.get_submodule(name)
    with body.graph.inserting_before(node):
        rounded = body.graph.call_module(name, (weight,))
    node.replace_input_with(weight, rounded)
    bias = node.args[2] if len(node.args) > 2 else None
    source = _quantizer_of(node.args[0], behind)
    if bias is not None and parameter_name(bias) is not None and source is not None:
        name = f"quantizers.bias_{node.name}"
        body.add_submodule(name, BiasQuantizer(source, quantizer))  # type: ignore[arg-type]
        with body.graph.inserting_before(node):
            node.replace_input_with(bias, body.graph.call_module(name, (bias, weight)))


def _quantizer_of(value: Node, behind: dict[Node, ActivationQuantizer]) -> ActivationQuantizer | None:
    """The quantizer whose numbers a value has, looking back through what only moves it."""
    while value not in behind:
        first = value.args[0] if value.args else None
        value = first[0] if isinstance(first, list | tuple) else first  # type: ignore[assignment]
        if not isinstance(value, fx.Node):
            return None
    return behind[value]
