"""`Term`: one loss between a feature of the student and a feature of the teacher, with an adapter where their shapes differ.

Term              the user's setting: a loss, taps, a weight, an adapter
resolve_terms     globs replaced by the modules that they match: one BoundTerm for each pair
start_terms       losses with a memory and adapters made from the features of one example
compute_terms     the weighted losses of a batch
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.objective import Losses
from compresskit.distill.objectives.loss_weights import LossWeight, check_loss_weight, weight_at
from compresskit.graph.taps import feature, find_taps

AdapterFactory = Callable[[Any, Any], nn.Module]
Features = dict[str, Tensor]

#: Submodule of the student (of a Sequential: of its first layer) that holds its adapters during training, so that its
#: optimizer, policy and checkpoints include them.
ADAPTERS = "distill_adapters"


class DistillLoss(Protocol):
    """`(student, teacher) -> scalar` on plain tensors.

    The arguments are logits (N, C, ...) or features (N, ...); of a `Term` with several taps, tuples of features. A loss with a
    parameter called `target` is also given the labels, and one with `index` the indices (N,) of the samples in the data set. It
    should send no gradient to the teacher. A loss whose state must be saved in checkpoints has `resume_state` and `resume_from_`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


@runtime_checkable
class StatefulLoss(Protocol):
    """Settings of a loss with a memory, such as `CRDLoss`; each training starts a new one."""

    def start(self, student: Any, teacher: Any, /) -> DistillLoss:
        """Return the loss for features of these shapes, both behind the term's adapter."""


@runtime_checkable
class TeacherAdapter(Protocol):
    """An adapter that also adapts the teacher's feature, such as `projection_heads`."""

    def adapt_teacher(self, teacher: Any, /) -> Any:
        """Return the feature that is compared with the adapted feature of the student."""


def project(student: Tensor, teacher: Tensor) -> nn.Module:
    """Make an adapter to the teacher's width: a 1x1 convolution or a linear layer (FitNets' regressor, 1412.6550).

    Args:
        student, teacher: features of an example: (N, C, H, W) or (N, C, D, H, W) for a convolution, (N, ..., D) for a layer.

    Raises: ModelError for features of different dimensions.
    """
    if student.ndim != teacher.ndim or student.ndim < 2:
        raise ModelError(f"no adapter turns features {tuple(student.shape)} into {tuple(teacher.shape)}: dimensions differ")
    convolutions = {4: nn.Conv2d, 5: nn.Conv3d}
    if student.ndim in convolutions:
        return convolutions[student.ndim](student.shape[1], teacher.shape[1], 1)
    return nn.Linear(student.shape[-1], teacher.shape[-1])


@dataclass(frozen=True)
class Term:
    """One loss of an objective: weight * loss(student's feature, teacher's feature).

    Args:
        loss: a `DistillLoss`, or the settings of one with a memory, such as `CRDLoss`.
        student_tap: the student's module whose output is compared, by name or glob, see `find_taps`; None for the predictions.
            A glob stands for one term for each module that it matches. A tuple of names is one term whose loss is given tuples
            of features, such as `reviewkd`.
        teacher_tap: the same of the teacher, with as many matches; None for the student's.
        weight: a number >= 0, or a function of the fraction of the training that is done, such as `linear_warmup`.
        adapt: `(student's feature, teacher's feature) -> module`, such as `project`. The adapter is made from the features of
            one example, applied to the student's feature, trained with the student and removed at the end.

    Raises: SettingError for settings of the wrong type or range.
    """

    loss: DistillLoss | StatefulLoss
    student_tap: str | tuple[str, ...] | None = None
    teacher_tap: str | tuple[str, ...] | None = None
    _: KW_ONLY
    weight: LossWeight = 1.0
    adapt: AdapterFactory | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss) and not isinstance(self.loss, StatefulLoss):
            raise SettingError(f"Term(loss=...): wanted a function, got {type(self.loss).__name__}")
        if self.adapt is not None and not callable(self.adapt):
            raise SettingError(f"Term(adapt=...): wanted a function, got {type(self.adapt).__name__}")
        check_loss_weight("Term", self.weight)
        if self.student_tap is None and (self.teacher_tap is not None or self.adapt is not None):
            raise SettingError("Term(): a teacher_tap or adapt without a student_tap; name the student's module too")

    @property
    def label(self) -> str:
        """Name of the loss, for messages and for the names of the objective's losses."""
        loss = self.loss.func if isinstance(self.loss, functools.partial) else self.loss
        return loss.__name__ if inspect.isroutine(loss) or inspect.isclass(loss) else type(loss).__name__


