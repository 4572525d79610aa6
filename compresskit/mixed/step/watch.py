"""Notices what is written into half weights between steps, such as by `load_state_dict`, `clamp_` or a max_norm embedding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

#: Values of each weight that are compared on the CPU, as a write through `.data` leaves torch's version counter alone.
COMPARED_VALUES = 64


class WeightWatch:
    """Remembers half weights as a step left them, and tells which have been written into since.

    By torch's version counter and the memory's address, which cost nothing; on the CPU also by a sample of the values. On a GPU
    a sample would make the host wait in every step.
    """

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._views: list[NDArray[np.int16]] = []
        self._sample = np.zeros(0, np.int16)

    def record(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember the weights as they are now."""
        self._versions = [p._version for p in parameters]
        addresses = [p.data_ptr() for p in parameters]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [_view(p) for p in parameters if _is_sampled(p)]
        self.record_values()

    def record_values(self) -> None:
        """Remember new values of the weights, written through `.data` into the memory where they were."""
        self._sample = self._sampled()

    def changed(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that were written into since `record` was called with the same ones."""
        versions, addresses = [p._version for p in parameters], [p.data_ptr() for p in parameters]
        same = np.array_equal(self._sampled(), self._sample)
        if same and versions == self._versions and addresses == self._addresses:
            return []
        differ = set()
        if not same:
            parts = np.split(self._sample, np.cumsum([len(view) for view in self._views])[:-1])
            here = [p for p in parameters if _is_sampled(p)]
            differ = {p for p, view, part in zip(here, self._views, parts, strict=False) if not np.array_equal(view, part)}
        marks, before = zip(versions, addresses, strict=True), zip(self._versions, self._addresses, strict=True)
        return [p for p, now, then in zip(parameters, marks, before, strict=True) if now != then or p in differ]

    def _sampled(self) -> NDArray[np.int16]:
        # By numpy: for so many small parts, torch's concatenation is mostly overhead.
        return np.concatenate(self._views) if self._views else np.zeros(0, np.int16)


def _is_sampled(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.numel() > 0


def _view(parameter: nn.Parameter) -> NDArray[np.int16]:
    """A view of values across the whole parameter, as whole numbers, so that nan equals itself."""
    data = parameter.data
    count = min(data.numel(), COMPARED_VALUES)
    view: NDArray[np.int16] = data.as_strided((count,), (data.numel() // count,)).view(torch.int16).numpy()
    return view
