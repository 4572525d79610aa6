"""The layers of a quantized model that run in integers, and their outputs in float and quantized: what corrections minimise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from compresskit.base.inputs import Batches, first_and_all, not_finite, not_finite_error
from compresskit.base.task import Inputs
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.quant.calibration.paired_run import Pair, run_float_and_quantized
from compresskit.quant.model import Quantized
from compresskit.quant.numerics.quantizers import Quantizer, WeightQuantizer


@dataclass(frozen=True, eq=False)
class IntegerLayer:
    """A convolution or linear layer that runs in integers.

    node: of the layer. quantizer: of its weight. weight, bias: names of its parameters; bias None where it has none.
    """

    node: Node
    quantizer: WeightQuantizer
    weight: str
    bias: str | None

    @property
    def channel_dim(self) -> int:
        """The dimension of its output channels in its output."""
        return -1 if "linear" in str(self.node.target) else 1


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """One batch of a layer: its output in the float model and in the quantized one, and the quantized tensors that it reads."""

    float_output: Tensor
    quantized_output: Tensor
    arguments: list[Tensor]


def integer_layers(quantized: Quantized) -> Iterator[IntegerLayer]:
    """Yield the layers in the order of the graph, each weight once."""
    body, seen = quantized.body, set[str]()
    for node in body.graph.nodes:
        if quantized.placement.integer.get(node.name) not in ("conv", "linear") or node.args[1].op != "call_module":
            continue
        quantizer = body.get_submodule(node.args[1].target)
        if not isinstance(quantizer, WeightQuantizer) or node.args[1].target in seen:
            continue
        seen.add(node.args[1].target)
        bias = node.args[2] if len(node.args) > 2 else None
        bias = bias.args[0] if bias is not None and bias.op == "call_module" else bias
        yield IntegerLayer(node, quantizer, str(node.args[1].args[0].target), parameter_name(bias))


def parameter_readers(body: fx.GraphModule, name: str) -> list[Node]:
    """What reads a parameter."""
    return [user for node in body.graph.nodes if node.op == "get_attr" and node.target == name for user in node.users]


def only_rounded(body: fx.GraphModule, name: str) -> bool:
    """Whether layers alone read a weight, each rounded, and no lookup in a table that is also the last layer's weight."""
    readers = parameter_readers(body, name)
    if any(user.target is aten.embedding.default for node in readers for user in node.users):
        return False
    return all(node.op == "call_module" and isinstance(body.get_submodule(str(node.target)), Quantizer) for node in readers)


def finite_batches(quantized: Quantized, batches: Batches, where: str) -> list[Inputs]:
    """Return the inputs of all batches, to learn from.

    A mask of -inf, which ends in a softmax, and nan that the model replaces are let pass.

    Raises DataError, which begins with `where`, where there is no batch, or one holds nan or infinite values that reach the
    output of a layer in float, or nan that reaches an output of the model.
    """
    data = list(first_and_all(batches, where)[1])
    layers = {layer.node for layer in integer_layers(quantized)}
    for number, inputs in enumerate(data, 1):
        reached: list[str] = []

        def visit(node: Node, pair: Pair, _: Callable[[Node], Pair], reached: list[str] = reached) -> None:
            if node in layers and not_finite(pair[0]):
                reached.append(f"the output of {module_path(node) or node.name}")
            elif node.op == "output" and not_finite(pair[0]) == "nan":
                reached.append("an output of the model")

        if not_finite(inputs):
            run_float_and_quantized(quantized.body, inputs, visit)
        if reached:
            raise not_finite_error(where, reached[0], [inputs], number)
    return data


def layer_outputs(
    body: fx.GraphModule, node: Node, batches: Iterable[Inputs], float_weights: Mapping[str, Tensor]
) -> Iterator[LayerOutputs]:
    """Yield the outputs of one layer for each batch; nothing after it is run.

    float_weights: parameters of the float model, by name, before any correction changed them.
    """
    for inputs in batches:
        arguments: list[Tensor] = []

        def visit(here: Node, pair: Pair, pair_of: Callable[[Node], Pair], arguments: list[Tensor] = arguments) -> None:
            if here is node:
                arguments += [pair_of(a)[1] for a in node.args if isinstance(a, fx.Node)]

        outputs = run_float_and_quantized(body, inputs, visit, float_weights, until=node)
        yield LayerOutputs(*outputs, arguments)
