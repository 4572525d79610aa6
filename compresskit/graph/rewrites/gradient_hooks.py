"""Gradient hooks of parameters, by which users freeze a part of a weight: copies and captured graphs leave them behind.

Those of `register_hook` get a gradient alone, and fit a copy. Those of `register_post_accumulate_grad_hook` get the parameter: an
optimizer that steps in one knows the parameters of the model itself, and copies are trained without it.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from torch import Tensor, nn

from compresskit.graph.tracing import first_time

log = logging.getLogger(__name__)

Copied = TypeVar("Copied", bound=nn.Module)


def is_hooked(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks that its copies have, too."""
    return bool(parameter._backward_hooks)


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradient hooks, by each of their dotted names."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_hooked(p)}


def hooked_modules(model: nn.Module) -> set[str]:
    """Dotted names of the modules that have such parameters of their own."""
    return {name.rpartition(".")[0] for name in hooked_parameters(model)}


def copy_gradient_hooks_(source: Tensor, target: Tensor, *, of_same_model: bool = False) -> None:
    """Register the gradient hooks of a parameter on another one, which may be frozen; nothing is done where that has some.

    of_same_model: whether the other one takes its place in the same model, where hooks after accumulation are right, too.
    """
    accumulated = source._post_accumulate_grad_hooks if of_same_model else None
    if not (is_hooked(source) or accumulated) or is_hooked(target):
        return
    trains = target.requires_grad
    target.requires_grad_(True)  # torch registers hooks on nothing else
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (accumulated or {}).values():
        target.register_post_accumulate_grad_hook(hook)
    target.requires_grad_(trains)


def hooked_as(model: nn.Module, copied: Copied) -> Copied:
    """A copy of a model, with the gradient hooks that the parameters of the model have; what is left out is logged, once."""
    left = [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    if left and first_time(type(model), ("post-accumulate hooks", *left)):
        log.warning(
            "%s: copies of the model, as recipes and QAT train them, have not the hooks of register_post_accumulate_grad_hook"
            " (%s, %d in all), which may hold an optimizer of the model itself; those of register_hook stay",
            type(model).__name__,
            left[0],
            len(left),
        )
    targets = dict(copied.named_parameters())
    for name, parameter in hooked_parameters(model).items():
        if name in targets:
            copy_gradient_hooks_(parameter, targets[name])
    return copied


def drop_gradient_hooks_(model: nn.Module) -> None:
    """Take the gradient hooks from the parameters of a model."""
    for parameter in model.parameters():
        (parameter._backward_hooks or {}).clear()
        (parameter._post_accumulate_grad_hooks or {}).clear()
