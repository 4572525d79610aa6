"""The buffers of a half model: cast with its weights, watched in the first forward passes, and in fp32 again at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.mixed.formats.casts import in_fp32
from compresskit.mixed.formats.policy import HALVES, Policy

#: In so many forward passes of a training are the buffers compared; a model may write into some only from the second one on.
WATCHED_PASSES = 3


class HalfBuffers:
    """The fp32 buffers of a model that a policy has cast to half. One that several modules share stays one tensor.

    entries: a module, the name of its buffer, and the fp32 tensor that was there.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self.entries: list[tuple[nn.Module, str, Tensor]] = []
        self._passes = 0

    def cast_(self, dtype: torch.dtype, kept: set[Any]) -> None:
        """Cast the fp32 buffers that are not cast yet; `kept` has the modules and the ids of buffers that stay in fp32."""
        shared = {id(b) for module in self.model.modules() if module in kept for b in module._buffers.values()}
        halves: dict[Tensor, Tensor] = {}
        for module in self.model.modules():
            if module in kept:
                continue
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.dtype != torch.float32 or id(buffer) in kept or id(buffer) in shared:
                    continue
                if buffer not in halves:
                    halves[buffer] = buffer.to(dtype)
                module._buffers[name] = halves[buffer]
                self.entries.append((module, name, buffer))

    def restore_(self) -> None:
        """Bring the buffers to fp32; a constant, such as a mean that inputs lose, gets back the bits that half dropped."""
        restored: dict[Tensor, Tensor] = {}
        for module, name, full in self.entries:
            now = module._buffers.get(name)
            if now is None:  # taken out by the model
                continue
            if now not in restored:
                constant = torch.equal(full.to(now.dtype), now)
                restored[now] = full if constant else in_fp32(now)
            module._buffers[name] = restored[now]
        self.entries = []

    def watching(self, called: nn.Module) -> AbstractContextManager[None]:
        """Warn of buffers that a forward pass writes into, where the block is one of the first passes of a training.

        Small additions are lost in half, and `prepare` cannot know which buffers a forward pass writes into.

        called: the model that the block calls, which may be wrapped.
        """
        if not self.entries or self._passes >= WATCHED_PASSES or not called.training:
            return nullcontext()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return nullcontext()  # a comparison makes the host wait, which ends the recording of a graph
        return self._compared(by_version=not isinstance(called, nn.parallel.DistributedDataParallel))

    @contextmanager
    def _compared(self, *, by_version: bool) -> Iterator[None]:
        """Compare the buffers around the block; `by_version` is False where DDP writes the same values into all of them."""
        self._passes += 1
        entries = [(module, name, b) for module, name, _ in self.entries if (b := module._buffers.get(name)) is not None]
        before = [(_write_count(b) if by_version else 0, b.detach().clone()) for _, _, b in entries]
        yield
        written = set()
        for (module, name, old), (version, values) in zip(entries, before, strict=True):
            now = module._buffers.get(name)
            if now is None or now.dtype not in HALVES:
                continue
            same = now is old and (not by_version or _write_count(now) == version)
            # The values too: a write through `.data`, as running averages are often kept, leaves the version alone.
            if not same or not torch.equal(now.view(torch.int16), values.view(torch.int16)):
                written.add((module, name))
        if written:
            self._passes = WATCHED_PASSES
            self._warn(written)

    def _warn(self, written: set[tuple[nn.Module, str]]) -> None:
        places = ((path, module, name) for path, module in self.model.named_modules() for name in module._buffers)
        names = [f"{path}.{name}".lstrip(".") for path, module, name in places if (module, name) in written]
        half = str(self.policy.param_dtype).removeprefix("torch.")
        end = 256 if self.policy.param_dtype is torch.bfloat16 else 2048
        keep = ", ".join([repr(name) for name in names[:3]] + ["..."] * (len(names) > 3))
        warnings.warn(
            f"{self.policy.name}: forward writes into the buffer {names[0]} ({len(names)} in all), which is {half}: a counter"
            f" stops at {end} there, and a running average loses small updates; keep it in fp32, by"
            f" replace(policy, keep_fp32=(*policy.keep_fp32, {keep}))",
            stacklevel=5,
        )


def widen_buffers_(model: nn.Module) -> None:
    """Bring the half buffers of a model to fp32; one that several modules share stays one tensor."""
    widened: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in HALVES:
                if buffer not in widened:
                    widened[buffer] = buffer.float()
                module._buffers[name] = widened[buffer]


def _write_count(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
