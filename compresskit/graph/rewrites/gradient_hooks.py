"""Gradient hooks of parameters, by which users freeze a part of a weight: copies and captured graphs leave them behind."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

Copied = TypeVar("Copied", bound=nn.Module)


def is_hooked(parameter: Tensor) -> bool:
    """Whether a parameter has gradient hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have gradient hooks, by each of their dotted names."""
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if is_hooked(p)}


def hooked_modules(model: nn.Module) -> set[str]:
    """Dotted names of the modules that have such parameters of their own."""
    return {name.rpartition(".")[0] for name in hooked_parameters(model)}


def copy_gradient_hooks_(source: Tensor, target: Tensor) -> None:
    """Register the gradient hooks of a parameter on another one, which may be frozen; nothing is done where that has some."""
    if not is_hooked(source) or is_hooked(target):
        return
    trains = target.requires_grad
    target.requires_grad_(True)  # torch registers hooks on nothing else
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (source._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)
    target.requires_grad_(trains)


def hooked_as(model: nn.Module, copied: Copied) -> Copied:
    """A copy of a model, with the gradient hooks that the parameters of the model have."""
    targets = dict(copied.named_parameters())
    for name, parameter in hooked_parameters(model).items():
        if name in targets:
            copy_gradient_hooks_(parameter, targets[name])
    return copied


def drop_gradient_hooks_(model: nn.Module) -> None:
    """Take the gradient hooks from the parameters of a model."""
    for parameter in hooked_parameters(model).values():
        (parameter._backward_hooks or {}).clear()
        (parameter._post_accumulate_grad_hooks or {}).clear()
