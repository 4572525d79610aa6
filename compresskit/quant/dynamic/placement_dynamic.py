"""Decide which operators of a captured graph are quantized dynamically: products with a stored weight, and embeddings.

| kind | weights | activations | in a file |
|---|---|---|---|
| linear, matmul by a constant | int8 | uint8, the range of the batch | DynamicQuantizeLinear, MatMulInteger |
| lstm | int8 | likewise, before every step | DynamicQuantizeLSTM |
| conv (on request) | int8 | likewise | DynamicQuantizeLinear, ConvInteger |
| embedding | int8 | none | Gather of integers |
| gru, rnn | int8, decoded when the file is loaded | float | GRU, RNN |
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from compresskit.base.errors import SettingError
from compresskit.base.settings import stands_in
from compresskit.graph.capture import module_path, parameter_name
from compresskit.graph.layers.stored import CONVS
from compresskit.graph.normalize import Node, aten
from compresskit.graph.recurrent import OPERATORS
from compresskit.graph.surgery import get_tensor
from compresskit.quant.numerics.operators import OPERATOR_KINDS, is_float_tensor
from compresskit.quant.numerics.targets import Target
from compresskit.quant.passes.coverage import ONCE, computed_once, costs_of_runs, stayed_float
from compresskit.quant.passes.placement import Placement, QuantizationPoint

#: ATen operator -> its kind in dynamic quantization.
DYNAMIC_KINDS: dict[Any, str] = {
    aten.linear.default: "linear",
    aten.addmm.default: "linear",
    aten.matmul.default: "matmul",
    aten.mm.default: "matmul",
    aten.bmm.default: "matmul",
    aten.embedding.default: "embedding",
    **dict.fromkeys(CONVS, "conv"),
    **{target: kind.split("_")[0] for kind, target in OPERATORS.items()},
}
#: Kinds that are quantized by default; a convolution in dynamic integers is slower than in float (ONNX Runtime, AVX512-VNNI).
DEFAULT_OPERATORS = ("linear", "matmul", "embedding", "lstm", "gru", "rnn")
#: Kinds of other operators with weights -> why they stay float.
UNSUPPORTED = {
    "conv_transpose": "ONNX Runtime has no dynamic integer kernel for transposed convolutions",
    "batch_norm": "it could not be folded into the layer before it",
}
STORED_KINDS = ("embedding", "gru", "rnn")  # whose weights are stored in integers, and decoded for a computation in float
ALL_ZERO = "its weights are all zero"


@dataclass(frozen=True, kw_only=True)
class StoredProduct:
    """A linear layer, matrix product or convolution with a stored weight.

    x, weight, bias: nodes of its operands. axis: the dimension of the weight with its outputs.
    """

    x: Node
    weight: Node
    bias: Node | None = None
    axis: int = 0


def stored_product(node: Node) -> StoredProduct | None:
    """The operands of a linear layer, product or convolution; None where its second operand is not a stored weight."""
    args = [*node.args, None, None]
    if node.target is aten.addmm.default:
        plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
        product = StoredProduct(x=args[1], weight=args[2], bias=args[0], axis=1) if plain else None
    elif DYNAMIC_KINDS[node.target] == "matmul":
        product = StoredProduct(x=args[0], weight=args[1], axis=1)
        if parameter_name(product.weight) and product.weight.meta["val"].ndim != 2:
            return None
    else:
        product = StoredProduct(x=args[0], weight=args[1], bias=args[2])
    return product if product is not None and parameter_name(product.weight) is not None else None


def recurrent_weights(node: Node) -> list[Node]:
    """The nodes of all weights and biases of a recurrent layer."""
    return list(node.args[2])


def float_layers(lstm: Node, floating: Collection[str]) -> list[int]:
    """The layers of an LSTM, from 0, that what stays float names: `lstm.0` is the first one of the node `lstm`. Else none."""
    layers = lstm.args[4] if DYNAMIC_KINDS.get(lstm.target) == "lstm" else 0
    return [layer for layer in range(layers) if f"{lstm.name}.{layer}" in floating]


def place_dynamic(
    module: fx.GraphModule,
    target: Target,
    *,
    operators: tuple[str, ...] = DEFAULT_OPERATORS,
    skip: tuple[str, ...] = (),
    floating: Mapping[str, str] | None = None,
) -> Placement:
    """Decide what is quantized; the graph is not changed.

    Args:
        module: captured, with BatchNorm folded.
        target: where it will run.
        operators: kinds that are quantized, of those in `DYNAMIC_KINDS`.
        skip: dotted names of modules whose operators stay float.
        floating: names of nodes, and of layers of an LSTM, that stay float, each with its reason.

    Returns a placement in which every value that feeds integer products is one point: rounded once for all products that read it.
    Raises SettingError for kinds or modules that do not exist.
    """
    if unknown := sorted(set(operators) - set(DYNAMIC_KINDS.values())):
        raise SettingError(f"operators={unknown}: dynamic quantization knows {sorted(set(DYNAMIC_KINDS.values()))}")
    paths = {module_path(node) for node in module.graph.nodes}
    if unknown := [s for s in skip if not any(stands_in(path, [s]) for path in paths)]:
        raise SettingError(f"skip={unknown}: no operator of the model stands in a module of that name")
    integer, decoded, stays_float = dict[str, str](), dict[str, str](), dict[str, str]()
    points: dict[Node, QuantizationPoint] = {}
    once = {node for node in computed_once(module.graph) if DYNAMIC_KINDS.get(node.target) not in STORED_KINDS}
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_float_tensor(node) or node.target is operator.getitem:
            continue
        kind = DYNAMIC_KINDS.get(node.target)
        reason = _reason_for_float(module, node, kind, operators, skip, floating or {}) or (ONCE if node in once else None)
        if reason is not None:
            stays_float[node.name] = reason
            continue
        assert kind is not None
        if kind in ("gru", "rnn"):
            decoded[node.name] = kind
            stays_float[node.name] = (
                f"its weights are stored in integers and decoded: ONNX Runtime has no integer kernel for {kind}"
            )
            continue
        integer[node.name] = kind
        stays_float |= {f"{node.name}.{i}": (floating or {})[f"{node.name}.{i}"] for i in float_layers(node, floating or ())}
        product = stored_product(node) if kind in ("linear", "matmul", "conv") else None
        if product is not None:
            points.setdefault(product.x, QuantizationPoint(node=product.x.name, group=len(points), everywhere=False))
    named = {node.name: module_path(node) for node in module.graph.nodes if node.name in integer or node.name in stays_float}
    named |= {name: named[lstm] for name in stays_float if (lstm := name.rpartition(".")[0]) in named}
    return Placement(
        target=f"{target.name}, dynamically",
        integer=integer,
        carried=decoded,
        floating=stays_float,
        points=tuple(points.values()),
        layers=named,
        costs=costs_of_runs(module.graph, once),
    )


def _reason_for_float(
    module: fx.GraphModule,
    node: Node,
    kind: str | None,
    operators: tuple[str, ...],
    skip: tuple[str, ...],
    floating: Mapping[str, str],
) -> str | None:
    """Why an operator stays float, or None."""
    path = module_path(node)
    if stands_in(path, skip):
        return "skipped by the user"
    if node.name in floating:
        return floating[node.name]
    if kind is None:
        static_kind = OPERATOR_KINDS.get(node.target, "")
        return UNSUPPORTED.get(static_kind, "only products with stored weights are quantized dynamically")
    if kind not in operators:
        return f"{kind} is quantized on request only: operators=(..., {kind!r})"
    if kind in ("gru", "rnn", "lstm"):
        if any(parameter_name(w) is None for w in recurrent_weights(node)):
            return "a weight of it is computed during the forward pass"
        if kind == "lstm" and len(float_layers(node, floating)) == node.args[4]:
            return floating[f"{node.name}.0"]
        return None
    product = None if kind == "embedding" else stored_product(node)
    weight = node.args[0] if kind == "embedding" else product.weight if product is not None else None
    if weight is None or parameter_name(weight) is None:
        return _reason_without_matrix(node)
    if kind == "conv" and node.target is aten.conv3d.default:
        return "ONNX Runtime has no integer kernel for three-dimensional convolutions"
    recorded = stayed_float(node, ALL_ZERO)
    if recorded is not None:
        return ALL_ZERO if recorded else None
    return None if bool(get_tensor(module, str(parameter_name(weight))).any()) else ALL_ZERO


def _reason_without_matrix(node: Node) -> str:
    """Why a product has no stored matrix that it could be multiplied by in integers."""
    if node.target is aten.addmm.default and any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return "it scales an operand (alpha, beta)"
    operands = [value for value in node.args[:3] if isinstance(value, fx.Node)][-2:]
    stored = [value for value in operands if parameter_name(value) is not None]
    if stored and DYNAMIC_KINDS.get(node.target) in ("linear", "matmul"):
        shape = list(stored[-1].meta["val"].shape)
        return f"its stored weight, of shape {shape}, is not a matrix on the right, which alone an integer product takes"
    return "both of its operands are computed: there is no weight to store"
