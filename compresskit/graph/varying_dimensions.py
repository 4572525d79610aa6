"""Say where the code of a model takes a dimension that should vary for a constant, after `torch.export` has failed for that."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_CONSTANT = re.compile(r"You marked (\S+)\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)")


class _Messages(logging.Handler):
    """Keeps what torch logs about the sizes of a traced model."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


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
    line = _place_of(f"{source}.size()[{dim}]", trace_again)
    return (
        f"dimension {dim} of input {name!r} should vary, but the code takes it for the constant {size}{line}, as a loop over it"
        " does, and len(); use nn.LSTM or nn.GRU, or an operator over the whole input, write x.shape[0] for len(x), or leave the"
        " dimension out of dynamic="
    )


def _place_of(size: str, trace_again: Callable[[], object]) -> str:
    """`" (model.py:7 in forward)"`, where the size became a constant, or ""."""
    logger, messages = logging.getLogger(_LOGGER), _Messages()
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers[:] = [messages]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        trace_again()
    except Exception:  # the error that is described
        pass
    finally:
        level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)
    text = "\n".join(messages.texts)
    symbol = re.search(rf"create_symbol (\w+) = \d+ for {re.escape(size)}", text)
    place = symbol and re.search(rf"eval Eq\({symbol[1]}, \d+\) \[guard added\] \(([^()]*:\d+ in \w+)\)", text)
    return f" ({place[1]})" if place else ""