def layer_terms(
    loss: DistillLoss,
    layers: Mapping[int, int],
    student: str | tuple[str, ...],
    teacher: str | tuple[str, ...] | None = None,
    *,
    weight: LossWeight = 1.0,
    adapt: AdapterFactory | None = None,
) -> list[Term]:
    """Return a term for each pair of layers, such as TinyBERT's or MiniLM's.

    Args:
        loss: of each pair.
        layers: the student's layer -> the teacher's, such as `layer_map(4, 12)`.
        student: a tap of the student with {} for the layer's number, or several: "bert.encoder.layer.{}".
        teacher: the same of the teacher; None for the student's.
        weight, adapt: of each term.

    Raises: SettingError for a tap without {}.
    """
    other = student if teacher is None else teacher
    for tap in (*_as_tuple(student), *_as_tuple(other)):
        if "{}" not in tap:
            raise SettingError(f"layer_terms({tap!r}): wanted a tap with {{}} for the number of the layer")

    def numbered(taps: str | tuple[str, ...], layer: int) -> str | tuple[str, ...]:
        return taps.format(layer) if isinstance(taps, str) else tuple(tap.format(layer) for tap in taps)

    return [Term(loss, numbered(student, s), numbered(other, t), weight=weight, adapt=adapt) for s, t in layers.items()]


def _as_tuple(taps: str | tuple[str, ...]) -> tuple[str, ...]:
    return (taps,) if isinstance(taps, str) else taps


@dataclass(frozen=True, kw_only=True)
class BoundTerm:
    """A term with the names of the modules that its taps match: none for the predictions, one of each model, or `several`."""

    name: str
    loss: Any  # a StatefulLoss until the term is started, then a DistillLoss
    weight: LossWeight
    student: tuple[str, ...] = ()
    teacher: tuple[str, ...] = ()
    several: bool = False
    adapt: AdapterFactory | None = None

    def select(self, features: Features, taps: tuple[str, ...]) -> Any:
        """Return the feature of its tap, or a tuple of several."""
        selected = tuple(feature(features, tap) for tap in taps)
        return selected if self.several else selected[0]


def takes_argument(loss: DistillLoss | StatefulLoss, name: str) -> bool:
    """Whether a loss has a parameter of that name that is not set yet."""
    if not callable(loss):
        return False
    known = loss.keywords if isinstance(loss, functools.partial) else {}
    try:
        # The first two are the student's and the teacher's, whatever they are called: F.mse_loss(input, target).
        return name in list(inspect.signature(loss).parameters)[2:] and name not in known
    except (TypeError, ValueError):  # builtins without a signature
        return False


def _matches(model: nn.Module, tap: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for pattern in ((tap,) if isinstance(tap, str) else tap) for name in find_taps(model, pattern))


