"""Teachers: one model or an ensemble, frozen, in eval mode and cast once; or an average of the student itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.task import Inputs, Task, call
from compresskit.distill.models.taps import tapped
from compresskit.graph.surgery import frozen_copy

Seen = tuple[Any, dict[str, Tensor]]


class Source(Protocol):
    """Where the teacher's side of a loss comes from: a live model, or a cache of one."""

    label: str

    @property
    def inside(self) -> nn.Module | None:
        """The model whose modules can be tapped."""

    def example(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        """Something of the shape that `opinion` will have."""

    def opinion(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        """Predictions, and features by tap, for one batch of which `inputs` are on the task's device."""


class Teacher(nn.Module):
    """Frozen copies of one or more models, in eval mode, that give their opinion together: `imitate(Teacher(a, b, c))`.

    Several are averaged in probability (Hinton et al., 1503.02531): their logits are log(mean of softmax). What they say is fp32.

    models: trained models, in eval mode; one in train mode is refused, for it is most likely not done yet.
    dtype: the numbers they run in, such as torch.bfloat16; they are cast once, here, and BatchNorm keeps its own.
    compiled: run them through torch.compile; such a teacher has no modules to tap.
    inputs: `(the student's inputs) -> the teacher's`, a tuple or a dict, for a teacher that is fed otherwise: at another
        resolution, or with another tokenizer's ids out of the same batch.
    """

    def __init__(
        self,
        *models: nn.Module,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        inputs: Callable[[Inputs], Inputs] | None = None,
    ) -> None:
        super().__init__()
        if not models:
            raise SettingError("Teacher(): wanted at least one model")
        if wrong := [type(m).__name__ for m in models if not isinstance(m, nn.Module)]:
            raise SettingError(f"Teacher(): wanted models, got {wrong[0]}; an ensemble is Teacher(a, b), not a list")
        if dtype is not None and not dtype.is_floating_point:
            raise SettingError(f"Teacher(dtype=...): wanted a floating-point type, got {dtype}")
        if inputs is not None and not callable(inputs):
            raise SettingError(f"Teacher(inputs=...): wanted a function, got {type(inputs).__name__}")
        if learning := [type(m).__name__ for m in models if m.training]:
            raise ModelError(
                f"the teacher {learning[0]} is in train mode, as a model is that is not trained yet; put it in eval mode if it is"
            )
        self.dtype, self.inputs = dtype, inputs
        self.label = " + ".join(type(m).__name__ for m in models)
        self.members = nn.ModuleList(frozen_copy(m) for m in models)
        super().train(False)
        if dtype is not None:
            for module in self.members.modules():
                if not isinstance(module, nn.modules.batchnorm._NormBase):
                    _cast_(module, dtype)
        # In a list: what compile() gives holds the members too, and they must not be there twice.
        self._compiled = [torch.compile(member) for member in self.members] if compiled else []

    def train(self, mode: bool = True) -> Teacher:
        """A teacher is in eval mode always: its running statistics must not change."""
        if mode:
            raise ModelError("Teacher.train(): a teacher stays in eval mode; train the model that it was made of")
        return self

    @property
    def inside(self) -> nn.Module | None:
        """The model whose modules can be tapped; an ensemble has none, nor has a compiled one."""
        return self.members[0] if len(self.members) == 1 and not self._compiled else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the one model returns, or what each of several does."""
        args, kwargs = self._cast(args), self._cast(kwargs)
        outputs = [run(*args, **kwargs) for run in self._compiled or self.members]
        return outputs[0] if len(outputs) == 1 else outputs

    def _cast(self, value: Any) -> Any:
        def cast(leaf: Any) -> Any:
            return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return value if self.dtype is None else pytree.tree_map(cast, value)

    def predictions(self, inputs: Inputs, task: Task) -> Tensor:
        """fp32 logits (N, C, ...), without gradients."""
        # no_grad, not inference_mode: autograd refuses to save an inference tensor for the student's backward pass.
        with torch.no_grad():
            outputs = call(self, inputs if self.inputs is None else self.inputs(inputs))
            if len(self.members) == 1:
                return task.predict(outputs).float()
            logits = [task.predict(output).float() for output in outputs]
            if len({tuple(z.shape) for z in logits}) > 1:
                raise ModelError(f"the teachers {self.label} give predictions of shapes {[tuple(z.shape) for z in logits]}")
            return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))

    def example(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        """Predictions and features of the task's example."""
        try:
            return self._see(inputs, task, taps)
        except CompressError:
            raise
        except Exception as error:
            raise ModelError(f"the teacher {self.label} does not run on the student's inputs: {error}") from error

    def opinion(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        """Predictions and features of one batch."""
        return self._see(inputs, task, taps)

    def _see(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        if not taps or self.inside is None:
            return self.predictions(inputs, task), {}
        with tapped(self.inside, taps) as features:
            return self.predictions(inputs, task), features


def _cast_(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


@dataclass(frozen=True, kw_only=True)
class EMA:
    """The student's own moving average as its teacher (mean teacher, Tarvainen & Valpola, 1703.01780): `imitate(EMA())`.

    decay: share of the average that a batch leaves; the first ones leave less, min(decay, (1 + n) / (10 + n)) after n batches.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise SettingError(f"EMA(decay=...): wanted a number in [0, 1), got {self.decay}")


class Follower(Teacher):
    """A teacher that moves towards the student, from its fp32 masters where it has any, before every opinion."""

    def __init__(self, student: nn.Module, decay: float) -> None:
        super().__init__(frozen_copy(student))
        self.decay, self.batches, self.student = decay, 0, [student]  # in a list: the student is no submodule of its teacher

    def opinion(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> Seen:
        """One step towards the student, then predictions and features."""
        self.follow_(model)
        return super().opinion(model, batch, inputs, task, taps)

    @torch.no_grad()
    def follow_(self, model: Callable[..., Any]) -> None:
        """Set the average to decay * average + (1 - decay) * student, for all floating-point numbers; others are copied."""
        student = self.student[0]
        values: dict[str, Tensor] = dict(student.named_buffers())
        names = [name for name, _ in student.named_parameters()]
        masters = getattr(model, "masters", None)  # of a student that runs under a precision policy
        values |= dict(zip(names, student.parameters() if masters is None else masters(), strict=True))
        keep = min(self.decay, (1 + self.batches) / (10 + self.batches))
        self.batches += 1
        own = dict(self.members[0].named_parameters()) | dict(self.members[0].named_buffers())
        for name, average in own.items():
            new = values[name].to(average.dtype)
            if average.is_floating_point():
                average.lerp_(new, 1 - keep)
            else:
                average.copy_(new)

    def resume_state(self) -> dict[str, Any]:
        """The average, and how many batches it has seen."""
        member = self.members[0]
        return {"batches": self.batches, "values": dict(member.named_parameters()) | dict(member.named_buffers())}

    @torch.no_grad()
    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.batches = state["batches"]
        for name, average in (dict(self.members[0].named_parameters()) | dict(self.members[0].named_buffers())).items():
            average.copy_(state["values"][name])


AnyTeacher = nn.Module | EMA | Source


def as_source(teacher: AnyTeacher, student: nn.Module, where: str) -> Source:
    """A model is frozen and copied, unless it is a Teacher already; a cache gives its own opinion."""
    if isinstance(teacher, EMA):
        return Follower(student, teacher.decay)
    if teacher is student:
        raise SettingError(f"{where}: teacher and student are one module; pass a copy of the teacher")
    if hasattr(teacher, "opinion"):
        return teacher  # type: ignore[return-value]
    if not isinstance(teacher, nn.Module):
        raise SettingError(f"{where}: wanted a model, a Teacher, an EMA or a cache, got {type(teacher).__name__}")
    return Teacher(teacher)
