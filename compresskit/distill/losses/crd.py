"""Contrastive representation distillation with a memory bank (Tian et al., 1910.10699).

train = numbered(dataset, batch_size=64, shuffle=True)          # a loader whose batches know which samples they hold
Term(Contrast(samples=len(dataset)), "pool", adapt=embed)       # embed: 128 trained numbers of either network
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError, SettingError
from compresskit.distill.losses.common import positive, unit


def crd(anchor: Tensor, own: Tensor, others: Tensor, *, samples: int, log_z: Tensor | float, temperature: float = 0.07) -> Tensor:
    """-log h(own) - sum over others of log(1 - h), averaged over the batch (1910.10699, eq. 17-19).

    anchor: unit features (N, D) of one network; own: the other network's (N, D) of the same samples; others: its (N, M, D) of
    random ones. h = P / (P + M / samples), P = exp(anchor . other / T) / Z. Written with log-sigmoids: finite for any input.
    """
    positive("crd", "temperature", temperature)
    if own.shape != anchor.shape or others.ndim != 3 or others.shape[::2] != anchor.shape:
        raise DataError(
            f"crd: wanted (N, D), (N, D) and (N, M, D), got {tuple(anchor.shape)}, {tuple(own.shape)}, {tuple(others.shape)}"
        )
    shift = log_z + math.log(others.shape[1] / samples)
    a = anchor.float()
    hit = (a * own.float()).sum(1) / temperature - shift
    miss = (others.float() @ a.unsqueeze(2)).squeeze(2) / temperature - shift
    return -(F.logsigmoid(hit) + F.logsigmoid(-miss).sum(1)).mean()


class MemoryBank:
    """Two banks of unit features, the student's and the teacher's, one row a sample: `bank(student, teacher, index)` is the loss.

    samples, width: rows and columns; negatives: M, drawn anew for every sample from the other samples; momentum: share of the
    old row that a new feature leaves. The first call sets Z to the mean of exp(. / T) times `samples`, as the authors do.
    teacher_head: let the gradient reach the teacher's features, for a head on top of a frozen teacher that is trained too.
    """

    def __init__(
        self,
        *,
        samples: int,
        width: int,
        negatives: int = 4096,
        momentum: float = 0.5,
        temperature: float = 0.07,
        seed: int = 0,
        device: torch.device | str = "cpu",
        teacher_head: bool = False,
    ) -> None:
        positive("MemoryBank", "temperature", temperature)
        if samples < 2 or width < 1 or negatives < 1:
            raise SettingError(
                f"MemoryBank: wanted samples >= 2, width >= 1, negatives >= 1, got {samples}, {width}, {negatives}"
            )
        if not 0 <= momentum < 1:
            raise SettingError(f"MemoryBank(momentum=...): wanted a number in [0, 1), got {momentum}")
        self.negatives, self.momentum, self.temperature, self.teacher_head = negatives, momentum, temperature, teacher_head
        self._random = torch.Generator().manual_seed(seed)
        self.student, self.teacher = (unit(torch.randn(samples, width, generator=self._random)).to(device) for _ in range(2))
        self._log_z: dict[str, Tensor] = {}

    def __call__(self, student: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
        """The sum of both directions for features (N, width) of the samples `index` (N,); then the rows are renewed."""
        samples, width = self.student.shape
        for features in (student, teacher):
            if features.shape != (len(index), width):
                raise DataError(f"MemoryBank: wanted features {(len(index), width)}, got {tuple(features.shape)}")
        if index.device.type == "cpu" and len(index) and not 0 <= int(index.min()) <= int(index.max()) < samples:
            raise DataError(f"MemoryBank: indices must be 0..{samples - 1}, got {int(index.min())}..{int(index.max())}")
        s, t = unit(student.float()), unit((teacher if self.teacher_head else teacher.detach()).float())
        # An offset of 1..samples-1 from one's own row is any row but one's own.
        offset = torch.randint(1, samples, (len(index), self.negatives), generator=self._random).to(index.device)
        rows = (index.unsqueeze(1) + offset) % samples
        value = self._one_way("student", s, t, self.teacher[rows]) + self._one_way("teacher", t, s, self.student[rows])
        for bank, new in ((self.student, s.detach()), (self.teacher, t.detach())):
            bank[index] = unit(self.momentum * bank[index] + (1 - self.momentum) * new)
        return value

    def resume_state(self) -> dict[str, Any]:
        """Both banks, Z, and where its random numbers are."""
        return {"student": self.student, "teacher": self.teacher, "log_z": self._log_z, "random": self._random.get_state()}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.student.copy_(state["student"])
        self.teacher.copy_(state["teacher"])
        self._log_z = {name: value.to(self.student.device) for name, value in state["log_z"].items()}
        self._random.set_state(state["random"])

    def _one_way(self, name: str, anchor: Tensor, own: Tensor, others: Tensor) -> Tensor:
        samples = len(self.student)
        if name not in self._log_z:
            scores = (others @ anchor.detach().unsqueeze(2)) / self.temperature
            self._log_z[name] = scores.logsumexp((0, 1, 2)) - math.log(scores.numel()) + math.log(samples)
        return crd(anchor, own, others, samples=samples, log_z=self._log_z[name], temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A memory bank as the loss of a `Term`; the width is that of the features, and every training starts with a fresh bank.

    The batches must say which samples they hold, see `numbered`. Other settings as in `MemoryBank`.
    """

    samples: int
    negatives: int = 4096
    momentum: float = 0.5
    temperature: float = 0.07
    seed: int = 0

    def __post_init__(self) -> None:
        self._bank(1, "cpu", samples=min(self.samples, 2))  # its checks, without its memory

    def start(self, student: Tensor, teacher: Tensor) -> MemoryBank:
        """The bank for features (N, D) such as these."""
        if student.ndim != 2 or student.shape != teacher.shape:
            raise DataError(
                f"Contrast: wanted features (N, D) of one width, got {tuple(student.shape)} and {tuple(teacher.shape)};"
                " use Term(adapt=embed)"
            )
        return self._bank(student.shape[1], student.device, samples=self.samples)

    def _bank(self, width: int, device: torch.device | str, *, samples: int) -> MemoryBank:
        return MemoryBank(
            samples=samples,
            width=width,
            negatives=self.negatives,
            momentum=self.momentum,
            temperature=self.temperature,
            seed=self.seed,
            device=device,
            teacher_head=True,
        )


class Embed(nn.Module):
    """A linear layer on top of each network, (N, ...) to unit rows (N, width); both are trained, and dropped at the end."""

    def __init__(self, student: int, teacher: int, width: int) -> None:
        super().__init__()
        self.student_head, self.teacher_head = nn.Linear(student, width), nn.Linear(teacher, width)

    def forward(self, student: Tensor) -> Tensor:
        return unit(self.student_head(_pooled(student)))

    def teacher(self, teacher: Tensor) -> Tensor:
        """The same for the teacher's feature."""
        return unit(self.teacher_head(_pooled(teacher)))


def _pooled(features: Tensor) -> Tensor:
    """(N, C, H, W) to its mean over positions, (N, C); other features flat, (N, D)."""
    return features.mean((2, 3)) if features.ndim == 4 else features.flatten(1)


def embed(student: Tensor, teacher: Tensor, *, width: int = 128) -> Embed:
    """An adapter for `Contrast`: features (N, ...) of both networks to `width` numbers each."""
    return Embed(_pooled(student).shape[1], _pooled(teacher).shape[1], width)
