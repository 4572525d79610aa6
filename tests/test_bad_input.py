"""Bad input to every public function and stage: one clear error each, of the right class, that says what to do."""

from __future__ import annotations

from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit import distill, export, mixed, prune, quant
from compresskit.base.errors import (
    CheckpointError,
    CompressError,
    DataError,
    ExportError,
    ModelError,
    SettingError,
    StageOrderError,
    TrainingError,
)
from compresskit.graph.capture import capture
from compresskit.measure import latency

NET = build(networks.Chain)
TRAIN = ck.Train(epochs=1)


def task(**settings):
    return images_task(ck, samples=32, batch=16, **settings)


def with_labels(labels):
    x = torch.randn(16, 3, 16, 16)
    return ck.Task(train=[(x, labels)], val=[(x, labels)])


def fit(model=None, how=TRAIN, given=None):
    return how(build(networks.Chain) if model is None else model, task() if given is None else given)


def quantized():
    return quant.quantize_static(NET, [image(8)])


WRONG = torch.zeros(2, 5, 16, 16)

BAD = {
    "MACs of other inputs": (lambda: ck.count_macs(NET, WRONG), DataError, "^count_macs: the model does not run on inputs of sh"),
    "MACs of a text": (lambda: ck.count_macs("net", image(1)), ModelError, "^count_macs: wanted a torch.nn.Module"),
    "parameters of none": (lambda: ck.count_parameters(None), ModelError, "^count_parameters: wanted a torch.nn.Module"),
    "ranks of other inputs": (
        lambda: prune.low_rank.plan_ranks(NET, WRONG, ck.keep(macs=0.5)),
        DataError,
        "^plan_ranks: the model does not run on inputs of shape",
    ),
    "masks of none": (lambda: prune.plan_mask(None, ck.remove(weights=0.5)), ModelError, "^plan_mask: wanted a torch.nn.Module"),
    "a plan that is text": (lambda: prune.apply_(NET, "{}"), ModelError, "^apply_.*: wanted a Plan, as of .*, got str"),
    "diagnosis of other inputs": (lambda: quant.diagnose(quantized(), WRONG), DataError, "the model does not run on inputs of"),
    "biases of other inputs": (lambda: quant.correct_bias_(quantized(), WRONG), DataError, "the model does not run on inputs of"),
    "biases of no inputs": (lambda: quant.correct_bias_(quantized(), {}), DataError, "the model does not run on inputs of"),
    "accuracy of lists": (lambda: ck.accuracy([[1.0]], [0]), DataError, "^accuracy: wanted predictions and targets as tensors"),
    "audit of none": (lambda: ck.audit(None), SettingError, "^an ONNX file: wanted a path, got NoneType"),
    "metadata of a list": (lambda: export.read_metadata(["f"]), SettingError, "^an ONNX file: wanted a path, got list"),
    "bundle of none": (lambda: export.bundle(None, "f", example=image(1)), SettingError, r"^bundle\(source=...\): wanted a path"),
    "size of none": (lambda: export.compressed_bytes(None), SettingError, r"^compressed_bytes\(path=...\): wanted a path"),
    "a benchmark of nothing": (
        lambda: export.benchmark([]),
        SettingError,
        r"^benchmark\(paths=...\): wanted a list of one path or",
    ),
    "a benchmark of a number": (
        lambda: export.benchmark(3),
        SettingError,
        r"^benchmark\(paths=...\): wanted a list of .*, got 3",
    ),
    "outputs of zero": (
        lambda: quant.quantize_to_accuracy(NET, [(torch.full((2, 3, 16, 16), torch.nan),)], sqnr=10),
        DataError,
        "^quantize_to_accuracy: each output of the model is 0, or is nan or infinite, since batch 1 holds nan",
    ),
    "no stages": (lambda: ck.Recipe(), SettingError, "give at least one stage"),
    "export by another name": (lambda: ck.Recipe(TRAIN, export="all"), SettingError, "wanted 'each' or 'last', got 'all'"),
    "save by a number": (lambda: ck.Recipe(TRAIN, save=60), SettingError, r"wanted Every\(seconds=...\), got 60"),
    "a stage that is none": (lambda: ck.Recipe("train"), SettingError, "wanted stages such as Train"),
    "prune after QAT": (
        lambda: ck.Recipe(TRAIN, ck.QAT(epochs=1), ck.Prune(budget=ck.keep(macs=0.5))),
        StageOrderError,
        "a legal order is Train, Prune, QAT",
    ),
    "quantize twice": (lambda: ck.Recipe(ck.QAT(epochs=1), ck.StaticQuant()), StageOrderError, "needs a float model"),
    "cut after masks": (
        lambda: ck.Recipe(ck.Sparsify(budget=ck.remove(weights=0.5)), ck.Prune(budget=ck.keep(macs=0.5))),
        StageOrderError,
        "needs a dense model",
    ),
    "rewind to nothing": (
        lambda: ck.Recipe(ck.Sparsify(budget=ck.remove(weights=0.5), finetune=TRAIN, rewind=prune.rewind())),
        StageOrderError,
        "put a Train or Distill before it",
    ),
    "no epochs": (lambda: ck.Train(epochs=0), SettingError, "a whole number >= 1, got 0"),
    "epochs of text": (lambda: ck.Train(epochs="3"), SettingError, "a whole number >= 1, got '3'"),
    "a loader for a task": (
        lambda: ck.evaluate(nn.Linear(2, 2), [(torch.ones(1, 2), torch.zeros(1))]),
        SettingError,
        r"evaluate: wanted a Task, got list; loaders go into Task\(train=..., val=...\)",
    ),
    "a loader for the task of a training": (
        lambda: ck.Train(epochs=1)(nn.Linear(2, 2), []),
        SettingError,
        "Train: wanted a Task, got list",
    ),
    "a model and a task swapped": (
        lambda: ck.Recipe(ck.Train(epochs=1)).run(ck.Task(), nn.Linear(2, 2), "runs/none"),
        ModelError,
        "Recipe.run: wanted a torch.nn.Module as the model, got Task",
    ),
    "a plan and a model swapped": (
        lambda: ck.prune.apply_(ck.Task(), nn.Linear(2, 2)),
        ModelError,
        r"apply_\(model, plan\): wanted a torch.nn.Module as the model, got Task",
    ),
    "a plan for a loader": (
        lambda: ck.Recipe(TRAIN).plan(NET, [], "runs/none"),
        SettingError,
        "Recipe.plan: wanted a Task, got list",
    ),
    "a plan with a model and a task swapped": (
        lambda: ck.Recipe(TRAIN).plan(task(), NET, "runs/none"),
        ModelError,
        "Recipe.plan",
    ),
    "diagnosis of a float model": (
        lambda: ck.quant.diagnose(nn.Linear(2, 2), torch.ones(1, 2)),
        ModelError,
        "diagnose: wanted a quantized model, got Linear",
    ),
    "QAT of no length": (lambda: ck.QAT(), SettingError, r"QAT\(\): wanted epochs= or steps=, one of the two, got neither"),
    "clip of nan": (
        lambda: ck.Train(epochs=1, clip=float("nan")),
        SettingError,
        r"Train\(clip=...\): wanted a number or None, got nan",
    ),
    "clip below zero": (lambda: ck.Train(epochs=1, clip=-1.0), SettingError, "wanted a positive, finite norm, got -1.0"),
    "accumulate nothing": (lambda: ck.Train(epochs=1, accumulate=0), SettingError, "a whole number >= 1, got 0"),
    "accumulate text": (
        lambda: ck.Train(epochs=1, accumulate="2"),
        SettingError,
        r"Train\(accumulate=...\): wanted a whole number, got '2'",
    ),
    "precision by a dtype": (
        lambda: ck.Train(epochs=1, precision=torch.bfloat16),
        SettingError,
        "wanted a policy of compresskit.mixed, got torch.bfloat16; write mixed.AMP_BF16",
    ),
    "an optimizer that is made": (
        lambda: ck.Train(epochs=1, optimizer=torch.optim.SGD(NET.parameters(), lr=1)),
        SettingError,
        r"wanted a function, got SGD; write partial\(torch\.optim\.SGD, lr=\.\.\.\)",
    ),
    "a schedule of numbers": (
        lambda: ck.Train(epochs=1, schedule=[0.1]),
        SettingError,
        r"wanted a learning-rate schedule .* got \[0.1\]",
    ),
    "a schedule that is a function": (
        lambda: ck.Train(epochs=1, schedule=lambda done: 1 - done),
        SettingError,
        r"wrap a function \(done\) -> factor in lr.Function",
    ),
    "an objective that is no Objective": (
        lambda: fit(how=ck.Train(epochs=1, objective=type("Custom", (), {"__call__": None, "bind": None, "close": None})())),
        SettingError,
        "Custom has bind, close but is no Objective; subclass ck.Objective",
    ),
    "an objective that is no function": (
        lambda: fit(how=ck.Train(epochs=1, objective="mse")),
        SettingError,
        "wanted an Objective or a function .* got str",
    ),
    "precision by an apex level": (
        lambda: ck.Train(epochs=1, precision="O2"),
        SettingError,
        r"wanted a policy of compresskit.mixed, got 'O2'; write mixed.level\('O2'\)",
    ),
    "precision by the dtype fp16": (
        lambda: ck.Train(epochs=1, precision=torch.float16),
        SettingError,
        "got torch.float16; write mixed.AMP_FP16 or mixed.MASTER_FP16",
    ),
    "a metric by name": (
        lambda: ck.Task(val=[1], metric="accuracy"),
        SettingError,
        r"Task\(metric=...\): wanted a function .* with update, compute and reset, got str",
    ),
    "an unknown backend": (
        lambda: ck.Train(epochs=1, backend="fused"),
        SettingError,
        "wanted None, 'foreach' or 'compiled', got 'fused'",
    ),
    "save every 0 steps": (lambda: ck.Every(steps=0), SettingError, "wanted a whole number >= 1, or None, got 0"),
    "save before now": (lambda: ck.Every(seconds=-1), SettingError, "wanted a number >= 0, or None, got -1"),
    "save all the time": (lambda: ck.Every(overhead=0), SettingError, r"wanted a fraction in \(0, 1\], got 0"),
    "no training data": (
        lambda: fit(given=ck.Task(val=task().val)),
        SettingError,
        r"this stage needs Task\(train=...\), which was not given",
    ),
    "a one-pass loader": (
        lambda: ck.Task(val=iter([1])),
        SettingError,
        "a loader that can be read many times, got a one-pass list_iterator",
    ),
    "a loader that is none": (lambda: ck.Task(val=3), SettingError, "wanted a loader of batches, got int"),
    "an empty loader": (lambda: fit(given=ck.Task(train=[], val=task().val)), DataError, "the loader is empty"),
    "a batch of one tensor": (
        lambda: ck.evaluate(NET, ck.Task(val=[torch.zeros(2)])),
        DataError,
        r"wanted \(inputs..., target\) or a dict, got Tensor",
    ),
    "no target in a dict": (
        lambda: ck.evaluate(NET, ck.Task(val=[{"x": torch.zeros(2)}])),
        DataError,
        "no entry 'labels' for the target",
    ),
    "labels too large": (lambda: fit(given=with_labels(torch.full((16,), 10))), DataError, r"labels must be 0..9, got 10"),
    "labels below zero": (
        lambda: ck.accuracy(torch.zeros(2, 3), torch.tensor([0, -1])),
        DataError,
        r"labels must be 0..2, got -1",
    ),
    "accuracy of one class": (lambda: ck.accuracy(torch.zeros(2, 1), torch.zeros(2)), DataError, r"pass another metric to Task"),
    "labels of another length": (
        lambda: fit(given=ck.Task(train=[(image(16)[0], torch.arange(4))], val=task().val)),
        TrainingError,
        "the loss cannot be computed",
    ),
    "nan in the data": (
        lambda: fit(given=ck.Task(train=[(image(16)[0] * float("nan"), torch.arange(16) % 10)], val=task().val)),
        TrainingError,
        "the batch itself holds nan or inf; clean the data",
    ),
    "a rate too high": (
        lambda: fit(how=ck.Train(epochs=5, optimizer=partial(torch.optim.SGD, lr=1e30))),
        TrainingError,
        "lower the learning rate",
    ),
    "nothing to train": (lambda: fit(nn.Flatten()), ModelError, "no parameter with requires_grad"),
    "a metric of nan": (
        lambda: ck.evaluate(NET, task(metric=lambda p, t: float("nan"))),
        DataError,
        "the metric is nan on the validation set",
    ),
    "images of another size": (lambda: capture(NET, (torch.zeros(2, 5, 8, 8),)), ModelError, "does not run on the example"),
    "latency of no rounds": (lambda: latency([], image(1), rounds=0), SettingError, "wanted rounds >= 1 and seconds > 0"),
    "prune to nothing": (
        lambda: ck.Prune(budget=ck.keep(macs=0.0)),
        SettingError,
        r"the fraction that stays, in \(0, 1\], got 0.0",
    ),
    "prune by two": (
        lambda: ck.Prune(budget=ck.keep(macs=0.5, channels=0.5)),
        SettingError,
        "wanted exactly one of macs, parameters, bytes, latency, channels, weights",
    ),
    "a criterion by name": (
        lambda: ck.Prune(budget=ck.keep(macs=0.5), criterion="l1"),
        SettingError,
        "wanted a function such as prune.criteria.l1",
    ),
    "precision by name": (
        lambda: ck.Train(epochs=1, precision="bf16"),
        SettingError,
        "wanted a policy of compresskit.mixed, got 'bf16'; write mixed.AMP_BF16",
    ),
    "a criterion by name, without a stage": (
        lambda: prune.plan_channels(NET, image(2), budget=ck.keep(macs=0.5), criterion="l2"),
        SettingError,
        "wanted a function",
    ),
    "a budget of text": (lambda: ck.Prune(budget=ck.keep(macs="0.5")), SettingError, r"in \(0, 1\], got '0.5'"),
    "steps of half": (lambda: ck.Prune(budget=ck.keep(macs=0.5), steps=0.5), SettingError, r"wanted a whole number, got 0.5"),
    "between nothing": (
        lambda: ck.Prune(budget=ck.keep(macs=0.5), between=TRAIN),
        SettingError,
        "there is nothing between the cuts of one step",
    ),
    "ratios that are none": (
        lambda: ck.Prune(budget=ck.keep(macs=0.5), ratios=[0.5]),
        SettingError,
        r"Prune\(ratios=...\): wanted a mapping",
    ),
    "an unknown layer": (
        lambda: prune.plan_channels(NET, image(2), budget=ck.keep(macs=0.5), ignore=("nosuch",)),
        SettingError,
        r"ignore=\['nosuch'\]: no layer",
    ),
    "a plan that is none": (lambda: prune.Plan.from_json({"remove": 3}), CheckpointError, "not a pruning plan"),
    "a ratio above one": (lambda: ck.Sparsify(budget=ck.remove(weights=1.5)), SettingError, "got 1.5"),
    "a pattern by name": (
        lambda: ck.Sparsify(budget=ck.remove(weights=0.5), pattern="2:4"),
        SettingError,
        r"wanted a pattern such as prune.patterns.NM\(n=2, m=4\), got '2:4'",
    ),
    "a schedule without training": (
        lambda: ck.Sparsify(budget=ck.remove(weights=0.5), schedule=prune.schedules.Cubic()),
        SettingError,
        "it is part of a training; pass finetune=",
    ),
    "no rounds": (
        lambda: ck.LotteryTicket(budget=ck.remove(weights=0.5), train=TRAIN, rounds=0),
        SettingError,
        "a whole number >= 1, got 0",
    ),
    "rewind past the end": (lambda: prune.rewind(to=1.0), SettingError, r"wanted a share of the training, in \[0, 1\), got 1.0"),
    "no teacher": (
        lambda: fit(how=ck.Train(epochs=1, objective=ck.imitate())),
        SettingError,
        r"there is no teacher; pass imitate\(teacher\)",
    ),
    "a teacher in train mode": (
        lambda: distill.Teacher(build(networks.Chain).train()),
        ModelError,
        "put it in eval mode if it is",
    ),
    "terms that are none": (lambda: ck.imitate(NET, terms=[distill.losses.hint]), SettingError, r"wanted Terms, got function"),
    "terms without a list": (lambda: ck.imitate(NET, terms=3), SettingError, "wanted a list of Terms, got int"),
    "temperature zero": (lambda: ck.imitate(NET, temperature=0), SettingError, "wanted a positive number, got 0"),
    "both weights zero": (lambda: ck.imitate(NET, weight=0, task_weight=0), SettingError, "nothing would be learned"),
    "generations without a student": (lambda: ck.Distill(epochs=1, generations=2), SettingError, "each generation starts afresh"),
    "mutual with nobody": (lambda: distill.mutual(), SettingError, "wanted at least one peer"),
    "unlabelled tensors": (
        lambda: distill.pseudo_label(NET, torch.zeros(3)),
        SettingError,
        "a loader of batches that can be read many times",
    ),
    "a threshold of one": (lambda: distill.pseudo_label(NET, [], threshold=1.0), SettingError, r"a number in \[0, 1\), got 1.0"),
    "quantize without data": (lambda: quant.quantize_static(NET, []), DataError, "no calibration batch"),
    "skip what is not there": (
        lambda: quant.quantize_static(NET, [image(4)], skip=("nosuch",)),
        SettingError,
        r"skip=\['nosuch'\]: no operator",
    ),
    "freeze after the end": (
        lambda: ck.QAT(epochs=1, freeze=2.0),
        SettingError,
        r"a fraction of the training in \[0, 1\], got 2.0",
    ),
    "QAT on no samples": (lambda: ck.QAT(epochs=1, samples=0), SettingError, "a whole number >= 1, got 0"),
    "samples of text": (
        lambda: ck.StaticQuant(samples="all"),
        SettingError,
        r"StaticQuant\(samples=...\): wanted a whole number, got 'all'",
    ),
    "momentum of zero": (lambda: quant.observers.MovingAverage(0.0), SettingError, r"wanted \(0, 1\], got 0.0"),
    "a half model": (
        lambda: mixed.prepare(build(networks.Chain).half(), torch.optim.SGD(NET.parameters(), lr=1)),
        CompressError,
        ".",
    ),
    "clip in prepare": (
        lambda: mixed.prepare(NET, torch.optim.SGD(NET.parameters(), lr=1), clip=-1),
        SettingError,
        r"prepare\(clip=...\): wanted a positive, finite norm, got -1",
    ),
    "a level that is none": (lambda: mixed.level("O9"), SettingError, "O9"),
    "a scaler of nothing": (lambda: mixed.LossScaler(growth=0.5), SettingError, "wanted growth > 1"),
    "a file that is not there": (lambda: export.read_metadata("nosuch.onnx"), ExportError, "nosuch.onnx"),
    "a folder that is not there": (
        lambda: ck.load(build(networks.Chain), "nosuch"),
        CheckpointError,
        "structure.json: not there; a model's structure was expected",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_one_clear_error(name) -> None:
    make, kind, message = BAD[name]
    with pytest.raises(kind, match=message) as told:
        make()
    assert isinstance(told.value, CompressError)
    assert len(str(told.value)) > 15


def test_every_kind_of_error_is_in_the_table() -> None:
    assert len(BAD) >= 60
    assert {kind for _, kind, _ in BAD.values()} >= {
        SettingError, DataError, ModelError, TrainingError, StageOrderError, ExportError, CheckpointError,
    }  # fmt: skip
