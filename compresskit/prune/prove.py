"""Proof of a plan, on copies: the pruned model equals the model with exactly those values set to zero."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.prune.plan import Plan, apply_, zero_
from compresskit.task import Inputs, call

TOLERANCE = 1e-9  # of the largest output, in float64


def prove(model: nn.Module, plan: Plan, example: Inputs) -> str | None:
    """None where the plan is right, else what is wrong with it; the model is not changed.

    The pruned copy must run in train and eval mode, and in eval mode give what the zeroed copy gives: in float64, or in float32
    for a model that makes its own float32 values and so cannot run in float64.
    """
    try:
        with torch.no_grad():
            call(copy.deepcopy(model).double().eval(), _double(example))
    except Exception:
        return _prove(copy.deepcopy(model), plan, example, 1e-5)
    return _prove(copy.deepcopy(model).double(), plan, _double(example), TOLERANCE)


def _prove(model: nn.Module, plan: Plan, example: Inputs, tolerance: float) -> str | None:
    with torch.no_grad():
        wanted = _tensors(call(zero_(copy.deepcopy(model).eval(), plan), example))
        pruned = apply_(model.eval(), plan)
        try:
            got = _tensors(call(pruned, example))
            call(pruned.train(), pytree.tree_map(_twice, example))
        except Exception as error:
            return f"the pruned model does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for a, b in zip(wanted, got, strict=True):
        if a.shape != b.shape:
            return f"the pruned model gives {tuple(b.shape)} where the model gives {tuple(a.shape)}"
        difference = float((a - b).abs().max()) if a.numel() else 0.0
        if not difference <= tolerance * max(1.0, float(a.abs().max())):
            return f"removed is not zeroed: the outputs differ by {difference:.2g}"
    return None


def _twice(value: Any) -> Any:
    # BatchNorm in train mode needs more than one value a channel.
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value


def _double(inputs: Inputs) -> Inputs:
    doubled: Inputs = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, inputs)
    return doubled


def _tensors(output: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.is_floating_point()]
