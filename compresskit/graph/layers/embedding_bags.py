"""Bags of embeddings that all have as many entries: a look-up and a sum, mean or maximum.

`nn.EmbeddingBag` on indices (N, L) is traced with offsets 0, L, 2 L, ..., which ONNX has as a loop over the bags, and whose table
no quantization knows. As a look-up it is one Gather, and its table is one like any other.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from compresskit.graph.normalize import Node, aten, insert_call

#: The arguments of torch's operators for bags, in their order, and what those that are left out are.
BAG_ARGUMENTS: dict[str, Any] = {
    "weight": None,
    "indices": None,
    "offsets": None,
    "scale_grad_by_freq": False,
    "mode": 0,
    "sparse": False,
    "per_sample_weights": None,
    "include_last_offset": False,
    "padding_idx": None,
}
BAGS = frozenset({aten.embedding_bag.default, aten.embedding_bag.padding_idx, aten._embedding_bag.default})
BAG_SUM, BAG_MEAN, BAG_MAX = 0, 1, 2  # modes, as torch numbers them


def write_bags_(module: fx.GraphModule) -> None:
    """Replace bags of one size by look-ups, in place.

    Bags whose sizes come with the data stay, and so do maxima that leave out padding.
    """
    for node in [node for node in module.graph.nodes if node.target in BAGS]:
        read_elsewhere = any(user.users and user.args[1] != 0 for user in node.users)  # what entries each bag has
        given = BAG_ARGUMENTS | dict(zip(BAG_ARGUMENTS, node.args, strict=False)) | node.kwargs
        indices, factors = _unflattened_rows(given["indices"]), _unflattened_rows(given["per_sample_weights"])
        padding = given["padding_idx"] if given["padding_idx"] is not None and given["padding_idx"] >= 0 else None
        if (
            read_elsewhere
            or indices is None
            or not _bags_have_one_size(given["offsets"], indices)
            or given["include_last_offset"]
        ):
            continue
        if (factors is None) != (given["per_sample_weights"] is None) or (given["mode"] == BAG_MAX and padding is not None):
            continue
        with module.graph.inserting_before(node):
            made = _bags_looked_up(node, given["weight"], indices, given["mode"], factors, padding)
        for user in list(node.users):
            user.replace_all_uses_with(made)  # others are not read
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def _bags_looked_up(node: Node, weight: Node, indices: Node, mode: int, factors: Node | None, padding: int | None) -> Node:
    """The value of the bags (N, width), of indices (N, L)."""
    rows = insert_call(node, aten.embedding.default, weight, indices)
    if factors is not None:  # torch takes them with sums alone
        rows = insert_call(node, aten.mul.Tensor, rows, insert_call(node, aten.unsqueeze.default, factors, -1))
    if padding is None:
        over = {BAG_SUM: aten.sum.dim_IntList, BAG_MEAN: aten.mean.dim, BAG_MAX: aten.amax.default}[mode]
        return insert_call(node, over, rows, [1])
    counts = insert_call(node, aten.ne.Scalar, indices, padding)
    counts = insert_call(node, aten.to.dtype, insert_call(node, aten.unsqueeze.default, counts, -1), rows.meta["val"].dtype)
    total = insert_call(node, aten.sum.dim_IntList, insert_call(node, aten.mul.Tensor, rows, counts), [1])
    if mode == BAG_SUM:
        return total
    entries = insert_call(node, aten.clamp.default, insert_call(node, aten.sum.dim_IntList, counts, [1]), 1.0)
    return insert_call(node, aten.div.Tensor, total, entries)


def _unflattened_rows(flat: Node | None) -> Node | None:
    """What was flattened, where it has two dimensions."""
    if flat is None or flat.target not in (aten.reshape.default, aten.view.default):
        return None
    return flat.args[0] if flat.args[0].meta["val"].ndim == 2 else None


def _bags_have_one_size(offsets: Node, indices: Node) -> bool:
    """Whether bags begin at 0, L, 2 L, ... for indices (N, L)."""
    if not isinstance(offsets, fx.Node) or offsets.target is not aten.arange.start_step:
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # heavy

    start, end, step = (each.meta["val"] if isinstance(each, fx.Node) else each for each in offsets.args[:3])
    value = indices.meta["val"]
    same = (start == 0, step == value.shape[1], end == value.numel())
    return all(map(statically_known_true, same))
