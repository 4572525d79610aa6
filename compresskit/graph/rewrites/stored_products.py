"""Rewrite products by a stored matrix to linear layers, which have integer kernels, on a captured graph.

    einsum("bti,io->bto", x, W)           -> matmul(x, W)
    matmul(x, W.t()), addmm(b, x, W.t())  -> linear(x, W, b)
    matmul(x, W) + b, addmm(b, x, W)      -> linear(x, W', b), with W stored transposed under its name as W'

The last line changes the graph's copy of a tensor. It is for targets that run linear layers in integers; the others take a matrix
as it is stored.
"""

from __future__ import annotations

import string
from typing import Any

from torch import fx

from compresskit.graph.capture import parameter_name
from compresskit.graph.masks import map_mask_
from compresskit.graph.normalize import Node, aten
from compresskit.graph.surgery import get_tensor, set_tensor_

_PRODUCTS = frozenset({aten.matmul.default, aten.mm.default, aten.addmm.default})
TRANSPOSES = frozenset({aten.t.default, aten.numpy_T.default, aten.mT.default})  # of a matrix


def rewrite_stored_products_(module: fx.GraphModule, *, transpose: bool) -> None:
    """Rewrite the products by a stored matrix of a captured graph, in place.

    Args:
        module: the graph.
        transpose: whether to store matrices transposed where that makes a linear layer of every operator that reads them.
    """
    for node in list(module.graph.nodes):
        if node.target is aten.einsum.default:
            _replace_einsum(module, node)
    for node in list(module.graph.nodes):
        if node.target in _PRODUCTS and (weight := _untransposed(module, _weight(node))) is not None and _is_linear(node):
            _make_linear(node, weight)
    if transpose:
        _transpose_weights(module)
    module.graph.eliminate_dead_code()
    module.recompile()


def _weight(node: Node) -> Any:
    """The right operand of a matrix product."""
    return node.args[2 if node.target is aten.addmm.default else 1]


def _is_matrix(module: fx.GraphModule, value: Any) -> bool:
    """Whether a value is a stored matrix of floating point numbers."""
    name = parameter_name(value)
    return name is not None and get_tensor(module, name).ndim == 2 and get_tensor(module, name).is_floating_point()


