"""Shortcuts for tests: less time for what most of a tiny run's time goes to, and no test is about."""

from __future__ import annotations

import functools
import importlib

from torch.onnx._internal._lazy_import import onnxscript_apis

from compresskit.measure import latency
from compresskit.recipe import engine


def make_quick() -> None:
    """Shorten what this process does: recipes measure the latency of a file for 0.05 s instead of a second, and torch's exporter
    parses the source of its 469 operators once instead of once per file.
    """
    engine.latency = functools.partial(latency, seconds=0.05)
    onnxscript_apis.get_torchlib_ops = _operators


@functools.cache
def _operators() -> list:
    return importlib.import_module(".", onnxscript_apis._name).get_torchlib_ops()
