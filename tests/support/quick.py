"""Shortcuts for tests: less time for what most of a tiny run's time goes to, and no test is about.

`python quick.py SCRIPT ARGUMENTS` runs a script with them, as `python SCRIPT ARGUMENTS` does without.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from torch._decomp import decomposition_table
from torch._logging._internal import trace_log
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx._internal._lazy_import import onnxscript_apis

from compresskit import measure
from compresskit.export.check.profile import layers as layer_profile
from compresskit.recipe import engine
from compresskit.recipe.details import layer_times

BRIEF = 0.05  # seconds that a file is timed, unless a test asks for more than `LONG`: a thousand runs of the small networks here
LONG = 1.0


def make_quick() -> None:
    """Shorten what this process does: files are timed for `BRIEF` seconds instead of up to one, their layers too, and once what
    the profiler costs; torch's exporter parses the source of its 469 operators once instead of once per file, and registers
    5,000 kernels per file without evaluating the annotations of a function for each. Where sizes vary, a trace computes the
    result of an activation function or a norm with a dozen operators, only to learn its form, which is known.
    pytest gives its handlers also to the log in which torch writes, for tools of its own, what each symbol of a trace is, and
    where from: without one it writes nothing.
    """
    measure.time_in_turn = _time_in_turn
    layer_profile.run_in_turn = _run_in_turn
    layer_profile.profiler_cost = lambda folder: _profiler_cost()
    engine.layer_times = functools.partial(layer_times, seconds=0.01)
    trace_log.handlers.clear()
    trace_log.addHandler = lambda handler: None
    fake_impls.get_fast_op_impls().update(KNOWN_FORMS)
    onnxscript_apis.get_torchlib_ops = _operators
    torch._ops.OpOverload.py_impl = _py_impl


_timed_in_turn, _profiled_in_turn = measure.time_in_turn, layer_profile.run_in_turn
_measured_cost = layer_profile.profiler_cost


def _time_in_turn(runs, *, seconds, rounds=15):
    return _timed_in_turn(runs, seconds=seconds if seconds > LONG else min(seconds, BRIEF), rounds=rounds)


def _run_in_turn(files, seconds, runs):
    _profiled_in_turn(files, min(seconds, 2 * BRIEF), runs)


@functools.cache
def _profiler_cost():
    with tempfile.TemporaryDirectory() as folder:
        return _measured_cost(Path(folder))


def _of_known_form(operator, mode, x, *rest, **kwargs):
    """The result of an operator, in a trace: of the form that follows from a contiguous input's, or as torch computes it."""
    shapes = FORMS[operator](x, *rest, **kwargs) if x.dtype == torch.float32 else None
    if shapes is None or not is_contiguous_for_memory_format_or_false(x, memory_format=torch.contiguous_format):
        with mode:
            return decomposition_table[operator](x, *rest, **kwargs)
    found = [FakeTensor(mode, torch.empty(shape, dtype=x.dtype, device="meta"), device=x.device) for shape in shapes]
    return found[0] if len(found) == 1 else tuple(found)


def _mean(x, dims, keepdim=False, *, dtype=None):
    if not dims or dtype is not None:
        return None
    gone = {d % x.ndim for d in dims}
    return [[1 if d in gone else size for d, size in enumerate(x.shape) if keepdim or d not in gone]]


def _batch_norm(x, *_):
    return [x.shape, (0,), (0,)] if isinstance(x.shape[1], int) else None  # else torch asks whether it is that of the weight


def _layer_norm(x, sizes, *_):
    outer = x.ndim - len(sizes)
    if not all(isinstance(size, int) for size in x.shape[outer:]):
        return None
    return [x.shape, *[(*x.shape[:outer], *[1] * len(sizes))] * 2]


aten = torch.ops.aten
#: Operator -> the shapes of its results.
FORMS = {
    aten.mean.dim: _mean,
    aten.native_layer_norm.default: _layer_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    **dict.fromkeys(
        [
            aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.silu.default, aten.gelu.default,
            aten.hardtanh.default, aten.clamp.default, aten.hardsigmoid.default, aten.hardswish.default,
            aten.leaky_relu.default, aten.elu.default, aten._softmax.default,
        ],
        lambda x, *_, **__: [x.shape],
    ),
}  # fmt: skip


KNOWN_FORMS = {operator: functools.partial(_of_known_form, operator) for operator in FORMS}


@contextlib.contextmanager
def as_torch_traces():
    """Inside the block, a trace computes all forms as it does for users: on the way it may decide by sizes."""
    for operator in KNOWN_FORMS:
        del fake_impls.get_fast_op_impls()[operator]
    try:
        yield
    finally:
        fake_impls.get_fast_op_impls().update(KNOWN_FORMS)


@functools.cache
def _operators() -> list:
    return importlib.import_module(".", onnxscript_apis._name).get_torchlib_ops()


def _py_impl(self, key):
    """`OpOverload.py_impl` for a dispatch key; anything else goes to torch's own."""
    if not isinstance(key, torch._C.DispatchKey) or key == torch._C.DispatchKey.Python or key in self.py_kernels:
        return torch._ops.OperatorBase.py_impl(self, key)

    def register(function):
        self.py_kernels[key] = function
        self._dispatch_cache.clear()
        return function

    return register


if __name__ == "__main__":
    make_quick()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
