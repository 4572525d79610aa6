"""Memory of a training under each policy: between two steps and at the highest point of one.

On a GPU the figures are its allocator's, allocated and reserved. On a CPU, whose allocator does not tell, the storages of all
live tensors are counted; what kernels take for themselves is not seen.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import SettingError
from compresskit.mixed.formats.levels import require_policy
from compresskit.mixed.formats.policy import AMP_BF16, FP32, KAHAN_BF16, MASTER_BF16, SPLIT_BF16, SR_BF16, Policy
from compresskit.mixed.histograms import output_loss, split_batch
from compresskit.mixed.run import prepare

POLICIES = (FP32, AMP_BF16, MASTER_BF16, SPLIT_BF16, KAHAN_BF16, SR_BF16)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PolicyMemory:
    """Bytes of a training under one policy.

    Attributes:
        policy: its name.
        allocated: between two steps: weights, masters and the optimizer's state.
        peak: at the highest point of a step, which adds gradients, activations and temporaries.
        reserved, peak_reserved: what the allocator holds for that; None on a CPU, which does not say.
    """

    policy: str
    allocated: int
    peak: int
    reserved: int | None = None
    peak_reserved: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What `memory_report` measured, a row for each policy; prints as a table in MiB."""

    rows: tuple[PolicyMemory, ...]
    device: str

    def __str__(self) -> str:
        how = "the allocator's figures" if self.device != "cpu" else "live tensors; the allocator does not tell what it reserves"
        lines = [f"MiB on {self.device}: {how}", f"{'policy':<14}{'allocated':>12}{'peak':>12}{'reserved':>12}{'peak':>12}"]
        for row in self.rows:
            cells = (row.allocated, row.peak, row.reserved, row.peak_reserved)
            lines.append(f"{row.policy:<14}" + "".join(f"{'-' if c is None else f'{c / MIB:.2f}':>12}" for c in cells))
        return "\n".join(lines)


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while it is active, and the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
        # A view makes nothing.
        if sum(self.add_(value) for value in made if value.untyped_storage()._cdata not in given):
            self.peak = max(self.peak, self.live_bytes())
        return output

    def add_(self, tensor: Tensor) -> bool:
        """Count the storage of a tensor from here on; returns whether it was new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known() is not None:
            return False
        self._live[key] = weakref.ref(storage)
        return True

    def live_bytes(self) -> int:
        """The bytes of the storages that live now."""
        alive = {key: storage for key, ref in self._live.items() if (storage := ref()) is not None}
        self._live = {key: self._live[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def memory_report(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=1e-3),
    policies: Sequence[Policy] = POLICIES,
    steps: int = 3,
) -> MemoryReport:
    """Measure the memory of a few training steps under each policy, on a copy of the model where the model is.

    Args:
        model: an fp32 model in train mode.
        batch: one batch, as in `histograms`: with a loss, the last entry of a tuple is its target.
        loss: `(output, target) -> scalar`; None for the mean square of all outputs.
        optimizer: `(parameters) -> optimizer`.
        policies: what to compare.
        steps: training steps under each policy; the optimizer's state exists after the first.

    Raises:
        SettingError, ModelError: as in `histograms` and `prepare`.
    """
    if not policies:
        raise SettingError("memory_report(policies=...): wanted at least one policy, such as mixed.MASTER_BF16")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise SettingError(f"memory_report(steps=...): wanted a whole number >= 1, got {steps!r}")
    for policy in policies:
        require_policy(policy, "memory_report(policies=...)")
    args, kwargs, target = split_batch(batch, has_target=loss is not None)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    chosen = None if loss is None else lambda output: loss(output, target)
    measure = _cuda_memory if device.type == "cuda" else _cpu_memory
    rows = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout draws numbers
        for policy in policies:
            step = partial(_some_steps_, args=args, kwargs=kwargs, loss=chosen, steps=steps)
            rows.append(measure(model, policy, optimizer, step))
    return MemoryReport(rows=tuple(rows), device=device.type)


def _some_steps_(
    run: Any, *, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None, steps: int
) -> None:
    for _ in range(steps):
        run.backward(output_loss(run(*args, **kwargs), loss, "memory_report"))
        run.step()


def _cpu_memory(
    model: nn.Module, policy: Policy, optimizer: Callable[..., torch.optim.Optimizer], train: Callable[..., None]
) -> PolicyMemory:
    with StorageTracker() as tracker:
        own = copy.deepcopy(model)
        for tensor in (*own.parameters(), *own.buffers()):
            tracker.add_(tensor)
        run = prepare(own, optimizer(own.parameters()), policy)
        train(run)
        return PolicyMemory(policy=policy.name, allocated=tracker.live_bytes(), peak=tracker.peak)


def _cuda_memory(
    model: nn.Module, policy: Policy, optimizer: Callable[..., torch.optim.Optimizer], train: Callable[..., None]
) -> PolicyMemory:
    cuda, device = torch.cuda, next(model.parameters()).device
    cuda.synchronize(device)
    cuda.empty_cache()
    before, reserved = cuda.memory_allocated(device), cuda.memory_reserved(device)
    own = copy.deepcopy(model)
    run = prepare(own, optimizer(own.parameters()), policy)
    cuda.reset_peak_memory_stats(device)
    train(run)
    cuda.synchronize(device)
    return PolicyMemory(
        policy=policy.name,
        allocated=cuda.memory_allocated(device) - before,
        peak=cuda.max_memory_allocated(device) - before,
        reserved=cuda.memory_reserved(device) - reserved,
        peak_reserved=cuda.max_memory_reserved(device) - reserved,
    )
