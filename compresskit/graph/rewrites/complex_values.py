"""Complex values as pairs of real ones, (..., 2), through operators that torch's ONNX exporter has for real values alone.

    select(f, 1, 0)      -> view_as_complex(select(view_as_real(f), 1, 0))         so all that moves, copies or pads values
    einsum(".., ..", f, g) -> complex(einsum(re, re) - einsum(im, im), ...)         so all products of matrices

Results stay pairs from one such operator to the next, and tensors that are written piece by piece are pairs from where they are
made, so that writes into views of them are writes into views of real tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.graph.normalize import Node, aten, insert_call, source_line, usual_operator


def write_complex_(module: fx.GraphModule) -> None:
    """Compute on pairs where the operators below take or give complex values.

    Raises ModelError for an operator that has no form for complex values, unless it is computed of weights alone.
    """
    made: list[Node] = []
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not any(_is_complex(value) for value in (node, *node.all_input_nodes)):
            continue
        node.target = usual_operator(node.target)
        write = (_PAIRED if _is_complex(node) else _TO_REAL).get(node.target)
        with module.graph.inserting_before(node):
            pairs = write(node) if write is not None else None
            if pairs is None:
                _check_is_written(node)
                continue
            made += _put_in_place_(node, pairs)
    for node in reversed(made):
        if not node.users:
            module.graph.erase_node(node)


def _put_in_place_(node: Node, pairs: Node) -> Iterator[Node]:
    """Let the users of a node read complex views of pairs: of a node, or of each result of one that has several."""
    if not _is_complex(node):  # pairs gave a real value
        node.replace_all_uses_with(pairs)
        node.graph.erase_node(node)
        return
    if isinstance(node.meta["val"], Tensor):
        by = {node: pairs}
    else:
        by = {user: _called(node, user.target, pairs, user.args[1]) for user in list(node.users)}
    for old, pair in by.items():
        viewed = _viewed(old, pair)
        old.replace_all_uses_with(viewed)
        yield viewed
        if old is not node:
            node.graph.erase_node(old)
    node.graph.erase_node(node)


def _viewed(node: Node, pair: Node) -> Node:
    if pair.meta["val"].stride()[-1] == 1:
        return _called(node, aten.view_as_complex.default, pair)
    return _called(node, aten.complex.default, *(_called(node, aten.select.int, pair, -1, i) for i in (0, 1)))


def _is_complex(node: Any) -> bool:
    values = pytree.tree_leaves(node.meta.get("val")) if isinstance(node, fx.Node) else [node]
    return any(value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex) for value in values)


def _called(node: Node, target: Any, *args: Any, **settings: Any) -> Node:
    """A call of the module of a node, which may have settings, and may make a tensor of sizes alone."""
    made = node.graph.call_function(target, args, settings)
    values = fx.map_arg((args, settings), lambda parent: parent.meta["val"])
    made_like: Any = next(value for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, Tensor))
    with enable_python_dispatcher(), made_like.fake_mode:
        made.meta = {**node.meta, "val": target(*values[0], **values[1])}
    return made


def real_pair(node: Node, x: Node) -> Node:
    """The two parts of a value, (..., 2), for the call of a node; the second part of a real value is zero."""
    if x.target is aten.view_as_complex.default:
        return x.args[0]
    if not _is_complex(x):
        if x.meta["val"].dtype != (dtype := node.meta["val"].dtype.to_real()):
            x = insert_call(node, aten.to.dtype, x, dtype)
        x = insert_call(node, aten.complex.default, x, insert_call(node, aten.zeros_like.default, x))
    elif x.meta["val"].is_conj():
        x = insert_call(node, aten.resolve_conj.default, x)
    return insert_call(node, aten.view_as_real.default, x)


def _part(node: Node, x: Node, which: int) -> Node:
    return insert_call(node, aten.select.int, real_pair(node, x), -1, which)


def _pair_from(node: Node, real: Node, imaginary: Node) -> Node:
    return insert_call(node, aten.stack.default, [real, imaginary], -1)


def _bound(node: Node) -> dict[str, Any]:
    """The arguments of a node by name, with their defaults."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    return {**given, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _on_pairs(node: Node) -> Node | None:
    """The operator on pairs: they have one dimension more, the last, which stays where it is."""
    given, shifts = _bound(node), _MOVED[node.target]
    first = given["self"] if "self" in given else given["tensors"]
    rank = (first[0] if isinstance(first, list | tuple) else first).meta["val"].ndim
    if not rank and _from_start in shifts.values():
        return None
    for name, shift in shifts.items():
        given[name] = shift(given[name], rank)
    tensors = ("self", "src", "source", "values", "tensors", "other")
    for name in (name for name in tensors if name in given):
        given[name] = fx.map_arg(given[name], lambda x: real_pair(node, x))
    named = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}
    return _called(
        node,
        node.target,
        *(value for name, value in given.items() if name not in named),
        **{name: value for name, value in given.items() if name in named},
    )


