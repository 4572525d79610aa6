"""Operations of what torch's flop counter gives none for, as functions of shapes; a multiply-accumulate is two operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

Shape = Sequence[int]


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Operator -> its operations from the shapes of its arguments, for `FlopCounterMode(custom_mapping=...)`.

    The counter takes an operator's in-place form for another operator: `addmm_`, which adds a product to a tensor.
    """
    found: dict[Any, Callable[..., int]] = {}
    for formula, names in _FORMULAS.items():
        for name in names.split():
            with suppress(AttributeError):  # a release of torch that does not have it
                found[getattr(torch.ops.aten, name)] = formula
    with suppress(AttributeError):  # torchvision is not imported
        found[torch.ops.torchvision.deform_conv2d] = _deformable_flops
    return found


def _by_vector_flops(first: Shape, *_: Any, **__: Any) -> int:
    """A product of a matrix, or of a vector, and a vector."""
    return 2 * math.prod(first)


def _added_by_vector_flops(_: Shape, matrix: Shape, *__: Any, **___: Any) -> int:
    return 2 * math.prod(matrix)


def _product_flops(first: Shape, second: Shape, *_: Any, **__: Any) -> int:
    """(..., n, k) by (..., k, m), one for each of the first one's batch."""
    return 2 * math.prod(first) * second[-1]


def _added_product_flops(_: Shape, first: Shape, second: Shape, *__: Any, **___: Any) -> int:
    return _product_flops(first, second)


def _grouped_flops(first: Shape, second: Shape, *_: Any, **__: Any) -> int:
    """A product for each of G groups. Of a matrix without a dimension G, each row or column belongs to one group."""
    columns_belong = len(first) == 3 and len(second) == 2
    return _product_flops(first, second) // (first[0] if columns_belong else 1)


def _distances_flops(first: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """Distances of vectors (..., D), each as a product of two vectors."""
    return 2 * math.prod(out_shape) * first[-1]


def _convolution_over_time_flops(_: Shape, weight: Shape, *__: Any, out_shape: Shape, **___: Any) -> int:
    """`torch.conv_tbc`, with weight (width, inputs, outputs)."""
    return 2 * math.prod(out_shape) * math.prod(weight[:2])


def _recurrent_flops(values: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """An LSTM, GRU or RNN of cuDNN on (..., inputs): every matrix once for each word of each sequence."""
    return 2 * math.prod(values[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _bilinear_flops(_: Shape, weight: Shape, second: Shape, *__: Any, **___: Any) -> int:
    """`nn.Bilinear`: the weight has one entry for each pair of inputs and each output."""
    return 2 * math.prod(weight) * second[0]


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Attention on a CPU, which torch 2.11 does not count: (N, H, L, D) and (N, H, S, D or E)."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _deformable_flops(_: Shape, weight: Shape, *__: Any, out_shape: Shape, **___: Any) -> int:
    """A deformable convolution of torchvision, with weight (O, I / groups, ...)."""
    return 2 * math.prod(out_shape) * math.prod(weight[1:])


_FORMULAS: dict[Callable[..., int], str] = {
    _by_vector_flops: "mv dot vdot",
    _added_by_vector_flops: "addmv addmv_",
    _product_flops: "_int_mm",
    _added_product_flops: "addmm_ baddbmm_ addbmm addbmm_ _addmm_activation",
    _grouped_flops: "_grouped_mm",
    _distances_flops: "_euclidean_dist _cdist_forward _pdist_forward",
    _convolution_over_time_flops: "conv_tbc",
    _recurrent_flops: "_cudnn_rnn",
    _bilinear_flops: "_trilinear",
    _attention_flops: "_scaled_dot_product_flash_attention_for_cpu",
}
