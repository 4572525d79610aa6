"""Taps: what flows through named modules of a model, read by hooks that exist only inside a `with` block.

tapped(model, ["layer3", "encoder.0.attn:in"])     "name" is a module's output, "name:in" its first input
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from compresskit.errors import ModelError

INPUT = ":in"


def find_taps(model: nn.Module, pattern: str) -> list[str]:
    """Taps that a name or a glob means, in the model's order; a `*` stands for one part between dots.

    >>> find_taps(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "*:in")
    ['0:in', '1:in']

    Raises ModelError, with the nearest names, where there is none.
    """
    path = pattern.removesuffix(INPUT)
    names = [name for name, _ in model.named_modules() if name]
    parts = path.split(".")
    found = [n for n in names if len(n.split(".")) == len(parts) and all(map(fnmatchcase, n.split("."), parts))]
    if not found:
        near = difflib.get_close_matches(path, names, n=3, cutoff=0.0)
        raise ModelError(f"tap {pattern!r}: {type(model).__name__} has no such module; the nearest are {near}")
    return [name + pattern[len(path) :] for name in found]


def _first(value: Any) -> Tensor | None:
    """The tensor itself, or the first one in a tuple, list or dict."""
    if isinstance(value, Tensor):
        return value
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for entry in entries if (found := _first(entry)) is not None), None)


@contextmanager
def tapped(model: nn.Module, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect features by tap while the block runs; a module that is called more than once leaves its last call's.

    Features are copies: an in-place operation behind the tap, such as `ReLU(inplace=True)`, would change them otherwise. Tap
    the model itself, not a wrapper of it such as DistributedDataParallel.
    """
    features: dict[str, Tensor] = {}
    handles = []

    def keep(tap: str, value: Any) -> None:
        found = _first(value)
        if found is None:
            raise ModelError(f"tap {tap!r}: no tensor there, only {type(value).__name__}")
        features[tap] = found.clone()

    def reader(tap: str) -> Callable[..., None]:
        if tap.endswith(INPUT):
            return lambda module, args, kwargs: keep(tap, (*args, *kwargs.values()))
        return lambda module, args, output: keep(tap, output)

    try:
        for tap in dict.fromkeys(taps):
            module = model.get_submodule(tap.removesuffix(INPUT))
            if tap.endswith(INPUT):
                handles.append(module.register_forward_pre_hook(reader(tap), with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(reader(tap)))
        yield features
    finally:
        for handle in handles:
            handle.remove()


def feature(features: dict[str, Tensor], tap: str) -> Tensor:
    """The feature of a tap; ModelError where the forward pass did not come by."""
    if tap not in features:
        raise ModelError(f"tap {tap!r}: the forward pass does not call that module; tap one that it calls")
    return features[tap]
