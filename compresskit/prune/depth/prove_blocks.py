"""Prove on a copy that removed blocks are what a plan says: the model with every addition and norm on their way skipped.

The reference is the original model, run operator by operator: an addition on the way from a block's input to its output gives the
operand on that way alone, so that the block's branch counts as zero; a norm on it gives what goes in. A ReLU on the way is run as
it is: a block whose ReLU would change its input is not removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from compresskit.base.errors import named_first_line
from compresskit.base.task import Inputs, call, first_rows
from compresskit.graph.differences import NOTHING_FINITE, any_finite, relative_difference
from compresskit.graph.replacements import bypass_
from compresskit.graph.surgery import copy_model, frozen_copy, mode
from compresskit.measure import few_rows
from compresskit.prune.depth.find_blocks import ResidualBlock, find_blocks, outermost
from compresskit.prune.structure.repeatable import repeatable, state_restored, varied_inputs, vary_constants_
from compresskit.prune.structure.trace import repeat_rows

WIDE_TOLERANCE, SINGLE_TOLERANCE = 1e-9, 1e-4  # of the largest output, in float64 and float32


class BranchesZeroed(TorchDispatchMode):
    """While it is on, the operators of these numbers hand on one of their arguments: `ResidualBlock.skipped`."""

    def __init__(self, skipped: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.skipped, self.count = skipped, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        position = self.skipped.get(self.count)
        self.count += 1
        if position is None:
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return args[0].copy_(args[position])
        # A copy: what follows may write into it.
        return (args[position].clone(), None, None) if len(func._schema.returns) > 1 else args[position].clone()


def remove_blocks_(model: nn.Module, blocks: Collection[ResidualBlock]) -> nn.Module:
    """Put a `Bypass` in the place of every block, in place, and return the model."""
    for block in blocks:
        bypass_(model, block.path, block.bypass())
    return model


def check_blocks(model: nn.Module, paths: Collection[str], example: Inputs) -> str | None:
    """Compare the model without some blocks with the original whose branches are zero, on other inputs and another batch size.

    In float64, or in float32 for a model that does not run in it; in train mode the model without the blocks must run where the
    original does.

    Args:
        model: the original; it is not changed. paths: of the blocks to remove. example: inputs.

    Returns: None where they agree, else what is wrong.
    """
    example = first_rows(example, 2) if runs_here(model, first_rows(example, 2)) else example
    wide, double, tolerance = copy_model(model).double().eval(), changed_inputs(example, Tensor.double), WIDE_TOLERANCE
    if not runs_here(wide, double):
        wide, double, tolerance = copy_model(model).eval(), example, SINGLE_TOLERANCE
    vary_constants_(wide)
    tried = [
        inputs for inputs in (varied_inputs(double), changed_inputs(first_rows(double, 1), Tensor.neg)) if runs_here(wide, inputs)
    ]
    for inputs in tried or [double]:  # a model with a fixed batch takes no other
        found = find_blocks(wide, inputs).removable
        if missing := [path for path in paths if path not in found]:
            return f"{missing[0]} is no residual block for inputs of another size"
        wanted = _run_skipping(wide, inputs, {n: p for path in paths for n, p in found[path].skipped.items()})
        if wanted and not any_finite(wanted):
            return NOTHING_FINITE
        removed = remove_blocks_(copy_model(wide), [found[path] for path in paths])
        try:
            got = _run_skipping(removed, inputs, {})
        except Exception as error:
            return f"the model does not run without it: {named_first_line(error)}"
        if [v.shape for v in got] != [v.shape for v in wanted]:
            return "the outputs have other shapes without it"
        worst = max((relative_difference(a, b) for a, b in zip(wanted, got, strict=True)), default=0.0)
        if not worst <= tolerance:
            return f"its input is not what is left with its branch at zero, by {worst:.2g}, as where a ReLU changes that input"
    found = find_blocks(model, example).removable
    removed = remove_blocks_(copy_model(model), [found[path] for path in paths])
    return training_failure(model, removed, example)


def blocks_that_cannot_go(model: nn.Module, blocks: Mapping[str, ResidualBlock], example: Inputs) -> dict[str, str]:
    """Blocks without which the model does not run, each with the error: code that reads an attribute of its first layer."""
    some = few_rows(model, example, 2)

    def error_without(paths: Collection[str]) -> Exception | None:
        try:
            _run_skipping(remove_blocks_(frozen_copy(model), [blocks[path] for path in paths]), some, {})
        except Exception as error:
            return error
        return None

    outer = outermost(blocks)
    alone = [path for path in blocks if path not in outer] if error_without(outer) is None else list(blocks)
    errors = {path: error for path in alone if (error := error_without([path])) is not None}
    if not errors or not runs_here(model, some):
        return {}
    return {path: f"the model does not run without it: {named_first_line(error)}" for path, error in errors.items()}


def failing_alone(model: nn.Module, paths: Collection[str], example: Inputs) -> dict[str, str]:
    """Those of some blocks whose removal alone is not what a plan says, each with what is wrong, see `check_blocks`."""
    failures = {path: check_blocks(model, [path], example) for path in paths}
    return {path: failure for path, failure in failures.items() if failure is not None}


def changed_inputs(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs with another value in the place of every floating point tensor."""
    changed: Inputs = pytree.tree_map(lambda v: change(v) if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    return changed


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The floating point tensors that a model gives in eval mode, with the same noise in every call."""
    return _run_skipping(model, inputs, {})


def _run_skipping(model: nn.Module, inputs: Inputs, skipped: Mapping[int, int]) -> list[Tensor]:
    quiet = torch.inference_mode(), mode(model, training=False), torch.random.fork_rng()
    with quiet[0], quiet[1], quiet[2], repeatable(model), BranchesZeroed(skipped):
        return [v for v in pytree.tree_leaves(call(model, inputs)) if isinstance(v, Tensor) and v.is_floating_point()]


def runs_here(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a model runs on inputs, in eval mode."""
    try:
        _run_skipping(model, inputs, {})
    except Exception:
        return False
    return True


def training_failure(model: nn.Module, changed: nn.Module, example: Inputs) -> str | None:
    """Why a changed copy of a model does not run in train mode where the model does; None where it does."""
    inputs = repeat_rows(first_rows(example, 2))
    failures = []
    for each in (model, changed):
        try:
            with torch.no_grad(), torch.random.fork_rng(), mode(each, training=True), state_restored(each):
                call(each, inputs)
            failures.append("")
        except Exception as error:  # training may need more than inputs, such as targets
            failures.append(named_first_line(error))
    return f"the model does not train without it: {failures[1]}" if failures[1] and not failures[0] else None
