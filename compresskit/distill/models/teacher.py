"""Teachers: one model or an ensemble, frozen, in eval mode and cast once; or a moving average of the student itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from compresskit import mixed
from compresskit.base.errors import CompressError, ModelError, SettingError
from compresskit.base.task import Inputs, Task, call
from compresskit.graph.surgery import frozen_copy, no_attention_fastpath
from compresskit.graph.taps import tapped

#: What an ensemble is the mean of.
Average = Literal["probabilities", "outputs"]

#: `(the student's inputs) -> other inputs of the same meaning`, such as `mirror`.
View = Callable[[Inputs], Inputs]

#: Predictions (N, C, ...), or the `TopK` of a cache, and features by tap.
TeacherOutputs = tuple[Any, dict[str, Tensor]]


@runtime_checkable
class TeacherSource(Protocol):
    """Where an objective gets the teacher's outputs from: a model in memory (`Teacher`), or a cache of one (`Cached`).

    label: name of the teacher, for messages.
    """

    label: str

    @property
    def tappable(self) -> nn.Module | None:
        """The model whose modules can be tapped; None where only predictions are available."""

    def example_outputs(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return outputs of the shapes that `outputs` will have for such inputs; called once, before training."""

    def outputs(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return the outputs for one batch.

        Args:
            model: the student, under its precision policy.
            batch: what the loader yields.
            inputs: the inputs of the batch, on the task's device.
            task: splits batches, and finds the predictions in what a model returns.
            taps: the teacher's taps whose features are needed.
        """


class Teacher(nn.Module):
    """Frozen copies of one or more models, in eval mode: `imitate(Teacher(a, b, c))`.

    Several models are an ensemble. Of classifiers the probabilities are averaged (Hinton et al., 1503.02531), and its logits are
    log(mean of softmax); of other models, such as those of a regression, the outputs themselves. Predictions are fp32 whatever
    the dtype of the models.

    Args:
        models: trained models, in eval mode; a model in train mode is most likely not trained yet, and refused.
        dtype: floating dtype in which they run, such as torch.bfloat16. They are cast once, here; BatchNorm keeps its own dtype.
            None leaves them as they are; the inputs of a model that is all bf16 or fp16 are cast to that, and an fp32 model runs
            under autocast in the half dtype of the student's precision policy, if it has one. torch.float32 keeps it in fp32.
        compiled: run them through torch.compile; the modules of such a teacher cannot be tapped.
        inputs: `(the student's inputs) -> the teacher's inputs`, a tuple or a dict, for a teacher with another input
            resolution or another tokenizer.
        average: "probabilities" or "outputs", what an ensemble is the mean of. None is outputs for one channel, and where the
            loss of `imitate` or `pseudo_label` reads more of the teacher than a softmax of it keeps, as F.mse_loss does: it
            teaches something else when all channels of the teacher grow by one number. Any other loss, and one that takes
            `target` or `index`, gets probabilities.

    Raises:
        SettingError: for settings of the wrong type.
        ModelError: for a model in train mode.
    """

    class_dim: int = 1  # of the class, as pickled teachers may have none of their own

    def __init__(
        self,
        *models: nn.Module,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        inputs: Callable[[Inputs], Inputs] | None = None,
        average: Average | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise SettingError(f"Teacher(dtype=...): wanted a floating-point type, got {dtype}")
        if inputs is not None and not callable(inputs):
            raise SettingError(f"Teacher(inputs=...): wanted a function, got {type(inputs).__name__}")
        if average not in (None, *get_args(Average)):
            raise SettingError(f"Teacher(average=...): wanted 'probabilities', 'outputs' or None, got {average!r}")
        _check_models(models)
        self._hold_([frozen_copy(m) for m in models], dtype=dtype, compiled=compiled, inputs=inputs, average=average)

    def _hold_(
        self,
        members: Sequence[nn.Module],
        *,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        inputs: Callable[[Inputs], Inputs] | None = None,
        average: Average | None = None,
    ) -> None:
        """Make it the teacher of these models, which are frozen and its own."""
        self.dtype, self.inputs, self.average = dtype, inputs, average
        self.views: tuple[View, ...] = ()
        self.label = " + ".join(type(m).__name__ for m in members)
        self.members = nn.ModuleList(members)
        super().train(False)
        if dtype is not None:
            for module in self.members.modules():
                if not isinstance(module, nn.modules.batchnorm._NormBase):
                    _cast_(module, dtype)
        self._input_dtypes = [dtype or _half_dtype(member) for member in self.members]
        # In a list: a compiled module registers the members too, and they must not be submodules twice.
        self._compiled = [torch.compile(member) for member in self.members] if compiled else []

    def train(self, mode: bool = True) -> Teacher:
        """Stay in eval mode whatever `mode` says, so that `outer.train()` of a module that holds a teacher leaves it as it is."""
        return self

    @property
    def tappable(self) -> nn.Module | None:
        """The model whose modules can be tapped; None for an ensemble and for a compiled teacher."""
        return self.members[0] if len(self.members) == 1 and not self._compiled else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the one model returns, or a list of what each of several returns."""
        inputs = {dtype: (_floats_to(dtype, args), _floats_to(dtype, kwargs)) for dtype in set(self._input_dtypes)}
        outputs = []
        members: Sequence[Callable[..., Any]] = self._compiled or list(self.members)
        for run, dtype in zip(members, self._input_dtypes, strict=True):
            cast_args, cast_kwargs = inputs[dtype]
            outputs.append(run(*cast_args, **cast_kwargs))
        return outputs[0] if len(outputs) == 1 else outputs

    @property
    def takes_mean(self) -> bool:
        """Whether its predictions are the mean of several: of an ensemble, or of views of the inputs."""
        return len(self.members) > 1 or bool(self.views)

    def predictions(self, inputs: Inputs, task: Task) -> Tensor:
        """Return fp32 logits (N, C, ...), or outputs of other shapes, without gradients."""
        # no_grad, not inference_mode: autograd refuses to save an inference tensor for the student's backward pass.
        with torch.no_grad(), no_attention_fastpath():
            outputs: list[Any] = []
            for seen in (*(view(inputs) for view in self.views), inputs):  # as they are at last: a tap keeps its last value
                output = call(self, seen if self.inputs is None else self.inputs(seen))
                outputs += [output] if len(self.members) == 1 else output
            logits = [task.predict(output).float() for output in outputs]
            if not self.takes_mean:
                return logits[0]
            if len({tuple(z.shape) for z in logits}) > 1:
                raise ModelError(f"the teachers {self.label} give predictions of shapes {[tuple(z.shape) for z in logits]}")
            one_channel = logits[0].ndim < 2 or logits[0].shape[self.class_dim] == 1
            if one_channel and self.average == "probabilities":
                raise ModelError(
                    f"Teacher(average='probabilities'): the teachers {self.label} give one channel, of which a softmax says"
                    " nothing; leave average out, or set it to 'outputs'"
                )
            if one_channel or self.average == "outputs":
                return torch.stack(logits).mean(0)
            return torch.stack([z.log_softmax(self.class_dim) for z in logits]).logsumexp(0) - math.log(len(logits))

    def averaging(self, average: Average | None, class_dim: int = 1) -> Teacher:
        """Return a teacher of the same models, which are shared, with another `average`, of classes in another dimension."""
        other = copy.copy(self)
        other.average, other.class_dim = average, class_dim
        return other

    def seeing(self, views: Sequence[View]) -> Teacher:
        """Return a teacher of the same models, which are shared, whose predictions are the mean over these views, too."""
        other = copy.copy(self)
        other.views = tuple(views)
        return other

    def example_outputs(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return the outputs for an example; `ModelError` where the teacher does not run on such inputs."""
        try:
            return self._outputs(inputs, task, taps)
        except CompressError:
            raise
        except Exception as error:
            raise ModelError(f"the teacher {self.label} does not run on the student's inputs: {error}") from error

    def outputs(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Return the outputs for one batch; fp32 models compute in the half dtype in which a `mixed.Run` trains the student."""
        if not isinstance(model, mixed.Run) or (half := self._half_of(model)) is None:
            return self._outputs(inputs, task, taps)
        with torch.autocast(model.device.type, dtype=half):
            predictions, features = self._outputs(inputs, task, taps)
        # In fp32, since a user's own loss would compute in half precision with the features as they are.
        return predictions, pytree.tree_map(lambda v: v.float() if isinstance(v, Tensor) and v.dtype == half else v, features)

    def _half_of(self, run: mixed.Run) -> torch.dtype | None:
        """The dtype of autocast for the models, or None for none."""
        if self.dtype is not None or any(self._input_dtypes):
            return None
        half = run.policy.autocast_dtype or run.policy.param_dtype
        return None if half is torch.float16 and run.device.type == "cpu" else half  # which is slower there than fp32

    def _outputs(self, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        if not taps or self.tappable is None:
            return self.predictions(inputs, task), {}
        with tapped(self.tappable, taps) as features:
            return self.predictions(inputs, task), features


def _check_models(models: Sequence[Any]) -> None:
    if not models:
        raise SettingError("Teacher(): wanted at least one model")
    if wrong := [type(m).__name__ for m in models if not isinstance(m, nn.Module)]:
        raise SettingError(f"Teacher(): wanted models, got {wrong[0]}; an ensemble is Teacher(a, b), not a list")
    if learning := [type(m).__name__ for m in models if m.training]:
        raise ModelError(
            f"the teacher {learning[0]} is in train mode, as a model is that is not trained yet; put it in eval mode if it is"
        )


def _half_dtype(model: nn.Module) -> torch.dtype | None:
    """The half dtype of all floating parameters of a model but those of its BatchNorms; None where there is no such one."""
    modules = [module for module in model.modules() if not isinstance(module, nn.modules.batchnorm._NormBase)]
    dtypes = {p.dtype for module in modules for p in module.parameters(recurse=False) if p.is_floating_point()}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else None


def _floats_to(dtype: torch.dtype | None, value: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return value if dtype is None else pytree.tree_map(cast, value)


def _cast_(module: nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            module._buffers[name] = buffer.to(dtype)


@dataclass(frozen=True, kw_only=True)
class EMA:
    """A moving average of the student as its teacher (mean teacher, Tarvainen & Valpola, 1703.01780): `imitate(EMA())`.

    Args:
        decay: fraction of the average that stays when a batch updates it, in [0, 1). After n batches it is at most
            (1 + n) / (10 + n), so that the first batches count more.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise SettingError(f"EMA(decay=...): wanted a number in [0, 1), got {self.decay}")


class EMATeacher(Teacher):
    """A teacher whose weights are a moving average of the student's, updated before every batch.

    The average is of the fp32 masters where the student is trained with masters.
    """

    def __init__(self, student: nn.Module, decay: float) -> None:
        nn.Module.__init__(self)
        self._hold_([frozen_copy(student)])  # a Teacher would copy the copy
        self.decay, self.batches, self.student = decay, 0, [student]  # in a list: the student is no submodule of its teacher

    def outputs(self, model: Callable[..., Any], batch: Any, inputs: Inputs, task: Task, taps: Sequence[str]) -> TeacherOutputs:
        """Update the average, then return the outputs for one batch."""
        self.update_(model)
        return super().outputs(model, batch, inputs, task, taps)

    @torch.no_grad()
    def update_(self, model: Callable[..., Any]) -> None:
        """Set the average to decay * average + (1 - decay) * student; tensors of integers are copied.

        model: the student, or the `mixed.Run` that trains it and has its masters.
        """
        student = self.student[0]
        values: dict[str, Tensor] = dict(student.named_buffers())
        names = [name for name, _ in student.named_parameters()]
        parameters = model.masters() if isinstance(model, mixed.Run) else student.parameters()
        values |= dict(zip(names, parameters, strict=True))
        keep = min(self.decay, (1 + self.batches) / (10 + self.batches))
        self.batches += 1
        for name, average in self._averages().items():
            new = values[name].to(average.dtype)
            if average.is_floating_point():
                average.lerp_(new, 1 - keep)
            else:
                average.copy_(new)

    def _averages(self) -> dict[str, Tensor]:
        return dict(self.members[0].named_parameters()) | dict(self.members[0].named_buffers())

    def resume_state(self) -> dict[str, Any]:
        """Return the average, and how many batches have updated it."""
        return {"batches": self.batches, "values": self._averages()}

    @torch.no_grad()
    def resume_from_(self, state: Mapping[str, Any]) -> None:
        """Restore what `resume_state` returned."""
        self.batches = state["batches"]
        for name, average in self._averages().items():
            average.copy_(state["values"][name])


TeacherLike = nn.Module | EMA | TeacherSource


def teacher_source(teacher: TeacherLike, student: nn.Module, where: str) -> TeacherSource:
    """Return the source of a teacher's outputs: a model is copied and frozen, a `Teacher` or a cache is used as it is.

    Raises `SettingError`, which names the function `where`, for what is no teacher and for the student itself.
    """
    check_is_teacher(teacher, where)
    if isinstance(teacher, EMA):
        return EMATeacher(student, teacher.decay)
    if teacher is student:
        raise SettingError(f"{where}: teacher and student are one module; pass a copy of the teacher")
    return teacher if isinstance(teacher, TeacherSource) else Teacher(teacher)


def check_is_teacher(teacher: Any, where: str) -> None:
    """Raise `SettingError`, which begins with `where`, for what is no teacher."""
    if isinstance(teacher, type) or not isinstance(teacher, nn.Module | EMA | TeacherSource):
        kind = f"the class {teacher.__name__}" if isinstance(teacher, type) else type(teacher).__name__
        raise SettingError(f"{where}: wanted a model, a Teacher, an EMA or a cache, got {kind}")
