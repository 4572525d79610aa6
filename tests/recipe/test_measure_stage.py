"""Exporting, verifying and measuring the model of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networks
import pytest
import short_run
import torch
from networks import images_task
from row_networks import GRAPH_DIMS, MASKED_DIMS, Frames, Graph, Masked, TimeFirst, graph_inputs, masked_inputs
from torch import nn
from torch.nn import functional as F

import compresskit as ck
from compresskit.base.errors import (
    ExportError,
)
from compresskit.measure import session
from compresskit.recipe import engine, measure_stage


def test_a_file_that_disagrees_with_its_model_stops_the_run(tmp_path, monkeypatch) -> None:
    real = measure_stage.export_onnx

    def broken(model, path, example, **kwargs):
        other = networks.build(networks.Residual)
        return real(other, path, example)

    monkeypatch.setattr(measure_stage, "export_onnx", broken)
    with pytest.raises(ExportError, match=r"model\.rejected\.onnx: DISAGREES"):
        short_run.run(tmp_path / "run", images_task(ck, samples=64))
    assert (tmp_path / "run" / "1-train" / "model.rejected.onnx").exists()
    assert not (tmp_path / "run" / "1-train" / "row.json").exists()


@pytest.fixture
def samples_compared(monkeypatch) -> list[int]:
    """How many samples each call of `verify_onnx` compared."""
    found: list[int] = []
    real = measure_stage.verify_onnx

    def counted(*args, **kwargs):
        verification = real(*args, **kwargs)
        found.append(verification.samples)
        return verification

    monkeypatch.setattr(measure_stage, "verify_onnx", counted)
    return found


def test_a_file_may_be_compared_on_a_few_samples_and_is_measured_on_all(tmp_path, samples_compared) -> None:
    task, model = images_task(ck, samples=64), networks.build(networks.Residual)
    wanted = sum(len(task.inputs(batch)[0]) for batch in task.batches("val"))
    (tmp_path / "all").mkdir()
    (tmp_path / "few").mkdir()
    whole = measure_stage.measure_stage(model, task, tmp_path / "all", settings={}, seconds=0, export=True)
    brief = measure_stage.measure_stage(model, task, tmp_path / "few", settings={}, seconds=0, export=True, compared=5)
    assert samples_compared == [wanted, 5]
    assert (brief.metric, brief.macs, brief.verified) == (whole.metric, whole.macs, True)
    assert [(tmp_path / name / "details.json").exists() for name in ("all", "few")] == [True, False]
    assert (tmp_path / "few" / "verify.json").exists()


def test_a_file_that_disagrees_on_a_few_samples_is_compared_on_all(tmp_path, monkeypatch, samples_compared) -> None:
    """A few samples may be those that are rounded to the other side; only all of them reject a file."""
    counted = measure_stage.verify_onnx

    def strict(*args, **kwargs):
        verification = counted(*args, **kwargs)
        return replace(verification, reason="few") if verification.samples == 5 else verification

    monkeypatch.setattr(measure_stage, "verify_onnx", strict)
    task, model = images_task(ck, samples=64), networks.build(networks.Residual)
    report = measure_stage.measure_stage(model, task, tmp_path, settings={}, seconds=0, export=True, compared=5)
    assert report.verified
    assert samples_compared[0] == 5
    assert len(samples_compared) == 2 < samples_compared[1]


def tokens_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


UNEQUAL_ROWS = {
    "mask": (Masked, masked_inputs, (16, 9), 8, MASKED_DIMS, 1),
    "graph": (Graph, graph_inputs, (12,), 3, GRAPH_DIMS, 12),
    "frames": (Frames, lambda: (torch.randn(16, 6),), (4,), 3, (), 16),
}


@pytest.fixture
def timed(monkeypatch) -> list[torch.Tensor]:
    """The first input of what files of a run are timed on."""
    found: list[torch.Tensor] = []
    real = engine.latency

    def noted(files, inputs):
        found.append(inputs[0])
        return real(files, inputs, seconds=0.01)

    monkeypatch.setattr(engine, "latency", noted)
    return found


@pytest.mark.parametrize("case", UNEQUAL_ROWS)
def test_recipes_of_inputs_whose_first_dimensions_are_not_all_the_batch(case, tmp_path, timed, caplog) -> None:
    caplog.set_level("INFO", logger="compresskit")
    kind, inputs, labels, classes, dynamic, rows = UNEQUAL_ROWS[case]
    data = [(*inputs(), torch.randint(0, classes, labels)) for _ in range(2)]
    task = ck.Task(train=data, val=data, loss=tokens_loss, metric=lambda output, y: (output.argmax(-1) == y).float().mean())
    stages = ck.Train(epochs=1), ck.StaticQuant(dynamic=dynamic, samples=16)
    result = ck.Recipe(*stages, dynamic=dynamic).run(kind(), task, out=tmp_path)
    assert [row.verified for row in result.rows] == [True, True]
    assert [len(value) for value in timed] == [rows]
    said = f"latencies are of the first validation batch, of {rows} rows: the files take no single one"
    assert (said in caplog.text) == (rows > 1)


@pytest.mark.parametrize("dims", [{0: "length", 1: "batch"}, {1: "batch"}], ids=["length", "fixed_length"])
def test_a_sample_of_a_network_with_time_first_is_all_its_steps(dims, tmp_path, timed) -> None:
    data, dynamic = [(torch.randn(9, 16, 6), torch.randint(0, 3, (16,)))], {"x": dims}
    stages = ck.Train(epochs=1), ck.StaticQuant(dynamic=dynamic, samples=16)
    result = ck.Recipe(*stages, dynamic=dynamic).run(TimeFirst(), ck.Task(train=data, val=data), out=tmp_path)
    one = 9 * 3 * 32 * (6 + 32) + 32 * 3  # steps of three gates, and the last layer
    assert [row.macs for row in result.rows] == [one, one]
    assert [tuple(value.shape) for value in timed] == [(9, 1, 6)]


class Attended(nn.Module):
    """Attention over positions, which come first, and a class for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.ModuleList(nn.Linear(6, 16) for _ in range(3)), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(F.scaled_dot_product_attention(*(layer(x).transpose(0, 1) for layer in self.enter)).mean(1))


