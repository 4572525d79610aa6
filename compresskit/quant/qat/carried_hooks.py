"""Gradient hooks of a float model in its quantization-aware training: parameters keep theirs, and what is lost is said."""

from __future__ import annotations

import logging
import re

import torch
from torch import Tensor, nn

from compresskit.graph.quantized import float_names
from compresskit.graph.rewrites.gradient_hooks import copy_gradient_hooks_, hooked_parameters
from compresskit.graph.surgery import get_tensor
from compresskit.quant.qat.left_out import few_names

log = logging.getLogger(__name__)


def carry_hooks_(model: nn.Module, whole: nn.Module, inside: str | None, where: str) -> None:
    """Register the gradient hooks of parameters on those that are trained in their place.

    A warning, which begins with `where`, is logged for hooks of parameters that the trained graph does not have as they are, and
    for backward hooks of modules, which nothing calls there.

    Args:
        model: the float model, which has the hooks.
        whole: the quantized model, or the copy of the model with a quantized part, ready to be trained.
        inside: dotted name of that part.
        where: the function that the user called.
    """
    trained: dict[str, list[Tensor]] = {}
    own = dict(model.named_parameters(remove_duplicate=False))
    for here, there in float_names(whole).items():
        copy = re.fullmatch(r"(.+)_\d+", there)  # of a layer that has a weight for each of its calls
        name = copy[1] if copy and there not in own and copy[1] in own else there
        trained.setdefault(name, []).append(get_tensor(whole, here))
    found: dict[int, bool] = {}
    hooked = hooked_parameters(model)
    for name, parameter in hooked.items():
        alike = trained.get(name, [])
        whole_alike = bool(alike) and all(_is_arranged_as(parameter, target) for target in alike)
        found[id(parameter)] = found.get(id(parameter), False) or whole_alike
        for target in alike if whole_alike else ():
            copy_gradient_hooks_(parameter, target)
    if lost := [name for name, parameter in hooked.items() if not found[id(parameter)]]:
        log.warning(
            "%s: the gradient hooks of %s are not called: in the graph that is trained this weight is merged into another, stored"
            " in another shape, or computed beforehand. Freeze it by requires_grad_(False), or train the float model alone",
            where,
            few_names(lost),
        )
    part = model.get_submodule(inside or "")
    hooks = (name for name, module in part.named_modules() if module._backward_hooks or module._backward_pre_hooks)
    if names := [".".join(filter(None, (inside, name))) or type(model).__name__ for name in hooks]:
        log.warning(
            "%s: the backward hooks of %s are not called: the graph that is trained has operators in the place of modules."
            " Register them on parameters, parameter.register_hook(...), which keep theirs",
            where,
            few_names(names),
        )


def _is_arranged_as(parameter: Tensor, target: Tensor) -> bool:
    """Whether a trained tensor is in the order of the parameter: of the same shape, and not stored transposed."""
    if target.shape != parameter.shape:
        return False
    turned = parameter.ndim == 2 and not torch.equal(parameter, target) and torch.equal(parameter.t(), target)
    return not turned
