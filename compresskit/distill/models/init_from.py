"""Start a smaller student from chosen layers of its teacher, as DistilBERT and TinyBERT do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compresskit.base.errors import ModelError, SettingError
from compresskit.distill.models.taps import find_taps


def layer_map(student: int, teacher: int) -> dict[int, int]:
    """For each of the student's layers, counted from 0, the teacher's: evenly spaced, the last one its last.

    >>> layer_map(4, 12)
    {0: 2, 1: 5, 2: 8, 3: 11}
    """
    if not 1 <= student <= teacher:
        raise SettingError(f"layer_map(): wanted 1 <= student's layers <= teacher's, got {student} and {teacher}")
    return {i: (i + 1) * teacher // student - 1 for i in range(student)}


@torch.no_grad()
def init_from_(student: nn.Module, teacher: nn.Module, pairs: Mapping[str, str]) -> None:
    """Copy the values of the teacher's modules into the student's: `{"layer.0": "layer.2", "embed": "embed"}`.

    All names and shapes are compared first; ModelError names the first that differs, and then nothing has changed.
    """
    copies: list[tuple[Tensor, Tensor]] = []
    for own, other in pairs.items():
        for model, name in ((student, own), (teacher, other)):
            find_taps(model, name)
        new, old = (model.get_submodule(name).state_dict() for model, name in ((student, own), (teacher, other)))
        if odd := sorted(set(new) ^ set(old)):
            raise ModelError(f"init_from_: {own} and {other} are not alike: only one of them has {odd[0]!r}")
        for leaf, value in new.items():
            if value.shape != old[leaf].shape:
                raise ModelError(
                    f"init_from_: {own}.{leaf} is {tuple(value.shape)}, the teacher's {other}.{leaf} {tuple(old[leaf].shape)}"
                )
            copies.append((value, old[leaf]))
    for to, values in copies:
        to.copy_(values)
