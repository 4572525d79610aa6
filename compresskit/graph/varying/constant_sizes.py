"""Dimensions that should vary and that code takes for a constant, so that `torch.export` fails: which, and in which line."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch

from compresskit.graph.tracing import SIZES_LOG, log_level

_GRAPH = os.path.dirname(os.path.dirname(__file__))
_TRACER = os.path.join(_GRAPH, "capture.py")
_TORCH, _OWN = (os.path.dirname(path) + os.sep for path in (torch.__file__, _GRAPH))  # _OWN: of this library
_CONSTANT = re.compile(r"You marked (\S+)\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)")


def takes_constant(error: BaseException) -> bool:
    """Whether an error of `torch.export` is about a dimension that the code takes for a constant."""
    return _CONSTANT.search(str(error)) is not None


class _Messages(logging.Handler):
    """Keeps what torch logs about the sizes of a traced model, and where in the code of the model."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[tuple[str, str, bool]] = []  # with the innermost line of the model, and whether torch is called there

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.texts.append((text, *_line_of_model(text)))


def constant_dimensions(error: BaseException, trace_again: Callable[[], object]) -> str:
    """Describe an error of `torch.export` about a dimension that the code takes for a constant; "" for any other error.

    Args:
        error: that tracing the model raised.
        trace_again: does the same once more, and raises the same; torch then logs the line of the code.
    """
    found = _CONSTANT.search(str(error))
    if found is None:
        return ""
    source, dim, size = found.groups()
    name = (re.findall(r"\['(\w+)'\]", source) or [source])[-1]
    line, in_torch = _place_of(f"{source}.size()[{dim}]", trace_again)
    if in_torch:
        why = f"but an operator of torch takes it for the constant {size}{line}; write that with other operators"
    else:
        why = (
            f"but the code takes it for the constant {size}{line}, as a loop over it does, and len(), int() and float() of it;"
            " use nn.LSTM or nn.GRU, or an operator over the whole input, write x.shape[0] for len(x) and x.shape[2] / 2"
            " without float()"
        )
    return (
        f"dimension {dim} of input {name!r} should vary, {why}, or leave the dimension out of dynamic=, where () takes all"
        ' sizes of the example, by name where another input has the same, {"x": {0: "batch"}}; or capture a part of it with'
        " inside='backbone', the dotted name of a submodule"
    )


def _place_of(size: str, trace_again: Callable[[], object]) -> tuple[str, bool]:
    """`" (model.py:7 in forward)"`, where the size became a constant, or ""; and whether in an operator that is called there."""
    logger, messages = logging.getLogger(SIZES_LOG), _Messages()
    before = logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = False, [messages]
    try:
        with log_level(SIZES_LOG, logging.INFO), suppress(Exception):  # the error that is described
            trace_again()
    finally:
        logger.propagate, logger.handlers[:] = before
    made = re.compile(rf"create_symbol (\w+) = \d+ for {re.escape(size)}")
    symbol = next((found[1] for text, *_ in messages.texts if (found := made.search(text))), None)
    for text, line, in_torch in messages.texts:
        if symbol and re.search(rf"eval Eq\({symbol}, \d+\) \[guard added\]", text):
            return line and f" ({line})", in_torch
    return "", False


def _line_of_model(text: str) -> tuple[str, bool]:
    """`model.py:7 in forward`, the innermost line of a model that is traced, or "", and whether torch is called there.

    text: what torch logs right now, with the line that it takes for the innermost.
    """
    if "[guard added]" not in text:
        return "", False
    iterates = False
    for frame, number in traceback.walk_stack(None):
        code = frame.f_code
        iterates |= code.co_name == "__iter__"  # of a tensor: a loop of the model, though the code is torch's
        if code.co_filename == _TRACER:
            break
        if not code.co_filename.startswith((_TORCH, _OWN, logging.__file__, "<")):
            line = f"{code.co_filename}:{number} in {code.co_name}"
            return line, not iterates and f"{os.path.basename(code.co_filename)}:{number} in " not in text
    return "", False
