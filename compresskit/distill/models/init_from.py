"""Initialise a smaller student from chosen layers of its teacher, as DistilBERT (1910.01108) does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.graph.taps import find_taps


def layer_map(student: int, teacher: int) -> dict[int, int]:
    """Return the teacher's layer for each layer of the student, counted from 0: evenly spaced, the last one the teacher's last.

    It is TinyBERT's map (1909.10351, section 4.2): of 12 layers, the 3rd, 6th, 9th and 12th teach a student of four.

    >>> layer_map(4, 12)
    {0: 2, 1: 5, 2: 8, 3: 11}

    Raises: SettingError unless 1 <= student <= teacher.
    """
    _check_depths("layer_map", student, teacher)
    return {i: (i + 1) * teacher // student - 1 for i in range(student)}


def distilbert_layers(student: int = 6, teacher: int = 12) -> dict[int, int]:
    """Return the teacher's layer for each layer of the student, counted from 0: evenly spaced, with its first and its last.

    DistilBERT is initialised so (1910.01108, and the authors' script).

    >>> distilbert_layers()
    {0: 0, 1: 2, 2: 4, 3: 7, 4: 9, 5: 11}

    Raises: SettingError unless 1 <= student <= teacher.
    """
    _check_depths("distilbert_layers", student, teacher)
    return {i: round(i * (teacher - 1) / max(1, student - 1)) for i in range(student)}


def _check_depths(where: str, student: int, teacher: int) -> None:
    if not 1 <= student <= teacher:
        raise SettingError(f"{where}(): wanted 1 <= student's layers <= teacher's, got {student} and {teacher}")


@torch.no_grad()
def init_from_(student: nn.Module, teacher: nn.Module, pairs: Mapping[str, str]) -> None:
    """Copy parameters and buffers of the teacher's modules into the student's.

    Args:
        student: changed in place, after all names and shapes have been checked.
        teacher: a model with modules of the same shapes.
        pairs: names of the student's modules and of the teacher's: `{"layer.0": "layer.2", "embed": "embed"}`.

    Raises: ModelError, which names the first module or tensor that differs; the student is then unchanged.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    for name_s, name_t in pairs.items():
        for model, name in ((student, name_s), (teacher, name_t)):
            find_taps(model, name)
        new, old = (model.get_submodule(name).state_dict() for model, name in ((student, name_s), (teacher, name_t)))
        if odd := sorted(set(new) ^ set(old)):
            raise ModelError(f"init_from_: {name_s} and {name_t} are not alike: only one of them has {odd[0]!r}")
        for leaf, value in new.items():
            if value.shape != old[leaf].shape:
                raise ModelError(
                    f"init_from_: {name_s}.{leaf} is {tuple(value.shape)}, the teacher's {name_t}.{leaf} {tuple(old[leaf].shape)}"
                )
            copies.append((value, old[leaf]))
    for to, values in copies:
        to.copy_(values)
