"""ReviewKD: deep features are fused into shallow ones before they are compared (Chen et al., 2104.09044).

Term(reviewkd, ("layer1", "layer2", "layer3"), adapt=abf, weight=partial(linear_warmup, over=0.1))

layer3 -> 1x1 -> gate -----------------------------> 3x3 -> compared with the teacher's layer3
layer2 -> 1x1 -> gate <- output of the gate above -> 3x3 -> compared with the teacher's layer2        (the same for layer1)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compresskit.base.errors import DataError, ModelError
from compresskit.distill.losses.features import hcl


def reviewkd(student: Sequence[Tensor], teacher: Sequence[Tensor], *, levels: tuple[int, ...] = (4, 2, 1)) -> Tensor:
    """Return the sum of `hcl` over features of several depths (2104.09044, eq. 7).

    Args:
        student: features (N, C, H, W) of each depth, already fused by the adapter `abf`.
        teacher: features of the same depths and shapes.
        levels: sizes to which `hcl` pools the features.

    Returns: an fp32 scalar.
    Raises: DataError where the numbers of features differ.
    """
    if len(student) != len(teacher) or not student:
        raise DataError(f"reviewkd: wanted as many features of the student as of the teacher, got {len(student)}, {len(teacher)}")
    return torch.stack([hcl(s, t, levels=levels) for s, t in zip(student, teacher, strict=True)]).sum()


class ABF(nn.Module):
    """Attention-based fusion of the feature of one depth with the fused feature of the next deeper one (2104.09044, fig. 3).

    inputs, outputs: channels of the student's and of the teacher's feature; width: channels between the depths; size: (h, w) of
    the teacher's feature; deepest: there is no deeper feature to fuse.

    forward: (N, inputs, H, W) and the deeper (N, width, h', w') or None, to (N, outputs, *size), which is compared with the
    teacher's feature, and (N, width, H, W) for the next shallower depth.
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
            attention = self.gate(torch.cat([x, deeper], 1)).sigmoid()
            x = x * attention[:, :1] + deeper * attention[:, 1:]
        resized = x if x.shape[2:] == self.size else F.interpolate(x, self.size)
        return self.widen(resized), x


class ABFStack(nn.Module):
    """One `ABF` for each depth, shallow first: the student's features in, features of the teacher's shapes out."""

    def __init__(self, fusions: Sequence[ABF]) -> None:
        super().__init__()
        self.fusions = nn.ModuleList(fusions)

    def forward(self, features: Sequence[Tensor]) -> tuple[Tensor, ...]:
        fused: list[Tensor] = []
        deeper: Tensor | None = None
        for fusion, feature in zip(reversed(self.fusions), reversed(features), strict=True):
            out, deeper = fusion(feature, deeper)
            fused.insert(0, out)
        return tuple(fused)


def abf(student: Sequence[Tensor], teacher: Sequence[Tensor], *, width: int | None = None) -> ABFStack:
    """Make the adapter of `reviewkd`: attention-based fusion of the student's features.

    Args:
        student, teacher: features (N, C, H, W) of an example, from shallow to deep.
        width: channels between the depths; the channels of the student's deepest feature, at most 512, where it is None.

    Raises: ModelError for features that are not (N, C, H, W).
    """
    for f in (*student, *teacher):
        if not isinstance(f, Tensor) or f.ndim != 4:
            shape = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ModelError(f"abf: wanted several features (N, C, H, W), got {shape}")
    between = width if width is not None else min(512, student[-1].shape[1])
    last = len(student) - 1
    return ABFStack(
        [
            ABF(s.shape[1], t.shape[1], between, (t.shape[2], t.shape[3]), deepest=i == last)
            for i, (s, t) in enumerate(zip(student, teacher, strict=True))
        ]
    )
