"""Param groups of an optimizer by the names and shapes of the parameters: `Train(param_groups=no_decay_on_vectors)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from compresskit.base.errors import SettingError

NamedParameters = list[tuple[str, nn.Parameter]]
#: (named parameters that require gradients) -> param groups as torch's optimizers take them.
ParamGroups = Callable[[NamedParameters], list[dict[str, Any]]]


def no_decay_on_vectors(named: NamedParameters) -> list[dict[str, Any]]:
    """Leave biases and the weights of norms, which have one dimension, without weight decay."""
    vectors = [parameter for _, parameter in named if parameter.ndim <= 1]
    others = [parameter for _, parameter in named if parameter.ndim > 1]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def groups_of(model: nn.Module, make: ParamGroups | None) -> list[Any]:
    """Return what the optimizer is made of: the parameters that require gradients, or the groups that `make` puts them in.

    Raises:
        SettingError: the groups lack one of these parameters, hold one twice, or hold something else.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if make is None:
        return [parameter for _, parameter in named]
    groups = make(named)
    try:
        groups = [{**group, "params": list(group["params"])} for group in groups]
        held = Counter(id(parameter) for group in groups for parameter in group["params"])
    except (TypeError, KeyError) as error:
        raise SettingError(
            f"Train(param_groups=...): wanted a list of dicts with an entry 'params' from its function, got {groups!r:.80}"
        ) from error
    if left := [name for name, parameter in named if held[id(parameter)] != 1]:
        often = held[id(dict(named)[left[0]])]
        raise SettingError(
            f"Train(param_groups=...): {left[0]} is in {often} groups; each parameter with a gradient belongs into one"
            " (freeze it with requires_grad_(False) to leave it out)"
        )
    if len(held) != len(named):
        raise SettingError("Train(param_groups=...): its groups hold tensors that it was not given")
    return groups
