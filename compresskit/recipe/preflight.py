"""The check before a run: everything that would otherwise fail hours later is tried once on the first batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, signature
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from compresskit.base.errors import CompressError, DataError, ModelError, first_line
from compresskit.base.fingerprint.functions import of_compresskit
from compresskit.base.inputs import check_has_rows
from compresskit.base.objective import Objective
from compresskit.base.randomness import generators_kept
from compresskit.base.settings import as_python_dims
from compresskit.base.stage import Stage
from compresskit.base.task import IGNORED, Inputs, RunningMetric, Task, batch_size, call, shapes_of
from compresskit.export.onnx import export_onnx
from compresskit.export.rewrite.dtypes import least_precise_dtype
from compresskit.graph.capture import Dynamic, capture, check_dynamic, check_runs, input_names
from compresskit.graph.quantized import is_quantized, quantized_parts
from compresskit.graph.surgery import copy_model, mode, state_kept
from compresskit.measure import checked_score, evaluate, few_rows, has_two_readings, input_row_dims, metric_value
from compresskit.metrics import OutputAgreement
from compresskit.mixed.formats.parallel import is_sharded
from compresskit.prune import Prune, Sparsify
from compresskit.prune.criteria import UNLABELLED_EVIDENCE, needs_of
from compresskit.quant import QAT, Repair, StaticQuant, prepare_qat
from compresskit.quant.qat.qat import QATSettings
from compresskit.recipe.baselines import trainings_in
from compresskit.train.length import check_last_row
from compresskit.train.objective import check_losses_are_fixed, supervised_loss
from compresskit.train.train import Train, refuse_optimizer_with_closure

#: Stages that train a model with the BatchNorm layers that it had before.
OF_THE_SAME_LAYERS = (Train, Prune, Sparsify, QAT)
#: Stages that capture their model on the first batch of the calibration data.
CALIBRATED = (StaticQuant, QAT, Repair)
COMPARED_BATCHES = 12  # of a loader, whose sizes are compared, or in which nan is looked for, before a run; of a list, all

#: Name of an input -> its shape, of one batch.
Shapes = dict[str, tuple[int, ...]]


def preflight_check(
    model: nn.Module,
    task: Task,
    stages: Sequence[Stage] = (),
    own: Mapping[int, Task] = MappingProxyType({}),
    *,
    dynamic: Dynamic = (0,),
) -> None:
    """Run the model, its capture, the loss and the metric once, on the first batch of each loader.

    The model is not changed. Raises ModelError where the model does not run or cannot be captured, SettingError where a training
    has no data, or `dynamic` names no dimensions, DataError where the loss or the metric does not fit the data, where a loss
    reads targets that the data have not, where lists of targets can be read in two ways, where a loader is empty, where a
    training counts epochs of data without a length, where its last batch is one row, of which BatchNorm has no statistics, where
    validation or calibration batches have sizes that a file will not take, or the calibration data no rows or nan that reaches
    the outputs, ExportError where ONNX Runtime cannot run the model's dtype, and what objectives raise that cannot train models
    with its predictions.

    own: the tasks of stages that have one of their own, by the stage's index. dynamic: dimensions that may vary in the files.
    """
    if is_sharded(model):
        raise ModelError(
            f"{type(model).__name__} is sharded by FSDP2, and the stages of a Recipe work on copies and export whole models;"
            " train it by ck.Train(...)(model, task), load its whole weights into a plain model, and give that to the Recipe"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"{type(model).__name__} runs a model on several devices, and the stages work on copies of the model itself; pass"
            " model.module"
        )
    for i, stage in enumerate(stages):
        if _reads_target(stage):
            where = f"stage {i + 1}, {type(stage).__name__}: its loss or its criterion"
            check_labelled(own.get(i, task), where, f"tasks[{i}]" if i in own else "its task")
    probe = copy_model(model).to(task.device)  # one for all checks in eval mode, each of which leaves it as it was
    read = _may_read_target([stage for i, stage in enumerate(stages) if i not in own])
    for which in ("val", "train", "calibration"):
        if which == "val" or getattr(task, which) is not None:
            _check_loader(probe, task, which, loss=read)
    for i, each in own.items():
        if each.train is not None:
            _check_loader(probe, each, "train", loss=_reads_target(stages[i]))
    for i, stage in enumerate(stages):
        for training in trainings_in(stage):
            training.length(own.get(i, task))
            check_losses_are_fixed(training.objective, own.get(i, task), reads_task_loss=training.reads_target)
            _check_steps_alone(training, f"stage {i + 1}, {type(stage).__name__}")
    _check_last_rows(model, task, stages, own)
    with mode(probe.to(task.device), training=False):
        for i, stage in enumerate(stages):
            stage.rehearse(probe, own.get(i, task))
        _rehearse_objectives(probe, task, stages, own)
        _check_trainings(probe, task, stages, own)
    with generators_kept():
        _check_sizes(model, task, stages, own, dynamic)
    if not is_quantized(model):
        example = task.example()
        graph = capture(model, few_rows(model, example, 2, input_row_dims(model, example, dynamic)), dynamic=dynamic).module
        if all(map(_keeps_classes, stages)) and _has_rare_dtype(graph, model):
            _try_file(model, example, dynamic)


def _check_sizes(model: nn.Module, task: Task, stages: Sequence[Stage], own: Mapping[int, Task], dynamic: Dynamic) -> None:
    """Raise DataError where batches have sizes that a file of the run, or a quantized model, will not take; nothing is trained.

    Raises SettingError for what cannot name dimensions.

    The first step always writes a file. What a stage quantizes is captured on its calibration data or on the first validation
    batch, takes the sizes of that and those that the stage lets vary, and is measured on the validation data.
    """
    check_dynamic(dynamic, "dynamic")
    shapes = _validation_shapes(model, task)
    starts_float = not stages or stages[0].starts_from_trained or (_is_own(stages[0]) and "float" in stages[0].keeps)
    if starts_float and not quantized_parts(model):
        _check_same_sizes("validation data", shapes[0], shapes, dynamic, "dynamic={}")
    calibration: dict[int, Shapes] = {}  # by the task, whose data are read once for all its stages
    for i, stage in enumerate(stages):
        where, settings, data = f"stage {i + 1}, {type(stage).__name__}", vars(stage), own.get(i, task)
        first, of = shapes[0], "validation data"
        if id(data) not in calibration and (readers := _calibrated_by(model, data, stages, task, own)):
            calibration[id(data)] = _input_shapes(model, _check_calibration(model, data, readers))
        if isinstance(stage, CALIBRATED):
            first, of = calibration[id(data)], _name_of_calibration(data)
        if _is_own(stage) and "float" not in stage.keeps and "dynamic" in settings and not settings.get("inside"):
            free = as_python_dims(settings["dynamic"])
            _check_same_sizes(f"{where}: {of}", first, shapes, free, f"{type(stage).__name__}(dynamic={{}})")


def _is_own(stage: Stage) -> bool:
    """Whether a stage is one of this library, or trains as `Train` does: what it says of itself is known."""
    return isinstance(stage, Train) or of_compresskit(type(stage))


def _validation_shapes(model: nn.Module, task: Task) -> list[Shapes]:
    """Of the first validation batches, of which the first is the example."""
    here = replace(task, device=None)  # type: ignore[arg-type]  # the batches stay where they are
    count = None if isinstance(task.val, list | tuple) else COMPARED_BATCHES
    return [_input_shapes(model, here.inputs(batch)) for batch in islice(task.batches("val"), count)]


def _input_shapes(model: nn.Module, inputs: Inputs) -> Shapes:
    leaves = zip(input_names(model, inputs), pytree.tree_leaves(inputs), strict=True)
    return {name: tuple(value.shape) for name, value in leaves if isinstance(value, Tensor)}


def _calibrated_by(
    model: nn.Module, data: Task, stages: Sequence[Stage], task: Task, own: Mapping[int, Task]
) -> list[tuple[str, int]]:
    """The stages that read the calibration data of one of the tasks, as messages name them, and how many samples each reads."""
    has_data = data.calibration is not None or data.train is not None  # weights alone can be factored or refitted without
    here = [(i, stage) for i, stage in enumerate(stages) if own.get(i, task) is data]
    read = [(i, stage, stage.calibration_samples(model)) for i, stage in here if has_data or isinstance(stage, CALIBRATED)]
    return [(f"stage {i + 1}, {type(stage).__name__}", samples) for i, stage, samples in read if samples]


def _name_of_calibration(task: Task) -> str:
    return "training data" if task.calibration is None else "calibration data"


def _check_calibration(model: nn.Module, task: Task, readers: Sequence[tuple[str, int]]) -> Inputs:
    """The first calibration batch; DataError where it has no rows, or one that is read has nan that reaches the outputs.

    Infinity is left to the stage: a mask of -inf may reach an output, where no quantizer has to take it.

    readers: stages, as messages name them, and how many samples each reads.
    """
    first: Inputs | None = None
    seen, most, read = 0, max(samples for _, samples in readers), _name_of_calibration(task)
    batches = task.batches("calibration")
    for number, batch in enumerate(islice(batches, None if isinstance(batches, list | tuple) else COMPARED_BATCHES), 1):
        inputs = task.inputs(batch)
        if first is None:
            first = inputs
            check_has_rows(first, f"{readers[0][0]}: the first batch of the {read}")
        if name := _nan_that_reaches_outputs(model, task, inputs):
            where = next(where for where, samples in readers if samples > seen)
            which = "the first batch" if number == 1 else f"batch {number}"
            raise DataError(
                f"{where}: {which} of the {read}: values of {name} are nan, and so are outputs of the model; clean the data"
            )
        seen += batch_size(inputs)
        if seen >= most:
            break
    if first is None:
        raise _no_batch(task, "calibration")
    return first


def _nan_that_reaches_outputs(model: nn.Module, task: Task, inputs: Inputs) -> str:
    """The name of an input that holds nan, where outputs of the model do, too; a model may replace what is missing."""
    if not any(map(_holds_nan, pytree.tree_leaves(inputs))):
        return ""
    leaves = zip(input_names(model, inputs), pytree.tree_leaves(inputs), strict=True)
    name = next(name for name, value in leaves if _holds_nan(value))
    probe = copy_model(model).to(task.device)
    with torch.no_grad(), mode(probe, training=False):
        outputs = pytree.tree_leaves(call(probe, inputs))
    return name if any(map(_holds_nan, outputs)) else ""


def _holds_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(value.isnan().any())


def _first_batch(task: Task, which: str) -> Any:
    """The first batch of a loader; DataError where it gives none, which the length of a loader without one does not tell."""
    for batch in task.batches(which):
        return batch
    raise _no_batch(task, which)


def _no_batch(task: Task, which: str) -> DataError:
    read = "train" if which == "calibration" and task.calibration is None else which
    return DataError(f"Task({read}=...): the loader is empty; give at least one batch")


def _check_same_sizes(what: str, first: Shapes, batches: Sequence[Shapes], dynamic: Dynamic, setting: str) -> None:
    """Raise DataError where a batch has other sizes than the first in dimensions that may not vary.

    what: has the first batch. dynamic: the dimensions that may. setting: how they are given, with {} for the dimensions.
    """
    named = dynamic if isinstance(dynamic, Mapping) else None
    found: dict[str, set[int]] = {}
    example = ""
    for number, batch in enumerate(batches, 1):
        for name, shape in batch.items():
            if any(0 in each[:1] for each in batch.values()):  # a batch without rows, of which nothing is measured
                break
            free = dynamic if named is None else named.get(name, ())
            other = first.get(name, shape)
            if len(other) == len(shape) and (dims := {d for d in range(len(shape)) if shape[d] != other[d]} - {*free}):
                found.setdefault(name, set()).update(dims)
                example = example or f"{name} is {other} in the first batch, and {shape} in batch {number} of the validation data"
    if not found:
        return
    if named is None:
        remedy = f"write {setting.format(tuple(sorted({*dynamic}.union(*found.values()))))}"
    else:
        lacking = " and ".join(f"{', '.join(map(str, sorted(dims)))} of {name}" for name, dims in found.items())
        remedy = f"name the dimensions {lacking} in {setting.format('...')}"
    raise DataError(
        f"{what}: {example}; a file takes one size of each dimension that is not named as one that varies: {remedy}, or give"
        " batches of one size"
    )


def _keeps_classes(stage: Stage) -> bool:
    """Whether the model that a stage returns is known to have the dtype and the classes of the incoming one."""
    return not stage.makes_student and of_compresskit(type(stage))


def _rehearse_objectives(probe: nn.Module, task: Task, stages: Sequence[Stage], own: Mapping[int, Task]) -> None:
    """Let the objectives of trainings refuse what the incoming model predicts, as long as stages keep its classes."""
    for i, stage in takewhile(lambda each: _keeps_classes(each[1]), enumerate(stages)):
        objectives = [each.objective for each in trainings_in(stage) if isinstance(each.objective, Objective)]
        if not objectives:
            continue
        each = own.get(i, task)
        with torch.no_grad(), state_kept(probe):
            predictions = each.predicted(call(probe, few_rows(probe, each.example(), 2)))
        for objective in objectives:
            try:
                objective.for_task(each).rehearse(probe, predictions)
            except CompressError as error:
                raise type(error)(f"stage {i + 1}, {type(stage).__name__}: {error}") from error


def _check_trainings(probe: nn.Module, task: Task, stages: Sequence[Stage], own: Mapping[int, Task]) -> None:
    """Let trainings refuse names and layers of the incoming model, as long as stages keep them."""
    for i, stage in enumerate(stages):
        if type(stage) not in OF_THE_SAME_LAYERS and not (isinstance(stage, Train) and _keeps_classes(stage)):
            return
        for training in trainings_in(stage):
            try:
                training.check_fits(probe, own.get(i, task))
            except CompressError as error:
                raise type(error)(f"stage {i + 1}, {type(stage).__name__}: {error}") from error


def _has_rare_dtype(graph: fx.GraphModule, model: nn.Module) -> bool:
    """Whether a model computes in float64, or in bf16 where its weights are not, for which ONNX Runtime has few kernels."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.graph.nodes])
    found = {value.dtype for value in values if isinstance(value, Tensor)}
    narrow = least_precise_dtype(model) is torch.bfloat16  # its file computes in fp32
    return torch.float64 in found or (torch.bfloat16 in found and not narrow)


