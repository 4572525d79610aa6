"""`Term`: one loss between a place in the student and a place in the teacher; adapters where their widths differ."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.objective import Losses
from compresskit.distill.models.taps import feature, find_taps
from compresskit.distill.objectives.loss_weights import LossWeight, check_loss_weight, weight_at

DistillLoss = Callable[..., Tensor]
Adapt = Callable[[Any, Any], nn.Module]
Features = dict[str, Tensor]

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

    loss: `(student, teacher) -> scalar`; one with a parameter called `target`, such as `dkd`, is given the labels too, and one
        with `index` the samples' indices, see `indexed_loader`. A loss with a memory is a setting whose `start(student, teacher)`
        makes it from an example's features, anew for every training, such as `CRDLoss`.
    student_tap, teacher_tap: names or globs of modules, see `find_taps`; a glob stands for as many terms as it has matches, and
        both must have the same number. A tuple of names is one term, whose loss is given a tuple of features, such as `reviewkd`.
        No student tap: the predictions. No teacher tap: the student's.
    weight: a number, or a function of the share of the training that is done, such as `partial(linear_warmup, over=0.1)`.
    adapt: `(student's feature, teacher's feature) -> module`, such as `project`: made from one example, applied to the student's
        feature, trained along with the student and dropped at the end. Its method
        `adapt_teacher`, if it has one, is applied to the teacher's feature.
    """

    loss: DistillLoss
    student_tap: str | tuple[str, ...] | None = None
    teacher_tap: str | tuple[str, ...] | None = None
    _: KW_ONLY
    weight: LossWeight = 1.0
    adapt: Adapt | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "adapt"):
            value = getattr(self, name)
            if not callable(value) and not (name == "adapt" and value is None) and not hasattr(value, "start"):
                raise SettingError(f"Term({name}=...): wanted a function, got {type(value).__name__}")
        check_loss_weight("Term", self.weight)
        if self.student_tap is None and (self.teacher_tap is not None or self.adapt is not None):
            raise SettingError("Term(): a teacher_tap or adapt without a student_tap; name the student's module too")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A term with its taps found in both models: none for the predictions, one of each, or `several` of each."""

    name: str
    loss: DistillLoss
    weight: LossWeight
    student: tuple[str, ...] = ()
    teacher: tuple[str, ...] = ()
    several: bool = False
    adapt: Adapt | None = None

    def read(self, features: Features, taps: tuple[str, ...]) -> Any:
        """The feature of its tap, or a tuple of several."""
        found = tuple(feature(features, tap) for tap in taps)
        return found if self.several else found[0]


def takes(loss: DistillLoss, name: str) -> bool:
    """Whether a loss has a parameter of that name that is not set yet."""
    given = loss.keywords if isinstance(loss, functools.partial) else {}
    try:
        # One of the first two is the prediction or the teacher's, whatever it is called: F.mse_loss(input, target).
        return name in list(inspect.signature(loss).parameters)[2:] and name not in given
    except (TypeError, ValueError):  # builtins without a signature, settings that make a loss
        return False


def _found(model: nn.Module, tap: str | tuple[str, ...]) -> list[str]:
    return [name for pattern in ((tap,) if isinstance(tap, str) else tap) for name in find_taps(model, pattern)]


def linked(terms: Sequence[Term], student: nn.Module, teacher: nn.Module | None) -> list[Link]:
    """Every term with its globs spelled out; terms of weight 0 are left out. Names are unique."""
    links: list[Link] = []
    for term in (t for t in terms if t.weight):
        called = getattr(term.loss, "func", term.loss)
        label = getattr(called, "__name__", type(called).__name__)
        pairs: list[tuple[tuple[str, ...], tuple[str, ...]]] = [((), ())]
        several = isinstance(term.student_tap, tuple)
        if term.student_tap is not None:
            if teacher is None:
                raise SettingError(f"Term({label}, {term.student_tap!r}): this teacher has no modules to tap, only predictions")
            left = _found(student, term.student_tap)
            right = _found(teacher, term.teacher_tap if term.teacher_tap is not None else term.student_tap)
            if len(left) != len(right):
                raise ModelError(
                    f"Term({label}): {len(left)} taps in the student ({left[0]}, ...), {len(right)} in the teacher"
                    f" ({right[0]}, ...); a pair for each is needed"
                )
            pairs = [(tuple(left), tuple(right))] if several else [((s,), (t,)) for s, t in zip(left, right, strict=True)]
        for s, t in pairs:
            name = ":".join([label, *s[:1]]) if not several else f"{label}:{'+'.join(s)}"
            taken = sum(link.name.partition("#")[0] == name for link in links)
            unique = f"{name}#{taken + 1}" if taken else name
            links.append(
                Link(name=unique, loss=term.loss, weight=term.weight, student=s, teacher=t, several=several, adapt=term.adapt)
            )
    return links


def started(links: Sequence[Link], student: Features, teacher: Features) -> tuple[list[Link], dict[str, nn.Module]]:
    """Links whose losses are ready, and adapters by name of the link, made from one example's features.

    Raises ModelError where the shapes are still not the same.
    """
    ready: list[Link] = []
    adapters: dict[str, nn.Module] = {}
    for link in links:
        if link.student:
            try:
                link = _start(link, adapters, student, teacher)
            except (CompressError, RuntimeError, ValueError, TypeError, IndexError) as error:
                raise ModelError(f"term {link.name}, teacher's {' + '.join(link.teacher)}: {error}") from error
        ready.append(link)
    return ready, adapters


def _start(link: Link, adapters: dict[str, nn.Module], student: Features, teacher: Features) -> Link:
    s, t = link.read(student, link.student), link.read(teacher, link.teacher)
    if link.adapt is not None:
        adapter = link.adapt(s, t).to(next(iter(student.values())).device)
        adapters[link.name] = adapter
        for module in adapter.modules():
            module.keeps_fp32 = True  # type: ignore[assignment]  # what compresskit.mixed asks for
        s, t = adapted(adapter, s, t)
        wanted, got = _shapes(t), _shapes(s)
        if got != wanted:
            raise ModelError(f"its adapter gives {got}, the teacher has {wanted}")
    start = getattr(link.loss, "start", None)
    link = link if start is None else replace(link, loss=start(s, t))
    if not takes(link.loss, "target") and not takes(link.loss, "index"):
        link.loss(s, t)
    return link


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(tuple(v.shape) for v in value)


def adapted(adapter: nn.Module, student: Any, teacher: Any) -> tuple[Any, Any]:
    """Both sides of a term behind its adapter, in the numbers of the adapter."""
    dtype = next((p.dtype for p in adapter.parameters()), torch.float32)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else tuple(v.to(dtype) for v in value)

    theirs = getattr(adapter, "adapt_teacher", None)
    return adapter(cast(student)), teacher if theirs is None else theirs(cast(teacher))


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
    student: tuple[Tensor, Features],
    teacher: tuple[Any, Features],
    done: float,
    **known: Callable[[str], Any],
) -> Losses:
    """Weighted losses by name, for (predictions, features by tap) of both.

    known: functions of a term's name that give what a loss may ask for by the name of a parameter: `target`, `index`.
    """
    losses: Losses = {}
    for link in links:
        s = link.read(student[1], link.student) if link.student else student[0]
        t = link.read(teacher[1], link.teacher) if link.student else teacher[0]
        if (adapter := adapters.get(link.name)) is not None:
            s, t = adapted(adapter, s, t)
        more = {name: get(link.name) for name, get in known.items() if takes(link.loss, name)}
        losses[link.name] = weight_at(link.weight, done) * link.loss(s, t, **more)
    return losses
