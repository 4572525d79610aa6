"""The compiled step on a CPU: `update.cpp`, built once a process by the C++ compiler that torch.compile would call.

torch.compile writes the same pass, but loads and stores sixteen half values under a mask, which takes longer than one plain
instruction for all of them, and hashes for stochastic rounding value by value. It stays the way for fp16, for tensors whose
layouts differ, and where this file cannot be built. Figures: `benchmarks/mixed_cpu.md`.

A new format or rule goes into `update.cpp`, and its name into `FORMATS` or `STEP_RULES` at the same place.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compresskit.mixed.formats.bf16_formats import random_key
from compresskit.mixed.formats.policy import Bf16Format

SOURCE = Path(__file__).with_name("update.cpp")
#: Of GCC and Clang. No contraction: all formats and all instruction sets then give the same bits.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
#: The first of these that the compiler of a machine knows; by itself GCC prefers vectors of 256 bits where there are 512.
OWN_INSTRUCTIONS = (("-march=native", "-mprefer-vector-width=512"), ("-mcpu=native",))
VALUES_OF_THREAD = 2**19  # fewer are not worth a thread

#: As in update.cpp.
STEP_RULES = ("adamw", "sgd", "momentum", "lion")
FORMATS: dict[Bf16Format | None, int] = {None: 1, "split": 2, "kahan": 3, "stochastic": 4}
POINTERS = ("master", "half", "remainder", "grad", "first", "second", "step")
TENSORS = np.dtype(
    [(name, np.uintp) for name in POINTERS]
    + [("numel", np.int64), ("offset", np.int64), ("rates", np.float32, 3), ("format", np.int32), ("bf16_grad", np.int32)],
    align=True,
)
STEP_NUMBERS = ("inverse", "beta1", "rest1", "beta2", "rest2", "eps", "weight_decay", "momentum")
SETTINGS = np.dtype(
    [(name, np.float64) for name in ("lr", "power1", "power2")]
    + [(name, np.float32) for name in STEP_NUMBERS]
    + [("key", np.uint32), ("rule", np.int32), ("nesterov", np.int32)],
    align=True,
)


class NativeUpdate(NamedTuple):
    """The functions of `update.cpp`; Python's lock is free while one runs.

    begin: (table of TENSORS, their number, SETTINGS) -> None; once a step, before `update`.
    update: the same, first value, end -> None.
    """

    begin: Callable[[Any, int, Any], None]
    update: Callable[[Any, int, Any, int, int], None]


@functools.cache
def native_update() -> NativeUpdate | None:
    """The compiled functions of `update.cpp`; None where there is no compiler that builds it."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception:  # torch's own class for it moved between versions; whatever it is, nothing can be built
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a loaded library cannot be deleted on Windows
        built = Path(folder) / "update.so"
        for own in OWN_INSTRUCTIONS:
            try:
                subprocess.run([compiler, *FLAGS, *own, str(SOURCE), "-o", str(built)], check=True, capture_output=True)
                library = ctypes.CDLL(str(built))
            except (OSError, subprocess.CalledProcessError):
                continue
            library.begin.restype, library.begin.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
            library.update.restype, library.update.argtypes = None, [*library.begin.argtypes, ctypes.c_int64, ctypes.c_int64]
            return NativeUpdate(library.begin, library.update)
    return None


