"""State as plain data."""

from __future__ import annotations

import math

import pytest
import torch

from compresskit.base.errors import CheckpointError
from compresskit.base.packing import pack, unpack


def test_nested_state_is_packed_and_unpacked() -> None:
    state = {"step": 3, "sums": {"a": torch.ones(2)}, 0.5: [None, True, "text", (1, math.inf)], "empty": {}}
    tensors: dict[str, torch.Tensor] = {}
    record = pack(state, tensors)
    assert list(tensors) == ["sums/a"]
    got = unpack(record, tensors)
    assert torch.equal(got["sums"].pop("a"), state["sums"].pop("a"))
    assert got == state


def test_objects_and_foreign_records_are_refused() -> None:
    with pytest.raises(CheckpointError, match="a/b: wanted tensors, numbers, text, lists and dicts, got object"):
        pack({"a": {"b": object()}}, {})
    with pytest.raises(CheckpointError, match="wanted keys of text or numbers, got tuple"):
        pack({("a",): 1}, {})
    with pytest.raises(ValueError, match="unknown mark"):
        unpack({"$call": "os"}, {})