def _tap_pairs(term: Term, student: nn.Module, teacher: nn.Module | None) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The taps of student and teacher that a term compares, a pair for each loss."""
    if term.student_tap is None:
        return [((), ())]
    if teacher is None:
        raise SettingError(f"Term({term.label}, {term.student_tap!r}): this teacher has no modules to tap, only predictions")
    s = _matches(student, term.student_tap)
    t = _matches(teacher, term.teacher_tap if term.teacher_tap is not None else term.student_tap)
    if len(s) != len(t):
        raise ModelError(
            f"Term({term.label}): {len(s)} taps in the student ({s[0]}, ...), {len(t)} in the teacher ({t[0]}, ...); a pair for"
            " each is needed"
        )
    return [(s, t)] if isinstance(term.student_tap, tuple) else [((a,), (b,)) for a, b in zip(s, t, strict=True)]


def resolve_terms(terms: Sequence[Term], student: nn.Module, teacher: nn.Module | None) -> list[BoundTerm]:
    """Return a `BoundTerm` with a unique name for each pair of modules that the terms' taps match.

    Terms of weight 0 are left out. Raises `ModelError` or `SettingError` for taps that do not fit the models.
    """
    bound: list[BoundTerm] = []
    for term in (t for t in terms if t.weight):
        several = isinstance(term.student_tap, tuple)
        for s, t in _tap_pairs(term, student, teacher):
            name = f"{term.label}:{'+'.join(s)}" if s else term.label
            same = sum(other.name.partition("#")[0] == name for other in bound)
            name = f"{name}#{same + 1}" if same else name
            bound.append(
                BoundTerm(name=name, loss=term.loss, weight=term.weight, student=s, teacher=t, several=several, adapt=term.adapt)
            )
    return bound


def start_terms(terms: Sequence[BoundTerm], student: Features, teacher: Features) -> tuple[list[BoundTerm], dict[str, nn.Module]]:
    """Make the adapters and start the losses with a memory, from the features of one example.

    Returns the terms, ready for use, and the adapters by name of the term. Raises ModelError where the shapes do not fit.
    """
    ready: list[BoundTerm] = []
    adapters: dict[str, nn.Module] = {}
    for term in terms:
        if term.student:
            try:
                term = _start_term(term, adapters, student, teacher)
            except (CompressError, RuntimeError, ValueError, TypeError, IndexError) as error:
                raise ModelError(f"term {term.name}, teacher's {' + '.join(term.teacher)}: {error}") from error
        ready.append(term)
    return ready, adapters


def _start_term(term: BoundTerm, adapters: dict[str, nn.Module], student: Features, teacher: Features) -> BoundTerm:
    s, t = term.select(student, term.student), term.select(teacher, term.teacher)
    if term.adapt is not None:
        adapter = term.adapt(s, t).to(next(iter(student.values())).device)
        adapters[term.name] = adapter
        keep_fp32_(adapter)
        s, t = apply_adapter(adapter, s, t)
        wanted, got = _feature_shapes(t), _feature_shapes(s)
        if got != wanted:
            raise ModelError(f"its adapter gives {got}, the teacher has {wanted}")
    if isinstance(term.loss, StatefulLoss):
        term = replace(term, loss=term.loss.start(s, t))
    if not takes_argument(term.loss, "target") and not takes_argument(term.loss, "index"):
        term.loss(s, t)
    return term


def _feature_shapes(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(tuple(v.shape) for v in value)


def keep_fp32_(module: nn.Module) -> None:
    """Mark a module and its submodules so that `compresskit.mixed` leaves their weights in fp32."""
    for part in module.modules():
        part.keeps_fp32 = True  # type: ignore[assignment]


def apply_adapter(adapter: nn.Module, student: Any, teacher: Any) -> tuple[Any, Any]:
    """Return both features of a term behind its adapter, computed in the adapter's dtype."""
    dtype = next((p.dtype for p in adapter.parameters()), torch.float32)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else tuple(v.to(dtype) for v in value)

    adapted = adapter(cast(student))
    return adapted, adapter.adapt_teacher(cast(teacher)) if isinstance(adapter, TeacherAdapter) else teacher


def attach_adapters_(student: nn.Module, adapters: dict[str, nn.Module]) -> None:
    """Make adapters a submodule of the student, in place of earlier ones."""
    drop_adapters_(student)
    if adapters:
        _host(student).add_module(ADAPTERS, nn.ModuleList(adapters.values()))


def drop_adapters_(student: nn.Module) -> None:
    """Remove the student's adapters, if it has any."""
    _host(student)._modules.pop(ADAPTERS, None)


def _host(module: nn.Module) -> nn.Module:
    """The module that gets the adapters: the student; of a container, which would call them as layers, its first layer."""
    while isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) and len(module):
        module = next(iter(module.children()))
    return module


def compute_terms(
    terms: Sequence[BoundTerm],
    adapters: dict[str, nn.Module],
    student: tuple[Tensor, Features],
    teacher: tuple[Any, Features],
    done: float,
    **arguments: Callable[[str], Any],
) -> Losses:
    """Return the weighted losses of a batch by name.

    Args:
        terms, adapters: what `start_terms` returned.
        student, teacher: predictions, and features by tap, of the batch.
        done: fraction of the training that is done, in [0, 1].
        arguments: what a loss is given if it has a parameter of that name (`target`, `index`), as functions of the term's name.
    """
    losses: Losses = {}
    for term in terms:
        s = term.select(student[1], term.student) if term.student else student[0]
        t = term.select(teacher[1], term.teacher) if term.student else teacher[0]
        if (adapter := adapters.get(term.name)) is not None:
            s, t = apply_adapter(adapter, s, t)
        more = {name: get(term.name) for name, get in arguments.items() if takes_argument(term.loss, name)}
        losses[term.name] = weight_at(term.weight, done) * term.loss(s, t, **more)
    return losses
