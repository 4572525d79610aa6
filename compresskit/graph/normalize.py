"""Normalize captured graphs: functional operators only, no identities, no guards, one operator for each operation."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

aten = torch.ops.aten

#: An `fx.Node`. torch annotates its arguments as a union of 24 types, which every reader would have to narrow.
Node = Any

#: Key of a node's meta: the `nn_module_stack` of the operator behind it that it took in, and whose output it gives since.
GIVES_OUTPUT_OF = "output_of"
#: The same of an operator before it, whose input it reads since.
READS_INPUT_OF = "input_of"

#: Operators that do nothing in eval mode; they are taken out of the graph.
IDENTITIES = frozenset(
    {
        aten.dropout.default,
        aten.dropout_.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.lift_fresh_copy.default,
    }
)

#: Operators whose results depend on numbers only: where the first argument is a tensor, on its dtype and device.
MADE_OF_NUMBERS = frozenset(
    {
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
    }
)

WHOLE = (0, None, 1)  # start, end and step of a slice that takes all

#: Other names of operators, of which torch records the one that was called.
_ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "special_erf": "erf",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_logit": "logit",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
} | {f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")}

_PADDED_BY_NAME = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def is_inplace(node: Node) -> bool:
    """Whether a node's operator writes into one of its arguments."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def normalize_(module: fx.GraphModule) -> None:
    """Normalize a captured graph in place.

    Operators get their usual names, in-place ones become functional, those that do nothing in eval mode and guards are removed,
    and so are copies of what is written into the whole of a value, or read again from where it was written (`x[:, :n] += y`);
    views become reshapes, padding given by name becomes numbers, and `batch_norm` has one output.
    """
    graph = module.graph
    for node in list(graph.nodes):
        node.target = usual_operator(node.target)
        if node.op == "call_module" and "guard" in str(node.target):
            graph.erase_node(node)
        elif node.target in IDENTITIES or (node.target is aten.slice.Tensor and _is_whole_slice(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (written := _as_written(node)) is not None:
            node.replace_all_uses_with(written)
            graph.erase_node(node)
        elif is_inplace(node) and (functional := functional_form(node.target)) is not None:
            _write_functional(node, functional)
        elif node.target in _PADDED_BY_NAME:
            _write_padding(graph, node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # a view may need the copy that an identity made
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            _restore_batch_norm(graph, node)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    module._modules.pop("_guards_fn", None)
    graph.lint()
    module.recompile()


@functools.cache
def usual_operator(target: Any) -> Any:
    """The operator of the usual name that does the same: `clamp` for `clip`; the operator itself for all others."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return target
    packet = target.overloadpacket.__name__
    usual = _ALIASES.get(packet.removesuffix("_"))
    if usual is None:
        return target
    return _with_same_arguments(getattr(aten, usual + "_" * packet.endswith("_")), target) or target


def functional_form(target: Any) -> OpOverload | None:
    """The operator that computes what an in-place operator writes: `add` for `add_`; None where there is none.

    Of its overloads, the one that takes the same arguments, which may be called otherwise: `pow_.Scalar` and `pow.Tensor_Scalar`.
    """
    packet = target.overloadpacket.__name__
    other = getattr(aten, packet.removesuffix("_"), None)
    if not packet.endswith("_") or other is None:
        return None
    return _with_same_arguments(other, target)


def _with_same_arguments(packet: Any, target: OpOverload) -> OpOverload | None:
    """The overload of an operator that takes the arguments of another operator, by preference the one of the same name."""
    same = [name for name in packet.overloads() if _argument_types(getattr(packet, name)) == _argument_types(target)]
    return getattr(packet, target._overloadname if target._overloadname in same else same[0]) if same else None


def _argument_types(target: OpOverload) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


def _write_functional(node: Node, functional: OpOverload) -> None:
    """Call the functional operator; where its result has another dtype than the tensor that was written, convert it."""
    node.target = functional
    values = [n.meta.get("val") for n in node.all_input_nodes]
    written, result = node.meta.get("val"), None
    if all(isinstance(value, torch.Tensor) for value in (written, *values)):
        with suppress(Exception):  # some want sizes that fit; none of them changes the dtype
            result = functional(*fx.map_arg(node.args, _one_value_like), **fx.map_arg(node.kwargs, _one_value_like))
    if isinstance(result, torch.Tensor) and result.dtype != written.dtype:
        with node.graph.inserting_after(node):
            converted = node.graph.call_function(aten.to.dtype, (node, written.dtype))
        converted.meta = dict(node.meta)
        node.replace_all_uses_with(converted, delete_user_cb=lambda user: user is not converted)
        node.meta = {**node.meta, "val": written.to(result.dtype)}


def _one_value_like(node: Node) -> torch.Tensor:
    """A tensor on no device of as many dimensions as a node's value, each of size 1."""
    value = node.meta["val"]
    return torch.empty((1,) * value.ndim, dtype=value.dtype, device="meta")


def _as_written(node: Node) -> Node | None:
    """What a node copies, where it is all that was written: into a whole value, or into the part that the node reads.

    Quantizers would round a copy again, in another range.
    """
    written = None
    if node.target is aten.copy.default or (node.target is aten.slice_scatter.default and _range_of(node, 2)[1:] == WHOLE):
        written = node.args[1]
    elif node.target is aten.slice.Tensor and (whole := node.args[0]).target is aten.slice_scatter.default:
        written = whole.args[1] if _range_of(node, 1) == _range_of(whole, 2) else None
    values = [each.meta.get("val") for each in (node, written) if isinstance(each, fx.Node)]
    kinds = {(value.dtype, str(tuple(value.shape))) for value in values if isinstance(value, torch.Tensor)}
    # Sizes that vary are known by their names. A written value of another dtype or shape is converted.
    return written if len(values) == 2 and len(kinds) == 1 and all(isinstance(v, torch.Tensor) for v in values) else None


def _range_of(node: Node, place: int) -> tuple[Any, Any, Any, Any]:
    """Dimension, start, end and step of a slice; an end of None is the last value. place: of the first of these arguments."""
    given = [*node.args[place:], *[0, None, None, 1][len(node.args) - place :]]
    named = zip(("dim", "start", "end", "step"), given, strict=True)
    dim, start, end, step = (node.kwargs.get(name, value) for name, value in named)
    value = node.args[0].meta.get("val")
    dim = dim % value.ndim if isinstance(value, torch.Tensor) else dim
    return dim, 0 if start is None else start, None if isinstance(end, int) and end >= 2**62 else end, step


def _is_whole_slice(node: Node) -> bool:
    return _range_of(node, 1)[1:] == WHOLE


def _restore_batch_norm(graph: fx.Graph, node: Node) -> None:
    *tensors, momentum, eps = node.args
    with graph.inserting_before(node):
        plain = graph.call_function(aten.batch_norm.default, (*tensors, False, momentum, eps, False))
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 0:
            plain.meta = dict(user.meta)
            user.replace_all_uses_with(plain)
        graph.erase_node(user)
    graph.erase_node(node)


def _write_padding(graph: fx.Graph, node: Node) -> None:
    """Write `padding="same"` or `"valid"` as numbers, or as a separate pad operator where "same" is not symmetric."""
    given: list[Any] = [*node.args, *[None, 1, "valid", 1, 1][len(node.args) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = given
    spatial = weight.meta["val"].ndim - 2
    dilations = list(dilation) if isinstance(dilation, list | tuple) else [dilation] * spatial
    total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilations, weight.meta["val"].shape[2:], strict=True)]
    sides = [n // 2 for n in total]
    if any(n % 2 for n in total):
        with graph.inserting_before(node):
            around = [side for n in reversed(total) for side in (n // 2, n - n // 2)]
            padded = graph.call_function(aten.pad.default, (x, around))
        shape = list(x.meta["val"].shape)
        shape[2:] = [n + t for n, t in zip(shape[2:], total, strict=True)]
        padded.meta = {**node.meta, "val": x.meta["val"].new_empty(shape)}
        x, sides = padded, [0] * spatial
    node.target = _PADDED_BY_NAME[node.target]
    strides = list(stride) if isinstance(stride, list | tuple) else [stride] * spatial
    node.args = (x, weight, bias, strides, sides, dilations, groups)


def source_line(node: Node) -> str:
    """`" (at model.py:12: x = x.clamp(0, 0.3))"`, the innermost line of the user's code that a node comes from, or ""."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]]
    return " (at {}:{}: {})".format(*own[-1]) if own else ""


def insert_call(replaced: Node, target: Any, *args: Any) -> Node:
    """Insert a call where the graph's insertion point stands: it belongs to the module of the node that it helps to replace."""
    new = replaced.graph.call_function(target, args)
    with enable_python_dispatcher():  # as in torch.export; without it torch 2.11 multiplies no value whose size may vary
        new.meta = {**replaced.meta, "val": target(*fx.map_arg(args, lambda node: node.meta["val"]))}
    return new


def mutates_a_view(graph: fx.Graph) -> bool:
    """Whether an in-place operator writes to memory that a later operator reads under another name."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not is_inplace(node):
            continue
        base = node.args[0]
        if not isinstance(base, fx.Node) or base.op in ("placeholder", "get_attr") or _returns_alias(base):
            return True
        if any(order[user] > order[node] or _returns_alias(user) for user in base.users if user is not node):
            return True
    return False


def _returns_alias(node: Node) -> bool:
    if node.target is operator.getitem:
        return _returns_alias(node.args[0])  # one of the views of a `split`
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in node.target._schema.returns)


def fold_written_constants_(module: fx.GraphModule) -> None:
    """Replace tensors that are made, then written piece by piece with numbers, by their values, in place.

    A mask is made so (`mask = x.new_zeros(h, w); mask[:3] = 1`). Writes into views would need torch's functionalization.
    """
    numbers = _written_numbers(module)
    for node in list(module.graph.nodes):
        if node.target in MADE_OF_NUMBERS and all(isinstance(size, int) for size in node.meta["val"].shape):
            family = _written_family(node, numbers)
            if family is not None:
                _fold_(module, family, numbers)
    _drop_unread_(module, numbers)
    module.recompile()


def _written_numbers(module: fx.GraphModule) -> dict[Node, torch.Tensor]:
    """Numbers in the code that torch 2.14 keeps as tensors, `mask[:3] = 1` as `fill_(mask[:3], tensor(1))`, and copies."""
    state, numbers = module.state_dict(keep_vars=True), dict[Node, torch.Tensor]()
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target not in state:
            value = operator.attrgetter(node.target)(module)
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                numbers[node] = value
        elif node.target is aten.lift_fresh_copy.default and node.args[0] in numbers:
            numbers[node] = numbers[node.args[0]]
    return numbers


def _drop_unread_(module: fx.GraphModule, numbers: Mapping[Node, torch.Tensor]) -> None:
    """Take numbers that no node reads any more out of the graph and the module."""
    for node in reversed(list(numbers)):
        if not node.users:
            module.graph.erase_node(node)
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in {node.target for node in numbers if node.op == "get_attr"} - read:
        holder, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(holder), leaf)


def _written_family(made: Node, numbers: Mapping[Node, torch.Tensor]) -> list[Node] | None:
    """The node, its views and the writes into them, in order; None where a write is not of numbers, or one follows a reader."""
    family, writes, readers = [made], 0, False
    for node in made.graph.nodes:
        if node is made or not any(parent in family for parent in node.all_input_nodes):
            continue
        tensors = [parent for parent in node.all_input_nodes if parent not in numbers]
        if node.op == "call_function" and tensors == [node.args[0]] and (is_inplace(node) or _returns_alias(node)):
            if is_inplace(node) and readers:
                return None
            writes += is_inplace(node)
            family.append(node)
        else:
            readers = True
    return family if writes else None


def _fold_(module: fx.GraphModule, family: list[Node], numbers: Mapping[Node, torch.Tensor]) -> None:
    values: dict[Node, Any] = dict(numbers)
    made = family[0]
    for node in family:
        if node is made and node.args and isinstance(node.args[0], fx.Node):
            like = node.args[0].meta["val"]
            values[node.args[0]] = torch.empty(0, dtype=like.dtype, device=like.device)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: values[parent])
        values[node] = node.target(*args, **kwargs)
    name = f"_written_{made.name}"
    module.register_buffer(name, values[made], persistent=False)
    with module.graph.inserting_before(made):
        constant = module.graph.get_attr(name)
    constant.meta = dict(made.meta)
    made.replace_all_uses_with(constant)
    for node in reversed(family):
        if is_inplace(node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.graph.erase_node(made)


def give_output_of_(node: Node, behind: Node) -> None:
    """Record that a node gives the output of an operator behind it, which it takes in."""
    node.meta[GIVES_OUTPUT_OF] = behind.meta.get("nn_module_stack") or {}


def read_input_of_(node: Node, before: Node) -> None:
    """Record that a node reads the input of an operator before it, which it takes in."""
    node.meta[READS_INPUT_OF] = before.meta.get("nn_module_stack") or {}
