"""TF32: fp32 products whose factors keep ten digits on NVIDIA GPUs from Ampere on, for as long as a policy asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def tf32(on: bool | None) -> Iterator[None]:
    """TF32 allowed or forbidden inside the block; torch's own settings stand again after it. None changes nothing.

    torch has it on for convolutions and off for matrix products unless told otherwise, so that "fp32" alone says nothing.
    """
    if on is None:
        yield
        return
    backends: Any = torch.backends  # its stubs do not know all of it
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if on else "ieee"
        yield
    finally:
        for place, old in zip(places, before, strict=True):
            place.fp32_precision = old