def _try_file(model: nn.Module, example: Inputs, dynamic: Dynamic) -> None:
    """Write a file of the model, as a run will, and forget it. Raises ExportError where that cannot be."""
    with TemporaryDirectory() as folder:
        export_onnx(model, Path(folder) / "model.onnx", example, dynamic=dynamic)


def _check_loader(probe: nn.Module, task: Task, which: str, *, loss: bool = True) -> None:
    """Try a copy of the model, and the loss or the metric, on the first batch of a loader.

    loss: whether to try the loss of `train`.
    """
    task.length(which) if which == "val" else task.known_length(which)
    batch = _first_batch(task, which)
    if which == "val" and (why := missing_target(task, batch)) is not None:
        raise DataError(f"Task(val=...): the metric reads targets, which its batches have not ({why}); give labelled data")
    if which == "val" or (which == "train" and loss and missing_target(task, batch) is None):
        inputs, target = task.split(batch)
    else:
        inputs, target = task.inputs(batch), None
    check_runs(probe.to(task.device), inputs)
    if target is None:
        return
    with torch.no_grad():
        with mode(probe, training=False), state_kept(probe):
            predictions = task.predicted(call(probe, inputs))
        try:
            if which == "train":
                supervised_loss(task, predictions, target)
            elif isinstance(task.metric, OutputAgreement):
                task.metric(predictions, target)
            elif not isinstance(task.metric, RunningMetric) and not _all_ignored(task, target):
                metric_value(checked_score(task, predictions, target))
                if has_two_readings(target, len(predictions)) and _none_tells(task):
                    evaluate(probe, task, finite=False)  # raises what it will raise later
        except CompressError:
            raise
        except Exception as error:
            what = "loss" if which == "train" else "metric"
            raise DataError(
                f"Task({what}=...) fails on the first batch of {which} (predictions {tuple(predictions.shape)}, target"
                f" {shapes_of(target) or type(target).__name__}): {first_line(error)}"
            ) from error


