"""Losses of attention heads from the linear layers that make queries, keys and values: no module has to return its scores.

Hugging Face's BERT, for example, computes attention in one kernel that keeps no scores; its layers `query`, `key` and `value`
can be tapped, and what the heads would compute follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from compresskit.base.errors import DataError
from compresskit.base.settings import check_whole_number
from compresskit.distill.losses.common import products
from compresskit.distill.losses.features import attention_scores, relation_kl


def query_key_scores(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    *,
    heads: int,
    key_heads: int | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = attention_scores,
) -> Tensor:
    """Compare the attention scores Q K' / sqrt(d) of two layers, before the softmax.

    With `attention_scores` it is TinyBERT's loss of attention (1909.10351, eq. 7), with `attention_kl` MiniLM's (2002.10957,
    eq. 6). Padding counts like words: the scores come from before the mask.

    Args:
        student, teacher: queries and keys of one layer, each (N, T, heads * d); d may differ. Keys of grouped-query attention
            (2305.13245) are (N, T, key_heads * d).
        heads: number of heads of both; MiniLMv2's relation heads may be any number that divides both widths.
        key_heads: number of heads of keys that are narrower than their queries, a divisor of `heads`; each is compared with
            `heads / key_heads` queries in turn. It is `num_key_value_heads` of Hugging Face.
        loss: of scores (N, heads, T, T).

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit.
    """
    scores = []
    for pair in (student, teacher):
        if isinstance(pair, Tensor) or len(pair) != 2:
            raise DataError("query_key_scores: wanted queries and keys; tap both, such as Term(..., ('attn.query', 'attn.key'))")
        query = split_heads("query_key_scores", pair[0], heads)
        key = _keys_of_queries(pair[1], pair[0].shape[2], heads, key_heads)
        scores.append(products(query, key.mT) / query.shape[-1] ** 0.5)
    return loss(scores[0], scores[1])


def _keys_of_queries(keys: Tensor, width: int, heads: int, key_heads: int | None) -> Tensor:
    """The key of each query, (N, heads, T, d), where several may have one. width: of the queries."""
    if keys.ndim != 3 or keys.shape[2] == width:
        return split_heads("query_key_scores", keys, heads)
    if key_heads is None or key_heads < 1 or heads % key_heads or keys.shape[2] * heads != width * key_heads:
        raise DataError(
            f"query_key_scores: queries of width {width} are {heads} heads of {width // heads}; wanted keys with heads of as"
            f" many, got width {keys.shape[2]} and key_heads={key_heads}; give the number of heads of the keys, a divisor"
            f" of {heads} (grouped-query attention: num_key_value_heads of Hugging Face)"
        )
    return split_heads("query_key_scores", keys, key_heads).repeat_interleave(heads // key_heads, 1)


def head_relations(student: Tensor, teacher: Tensor, *, heads: int) -> Tensor:
    """Compare how the values of a layer relate: `relation_kl` of each head of V V' / sqrt(d) (MiniLM, 2002.10957, eq. 8-10).

    Applied to queries or keys it is the loss of MiniLMv2 (2012.15828).

    Args:
        student, teacher: (N, T, heads * d), what the layer `value` gives; d may differ.
        heads: number of heads of both, see `query_key_scores`; of values in grouped-query attention, `key_heads`.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit.
    """
    return relation_kl(split_heads("head_relations", student, heads), split_heads("head_relations", teacher, heads))


def split_heads(where: str, values: Tensor, heads: int) -> Tensor:
    """(N, T, heads * d) to (N, heads, T, d). Raises `DataError`, which begins with `where`, for another shape."""
    check_whole_number(heads, f"{where}(heads=...)")
    if values.ndim != 3 or values.shape[2] % heads:
        raise DataError(f"{where}: wanted (N, T, width) with a width that {heads} heads divide, got {tuple(values.shape)}")
    return values.unflatten(2, (heads, -1)).transpose(1, 2)