def runs_natively(tensors: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether update.cpp covers tensors: one sequence for each parameter, of its weight, gradient, state and remainder.

    All of a parameter must lie alike in the CPU's memory, without gaps. Random bits are counted as the values lie.
    """
    for own in tensors:
        present = [t for t in own if t is not None]
        if any(t.device.type != "cpu" or t.dtype not in (torch.float32, torch.bfloat16, torch.int16) for t in present):
            return False
        last = present[0].dim() == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in present)
        if not last and not all(t.is_contiguous() for t in present):
            return False
    return True


def laid_as(grad: Tensor, weight: Tensor) -> Tensor:
    """A gradient in the memory layout of its weight, which convolutions with channels last do not always give it."""
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


class NativeGroup:
    """The tensors of one param group as `update.cpp` reads them: a table that is kept until one of them moves.

    So that a step does not ask each tensor for its layout and device, and fills no table, where nothing has moved.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        self._covered = False
        self._table = np.zeros(0, TENSORS)
        self._written: list[Tensor] = []  # of which autograd may know

    def take(self, tensors: Any, counters: Sequence[Tensor], bf16_format: Bf16Format | None) -> bool:
        """Take the tensors of a step; False where `update.cpp` does not cover them.

        Args:
            tensors: `StepTensors` of the group.
            counters: AdamW's counters of steps, fp32; none for other rules.
            bf16_format: of half weights without masters.
        """
        firsts, seconds = ([state[k] if k < len(state) else None for state in tensors.states] for k in (0, 1))
        lists = (tensors.masters, tensors.halves, tensors.remainders, firsts, seconds, counters)
        known = (
            [None if t is None else (t.data_ptr(), t.dtype, t.stride()) for values in lists for t in values],
            [(grad.dtype, grad.shape, grad.stride()) for grad in tensors.grads],
            tensors.offsets,
        )
        if known != self._known:
            self._known = known
            self._covered = native_update() is not None and runs_natively(tensors.of_each())
            if self._covered:
                table = self._table = np.zeros(len(tensors.grads), TENSORS)
                for name, values in zip((name for name in POINTERS if name != "grad"), lists, strict=True):
                    if values:
                        table[name] = [0 if t is None else t.data_ptr() for t in values]
                table["numel"], table["offset"] = [grad.numel() for grad in tensors.grads], tensors.offsets
                table["format"] = [0 if half is None else FORMATS[bf16_format] for half in tensors.halves]
                table["bf16_grad"] = [grad.dtype == torch.bfloat16 for grad in tensors.grads]
        if self._covered:
            self._table["grad"] = [grad.data_ptr() for grad in tensors.grads]
            self._written = [t for values in lists[:3] for t in values if t is not None]
        return self._covered

    def update(self, rule: str, settings: dict[str, Any], seed: int, inverse: Tensor | None, steps: Tensor) -> None:
        """One pass over the tensors that were taken, in as many threads as torch has.

        Args:
            rule: of `STEP_RULES`.
            settings: of the param group, with its "lr".
            seed: of the draws of stochastic rounding.
            inverse: factor of the gradients, None for 1.
            steps: counter of the steps, int64 of no dimension.
        """
        native = native_update()
        assert native is not None, "take() has asked"
        beta1, beta2 = settings.get("betas", (0.0, 0.0))
        known = {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2, "rule": STEP_RULES.index(rule)}
        known |= {"inverse": 1.0 if inverse is None else inverse.item(), "power1": beta1, "power2": beta2}
        if FORMATS["stochastic"] in self._table["format"]:
            known["key"] = int(random_key(seed, steps)) & 0xFFFFFFFF
        known |= {name: settings[name] for name in ("lr", "eps", "weight_decay", "momentum", "nesterov") if name in settings}
        record = np.zeros(1, SETTINGS)
        for name, value in known.items():
            record[name] = float(value) if isinstance(value, Tensor) else value
        arguments = self._table.ctypes.data, len(self._table), record.ctypes.data
        native.begin(*arguments)
        _in_threads(functools.partial(native.update, *arguments), int(self._table["numel"].sum()))
        torch.autograd.graph.increment_version(self._written)
        self._written = []


def _in_threads(part: Callable[[int, int], None], total: int) -> None:
    """Call `part(begin, end)` for equal parts of the values."""
    count = max(1, min(torch.get_num_threads(), total // VALUES_OF_THREAD))
    ends = [total * k // count // 64 * 64 for k in range(count)] + [total]
    threads = [threading.Thread(target=part, args=pair) for pair in itertools.pairwise(ends[1:])]
    for thread in threads:
        thread.start()
    part(ends[0], ends[1])
    for thread in threads:
        thread.join()
