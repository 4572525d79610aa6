"""Knowledge review: deep features flow back into shallow ones before they are compared (ReviewKD, Chen et al., 2104.09044).

Term(review, ("layer1", "layer2", "layer3"), adapt=fuse, weight=partial(warm_up, over=0.1))

layer3 -> 1x1 -> gate ------------------------------> 3x3 -> like the teacher's layer3
layer2 -> 1x1 -> gate <- what the gate above let by -> 3x3 -> like the teacher's layer2        (the same for layer1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError
from compresskit.distill.losses.features import hcl


def review(student: Sequence[Tensor], teacher: Sequence[Tensor], *, levels: tuple[int, ...] = (4, 2, 1)) -> Tensor:
    """Sum of `hcl` over features of several depths, (N, C, H, W) each, the student's already fused (2104.09044, eq. 7)."""
    if len(student) != len(teacher) or not student:
        raise DataError(f"review: wanted as many features of the student as of the teacher, got {len(student)}, {len(teacher)}")
    return torch.stack([hcl(s, t, levels=levels) for s, t in zip(student, teacher, strict=True)]).sum()


class Fusion(nn.Module):
    """Attention-based fusion of one depth with what comes from the next deeper one (2104.09044, fig. 3).

    width: channels of the features between the depths. forward: (N, inputs, H, W), and (N, width, h, w) of the deeper one or
    None, to (N, outputs, *size) for the teacher's and (N, width, H, W) for the next shallower one.
    """

    def __init__(self, inputs: int, outputs: int, width: int, size: tuple[int, int], *, deepest: bool) -> None:
        super().__init__()
        self.size = size
        self.narrow = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width))
        self.gate = None if deepest else nn.Conv2d(2 * width, 2, 1)
        self.widen = nn.Sequential(nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor, deeper: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.narrow(x)
        if self.gate is not None and deeper is not None:
            deeper = F.interpolate(deeper, x.shape[2:])
            shares = self.gate(torch.cat([x, deeper], 1)).sigmoid()
            x = x * shares[:, :1] + deeper * shares[:, 1:]
        fits = x if x.shape[2:] == self.size else F.interpolate(x, self.size)
        return self.widen(fits), x


class Fusions(nn.Module):
    """One `Fusion` for each depth, shallow first; features in, features of the teacher's shapes out."""

    def __init__(self, fusions: Sequence[Fusion]) -> None:
        super().__init__()
        self.fusions = nn.ModuleList(fusions)

    def forward(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        fused: list[Tensor] = []
        deeper: Tensor | None = None
        for fusion, feature in zip(reversed(self.fusions), reversed(features), strict=True):
            out, deeper = fusion(feature, deeper)
            fused.insert(0, out)
        return tuple(fused)


def fuse(student: Sequence[Tensor], teacher: Sequence[Tensor], *, width: int | None = None) -> Fusions:
    """An adapter for `review`: features (N, C, H, W) from shallow to deep; width: the deepest's channels where None."""
    for f in (*student, *teacher):
        if not isinstance(f, Tensor) or f.ndim != 4:
            raise ModelError(f"fuse: wanted several features (N, C, H, W), got {tuple(getattr(f, 'shape', ()))}")
    between = width if width is not None else min(512, student[-1].shape[1])
    last = len(student) - 1
    return Fusions(
        [
            Fusion(s.shape[1], t.shape[1], between, (t.shape[2], t.shape[3]), deepest=i == last)
            for i, (s, t) in enumerate(zip(student, teacher, strict=True))
        ]
    )
