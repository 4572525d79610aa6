"""The optimizer's step in parts, for masters that exist only around it: one part's masters are in memory at a time.

A part is read, stepped and stored while it is in the processor's cache, and the memory that masters take during a step is that of
one part, or of the largest weight. On a CPU, where memory is what such a step waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from compresskit.mixed.formats.bf16_in_pieces import flat_views
from compresskit.mixed.optim.lion import Lion
from compresskit.mixed.step.masters import HalfWeight, MasterWeights

#: Optimizers that step each tensor by its own gradient and state alone, whatever other tensors they are given beside it.
TENSORWISE_OPTIMIZERS = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, Lion),
)
PART = 2**20  # values: 4 MiB of masters, for each of which the optimizer is called once


def choose_step(weights: MasterWeights, optimizer: torch.optim.Optimizer, *, whole: bool) -> Callable[[], None]:
    """A function that steps the optimizer with its masters in memory; `MasterWeights.write_back` is to follow.

    whole: all masters are to be in memory after the step, for what looks at them. Parts have written theirs back by then.
    """
    if not whole and _can_step_in_parts(weights, optimizer):
        return partial(_step_in_parts_, weights, optimizer)
    return partial(_step_at_once_, weights, optimizer)


def _can_step_in_parts(weights: MasterWeights, optimizer: torch.optim.Optimizer) -> bool:
    """Whether parts give what one step gives, and there is more than one of them."""
    if weights.masters_in_memory or sum(half.master.numel() for half in weights.halves) <= PART:
        return False
    if type(optimizer) not in TENSORWISE_OPTIMIZERS or _has_hooks(optimizer):
        return False
    return all(flat_views(half.parameter.data) is not None for half in weights.halves)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody is called around the optimizer's step, and would be for every part; the run's guard does not mind."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own > 1 or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _step_at_once_(weights: MasterWeights, optimizer: Any) -> None:
    weights.materialize_masters()
    optimizer.step()


@torch.no_grad()
def _step_in_parts_(weights: MasterWeights, optimizer: Any) -> None:
    groups, halves = optimizer.param_groups, {half.master: half for half in weights.halves}
    copies = 2 if weights.policy.bf16_format == "kahan" else 1  # a value that did not move keeps its pair of numbers
    memory = torch.empty(copies, 0)
    weights.steps += 1
    draws = weights.draws()
    try:
        for part in _cut(groups):
            moved = [halves[p] for _, params in part for p in params if p in halves]
            size = sum(half.master.numel() for half in moved)
            memory = memory if memory.shape[1] >= size else torch.empty(copies, size)
            optimizer.param_groups = [{**group, "params": params} for group, params in part]
            with _in_memory(moved, memory):
                for half in moved:
                    weights.read_(half)
                optimizer.step()
                for half in moved:
                    weights.store_(half, draws)
    finally:
        optimizer.param_groups = groups
    weights.record_(written=not weights.compared)


def _cut(groups: list[dict[str, Any]]) -> Iterator[list[tuple[dict[str, Any], list[Tensor]]]]:
    """The tensors that have a gradient, in runs of about `PART` values, each with its group's settings."""
    part: list[tuple[dict[str, Any], list[Tensor]]] = []
    size = 0
    for group in groups:
        params: list[Tensor] = []
        for p in (p for p in group["params"] if p.grad is not None):
            if size and size + p.numel() > PART:
                yield [*part, (group, params)] if params else part
                part, params, size = [], [], 0
            params.append(p)
            size += p.numel()
        if params:
            part.append((group, params))
    if part:
        yield part


@contextmanager
def _in_memory(halves: list[HalfWeight], memory: Tensor) -> Iterator[None]:
    """Let masters lie in the first row of fp32 memory, what they were before the step in the second, and take them out."""
    empty = [half.master.data for half in halves]
    start = 0
    for half in halves:
        form = half.master.shape, half.master.stride()
        half.master.data, *before = (row.as_strided(*form, row.storage_offset() + start) for row in memory)
        half.before = before[0] if before else None
        start += half.master.numel()
    try:
        yield
    finally:
        for half, data in zip(halves, empty, strict=True):
            half.master.data, half.before = data, None
