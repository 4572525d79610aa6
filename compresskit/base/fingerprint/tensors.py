"""Digests of tensors and arrays by shape, dtype and content."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LARGE = 2**26  # bytes; of larger tensors of a data set only a sample of the rows is read
DIGESTED_ROWS = 1024


def fingerprint(value: Any) -> str:
    """Return a short hash of all tensors in nested data, or in the state dict of a module."""
    digest = hashlib.sha256()
    leaves = value.state_dict().values() if isinstance(value, nn.Module) else pytree.tree_leaves(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(str((tuple(leaf.shape), leaf.dtype)).encode())
            digest.update(_bytes(leaf))
    return digest.hexdigest()[:16]


def array_digest(value: Tensor | np.ndarray[Any, Any], *, sampled: bool = False) -> str:
    """Return a short hash of the values of a tensor or an array.

    Args:
        value: a strided, sparse or meta tensor, or an array of numbers or text. A meta tensor has only its shape and dtype.
        sampled: read no more than `DIGESTED_ROWS` rows of a value of more than `LARGE` bytes.
    """
    digest = hashlib.sha256(str((tuple(value.shape), str(value.dtype))).encode())
    if sampled and value.nbytes > LARGE and value.shape[0] > DIGESTED_ROWS:
        value = value[:: -(-value.shape[0] // DIGESTED_ROWS)]
    if isinstance(value, np.ndarray):
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif value.layout is not torch.strided:
        value = value.detach().to_sparse().coalesce()
        digest.update(_bytes(value.indices()))
        digest.update(_bytes(value.values()))
    elif value.device.type != "meta":
        digest.update(_bytes(value))
    return digest.hexdigest()[:16]


def _bytes(value: Tensor) -> Any:
    return value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
