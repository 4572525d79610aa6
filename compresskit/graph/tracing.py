"""What tracing needs of the whole process: one thread at a time, torch's log of sizes silent, which classes were warned of; and
modes: of torch, that the caller is in, and of modules.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributions import Distribution

SIZES_LOG = "torch.fx.experimental.symbolic_shapes"  # torch's logger of the sizes of a traced model

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")

_tracing = threading.RLock()
#: Class of a model -> what it was warned of. Effort levels trace one model many times. Classes that a user drops are not held.
_warned: WeakKeyDictionary[type, set[Hashable]] = WeakKeyDictionary()


@contextmanager
def no_autocast() -> Iterator[None]:
    """Turn off torch.autocast of the caller inside the block, so that results are in the dtype of the model, as without it.

    What a model, or a training, enters itself is not touched.
    """
    with ExitStack() as stack:
        for kind in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocasts_of_caller() -> list[torch.autocast]:
    """The torch.autocast that is on, to be entered again inside `no_autocast`; an empty list where none is."""
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
    ]


@contextmanager
def no_modes_of_caller() -> Iterator[None]:
    """Leave torch.autocast and torch.inference_mode of the caller inside the block: what is made in it can be trained."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(no_autocast())
        yield


def set_modes_(modes: Iterable[tuple[nn.Module, bool]], *, tells: bool = True) -> None:
    """Give each of the modules of a model, an outer one before those in it, its own mode.

    Those in another mode are told by `train`, which classes override that keep for eval mode what they computed of parameters, or
    merge weights for it: where the flag alone is set, such a model trains merged weights, or is validated with old values.

    Args:
        modes: the modules, in the order of `model.modules()`, and whether each is in train mode.
        tells: False where a graph shares the parameters, which would be changed with those of the model: then the flag alone is
            set.
    """
    modes = list(modes)
    for module, training in modes if tells else ():
        if module.training != training:
            module.train(training)
    for module, training in modes:  # of those in it, too, and of those whose `train` does not
        module.training = training


@contextmanager
def one_thread_traces() -> Iterator[None]:
    """Let one thread of the process at a time trace or export inside the block; others wait, and it may enter it again.

    Tracing and exporting replace functions of torch and onnxscript, standard error and the filters of warnings for the whole
    process. Two threads that put them back in another order would leave a replaced one there for good. Torch's log of sizes tells
    of its own internals; it is silent inside, and afterwards as it was. So are the checks that distributions make of their
    arguments: a trace has no values to check.
    """
    with _tracing, log_level(SIZES_LOG, logging.CRITICAL):
        checks = Distribution._validate_args
        Distribution.set_default_validate_args(False)
        try:
            yield
        finally:
            Distribution.set_default_validate_args(checks)


@contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Give a logger of another library a level inside the block, and the one that it had after it."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def first_time(cls: type, what: Hashable) -> bool:
    """Whether this is asked for the first time in a process about a class: of what is said once, it is said then."""
    said = _warned.setdefault(cls, set())
    new = what not in said
    said.add(what)
    return new


def _free_in_child() -> None:
    # A worker of a loader, forked while another thread traces, has no such thread, and would wait for it for ever.
    global _tracing
    _tracing = threading.RLock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_free_in_child)
