"""Mixed inputs for patient and consistent teaching (Beyer et al., 2106.05237): both networks see one crop and one mixture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs, batch_size


def mixup(inputs: Inputs, *, alpha: float = 1.0) -> Inputs:
    """Share * x + (1 - share) * x in another order, share drawn from Beta(alpha, alpha) (Zhang et al., 1710.09412).

    inputs: what a model is fed; all floating-point tensors with a row for each sample are mixed, with one share and one order.
    alpha 1 draws the share uniformly. Random numbers are those of torch's global generator.
    """
    count = batch_size(inputs)
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(count)
    tensors = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.ndim and len(v) == count]
    if not any(v.is_floating_point() for v in tensors):
        raise DataError(f"mixup: no floating-point inputs, got {[str(v.dtype) for v in tensors]}; ids cannot mix")

    def mix(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count and leaf.is_floating_point():
            return leaf.lerp(leaf[order.to(leaf.device)], 1 - share)
        return leaf

    return pytree.tree_map(mix, inputs)  # type: ignore[no-any-return]
