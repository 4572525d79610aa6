"""torch.compile for the forward and backward pass of a training, taken back at its end.

The model keeps its class, its names and its parameters. Measurements in between run as written, since a second compiled form
for eval mode would take minutes more than it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from compresskit.mixed.step.compiled import has_compiler

log = logging.getLogger(__name__)


@contextmanager
def compiled_model(model: nn.Module, device: torch.device, where: str) -> Iterator[None]:
    """Let torch.compile run a model inside the block. Without a compiler, a line of the log says so and it runs as written.

    Each shape of a batch is compiled for itself (`dynamic=False`): a form for several shapes would depend on the order in which
    they came, and a training that was interrupted would not go on with the same bits. What cannot be compiled runs as written.

    Args:
        model: called by its `__call__`. device: where it runs. where: what the line of the log begins with.
    """
    if not has_compiler(device):
        missing = "Triton" if device.type == "cuda" else "a C++ compiler"
        log.warning("%s needs %s, which is not here: the model runs as written, which is slower", where, missing)
        yield
        return
    import torch._dynamo  # only here: it takes a second

    model.compile(dynamic=False)
    try:
        with torch._dynamo.config.patch(suppress_errors=True):
            yield
    finally:
        model._compiled_call_impl = None  # what `nn.Module.compile` sets; torch has no way back of its own


@contextmanager
def as_written() -> Iterator[None]:
    """Run compiled models as they are written inside the block."""
    with torch.compiler.set_stance("force_eager"):
        yield