def _from_start(dims: Any, rank: int) -> Any:
    return [d % rank for d in dims] if isinstance(dims, list | tuple) else dims % rank


def _from_start_of_more(dim: int, rank: int) -> int:
    return dim % (rank + 1)


def _and_two(sizes: Any, _: int) -> list[Any]:
    return [*sizes, 2]


Written = Mapping[str, Callable[[Any, int], Any]]
_AS_IT_IS: Written = MappingProxyType({})
_DIM: Written = {"dim": _from_start}
_SIZE_OF_PAIRS: Written = {"size": _and_two}

#: Operators that move values: which of their arguments are written otherwise for pairs, and how.
_MOVED: dict[Any, Written] = {
    aten.select.int: _DIM,
    aten.slice.Tensor: _DIM,
    aten.slice_scatter.default: _DIM,
    aten.select_scatter.default: _DIM,
    aten.narrow.default: _DIM,
    aten.index_select.default: _DIM,
    aten.index_add.default: _DIM,
    aten.index_copy.default: _DIM,
    aten.unbind.int: _DIM,
    aten.split.Tensor: _DIM,
    aten.split_with_sizes.default: _DIM,
    aten.chunk.default: _DIM,
    aten.cumsum.default: _DIM,
    aten.squeeze.dim: _DIM,
    aten.squeeze.dims: _DIM,
    aten.cat.default: _DIM,
    aten.unflatten.int: _DIM,
    aten.unsqueeze.default: {"dim": _from_start_of_more},
    aten.stack.default: {"dim": _from_start_of_more},
    aten.flip.default: {"dims": _from_start},
    aten.flatten.using_ints: {"start_dim": _from_start, "end_dim": _from_start},
    aten.transpose.int: {"dim0": _from_start, "dim1": _from_start},
    aten.permute.default: {"dims": lambda dims, rank: [*_from_start(dims, rank), rank]},
    aten.movedim.int: {"source": _from_start, "destination": _from_start},
    aten.movedim.intlist: {"source": _from_start, "destination": _from_start},
    aten.expand.default: _SIZE_OF_PAIRS,
    aten.view.default: _SIZE_OF_PAIRS,
    aten._unsafe_view.default: _SIZE_OF_PAIRS,
    aten.reshape.default: {"shape": _and_two},
    aten.repeat.default: {"repeats": lambda counts, _: [*counts, 1]},
    **dict.fromkeys(
        (
            aten.index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten.clone.default,
            aten.contiguous.default,
            aten.zero_.default,
            aten.squeeze.default,
            aten.expand_as.default,
            aten.view_as.default,
        ),
        _AS_IT_IS,
    ),
}


def _padded_pair(node: Node) -> Node | None:
    x, pads, *rest = node.args
    mode = next((value for value in rest if isinstance(value, str)), node.kwargs.get("mode", "constant"))
    value = next((value for value in rest if not isinstance(value, str)), node.kwargs.get("value"))
    if mode != "constant" or value not in (None, 0):
        return None
    return _called(node, aten.constant_pad_nd.default, real_pair(node, x), [0, 0, *pads], 0.0)


def _rolled(node: Node) -> Node | None:
    x, shifts, *dims = node.args
    if not dims or not dims[0]:
        return None  # over all values, as if they were in one row
    dims = _from_start(dims[0], x.meta["val"].ndim)
    return _called(node, aten.roll.default, real_pair(node, x), shifts, dims)


def _made(node: Node) -> Node | None:
    """A tensor without values, or of one number, that is made of sizes, or like another."""
    given, value = _bound(node), node.meta["val"]
    settings = {"dtype": value.dtype.to_real() if value.is_complex() else value.dtype, "device": value.device}
    number = 1 if "ones" in str(node.target) else given.get("fill_value", given.get("value", 0))
    if isinstance(number, fx.Node):
        return None
    if "size" in given:
        sizes = given["size"]
    else:
        sizes = [
            n if isinstance(n, int) else _called(node, aten.sym_size.int, given["self"], d) for d, n in enumerate(value.shape)
        ]
    if not value.is_complex():
        return _called(node, aten.full.default, sizes, number, **settings)
    if number == 0:
        return _called(node, aten.zeros.default, [*sizes, 2], **settings)
    parts = [_called(node, aten.full.default, sizes, part, **settings) for part in (number.real, number.imag)]
    return _pair_from(node, *parts)


