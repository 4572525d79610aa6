"""Switch TF32 on or off inside a block (NVIDIA GPUs from Ampere on round the factors of fp32 products to ten mantissa bits)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(enabled: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 inside the block and restore torch's settings after it; None changes nothing.

    By default torch has it on for convolutions and off for matrix products, so "fp32" alone does not say how products round.
    """
    if enabled is None:
        yield
        return
    backends: Any = torch.backends  # its stubs do not know all of it
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if enabled else "ieee"
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            place.fp32_precision = old
