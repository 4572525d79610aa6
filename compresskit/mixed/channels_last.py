"""`torch.channels_last` for the weights and images of one training: the same values, laid out as fast kernels read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@contextmanager
def channels_last_weights(model: nn.Module) -> Iterator[None]:
    """Lay four-dimensional parameters out in `torch.channels_last` inside the block, and as they were after it."""
    changed = [p for p in model.parameters() if type(p.data) is Tensor and p.ndim == 4 and p.is_contiguous()]
    for parameter in changed:
        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.data = parameter.data.contiguous()


def channels_last_images(batch: Any) -> Any:
    """A batch with its floating tensors (N, C, H, W) in `torch.channels_last`."""

    def laid_out(value: Any) -> Any:
        images = isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()
        return value.contiguous(memory_format=torch.channels_last) if images else value

    return pytree.tree_map(laid_out, batch)