def _none_tells(task: Task) -> bool:
    """Whether lists of targets can be read in two ways in every validation batch; the first that tells ends the search."""
    return all(has_two_readings(target, batch_size(inputs)) for inputs, target in map(task.split, task.batches("val")))


def _check_steps_alone(training: Train, where: str) -> None:
    """Raise SettingError for an optimizer that evaluates the loss itself, as LBFGS does, where its class is given by itself."""
    made = training.optimizer.func if isinstance(training.optimizer, partial) else training.optimizer
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer):
        closure = signature(made.step).parameters.get("closure")
        if closure is None or closure.default is not Parameter.empty:
            return
        refuse_optimizer_with_closure(made.__name__, where)


def _check_last_rows(model: nn.Module, task: Task, stages: Sequence[Stage], own: Mapping[int, Task]) -> None:
    """Raise DataError where a training ends its first epoch at a batch of one row, of which BatchNorm has no statistics.

    Only in stages that train the incoming model, with all or fewer channels of its BatchNorm layers.
    """
    for i, stage in takewhile(lambda each: type(each[1]) in OF_THE_SAME_LAYERS, enumerate(stages)):
        each, where = own.get(i, task), f"stage {i + 1}, {type(stage).__name__}"
        for training in trainings_in(stage):
            length = training.length(each)
            if type(training) is Train:
                check_last_row(model, each, length, where)
            elif isinstance(training, QAT) and (length.steps_per_epoch or 0) - 1 < training.freeze * length.steps:
                check_last_row(model, each, length, where, prepare=partial(_prepared, training, each))