def _copied(node: Node, x: Node, value: Node) -> Node:
    """Written in place, in the sizes of what is written: the exporter has no copy that is broadcast."""
    pair = real_pair(node, x)
    return _called(node, aten.copy_.default, pair, _called(node, aten.expand_as.default, real_pair(node, value), pair))


def _filled_inplace(node: Node) -> Node | None:
    x, value = node.args
    if isinstance(value, fx.Node):
        return _copied(node, x, value)
    return _called(node, aten.zero_.default, real_pair(node, x)) if value == 0 else None


def _masked(node: Node) -> Node | None:
    x, mask, value = node.args
    if value != 0:
        return None
    return _called(node, node.target, real_pair(node, x), _called(node, aten.unsqueeze.default, mask, -1), 0)


def _chosen(node: Node) -> Node | None:
    condition, *values = node.args
    if any(value != 0 for value in values if not isinstance(value, fx.Node)):
        return None
    pairs = [real_pair(node, value) if isinstance(value, fx.Node) else 0.0 for value in values]
    return _called(node, node.target, _called(node, aten.unsqueeze.default, condition, -1), *pairs)


def _added_inplace(node: Node) -> Node | None:
    x, other = node.args
    if node.kwargs or not isinstance(other, fx.Node):
        return None
    return _called(node, node.target, real_pair(node, x), real_pair(node, other))


def _scaled_inplace(node: Node) -> Node | None:
    x, other = node.args
    if isinstance(other, complex) or _is_complex(other):
        usual = aten.mul.Tensor if node.target is aten.mul_.Tensor else aten.div.Tensor
        return _copied(node, x, _called(node, usual, x, other))
    if isinstance(other, fx.Node):
        other = _called(node, aten.unsqueeze.default, other, -1)
    return _called(node, node.target, real_pair(node, x), other)


def _times_complex_number(node: Node) -> Node | None:
    """A real value times a complex number, such as `1j * x`; torch's exporter has the other products."""
    x, number = node.args
    if not isinstance(number, complex) or _is_complex(x):
        return None
    return _pair_from(node, *(insert_call(node, aten.mul.Tensor, x, part) for part in (number.real, number.imag)))


def _conjugate(node: Node) -> Node:
    x = node.args[0]
    return _pair_from(node, _part(node, x, 0), insert_call(node, aten.neg.default, _part(node, x, 1)))


def _adjoint(node: Node) -> Node:
    return insert_call(node, aten.transpose.int, _conjugate(node), -2, -3)


def _exponential(node: Node) -> Node:
    size = insert_call(node, aten.exp.default, _part(node, node.args[0], 0))
    angle = _part(node, node.args[0], 1)
    parts = [insert_call(node, aten.mul.Tensor, size, insert_call(node, f, angle)) for f in (aten.cos.default, aten.sin.default)]
    return _pair_from(node, *parts)


def _logarithm(node: Node) -> Node:
    x = node.args[0]
    size = insert_call(node, aten.log.default, insert_call(node, aten.abs.default, x))
    return _pair_from(node, size, insert_call(node, aten.atan2.default, _part(node, x, 1), _part(node, x, 0)))


def _square(node: Node) -> Node | None:
    x, power = (*node.args, 2)[:2]
    return real_pair(node, insert_call(node, aten.mul.Tensor, x, x)) if power == 2 else None


def _norm(node: Node) -> Node | None:
    if node.kwargs:  # a dtype, which may be a complex one
        return None
    return _called(node, node.target, insert_call(node, aten.abs.default, node.args[0]), *node.args[1:])


def _multilinear(node: Node, operands: list[Node], product: Callable[[list[Node]], Node]) -> Node:
    """A product of complex operands of the products of their parts: of n operands, 2^n, each times a power of i."""
    parts = [[_part(node, x, which) for which in (0, 1)] for x in operands]
    sums: list[Node | None] = [None, None]
    for chosen in itertools.product((0, 1), repeat=len(operands)):
        term, power = product([parts[i][which] for i, which in enumerate(chosen)]), sum(chosen) % 4
        total = sums[power % 2]
        if total is None:  # the first ones are those of the powers 0 and 1
            sums[power % 2] = term
        else:
            sums[power % 2] = insert_call(node, aten.sub.Tensor if power > 1 else aten.add.Tensor, total, term)
    return _pair_from(node, *sums)


