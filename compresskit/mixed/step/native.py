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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compresskit.mixed.formats.bf16_formats import random_key
from compresskit.mixed.formats.policy import Bf16Format

SOURCE = Path(__file__).with_name("update.cpp")
#: Of GCC and Clang. No contraction: all formats and all instruction sets then give the same bits.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
#: One of these is known to the compiler of a machine.
OWN_INSTRUCTIONS = ("-march=native", "-mcpu=native")
VALUES_OF_THREAD = 2**19  # fewer are not worth a thread

#: As in update.cpp.
STEP_RULES = ("adamw", "sgd", "momentum", "lion")
FORMATS: dict[Bf16Format | None, int] = {None: 1, "split": 2, "kahan": 3, "stochastic": 4}
POINTERS = ("master", "half", "remainder", "grad", "first", "second")
TENSORS = np.dtype(
    [(name, np.uintp) for name in POINTERS]
    + [("numel", np.int64), ("offset", np.int64), ("rates", np.float32, 3), ("format", np.int32), ("bf16_grad", np.int32)],
    align=True,
)
STEP_NUMBERS = ("inverse", "beta1", "rest1", "beta2", "rest2", "eps", "weight_decay", "momentum")
SETTINGS = np.dtype(
    [(name, np.float32) for name in STEP_NUMBERS] + [("key", np.uint32), ("rule", np.int32), ("nesterov", np.int32)]
)

#: (table of TENSORS, their number, SETTINGS, first value, end) -> None; gives Python's lock away while it runs.
NativeUpdate = Callable[[Any, int, Any, int, int], None]


@functools.cache
def native_update() -> NativeUpdate | None:
    """The compiled function of `update.cpp`; None where there is no compiler that builds it."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception:  # torch's own class for it moved between versions; whatever it is, nothing can be built
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a loaded library cannot be deleted on Windows
        built = Path(folder) / "update.so"
        for own in OWN_INSTRUCTIONS:
            try:
                subprocess.run([compiler, *FLAGS, own, str(SOURCE), "-o", str(built)], check=True, capture_output=True)
                function = ctypes.CDLL(str(built)).update
            except (OSError, subprocess.CalledProcessError):
                continue
            function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 2]
            return function  # type: ignore[no-any-return]
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


def update_natively(
    rule: str,
    settings: dict[str, Any],
    policy: tuple[Bf16Format | None, int],
    tensors: Any,
    rates: Tensor,
    inverse: Tensor | None,
    steps: Tensor,
) -> None:
    """One pass over all tensors of a group, in as many threads as torch has.

    Args:
        rule: of `STEP_RULES`.
        settings: of the param group.
        policy: format of bf16 weights without masters, and the seed of their draws.
        tensors: `StepTensors` of the group.
        rates: (tensors, 1) or (tensors, 3), fp32: see the rules of `compiled.py`.
        inverse: factor of the gradients, None for 1.
        steps: counter of the steps, int64 of no dimension.
    """
    function = native_update()
    assert function is not None, "asked for before"
    table = np.zeros(len(tensors.grads), TENSORS)
    firsts, seconds = ([state[k] if k < len(state) else None for state in tensors.states] for k in (0, 1))
    lists = (tensors.masters, tensors.halves, tensors.remainders, tensors.grads, firsts, seconds)
    for name, values in zip(POINTERS, lists, strict=True):
        table[name] = [0 if t is None else t.data_ptr() for t in values]
    table["numel"], table["offset"] = [grad.numel() for grad in tensors.grads], tensors.offsets
    table["rates"][:, : rates.shape[1]] = rates.numpy()
    table["format"] = [0 if half is None else FORMATS[policy[0]] for half in tensors.halves]
    table["bf16_grad"] = [grad.dtype == torch.bfloat16 for grad in tensors.grads]
    beta1, beta2 = settings.get("betas", (0.0, 0.0))
    known = {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2, "rule": STEP_RULES.index(rule)}
    known["inverse"] = 1.0 if inverse is None else inverse.item()
    if policy[0] == "stochastic":
        known["key"] = int(random_key(policy[1], steps)) & 0xFFFFFFFF
    known |= {name: settings[name] for name in ("eps", "weight_decay", "momentum", "nesterov") if name in settings}
    record = np.zeros(1, SETTINGS)
    for name, value in known.items():
        record[name] = float(value) if isinstance(value, Tensor) else value
    _in_threads(functools.partial(function, table.ctypes.data, len(table), record.ctypes.data), int(table["numel"].sum()))
    written = (tensors.masters, tensors.halves, tensors.remainders, firsts, seconds)
    torch.autograd.graph.increment_version([t for values in written for t in values if t is not None])


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
