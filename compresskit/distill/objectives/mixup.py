"""Mixup of a batch's inputs (Zhang et al., 1710.09412)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from compresskit.base.errors import DataError
from compresskit.base.task import Inputs, batch_size


def mixup(inputs: Inputs, *, alpha: float = 1.0) -> Inputs:
    """Return lam * x + (1 - lam) * permuted x, with lam drawn from Beta(alpha, alpha) (Zhang et al., 1710.09412).

    The random numbers come from torch's global generator.

    Args:
        inputs: a tuple or a dict of a model's inputs. All floating-point tensors that have a row for each sample are mixed,
            with the same lam and the same permutation; other entries stay as they are.
        alpha: a positive number; at 1, lam is uniform in [0, 1].

    Raises: DataError where no input is a floating-point tensor.
    """
    count = batch_size(inputs)
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(count)
    tensors = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and v.ndim and len(v) == count]
    if not any(v.is_floating_point() for v in tensors):
        raise DataError(f"mixup: no floating-point inputs, got {[str(v.dtype) for v in tensors]}; ids cannot mix")

    def mix(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count and leaf.is_floating_point():
            return leaf.lerp(leaf[order.to(leaf.device)], 1 - lam)
        return leaf

    return pytree.tree_map(mix, inputs)  # type: ignore[no-any-return]
