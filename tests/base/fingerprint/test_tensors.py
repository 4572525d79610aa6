"""Digests of tensors and arrays."""

from __future__ import annotations

import torch

from compresskit.base.fingerprint import tensors
from compresskit.base.fingerprint.tensors import array_digest


def test_no_more_rows_are_read_of_a_large_value_than_are_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(tensors, "LARGE", 0)
    value = torch.zeros(2 * tensors.DIGESTED_ROWS - 1, 2)
    changed = value.clone()
    changed[1::2] = 1
    assert array_digest(changed, sampled=True) == array_digest(value, sampled=True)
    assert array_digest(changed) != array_digest(value)
    changed[2] = 1
    assert array_digest(changed, sampled=True) != array_digest(value, sampled=True)
