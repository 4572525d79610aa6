"""Contrastive representation distillation (CRD) with a memory bank (Tian et al., 1910.10699).

train = indexed_loader(dataset, batch_size=64, shuffle=True)                      # batches that carry their samples' indices
Term(CRDLoss(samples=len(dataset)), "pool", adapt=projection_heads)               # both features projected to 128 dimensions
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError, SettingError
from compresskit.base.settings import check_field_types, check_whole_number
from compresskit.distill.losses.common import check_positive, products, unit_norm


def crd(
    anchor: Tensor, positive: Tensor, negatives: Tensor, *, samples: int, log_z: Tensor | float, temperature: float = 0.07
) -> Tensor:
    """Return -log h(positive) - sum over negatives of log(1 - h), averaged over the batch (1910.10699, eq. 17-19).

    h = P / (P + M / samples) with P = exp(anchor . other / T) / Z. Written with log-sigmoids, so it is finite for any input.

    Args:
        anchor: unit features (N, D) of one network.
        positive: unit features (N, D) of the other network for the same samples.
        negatives: unit features (N, M, D) of the other network for random samples.
        samples: number of samples of the data set.
        log_z: logarithm of the normalization constant Z.
        temperature: T, a positive number.

    Returns: an fp32 scalar.
    Raises: DataError for shapes that do not fit.
    """
    check_positive("crd", "temperature", temperature)
    if positive.shape != anchor.shape or negatives.ndim != 3 or negatives.shape[::2] != anchor.shape:
        raise DataError(
            "crd: wanted (N, D), (N, D) and (N, M, D), got"
            f" {tuple(anchor.shape)}, {tuple(positive.shape)}, {tuple(negatives.shape)}"
        )
    shift = log_z + math.log(negatives.shape[1] / samples)
    a = anchor.float()
    hit = (a * positive.float()).sum(1) / temperature - shift
    miss = products(negatives, a.unsqueeze(2)).squeeze(2) / temperature - shift
    return -(F.logsigmoid(hit) + F.logsigmoid(-miss).sum(1)).mean()


class MemoryBank:
    """The loss of CRD with the features of all samples: `bank(student, teacher, index)` is a scalar.

    It keeps one unit feature of the student and one of the teacher for each sample of the data set. The first call sets Z to
    the mean of exp(. / T) times `samples`, as the authors' code does.

    Args:
        samples, width: rows and columns of each bank.
        negatives: number M of other samples that are drawn anew for each sample of a batch.
        momentum: fraction of the old row that stays when a feature is updated, in [0, 1).
        temperature: T, a positive number.
        seed: of the generator that draws the banks' first features and the negatives.
        device: device of the banks.
        teacher_head: let the gradient reach the teacher's features, for a trained projection head on a frozen teacher.

    Raises: SettingError for settings out of range.
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
        check_positive("MemoryBank", "temperature", temperature)
        if samples < 2 or width < 1 or negatives < 1:
            raise SettingError(
                f"MemoryBank: wanted samples >= 2, width >= 1, negatives >= 1, got {samples}, {width}, {negatives}"
            )
        if not 0 <= momentum < 1:
            raise SettingError(f"MemoryBank(momentum=...): wanted a number in [0, 1), got {momentum}")
        self.negatives, self.momentum, self.temperature, self.teacher_head = negatives, momentum, temperature, teacher_head
        self._random = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(samples, width, generator=self._random, device="cpu") for _ in range(2)]
        self.student, self.teacher = (unit_norm(rows).to(device) for rows in drawn)
        self._log_z: dict[str, Tensor] = {}

    def __call__(self, student: Tensor, teacher: Tensor, index: Tensor) -> Tensor:
        """Return the sum of `crd` in both directions, then update the rows of the batch.

        student, teacher: features (N, width); index: places (N,) of the samples in the data set.
        """
        samples, width = self.student.shape
        for features in (student, teacher):
            if features.shape != (len(index), width):
                raise DataError(f"MemoryBank: wanted features {(len(index), width)}, got {tuple(features.shape)}")
        if index.device.type == "cpu" and len(index) and not 0 <= int(index.min()) <= int(index.max()) < samples:
            raise DataError(f"MemoryBank: indices must be 0..{samples - 1}, got {int(index.min())}..{int(index.max())}")
        s, t = unit_norm(student.float()), unit_norm((teacher if self.teacher_head else teacher.detach()).float())
        # An offset of 1..samples-1 from a sample's row is any row but its own.
        offset = torch.randint(1, samples, (len(index), self.negatives), generator=self._random, device="cpu").to(index.device)
        others = (index.unsqueeze(1) + offset) % samples
        value = self._one_direction("student", s, t, self.teacher[others])
        value = value + self._one_direction("teacher", t, s, self.student[others])
        for bank, new in ((self.student, s.detach()), (self.teacher, t.detach())):
            bank[index] = unit_norm(self.momentum * bank[index] + (1 - self.momentum) * new)
        return value

    def resume_state(self) -> dict[str, Any]:
        """Return both banks, Z, and the state of the random generator."""
        return {"student": self.student, "teacher": self.teacher, "log_z": self._log_z, "random": self._random.get_state()}

    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Restore what `resume_state` returned."""
        self.student.copy_(state["student"])
        self.teacher.copy_(state["teacher"])
        self._log_z = {name: value.to(self.student.device) for name, value in state["log_z"].items()}
        self._random.set_state(state["random"])

    def _one_direction(self, name: str, anchor: Tensor, positive: Tensor, negatives: Tensor) -> Tensor:
        samples = len(self.student)
        if name not in self._log_z:
            scores = products(negatives, anchor.detach().unsqueeze(2)) / self.temperature
            self._log_z[name] = scores.logsumexp((0, 1, 2)) - math.log(scores.numel()) + math.log(samples)
        return crd(anchor, positive, negatives, samples=samples, log_z=self._log_z[name], temperature=self.temperature)


@dataclass(frozen=True, kw_only=True)
class CRDLoss:
    """Settings of a memory bank, as the loss of a `Term`; each training starts with a new bank of the features' width.

    The batches must carry the indices of their samples, see `indexed_loader`. The settings are those of `MemoryBank`.
    """

    samples: int
    negatives: int = 4096
    momentum: float = 0.5
    temperature: float = 0.07
    seed: int = 0

    def __post_init__(self) -> None:
        check_field_types(self)
        MemoryBank(**asdict(self) | {"samples": min(self.samples, 2)}, width=1)  # it checks the settings, on two rows

    def start(self, student: Tensor, teacher: Tensor) -> MemoryBank:
        """Return a new bank for features (N, D) such as these."""
        if student.ndim != 2 or student.shape != teacher.shape:
            raise DataError(
                f"CRDLoss: wanted features (N, D) of one width, got {tuple(student.shape)} and {tuple(teacher.shape)};"
                " use Term(adapt=projection_heads)"
            )
        return MemoryBank(**asdict(self), width=student.shape[1], device=student.device, teacher_head=True)


class ProjectionHeads(nn.Module):
    """A linear layer on each network's features, (N, ...) to unit rows (N, width); both are trained and dropped at the end."""

    def __init__(self, student: int, teacher: int, width: int) -> None:
        super().__init__()
        self.student_head, self.teacher_head = nn.Linear(student, width), nn.Linear(teacher, width)

    def forward(self, student: Tensor) -> Tensor:
        return unit_norm(self.student_head(_flat_features(student)))

    def adapt_teacher(self, teacher: Tensor) -> Tensor:
        """Project the teacher's feature."""
        return unit_norm(self.teacher_head(_flat_features(teacher)))


def _flat_features(features: Tensor) -> Tensor:
    """(N, C, H, W) to its mean over positions (N, C); other features flattened to (N, D)."""
    return features.mean((2, 3)) if features.ndim == 4 else features.flatten(1)


def projection_heads(student: Tensor, teacher: Tensor, *, width: int = 128) -> ProjectionHeads:
    """Make the adapter of `CRDLoss`, which projects the features (N, ...) of both networks to `width` dimensions."""
    check_whole_number(width, "projection_heads(width=...)")
    return ProjectionHeads(_flat_features(student).shape[1], _flat_features(teacher).shape[1], width)