def _einsum(node: Node) -> Node:
    equation, operands = node.args[:2]
    return _multilinear(node, operands, lambda parts: insert_call(node, aten.einsum.default, equation, parts))


def _product(node: Node) -> Node:
    return _multilinear(node, node.args[:2], lambda parts: insert_call(node, node.target, *parts, *node.args[2:]))


def _linear(node: Node) -> Node:
    x, weight, bias = (*node.args, None)[:3]
    bias = node.kwargs.get("bias", bias)
    pairs = _multilinear(node, [x, weight], lambda parts: insert_call(node, aten.linear.default, *parts))
    return pairs if bias is None else insert_call(node, aten.add.Tensor, pairs, real_pair(node, bias))


_MADE_LIKE = frozenset(
    {aten.zeros_like.default, aten.empty_like.default, aten.ones_like.default, aten.full_like.default}
    | {aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default}
)
_PAIRED: dict[Any, Callable[[Node], Node | None]] = {
    **dict.fromkeys(_MOVED, _on_pairs),
    aten.constant_pad_nd.default: _padded_pair,
    aten.pad.default: _padded_pair,
    aten.roll.default: _rolled,
    aten.fill_.Scalar: _filled_inplace,
    aten.fill_.Tensor: _filled_inplace,
    aten.copy_.default: lambda node: _copied(node, *node.args[:2]),
    aten.masked_fill.Scalar: _masked,
    aten.masked_fill_.Scalar: _masked,
    aten.where.self: _chosen,
    aten.where.ScalarOther: _chosen,
    aten.where.ScalarSelf: _chosen,
    aten.add_.Tensor: _added_inplace,
    aten.sub_.Tensor: _added_inplace,
    aten.mul.Tensor: _times_complex_number,
    aten.mul_.Tensor: _scaled_inplace,
    aten.div_.Tensor: _scaled_inplace,
    aten.exp.default: _exponential,
    aten.log.default: _logarithm,
    aten.square.default: _square,
    aten.pow.Tensor_Scalar: _square,
    aten.einsum.default: _einsum,
    aten.linear.default: _linear,
    aten.resolve_conj.default: lambda node: real_pair(node, node.args[0]),
    **dict.fromkeys((aten.conj.default, aten._conj.default, aten.conj_physical.default), _conjugate),
    aten.mT.default: lambda node: insert_call(node, aten.transpose.int, real_pair(node, node.args[0]), -2, -3),
    **dict.fromkeys((aten.mH.default, aten.adjoint.default, aten.matrix_H.default), _adjoint),
    **dict.fromkeys((aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default), _product),
    **dict.fromkeys((aten.outer.default, aten.inner.default, aten.tensordot.default), _product),
    **dict.fromkeys((aten.zeros.default, aten.empty.memory_format, aten.ones.default, aten.full.default), _made),
    **dict.fromkeys(_MADE_LIKE, _made),
}
#: Operators that make real values of complex ones.
_TO_REAL: dict[Any, Callable[[Node], Node | None]] = {
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(_MADE_LIKE, _made),
}
_REAL = """
    acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh sigmoid sqrt rsqrt exp2 expm1 log2 log10 log1p logaddexp sinc sgn
    pow prod cumprod eq ne isnan isinf isfinite var std var_mean std_mean addcmul addcdiv lerp linalg_vector_norm linalg_inv
    addmm baddbmm addbmm addmv pad constant_pad_nd roll squeeze masked_fill where gather scatter scatter_add index_fill
    diagonal diag_embed tril triu unfold repeat_interleave take masked_select nonzero fill copysign softmax cumsum rot90 trace
"""
_FOR_REAL_ALONE = frozenset(_REAL.split())


def _check_is_written(node: Node) -> None:
    """Raise ModelError where torch's exporter has an operator for real values alone, and none that takes its place."""
    name = node.target.overloadpacket.__name__.removesuffix("_") if isinstance(node.target, OpOverload) else ""
    if name in _FOR_REAL_ALONE and not _is_of_weights(node):
        raise ModelError(
            f"{node.target} of complex values{source_line(node)} has no form in ONNX: write it with real ones, of"
            " torch.view_as_real(x), whose last dimension has the real and the imaginary part"
        )


def _is_of_weights(node: Node) -> bool:
    """Whether a value depends on no input, by the names that torch gives to what a model stores: a file holds its result."""
    pending, visited = [node], {node}
    while pending:
        read = pending.pop()
        if read.op == "placeholder" and not read.name.startswith(("p_", "b_", "c_")):
            return False
        pending += [value for value in read.all_input_nodes if value not in visited]
        visited.update(read.all_input_nodes)
    return True
