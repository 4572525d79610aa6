"""What a training shows of its epochs, which metric is better, and whose weights are kept."""

from __future__ import annotations

import logging
from functools import partial

import checkout
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.errors import SettingError, TrainingError
from compresskit.train.train import fit_

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DATA = TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4)
BATCHES = [(DATA.tensors[0][i : i + 8], DATA.tensors[1][i : i + 8]) for i in range(0, 40, 8)]
TASK = ck.Task(train=BATCHES, val=BATCHES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def bits(model: nn.Module) -> list[bytes]:
    return [value.detach().numpy().tobytes() for value in [*model.parameters(), *model.buffers()]]


def lines_of(caplog, task: ck.Task, **settings) -> list[str]:
    caplog.clear()
    caplog.set_level("INFO", "compresskit.train")
    fit_(network(), task, ck.Train(optimizer=SGD, **settings))
    return [record.getMessage() for record in caplog.records]


def test_an_epoch_is_one_line_with_its_loss_and_metric(caplog) -> None:
    reports: list = []
    lines = lines_of(caplog, TASK, epochs=2, on_epoch=reports.append)
    assert lines == [f"train: epoch {r.epoch}/2, loss {r.loss:.4g}, accuracy {r.metric:.4g}" for r in reports]
    assert [(r.step, r.steps, r.epochs, r.stage, r.training) for r in reports] == [
        (5, 10, 2, "", "train"),
        (10, 10, 2, "", "train"),
    ]
    assert reports[1].metric == pytest.approx(ck.evaluate(fit_(network(), TASK, ck.Train(epochs=2, optimizer=SGD)), TASK))
    assert [line.partition(", loss")[0] for line in lines_of(caplog, TASK, steps=7)] == ["train: epoch 1/2", "train: epoch 2/2"]
    assert "accuracy" not in "".join(lines_of(caplog, TASK, epochs=2, validate_every=0))
    assert "accuracy" not in "".join(lines_of(caplog, ck.Task(train=BATCHES), epochs=1))
    between = lines_of(caplog, TASK, steps=5, validate_every=2)
    assert [line.split(", ")[0] for line in between] == ["train: step 2/5", "train: step 4/5", "train: epoch 1/1"]


SHOWN = """
import logging, sys, torch, compresskit as ck
batches, stderr = [(torch.randn(8, 8), torch.arange(8) % 4)] * 2, sys.stderr
for setup in sys.argv[1:]:
    exec(setup)
    ck.fit_(torch.nn.Linear(8, 4), ck.Task(train=batches, val=batches), ck.Train(epochs=2))
    sys.stderr = stderr
    stderr.write("next\\n")
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("compresskit").setLevel(logging.NOTSET)
"""


def test_lines_are_shown_without_a_terminal_unless_logging_says_otherwise() -> None:
    lines = {
        "pass": 2,
        "logging.basicConfig(level=logging.INFO)": 2,
        "logging.basicConfig()": 0,
        "logging.getLogger('compresskit').setLevel(logging.WARNING)": 0,
        "sys.stderr = None": 0,
    }
    shown = checkout.python("-c", SHOWN, *lines).stderr.split("next\n")
    assert [part.count("train: epoch") for part in shown] == [*lines.values(), 0]
    assert [len(part.splitlines()) for part in shown] == [*lines.values(), 0]
    assert shown[0].count(", accuracy ") == 2


def test_silence_holds_for_progress_bars(monkeypatch) -> None:
    from compresskit.base.progress import progress_bar

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert not progress_bar(range(3)).disable
    monkeypatch.setattr(logging.getLogger("compresskit"), "level", logging.WARNING)
    assert progress_bar(range(3)).disable


def test_a_metric_that_fails_ends_no_training_that_did_not_ask_for_it(caplog) -> None:
    def broken(predictions, target):
        raise ValueError("only one class")

    task = ck.Task(train=BATCHES, val=BATCHES, metric=broken, higher_is_better=True)
    lines = lines_of(caplog, task, epochs=2)
    assert lines[0] == "train: the metric is not measured during the training: only one class"
    assert len(lines) == 3
    for asked in ({"validate_every": 1}, {"keep_best": True}, {"patience": 1}):
        with pytest.raises(ValueError, match="only one class"):
            fit_(network(), task, ck.Train(epochs=2, **asked))


def test_measuring_that_runs_out_of_memory_says_what_helps() -> None:
    def large(predictions, target):
        raise MemoryError

    with pytest.raises(
        TrainingError, match=r"train: no memory to measure the metric; lower the batch size of Task\(val=...\), pass"
    ):
        fit_(network(), ck.Task(train=BATCHES, val=BATCHES, metric=large), ck.Train(epochs=1))


def test_measuring_takes_no_numbers_from_a_generator_that_loaders_share() -> None:
    ends = []
    for every in (0, 1):
        shared = torch.Generator().manual_seed(3)
        loaders = [DataLoader(DATA, batch_size=8, shuffle=True, generator=shared) for _ in range(2)]
        task = ck.Task(train=loaders[0], val=loaders[1])
        ends.append(bits(fit_(network(), task, ck.Train(epochs=3, optimizer=SGD, validate_every=every))))
    assert ends[0] == ends[1]


class Measured:
    """A metric that takes the given values in turn."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def __call__(self, predictions, target) -> float:
        return self.values.pop(0)


class MeasuredError(Measured):
    higher_is_better = False


def test_who_says_which_metric_is_better() -> None:
    def better(metric, said=None) -> bool | None:
        return ck.Task(val=BATCHES, metric=metric, higher_is_better=said).prefers_higher

    assert better(ck.accuracy) is better(partial(ck.accuracy, ignore_index=3)) is better(ck.metrics.agreement("psnr")) is True
    assert better(MeasuredError()) is better(Measured(), False) is better(ck.accuracy, False) is False
    assert better(Measured()) is None
    assert ck.Task(val=BATCHES, metric=lambda p, y: 0).metric_name == "metric"
    assert ck.Task(val=BATCHES, metric=partial(ck.accuracy)).metric_name == "accuracy"


def test_torchmetrics_say_which_is_better() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    task = ck.Task(train=BATCHES, val=BATCHES, metric=torchmetrics.MeanSquaredError())
    assert (task.prefers_higher, task.metric_name) == (False, "MeanSquaredError")
    task = ck.Task(train=BATCHES, val=BATCHES, metric=torchmetrics.classification.MulticlassAccuracy(4))
    assert task.prefers_higher is True
    fit_(network(), task, ck.Train(epochs=2, keep_best=True))


def test_a_smaller_error_is_kept() -> None:
    task = ck.Task(train=BATCHES, val=BATCHES, metric=MeasuredError(0.9, 0.2, 0.5))
    settings = {"optimizer": SGD, "schedule": ck.lr.Constant()}
    best = fit_(network(), task, ck.Train(epochs=3, keep_best=True, **settings))
    assert bits(best) == bits(fit_(network(), TASK, ck.Train(epochs=2, **settings)))


def test_the_best_weights_of_a_masked_model_keep_its_zeros() -> None:
    task = ck.Task(train=BATCHES, val=BATCHES, metric=Measured(0.1, 0.9, 0.3), higher_is_better=True)
    settings = {"optimizer": SGD, "schedule": ck.lr.Constant(), "precision": ck.mixed.MASTER_BF16}
    ends = []
    for given, training in ((task, ck.Train(epochs=3, keep_best=True, **settings)), (TASK, ck.Train(epochs=2, **settings))):
        model = ck.Sparsify(budget=ck.remove(weights=0.5), criterion=ck.prune.criteria.l2, finetune=training)(network(), given)
        assert sum(int((layer.weight == 0).sum()) for layer in (model[0], model[3])) == 96
        ends.append(bits(model))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("learned", [False, True])
def test_the_best_weights_of_qat_are_converted(learned: bool) -> None:
    ends = []
    for metric, epochs in (((0.1, 0.9, 0.3), 3), ((0.1, 0.9), 2)):
        task = ck.Task(train=BATCHES, val=BATCHES, metric=Measured(*metric), higher_is_better=True)
        qat = ck.QAT(epochs=epochs, schedule=ck.lr.Constant(), freeze=0, learned=learned, keep_best=epochs == 3)
        quantized = qat(network(), task)
        assert not [name for name, module in quantized.named_modules() if module.training]
        ends.append(bits(quantized))
    assert ends[0] == ends[1]


def test_measuring_leaves_qat_as_it_is() -> None:
    ends = [bits(ck.QAT(epochs=3, freeze=0.6, validate_every=every)(network(), TASK)) for every in (0, 1)]
    assert ends[0] == ends[1]


def test_the_best_stage(tmp_path) -> None:
    task = ck.Task(train=BATCHES, val=BATCHES)
    result = ck.Recipe(ck.Train(epochs=3, optimizer=SGD), ck.StaticQuant()).run(network(), task, tmp_path / "run")
    rows = result.rows
    assert result.higher_is_better is True
    assert result.best().metric == max(row.metric for row in rows)
    assert result.best(drop=1.0).bytes == min(row.bytes for row in rows)
    assert result.best(drop=1.0, by=lambda row: row.latency_ms).latency_ms == min(row.latency_ms for row in rows)
    assert result.best(by=lambda row: -row.metric).metric == result.best().metric
    with pytest.raises(SettingError, match="wanted a function of a row, such as lambda row: row.latency_ms, got 'latency_ms'"):
        result.best(by="latency_ms")
    with pytest.raises(SettingError, match=r"Result.best: of 2 stages that lose at most 1, none has the figure"):
        result.best(drop=1, by=lambda row: None)


def test_the_best_stage_by_an_error(tmp_path) -> None:
    from compresskit.recipe.report import StageReport

    rows = [StageReport(stage=s, metric=m, parameters=1, nonzero=1, macs=1, seconds=1, bytes=b) for s, m, b in
            (("a", 0.5, 100), ("b", 0.4, 80), ("c", 0.52, 20), ("d", 0.9, 10))]  # fmt: skip
    made = partial(ck.Result, model=network(), onnx=None, rows=tuple(rows), out=tmp_path)
    assert made(higher_is_better=False).best().stage == "b"
    assert made(higher_is_better=False).best(drop=0.05).stage == "c"
    assert made(higher_is_better=False).best(drop=0).stage == "b"
    assert made(higher_is_better=True).best().stage == "d"
    with pytest.raises(SettingError, match=r"Result.best: which of two metrics is better is not said; pass Task\(higher_is"):
        made().best()