def _untransposed(module: fx.GraphModule, value: Any) -> Node | None:
    """The stored matrix that a value is the transpose of, or None."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or not value.args or not _is_matrix(module, value.args[0]):
        return None
    args: list[Any] = list(value.args)
    swaps = value.target in TRANSPOSES
    if value.target is aten.permute.default:
        swaps = [d % 2 for d in args[1]] == [1, 0]
    elif value.target is aten.transpose.int:
        swaps = args[1] % 2 != args[2] % 2
    return args[0] if swaps else None


def _is_linear(node: Node) -> bool:
    """Whether a product by a matrix is what a linear layer computes with the matrix transposed."""
    if node.target is not aten.addmm.default:
        return node.args[0].op != "get_attr"  # a product of two stored matrices is no layer
    bias = node.args[0]
    width = node.meta["val"].shape[-1]
    plain = node.kwargs.get("beta", 1) == 1 and node.kwargs.get("alpha", 1) == 1
    return plain and parameter_name(bias) is not None and tuple(bias.meta["val"].shape) == (width,)


def _make_linear(node: Node, weight: Node) -> None:
    bias = (node.args[0],) if node.target is aten.addmm.default else ()
    x = node.args[1 if bias else 0]
    node.target, node.args, node.kwargs = aten.linear.default, (x, weight, *bias), {}


def _transpose_weights(module: fx.GraphModule) -> None:
    """Store every matrix transposed that only products take which are linear layers then."""
    readers: dict[int, list[Node]] = {}
    names: dict[int, set[str]] = {}
    for node in module.graph.nodes:
        if _is_matrix(module, node):
            key = id(get_tensor(module, node.target))  # tied weights are one tensor under several names
            readers.setdefault(key, []).extend(node.users)
            names.setdefault(key, set()).add(node.target)
    for key, products in readers.items():
        if not all(node.target in _PRODUCTS and _reads_as_weight(node, names[key]) for node in products):
            continue
        for name in sorted(names[key]):
            stored = get_tensor(module, name)
            if id(stored) == key:  # not yet replaced under another of its names
                set_tensor_(module, name, stored.detach().t().contiguous())
            map_mask_(module, name, lambda mask: mask.t().contiguous())
        for node in products:
            weight = _weight(node)
            weight.meta["val"] = node.args[-2].meta["val"].new_empty(get_tensor(module, weight.target).shape)
            _make_linear(node, weight)
            _take_bias(module.graph, node)


def why_no_linear(node: Node) -> str | None:
    """Why a product by a stored matrix could not be made a linear layer; None for a product of two activations."""
    if node.target not in _PRODUCTS or parameter_name(_weight(node)) is None or _weight(node).meta["val"].ndim != 2:
        return None
    if not _is_linear(node):
        return "it scales an operand (alpha, beta), or adds more than a stored vector"
    if node.args[-2].meta["val"].ndim < 2:
        return "its input is a vector, which linear layers in integers do not take"
    return "other operators read its matrix, too, and take it as it is stored"


def _reads_as_weight(node: Node, names: set[str]) -> bool:
    """Whether a product takes one of the tensors `names` as its weight alone, and can be written as a linear layer."""
    read = [n for n in node.all_input_nodes if parameter_name(n) in names]
    x = node.args[-2]
    return read == [_weight(node)] and x.op != "get_attr" and x.meta["val"].ndim > 1 and _is_linear(node)


def _take_bias(graph: fx.Graph, node: Node) -> None:
    """Make a stored vector that is added to a linear layer, and to nothing else of it, the bias of the layer."""
    users = list(node.users)
    if len(node.args) > 2 or len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return
    add = users[0]
    bias = add.args[1] if add.args[0] is node else add.args[0]
    if parameter_name(bias) is None or tuple(bias.meta["val"].shape) != (node.meta["val"].shape[-1],):
        return
    with graph.inserting_before(node):
        vector = graph.get_attr(bias.target)  # the other may stand behind the layer
    vector.meta = dict(bias.meta)
    node.args = (*node.args, vector)
    add.replace_all_uses_with(node)
    graph.erase_node(add)


def _replace_einsum(module: fx.GraphModule, node: Node) -> None:
    """Write `einsum` of an activation and a stored matrix as a product, with the dimensions permuted where they must be."""
    equation, operands = node.args[:2]
    if len(operands) != 2 or sum(_is_matrix(module, v) for v in operands) != 1:
        return
    place = 1 if _is_matrix(module, operands[1]) else 0
    x, weight = operands[1 - place], operands[place]
    labels = _labels(equation, [v.meta["val"].ndim for v in operands])
    if labels is None or x.op == "get_attr" or x.meta["val"].ndim < 2:
        return
    of_x, of_weight, result = labels[1 - place], labels[place], labels[2]
    summed = set(of_x) & set(of_weight) - set(result)
    made = set(of_weight) & set(result) - set(of_x)
    if len(summed) != 1 or len(made) != 1 or set(of_x) - summed | made != set(result):
        return
    inputs, outputs = summed.pop(), made.pop()
    if x.meta["val"].shape[of_x.index(inputs)] != weight.meta["val"].shape[of_weight.index(inputs)]:
        return  # einsum repeats a dimension of size 1
    kept = [label for label in of_x if label != inputs]
    graph = module.graph

    def add(target: Any, *args: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta = {**node.meta, "val": target(*fx.map_arg(args, lambda n: n.meta["val"]))}
        return new

    with graph.inserting_before(node):
        if of_x[-1] != inputs:
            x = add(aten.permute.default, x, [of_x.index(label) for label in (*kept, inputs)])
        product = add(aten.matmul.default if of_weight[0] == inputs else aten.linear.default, x, weight)
        if result != [*kept, outputs]:
            product = add(aten.permute.default, product, [[*kept, outputs].index(label) for label in result])
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def _labels(equation: str, ranks: list[int]) -> list[list[str]] | None:
    """The labels of each dimension of the operands and of the result; None where an operand has one twice (its diagonal).

    The dimensions of an ellipsis get labels 0, 1, ...
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    if sum("..." in term for term in terms) > 1:
        return None
    ellipsis = [str(i) for i in range(max(hidden))]
    if not arrow:
        letters = sorted({c for c in left if c in string.ascii_letters and left.count(c) == 1})
        right = ("..." if "..." in left else "") + "".join(letters)
    split = [[*head, *(ellipsis if dots else ()), *tail] for head, dots, tail in (t.partition("...") for t in [*terms, right])]
    if "..." in left and "..." not in right:
        return None
    return None if any(len(set(term)) < len(term) for term in split) else split
