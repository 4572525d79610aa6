"""Replace operators of an exported program that torch's ONNX exporter cannot write, or writes wrongly, by others that it can."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from compresskit.base.errors import ModelError
from compresskit.graph.layers.embedding_bags import write_bags_
from compresskit.graph.layers.recurrent_cells import write_cells_
from compresskit.graph.normalize import Node, aten, insert_call, source_line
from compresskit.graph.rewrites.complex_values import real_pair, write_complex_
from compresskit.graph.rewrites.composed import write_composed_
from compresskit.graph.rewrites.fourier import write_sizes_, write_transforms_
from compresskit.graph.rewrites.parts import write_parts_
from compresskit.graph.rewrites.pools import (
    made_of_size,
    replace_adaptive_averages_,
    replace_adaptive_max_pools_,
    replace_divisors_,
)


def make_exportable_(module: fx.GraphModule) -> None:
    """Replace what the exporter cannot write, or writes wrongly, in the graph of an exported program.

    A new replacement is a function of this folder, entered below; the graph is compiled once, after all of them.

    Raises ModelError for an operator that no other takes the place of.
    """
    for replace_ in (
        _inline_blocks_,
        write_parts_,
        replace_divisors_,
        _replace_bounds_,
        _replace_reversed_differences_,
        _replace_fractions_of_sizes_,
        _refuse_antialiasing,
        _replace_angles_,
        _replace_stable_sorts_,
        _give_ellipses_dimensions_,
        replace_adaptive_max_pools_,
        replace_adaptive_averages_,
        _replace_attention_ranks_,
        write_composed_,
        write_complex_,
        write_sizes_,
        write_transforms_,
        write_bags_,
        write_cells_,
    ):
        replace_(module)
    module.recompile()


def drop_constant_outputs_(program: ExportedProgram) -> list[str]:
    """Put None in the place of numbers, flags and text among the outputs, in place: of these, the exporter takes None alone.

    Returns what was there, with its place in the output: `[1] is 3`, `['size'] is 8`.
    """
    output: Node = program.graph.output_node()
    values: tuple[Any, ...] = output.args[0]
    places = pytree.tree_flatten_with_path(pytree.tree_unflatten(values, program.call_spec.out_spec))[0]
    constants = [(path, value) for path, value in places if value is not None and not isinstance(value, fx.Node)]
    if constants:
        output.args = (tuple(value if isinstance(value, fx.Node) else None for value in values),)
        for spec in program.graph_signature.output_specs:
            if isinstance(spec.arg, ConstantArgument):
                spec.arg = ConstantArgument(name=spec.arg.name, value=None)
    return [f"{pytree.keystr(path)} is {value!r}" for path, value in constants]


_CLAMPS = frozenset({aten.clamp.default, aten.clamp_.default, aten.clip.default, aten.clip_.default})


def _replace_bounds_(module: fx.GraphModule) -> None:
    """Give `clamp` two bounds of one type where one is an int and the other a float: the exporter knows no such operator."""
    for node in module.graph.nodes:
        if node.target not in _CLAMPS:
            continue
        bounds = [*node.args[1:], *(node.kwargs.get(name) for name in ("min", "max"))]
        if {type(bound) for bound in bounds if bound is not None} == {int, float}:
            node.args = (node.args[0], *(float(b) if isinstance(b, int) else b for b in node.args[1:]))
            node.kwargs = {name: float(b) if isinstance(b, int) else b for name, b in node.kwargs.items()}


def _are_known(node: Node) -> bool:
    """Whether shapes and dtypes of what an operator reads are in the graph."""
    return all("val" in value.meta for value in node.all_input_nodes)


_REVERSED_DIFFERENCES = frozenset({aten.rsub.Scalar, aten.rsub.Tensor})


def _replace_reversed_differences_(module: fx.GraphModule) -> None:
    """Convert integers before `1.0 - mask` to the dtype of the result: the exporter knows no such operator of two dtypes."""
    for node in module.graph.nodes:
        if node.target not in _REVERSED_DIFFERENCES or not _are_known(node):
            continue
        if node.args[0].meta["val"].dtype != (dtype := node.meta["val"].dtype):
            with module.graph.inserting_before(node):
                node.args = (insert_call(node, aten.to.dtype, node.args[0], dtype), *node.args[1:])


_PROMOTED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.floor_divide.default})
_OF_TENSORS = {
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow_.Scalar: aten.pow_.Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.remainder_.Scalar: aten.remainder_.Tensor,
}


def _replace_fractions_of_sizes_(module: fx.GraphModule) -> None:
    """Convert integers before `torch.arange(n) * (2 / n)` of a size n that varies to the dtype of the result, and write powers
    and remainders by such numbers as those by tensors: the exporter takes the numbers for constants.
    """
    for node in list(module.graph.nodes):
        if node.target not in _PROMOTED and node.target not in _OF_TENSORS:
            continue
        x, number = node.args[:2]
        if not isinstance(number, fx.Node) or not isinstance(number.meta.get("val"), torch.SymFloat) or "val" not in x.meta:
            continue
        dtype = node.meta["val"].dtype
        with module.graph.inserting_before(node):
            if x.meta["val"].dtype != dtype:
                x = insert_call(node, aten.to.dtype, x, dtype)
            if node.target in _OF_TENSORS:
                node.target = _OF_TENSORS[node.target]
                number = made_of_size(x, aten.scalar_tensor.default, number, dtype)
        node.args = (x, number, *node.args[2:])


def _replace_angles_(module: fx.GraphModule) -> None:
    """Write the angle of complex numbers as that of their two parts: the exporter's is -pi for negative ones, torch's is pi."""
    for node in list(module.graph.nodes):
        if node.target is aten.angle.default and _are_known(node) and node.args[0].meta["val"].is_complex():
            with module.graph.inserting_before(node):
                parts = real_pair(node, node.args[0])
                real, imaginary = (insert_call(node, aten.select.int, parts, -1, i) for i in (0, 1))
                node.replace_all_uses_with(insert_call(node, aten.atan2.default, imaginary, real))
            module.graph.erase_node(node)


_ANTIALIASED = frozenset({aten._upsample_bilinear2d_aa.vec, aten._upsample_bicubic2d_aa.vec})


def _refuse_antialiasing(module: fx.GraphModule) -> None:
    """Raise ModelError for interpolation with antialiasing whose windows ONNX has not: they follow the ratio of sizes there."""
    for node in module.graph.nodes:
        if node.target not in _ANTIALIASED or not _are_known(node):
            continue
        x, _, corners, scales = (*node.args, None)[:4]
        sizes = x.meta["val"].shape[-2:]
        exact = [s == int(s) or (type(n) is int and s * n == int(s * n)) for s, n in zip(scales or (), sizes, strict=False)]
        if corners or not all(exact):
            raise ModelError(
                "interpolate(antialias=True) with align_corners=True, or with a scale_factor that is not exactly the ratio of the"
                f" sizes{source_line(node)}, has no form in ONNX: give size= or recompute_scale_factor=True, no align_corners"
            )


_STABLE = {aten.sort.stable: aten.sort.default, aten.argsort.stable: aten.argsort.default}


def _replace_stable_sorts_(module: fx.GraphModule) -> None:
    """Write sorts that keep the order of equal values as others, of which the exporter makes TopK, which keeps it, too."""
    for node in module.graph.nodes:
        if node.target in _STABLE:
            node.args = (node.args[0], node.kwargs.get("dim", -1), node.kwargs.get("descending", False))
            node.target, node.kwargs = _STABLE[node.target], {}


def _give_ellipses_dimensions_(module: fx.GraphModule) -> None:
    """Give the operands of `einsum` as many dimensions for `...` as the one that has most: runtimes take no fewer."""
    for node in module.graph.nodes:
        if node.target is not aten.einsum.default or "..." not in node.args[0] or not _are_known(node):
            continue
        terms = node.args[0].replace(" ", "").split("->")[0].split(",")
        counts = [x.meta["val"].ndim - len(term.replace("...", "")) for term, x in zip(terms, node.args[1], strict=True)]
        most = max(count for term, count in zip(terms, counts, strict=True) if "..." in term)
        operands = list(node.args[1])
        with module.graph.inserting_before(node):
            for i, (term, count) in enumerate(zip(terms, counts, strict=True)):
                for _ in range(most - count if "..." in term else 0):
                    operands[i] = insert_call(node, aten.unsqueeze.default, operands[i], term.index("..."))
        node.args = (node.args[0], operands, *node.args[2:])


_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def _inline_blocks_(module: fx.GraphModule) -> None:
    """Put operators of `with torch.autocast(..., enabled=False)` and `with torch.enable_grad()` into the graph itself: in a graph
    that is executed alone they do what they do outside.
    """
    blocks: list[Node] = [
        node for node in module.graph.nodes if node.target is _SET_GRAD or (node.target is _AUTOCAST and not node.args[2])
    ]
    for node in blocks:
        stored, *operands = node.args[1 if node.target is _SET_GRAD else 4 :]
        block = module.get_submodule(stored.target)
        assert isinstance(block, fx.GraphModule)
        _inline_blocks_(block)  # one may stand in another
        placeholders = [n for n in block.graph.nodes if n.op == "placeholder"]
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(block.graph, dict(zip(placeholders, operands, strict=True)))
        for user in list(node.users):  # each takes one result
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not stored.users:
            module.graph.erase_node(stored)
            module.delete_submodule(stored.target)


_ATTENTION = aten.scaled_dot_product_attention.default


def _replace_attention_ranks_(module: fx.GraphModule) -> None:
    """Give attention of three or of more than four dimensions exactly four: the exporter writes no other.

    Of more than four, the dimensions between the batch and the last three are joined with the batch. Left as it is where leading
    dimensions differ between queries, keys, values and a mask of more than two dimensions.
    """
    for node in list(module.graph.nodes):
        if node.target is not _ATTENTION or any("val" not in x.meta for x in node.args[:3]):
            continue
        mask = (*node.args, None)[3]
        whole = list(node.args[:3]) + ([mask] if mask is not None and mask.meta["val"].ndim > 2 else [])
        shapes = [x.meta["val"].shape for x in whole]
        rank, inner = len(shapes[0]), shapes[0][1:-3]
        if rank in (2, 4) or any(len(shape) != rank for shape in shapes) or not all(type(n) is int for n in inner):
            continue
        if rank > 4 and any(shape[:-3] != shapes[0][:-3] for shape in shapes):
            continue
        join, part = _joined_rank(rank, list(inner))
        with module.graph.inserting_before(node):
            joined = [insert_call(node, join[0], x, *join[1:]) for x in whole]
            mixed = module.graph.call_function(_ATTENTION, (*joined, *node.args[len(joined) :]), dict(node.kwargs))
            mixed.meta = {**node.meta, "val": join[0](node.meta["val"], *join[1:])}
            parted = insert_call(node, part[0], mixed, *part[1:])
        node.replace_all_uses_with(parted)
        module.graph.erase_node(node)


def _joined_rank(rank: int, inner: list[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What makes a value of `rank` dimensions one of four, and back: operators with their arguments."""
    if rank == 3:
        return (aten.unsqueeze.default, 0), (aten.squeeze.dim, 0)
    return (aten.flatten.using_ints, 0, rank - 4), (aten.unflatten.int, 0, [-1, *inner])


_GROUPED = frozenset({aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}) | frozenset(
    {aten.conv1d.padding, aten.conv2d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input}
)


def refuse_weights_of_samples(graph: fx.Graph) -> None:
    """Raise ModelError for a convolution with as many groups as the batch has rows: ONNX's convolution has a number of them."""
    for node in graph.nodes:
        groups = (*node.args, *[1] * 7)[6] if node.target in _GROUPED else 1
        if isinstance(groups, fx.Node):
            raise ModelError(
                f"{node.target} has as many groups as an input has rows{source_line(node)}, a weight for each sample; ONNX wants"
                " a fixed number: multiply patches (F.unfold) by the weights with torch.bmm, or export with dynamic=() for one"
                " size of batch"
            )