def _prepared(stage: QAT, task: Task, model: nn.Module) -> nn.Module:
    """A model as a QAT trains it, calibrated on one batch: some of its BatchNorm layers may be constants there."""
    settings = {setting.name: getattr(stage, setting.name) for setting in fields(QATSettings)}
    return prepare_qat(model.eval(), [task.inputs(_first_batch(task, "calibration"))], **settings | {"choose": "rules"})


def check_labelled(task: Task, what: str, data: str) -> None:
    """Raise `DataError` where the training data of a task have no targets. what: reads them. data: what the task is called."""
    batch = None if task.train is None else next(iter(task.batches("train")), None)
    if batch is None or (missing := missing_target(task, batch)) is None:
        return  # an empty loader is said elsewhere
    raise DataError(
        f"{what} reads targets, which the training data of {data} have not ({missing}); give labelled data, in"
        " Recipe.run(tasks=...) for one stage alone, or what reads no targets, such as objective=imitate(teacher, task_weight=0)"
    )


def missing_target(task: Task, batch: Any) -> str | None:
    """Why a batch has no target; None where it has one."""
    try:
        task.split(batch)
    except DataError as error:
        return str(error)
    return None


def _reads_target(stage: Stage) -> bool:
    """Whether a training of a stage, or its criterion, is known to read the targets of the training data."""
    needed = needs_of(getattr(stage, "criterion", None)) - UNLABELLED_EVIDENCE
    return bool(needed) or any(training.reads_target for training in trainings_in(stage))


def _may_read_target(stages: Sequence[Stage]) -> bool:
    """False where there are trainings that are all known not to read targets: these need not fit the task's loss."""
    trainings = [training for stage in stages for training in trainings_in(stage)]
    known = all(isinstance(training.objective, Objective) and not training.reads_target for training in trainings)
    return not trainings or not known or any(map(_reads_target, stages))


def _all_ignored(task: Task, target: Any) -> bool:
    """Whether no label of a batch counts, as in one of padding alone; the whole validation set may still hold some that do."""
    labels = target.unique().tolist() if isinstance(target, Tensor) and not target.is_floating_point() else [0]
    return set(labels) <= {IGNORED, task.ignore_index}
