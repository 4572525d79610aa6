"""bf16 on processors without instructions for it, where torch converts every factor: many times slower than fp32."""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from compresskit.mixed.formats.policy import Policy

log = logging.getLogger(__name__)

SLOW = 3.0  # times fp32, from which on it is said: between processors that have bf16 and those that convert every factor
REPEATED = 3  # runs of a convolution, of which the fastest counts


@functools.cache
def bf16_slowdown() -> float:
    """How many times as long a convolution takes on this processor in bf16 as in fp32; measured once for a process, in 0.1 s."""
    # No random numbers, which the training draws.
    image, weight = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((4, 16, 32, 32), (16, 16, 3, 3)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for one another where other processes have the cores
    try:
        return _fastest(image.bfloat16(), weight.bfloat16()) / _fastest(image, weight)
    finally:
        torch.set_num_threads(threads)


def bf16_speed() -> str:
    """A sentence on how fast training in bf16 is on this processor, as measured."""
    if (slowdown := bf16_slowdown()) >= SLOW:
        return f"no bf16: a convolution takes {slowdown:.0f} times as long as in fp32; train in mixed.FP32 here"
    return f"bf16: a convolution takes {slowdown:.1f} times as long as in fp32"


def _fastest(image: Tensor, weight: Tensor) -> float:
    """Seconds of a convolution; the first run, which prepares it, does not count."""
    times = []
    with torch.no_grad():
        for _ in range(1 + REPEATED):
            begin = time.perf_counter()
            F.conv2d(image, weight, padding=1)
            times.append(time.perf_counter() - begin)
    return min(times[1:])


def warn_of_slow_bf16(policy: Policy, device: torch.device) -> None:
    """Warn, once for a process and a policy, where the policy's products are in bf16 and the device is a processor without it."""
    if device.type == "cpu" and torch.bfloat16 in (policy.param_dtype, policy.autocast_dtype):
        _warn_once(policy.name)


@functools.cache
def _warn_once(name: str) -> None:
    if (slowdown := bf16_slowdown()) >= SLOW:
        log.warning(
            "%s: this processor has no instructions for bf16, and a convolution takes %.0f times as long as in fp32; use"
            " mixed.FP32 here",
            name,
            slowdown,
        )
