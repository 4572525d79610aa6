"""Modules that take the place of a user's own, and how a saved structure names them: a removed block becomes a `Bypass`.

A record is plain data, `{path: {"kind": "bypass", ...}}`; nothing in it is executed. `replace_recorded_` makes the modules again
in a new model of the same class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import nn

from compresskit.base.errors import CheckpointError

MOST_OUTPUTS = 64  # of the tuple that a block returns


class Bypass(nn.Module):
    """Stands where a block was removed: returns one of the arguments that the block was called with.

    Args:
        argument: position of the argument, or its name where it is given by name.
        outputs: length of the tuple that the block returned; 0 where it returned a tensor.
        index: place of the argument in that tuple; the other entries become None.
    """

    def __init__(self, argument: int | str = 0, outputs: int = 0, index: int = 0) -> None:
        super().__init__()
        self.argument, self.outputs, self.index = argument, outputs, index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the argument, alone or in a tuple as the block did."""
        value = args[self.argument] if isinstance(self.argument, int) else kwargs[self.argument]
        return tuple(value if i == self.index else None for i in range(self.outputs)) if self.outputs else value

    def extra_repr(self) -> str:
        """The argument, for `print(model)`."""
        return f"argument={self.argument!r}" + (f", outputs={self.outputs}, index={self.index}" if self.outputs else "")

    def record(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {"kind": "bypass", "argument": self.argument, "outputs": self.outputs, "index": self.index}


def replacements(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The record of every module that took the place of a user's own, by its dotted name."""
    return {path: module.record() for path, module in model.named_modules() if isinstance(module, Bypass)}


def replace_recorded_(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Put the modules of a record into a model of the same class, which may have some of them already.

    Raises CheckpointError where the record is damaged, or of another model.
    """
    for path, saved in record.items():
        here = _module_at(model, path)
        made = _made(saved, path)
        if not isinstance(here, Bypass):
            model.set_submodule(path, made.train(here.training))
        elif here.record() != made.record():
            raise CheckpointError(f"{path}: the record says {made}, the model has {here}; it is of another model")


def _module_at(model: nn.Module, path: Any) -> nn.Module:
    try:
        return model.get_submodule(str(path or "no name"))
    except AttributeError:
        raise CheckpointError(
            f"the record was made of another model: {type(model).__name__} has no module {path!r}; build the model that the run"
            " started from"
        ) from None


def _made(saved: Any, path: str) -> Bypass:
    """The module of a record; CheckpointError where the record is not one that `Bypass.record` writes."""
    if isinstance(saved, dict) and saved.get("kind") == "bypass":
        argument, outputs, index = saved.get("argument"), saved.get("outputs"), saved.get("index")
        if (
            (isinstance(argument, str) or _is_count(argument))
            and (_is_count(outputs) and outputs <= MOST_OUTPUTS)
            and (_is_count(index) and index < max(1, outputs))
        ):
            return Bypass(argument, outputs, index)
    raise CheckpointError(f"{path}: not the record of a replaced module, got {saved!r}; delete the folder")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0
