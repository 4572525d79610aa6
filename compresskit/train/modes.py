"""Modules that the user put in eval mode, such as a frozen BatchNorm, and that stay there while the rest is trained.

Every training ends in eval mode, so that the modes are remembered on the modules themselves for the trainings after it; copies
and pruned models keep them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from compresskit.base import distributed
from compresskit.graph.tracing import set_modes_

log = logging.getLogger(__name__)

#: Attribute of a module: its mode in the trainings to come.
MODE_ATTRIBUTE = "compresskit_training_mode"


def given_modes(model: nn.Module) -> dict[str, bool]:
    """Return, by name, the mode of the modules whose mode is another than that of the module around them.

    Read from the modules where the model is in train mode; else what an earlier `remember_modes_` saw. Empty where all are to be
    trained, as in a model that is wholly in eval mode.
    """
    if not model.training:
        return _remembered(model)
    modes: dict[str, bool] = {}
    around = {"": True}
    for name, module in model.named_modules():
        outer = around[name.rpartition(".")[0]] if name else True
        around[name] = module.training
        if module.training != outer:
            modes[name] = module.training
    return modes


def remember_modes_(model: nn.Module) -> None:
    """Note on the modules of a model what `given_modes` says."""
    modes = given_modes(model)
    for name, module in model.named_modules():
        vars(module).pop(MODE_ATTRIBUTE, None)
        if name in modes:
            vars(module)[MODE_ATTRIBUTE] = modes[name]


def train_mode_(model: nn.Module, label: str) -> None:
    """Put a model in train mode but for the modules that `remember_modes_` saw in eval mode, which are logged."""
    model.train()
    modes = _remembered(model)
    for name, training in modes.items():
        model.get_submodule(name).train(training)
    if kept := [name for name, training in modes.items() if not training]:
        log.warning(
            "%s: %s (%d in all) stays in eval mode, as it was given; model.train() before it would train all",
            label,
            kept[0],
            len(kept),
        )


def call_and_share_(call: Callable[[], None], model: nn.Module) -> None:
    """Call a function that acts in process 0 alone; all processes get the modes and frozen parameters that it leaves there.

    Raises:
        TrainingError: in the other processes, where it raised an error in process 0.
    """
    modules, parameters = list(model.modules()), list(model.parameters())

    def left() -> tuple[list[bool], list[bool]]:
        call()
        return [module.training for module in modules], [parameter.requires_grad for parameter in parameters]

    modes, trained = distributed.on_rank_zero(left)
    set_modes_(zip(modules, modes, strict=True))
    for parameter, requires_grad in zip(parameters, trained, strict=True):
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _remembered(model: nn.Module) -> dict[str, bool]:
    return {name: kept for name, module in model.named_modules() if (kept := vars(module).get(MODE_ATTRIBUTE)) is not None}
