"""Decide, on a captured graph, what is quantized dynamically: products with a stored matrix, whose inputs are rounded then.

| kind | weights | activations | in a file |
|---|---|---|---|
| linear, matmul by a constant | int8 | uint8, the range they have just then | DynamicQuantizeLinear, MatMulInteger |
| lstm | int8 | likewise, before every step | DynamicQuantizeLSTM |
| conv (on request) | int8 | likewise | DynamicQuantizeLinear, ConvInteger |
| embedding | int8 | none | Gather of integers |
| gru, rnn | int8, decoded when the file is loaded | float | GRU, RNN |
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from compresskit.base.errors import SettingError
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.normalize import Node, aten
from compresskit.graph.recurrent import OPERATORS
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import CONVS, OPERATOR_KINDS, is_float_tensor
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import layer_costs
from compresskit.quant.passes.placement import Placement, QuantizationPoint

#: ATen operator -> what dynamic quantization calls it.
DYNAMIC: dict[Any, str] = {
    aten.linear.default: "linear",
    aten.addmm.default: "linear",
    aten.matmul.default: "matmul",
    aten.mm.default: "matmul",
    aten.bmm.default: "matmul",
    aten.embedding.default: "embedding",
    **dict.fromkeys(CONVS, "conv"),
    **{target: kind.split("_")[0] for kind, target in OPERATORS.items()},
}
#: What is quantized where nothing is said; a convolution in dynamic integers is slower than in float (ONNX Runtime, AVX512-VNNI).
DEFAULT_OPERATORS = ("linear", "matmul", "embedding", "lstm", "gru", "rnn")
#: Kinds whose inputs are rounded at run time.
ROUNDED = frozenset({"linear", "matmul", "conv", "lstm"})
#: Why other operators with weights stay float.
UNSUPPORTED = {
    "conv_transpose": "ONNX Runtime has no dynamic integer kernel for transposed convolutions",
    "batch_norm": "it could not be folded into the layer before it",
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A product with a stored weight. axis: the dimension of the weight with one index for each output."""

    x: Node
    weight: Node
    bias: Node | None = None
    axis: int = 0


def layer_of(node: Node) -> Layer | None:
    """What a linear layer, product or convolution multiplies; None where its second operand is not stored."""
    given = [*node.args, None, None]
    if node.target is aten.addmm.default:
        plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
        layer = Layer(x=given[1], weight=given[2], bias=given[0], axis=1) if plain else None
    elif DYNAMIC[node.target] == "matmul":
        layer = Layer(x=given[0], weight=given[1], axis=1)
        if parameter_name(layer.weight) and layer.weight.meta["val"].ndim != 2:
            return None
    else:
        layer = Layer(x=given[0], weight=given[1], bias=given[2])
    return layer if layer is not None and parameter_name(layer.weight) is not None else None


def matrices(node: Node) -> list[Node]:
    """The weight matrices of a recurrent layer: every tensor of two dimensions in its list of weights."""
    return list(node.args[2])


def place_dynamic(
    module: fx.GraphModule,
    target: Target,
    *,
    operators: tuple[str, ...] = DEFAULT_OPERATORS,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
) -> Placement:
    """Decide what is quantized; pure, nothing is changed.

    Args:
        module: captured and BatchNorm-folded.
        target: where it will run.
        operators: kinds that are quantized, of those in `DYNAMIC`.
        skip: dotted paths of modules whose operators stay float.
        floating: names of nodes that stay float, each with its reason.

    Every value that feeds integer products is one point, rounded once for all that read it.
    """
    if unknown := sorted(set(operators) - set(DYNAMIC.values())):
        raise SettingError(f"operators={unknown}: dynamic quantization knows {sorted(set(DYNAMIC.values()))}")
    paths = {module_path(node) for node in module.graph.nodes}
    if lost := [s for s in skip if not any(path == s or path.startswith(f"{s}.") for path in paths)]:
        raise SettingError(f"skip={lost}: no operator of the model stands in a module of that name")
    integer: dict[str, str] = {}
    decoded: dict[str, str] = {}
    left: dict[str, str] = {}
    points: dict[Node, QuantizationPoint] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_float_tensor(node) or node.target is operator.getitem:
            continue
        kind = DYNAMIC.get(node.target)
        reason = _reason(module, node, kind, operators, skip, floating or {})
        if reason is not None:
            left[node.name] = reason
            continue
        assert kind is not None
        if kind in ("gru", "rnn"):
            decoded[node.name] = kind
            left[node.name] = f"its weights are stored in integers and decoded: ONNX Runtime has no integer kernel for {kind}"
            continue
        integer[node.name] = kind
        layer = layer_of(node) if kind in ("linear", "matmul", "conv") else None
        if layer is not None:
            points.setdefault(layer.x, QuantizationPoint(node=layer.x.name, group=len(points), everywhere=False))
    named = {node.name: module_path(node) for node in module.graph.nodes if node.name in integer or node.name in left}
    return Placement(
        target=f"{target.name}, dynamically",
        integer=integer,
        carried=decoded,
        floating=left,
        points=tuple(points.values()),
        layers=named,
        costs=layer_costs(module.graph),
    )


def _reason(
    module: fx.GraphModule,
    node: Node,
    kind: str | None,
    operators: tuple[str, ...],
    skip: tuple[str, ...],
    kept: Mapping[str, str],
) -> str | None:
    """Why an operator stays float, or None."""
    path = module_path(node)
    if any(path == s or path.startswith(f"{s}.") for s in skip):
        return "skipped by the user"
    if node.name in kept:
        return kept[node.name]
    if kind is None:
        known = OPERATOR_KINDS.get(node.target, "")
        return UNSUPPORTED.get(known, "only products with stored weights are quantized dynamically")
    if kind not in operators:
        return f"{kind} is quantized on request only: operators=(..., {kind!r})"
    if kind in ("gru", "rnn", "lstm"):
        if any(parameter_name(w) is None for w in matrices(node)):
            return "a weight of it is computed during the forward pass"
        return None
    weight = node.args[0] if kind == "embedding" else getattr(layer_of(node), "weight", None)
    if weight is None or parameter_name(weight) is None:
        return "both of its operands are computed: there is no weight to store"
    if kind == "conv" and node.target is aten.conv3d.default:
        return "ONNX Runtime has no integer kernel for three-dimensional convolutions"
    values = get_tensor(module, str(parameter_name(weight)))
    return None if bool(values.any()) else "its weights are all zero"
