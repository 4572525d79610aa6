"""`Term`: one loss between a place in the student and a place in the teacher; adapters where their widths differ."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.distill.taps import feature, find_taps
from compresskit.errors import CompressError, ModelError, SettingError
from compresskit.task import Losses

DistillLoss = Callable[..., Tensor]
Adapt = Callable[[Tensor, Tensor], nn.Module]

#: Where the student carries its adapters while it is trained, so that its optimizer, policy and checkpoints have them too.
ADAPTERS = "distill_adapters"


def project(student: Tensor, teacher: Tensor) -> nn.Module:
    """A 1x1 convolution (features (N, C, L, ...) of 4 or 5 dimensions) or a linear layer (..., D) to the teacher's width."""
    if student.ndim != teacher.ndim or student.ndim < 2:
        raise ModelError(f"no adapter turns features {tuple(student.shape)} into {tuple(teacher.shape)}: dimensions differ")
    kinds = {4: nn.Conv2d, 5: nn.Conv3d}
    if student.ndim in kinds:
        return kinds[student.ndim](student.shape[1], teacher.shape[1], 1)
    return nn.Linear(student.shape[-1], teacher.shape[-1])


@dataclass(frozen=True)
class Term:
    """weight * loss(student's feature, teacher's feature).

    loss: `(student, teacher) -> scalar`; one with a parameter called `target`, such as `dkd`, is given the labels too.
    student_tap, teacher_tap: names or globs of modules, see `find_taps`; a glob stands for as many terms as it has matches, and
        both must have the same number. No student tap: the predictions. No teacher tap: the student's.
    adapt: `(student's feature, teacher's feature) -> module`, such as `project`: made from one example, applied to the student's
        feature, trained along with the student and dropped at the end.
    """

    loss: DistillLoss
    student_tap: str | None = None
    teacher_tap: str | None = None
    _: KW_ONLY
    weight: float = 1.0
    adapt: Adapt | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "adapt"):
            value = getattr(self, name)
            if not callable(value) and not (name == "adapt" and value is None):
                raise SettingError(f"Term({name}=...): wanted a function, got {type(value).__name__}")
        if self.weight < 0:
            raise SettingError(f"Term(weight=...): wanted a number >= 0, got {self.weight}")
        if self.student_tap is None and (self.teacher_tap is not None or self.adapt is not None):
            raise SettingError("Term(): a teacher_tap or adapt without a student_tap; name the student's module too")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A term of two taps, found in both models."""

    name: str
    loss: DistillLoss
    weight: float
    student: str | None
    teacher: str | None
    adapt: Adapt | None


def takes_target(loss: DistillLoss) -> bool:
    """Whether a loss has a parameter called `target` that is not set yet."""
    given = loss.keywords if isinstance(loss, functools.partial) else {}
    try:
        # One of the first two is the prediction or the teacher's, whatever it is called: F.mse_loss(input, target).
        return "target" in list(inspect.signature(loss).parameters)[2:] and "target" not in given
    except (TypeError, ValueError):  # builtins without a signature
        return False


def linked(terms: Sequence[Term], student: nn.Module, teacher: nn.Module | None) -> list[Link]:
    """Every term with its globs spelled out; terms of weight 0 are left out. Names are unique."""
    links: list[Link] = []
    for term in (t for t in terms if t.weight):
        called = getattr(term.loss, "func", term.loss)
        label = getattr(called, "__name__", type(called).__name__)
        pairs: list[tuple[str | None, str | None]] = [(None, None)]
        if term.student_tap is not None:
            if teacher is None:
                raise SettingError(f"Term({label}, {term.student_tap!r}): this teacher has no modules to tap, only predictions")
            left = find_taps(student, term.student_tap)
            right = find_taps(teacher, term.teacher_tap if term.teacher_tap is not None else term.student_tap)
            if len(left) != len(right):
                raise ModelError(
                    f"Term({label}): {len(left)} taps in the student ({left[0]}, ...), {len(right)} in the teacher"
                    f" ({right[0]}, ...); a pair for each is needed"
                )
            pairs = list(zip(left, right, strict=True))
        for s, t in pairs:
            name = label if s is None else f"{label}:{s}"
            taken = sum(link.name.partition("#")[0] == name for link in links)
            unique = f"{name}#{taken + 1}" if taken else name
            links.append(Link(name=unique, loss=term.loss, weight=term.weight, student=s, teacher=t, adapt=term.adapt))
    return links


def make_adapters(links: Sequence[Link], student: dict[str, Tensor], teacher: dict[str, Tensor]) -> dict[str, nn.Module]:
    """Adapters by name of the link, made from one example's features; ModelError where the shapes are still not the same."""
    made: dict[str, nn.Module] = {}
    for link in links:
        if link.student is None or link.teacher is None:
            continue
        s, t = feature(student, link.student), feature(teacher, link.teacher)
        try:
            if link.adapt is not None:
                made[link.name] = adapter = link.adapt(s, t).to(s.device)
                for module in adapter.modules():
                    module.keeps_fp32 = True  # type: ignore[assignment]  # what compresskit.mixed asks for
                s = adapter(s.float())
                if s.shape != t.shape:
                    raise ModelError(f"its adapter gives {tuple(s.shape)}, the teacher has {tuple(t.shape)}")
            if not takes_target(link.loss):
                link.loss(s, t)
        except (CompressError, RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(f"term {link.name}, teacher's {link.teacher}: {error}") from error
    return made


def attach_(student: nn.Module, adapters: dict[str, nn.Module]) -> None:
    """Let the student carry adapters, in the place of any from before."""
    drop_adapters_(student)
    if adapters:
        student.add_module(ADAPTERS, nn.ModuleList(adapters.values()))


def drop_adapters_(student: nn.Module) -> None:
    """Take the adapters off a student, if it has any."""
    student._modules.pop(ADAPTERS, None)


def term_losses(
    links: Sequence[Link],
    adapters: dict[str, nn.Module],
    student: tuple[Tensor, dict[str, Tensor]],
    teacher: tuple[Any, dict[str, Tensor]],
    target: Any,
) -> Losses:
    """Weighted losses by name, for (predictions, features by tap) of both."""
    losses: Losses = {}
    for link in links:
        s = student[0] if link.student is None else feature(student[1], link.student)
        t = teacher[0] if link.teacher is None else feature(teacher[1], link.teacher)
        if (adapter := adapters.get(link.name)) is not None:
            s = adapter(s.to(next(adapter.parameters(), torch.empty(0)).dtype))
        more = {"target": target} if takes_target(link.loss) else {}
        losses[link.name] = link.weight * link.loss(s, t, **more)
    return losses
