"""Fourier transforms of real numbers whose length varies: ONNX Runtime fails on the forms that the exporter gives them; and
transforms of complex ones of another size than they are given, for which the exporter has no form.

Inverse ones are the real part of the inverse transform of half a spectrum in which every frequency counts twice, for itself and
for its conjugate in the other half, but for the first and, of an even length, the last:

    irfft(X, n)[j] = Re sum_k w_k X_k exp(2 pi i j k / n),   k = 0 .. n // 2,   w_0 = w_(n / 2) = 1 / n, else 2 / n
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from compresskit.base.errors import ModelError
from compresskit.graph.normalize import Node, aten, insert_call, source_line
from compresskit.graph.rewrites.complex_values import real_pair
from compresskit.graph.rewrites.pools import made_of_size

#: Over one dimension the exporter's form is right; over more, ONNX takes a value in between for as long as the input.
_FORWARD = frozenset({aten.fft_rfft2.default, aten.fft_rfftn.default})
_INVERSE = frozenset({aten.fft_irfft.default, aten.fft_irfft2.default, aten.fft_irfftn.default})
_COMPLEX = frozenset({getattr(aten, f"fft_{name}").default for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn")})
_OF_ONE = frozenset({aten.fft_irfft.default, aten.fft_hfft.default, aten.fft_fft.default, aten.fft_ifft.default})
_OF_TWO = frozenset({aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_hfft2.default})
_OF_TWO |= {aten.fft_rfft2.default, aten.fft_irfft2.default}
_HERMITIAN = frozenset({aten.fft_hfft.default, aten.fft_hfft2.default, aten.fft_hfftn.default})


def write_transforms_(module: fx.GraphModule) -> None:
    """Write transforms of real numbers, and to real numbers, of which the last dimension varies.

    Inverse ones become the real part of a complex one, those over several dimensions transforms over one after the other.

    Raises ModelError for `hfft` over such a dimension.
    """
    for node in list(module.graph.nodes):
        if node.target not in _FORWARD | _INVERSE | _HERMITIAN or "val" not in node.args[0].meta:
            continue
        x, sizes, dims, norm = (*node.args, *[None] * 3)[:4]
        value = x.meta["val"]
        sizes, dims = _sizes_and_dimensions(node, value.ndim, sizes, dims)
        if all(type(shape[dims[-1]]) is int for shape in (value.shape, node.meta["val"].shape)):
            continue
        if node.target in _HERMITIAN:
            raise ModelError(
                f"{node.target} over a dimension that varies{source_line(node)} has no form in ONNX Runtime: write it as"
                " torch.fft.irfft of x.conj(), times the length; or leave the dimension out of dynamic="
            )
        with module.graph.inserting_before(node):
            if node.target in _FORWARD:
                x = insert_call(node, aten.fft_rfft.default, x, sizes[-1], dims[-1], norm)
            elif not value.is_complex():
                x = insert_call(node, aten.complex.default, x, insert_call(node, aten.zeros_like.default, x))
            other = aten.fft_fft.default if node.target in _FORWARD else aten.fft_ifft.default
            for size, dim in zip(sizes[:-1], dims[:-1], strict=True):
                x = insert_call(node, other, x, size, dim, norm)
            if node.target in _INVERSE:
                x = _real_inverse(node, x, sizes[-1], dims[-1] % value.ndim, norm)
        node.replace_all_uses_with(x)
        module.graph.erase_node(node)


def write_sizes_(module: fx.GraphModule) -> None:
    """Pad, or cut, complex values to the sizes that a transform is asked for: the exporter pads and cuts real ones alone.

    The last dimension of inverse transforms that varies is left to `write_transforms_`.
    """
    for node in module.graph.nodes:
        x = node.args[0] if node.target in _COMPLEX | _INVERSE else None
        if x is None or "val" not in x.meta or not x.meta["val"].is_complex():
            continue
        value = x.meta["val"]
        sizes, dims = _sizes_and_dimensions(node, value.ndim, *(*node.args[1:], None, None)[:2])
        wanted = list(sizes)
        if node.target in _INVERSE:
            length = wanted[-1]
            wanted[-1] = length // 2 + 1 if type(length) is int and type(value.shape[dims[-1]]) is int else None
        with module.graph.inserting_before(node):
            parts = pairs = real_pair(node, x)
            for size, dim in zip(wanted, dims, strict=True):
                parts = parts if size is None else _of_size(node, parts, dim % value.ndim, size)
            if parts is not pairs:
                node.args = (insert_call(node, aten.view_as_complex.default, parts), *node.args[1:])
            elif not pairs.users:
                module.graph.erase_node(pairs)


def _of_size(node: Node, parts: Node, dim: int, size: Any) -> Node:
    """Pairs of a size, a number or a node: padded by as many as are wanted, and cut, whether more or fewer were given."""
    given = parts.meta["val"].shape[dim]
    if str(getattr(size, "meta", {"val": size})["val"]) == str(given):  # as text, it adds no guard
        return parts
    if not isinstance(given, int) or not isinstance(size, int) or given < size:
        zeros = [0, 0] * (parts.meta["val"].ndim - 1 - dim)
        parts = insert_call(node, aten.constant_pad_nd.default, parts, [*zeros, 0, size])
    return insert_call(node, aten.slice.Tensor, parts, dim, 0, size)


def _sizes_and_dimensions(node: Node, rank: int, sizes: Any, dims: Any) -> tuple[list[Any], list[int]]:
    """What is asked for of each dimension that is transformed, None for the size that it has; and these dimensions."""
    if isinstance(dims, int) or node.target in _OF_ONE:
        return [sizes], [-1 if dims is None else dims]
    if dims is None and node.target in _OF_TWO:
        dims = [-2, -1]
    dims = list(dims or (range(rank - len(sizes), rank) if sizes else range(rank)))
    return [None if size == -1 else size for size in sizes or [None] * len(dims)], dims


def _real_inverse(node: Node, x: Node, size: Any, dim: int, norm: str | None) -> Node:
    """The transform over one dimension. size: of the result, a number or a node; None for twice what is given, less two."""
    parts = real_pair(node, x)
    behind = parts.meta["val"].ndim - 1 - dim  # how many dimensions follow
    given = insert_call(node, aten.sym_size.int, parts, dim)
    if size is None:
        size = insert_call(node, operator.mul, insert_call(node, operator.sub, given, 1), 2)
    else:
        half = size // 2 + 1 if isinstance(size, int) else insert_call(node, operator.floordiv, size, 2)
        half = half if isinstance(half, int) else insert_call(node, operator.add, half, 1)
        parts = _of_size(node, parts, dim, half)
        given = insert_call(node, aten.sym_size.int, parts, dim)
    numbers = made_of_size(parts, aten.arange.default, given)
    length = made_of_size(parts, aten.scalar_tensor.default, size) if isinstance(size, fx.Node) else size
    twice = insert_call(node, aten.mul.Tensor, numbers, 2)
    differs = aten.ne.Tensor if isinstance(size, fx.Node) else aten.ne.Scalar
    inner = [insert_call(node, aten.gt.Scalar, numbers, 0), insert_call(node, differs, twice, length)]
    counts = insert_call(node, aten.to.dtype, insert_call(node, aten.logical_and.default, *inner), parts.meta["val"].dtype)
    counts = insert_call(node, aten.view.default, insert_call(node, aten.add.Tensor, counts, 1.0), [-1] + [1] * behind)
    zeros = [0, 0] * behind + [0, insert_call(node, operator.sub, size, given)]
    whole = insert_call(node, aten.constant_pad_nd.default, insert_call(node, aten.mul.Tensor, parts, counts), zeros)
    spectrum = insert_call(node, aten.view_as_complex.default, whole)
    values = insert_call(node, aten.fft_ifft.default, spectrum, None, dim, norm)
    return insert_call(node, aten.select.int, insert_call(node, aten.view_as_real.default, values), -1, 0)