def test_a_table_is_of_the_example_where_its_first_dimension_is_no_batch(tmp_path, timed, caplog) -> None:
    caplog.set_level("INFO", logger="compresskit")
    data = [(torch.randn(40, 4, 6), torch.randint(0, 3, (4,)))]
    stages = ck.Train(epochs=1), ck.Prune(budget=ck.keep(macs=0.7), round_to=2)
    result = ck.Recipe(*stages, dynamic={"x": {0: "length"}}).run(Attended(), ck.Task(train=data, val=data), out=tmp_path)
    dense, pruned = (row.macs for row in result.rows)
    whole = 4 * (40 * 6 * 48 + 2 * 40 * 40 * 16 + 16 * 3)
    assert dense == whole // 40
    assert pruned == ck.count_macs(result.model, data[0][0]) <= 0.7 * dense
    assert [len(value) for value in timed] == [40]
    assert "latencies are of the first validation batch, of 40 rows: a single one is another workload" in caplog.text


class Recurrent(nn.Module):
    """An LSTM and a head behind each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def size(outputs, target) -> float:
    return float(outputs.double().abs().mean())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("compared", [None, 4])
def test_a_metric_does_not_depend_on_the_threads_of_this_machine(compared, tmp_path) -> None:
    """Each thread of ONNX Runtime's quantized LSTM rounds its part of a batch by a range of its own."""
    x = torch.randn(32, 6, 8)
    x[-1] *= 100
    task = ck.Task(val=[(x, torch.zeros(32, 6, 3))], metric=size)
    model = ck.quant.quantize_dynamic(Recurrent().eval(), x)
    row = measure_stage.measure_stage(model, task, tmp_path, settings={}, seconds=0, export=True, compared=compared)

    def run(threads: int) -> float:
        opened = session(tmp_path / "model.onnx", threads=threads)
        (outputs,) = opened.run(None, {opened.get_inputs()[0].name: x.numpy()})
        return size(torch.from_numpy(outputs), None)

    assert run(1) != run(2)
    assert row.metric == run(1)
