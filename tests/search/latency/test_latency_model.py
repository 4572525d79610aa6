"""Latencies that are predicted from operators of measured files: interpolation, errors that are stated, what is not known."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import networks
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.base.files import write_json
from compresskit.search.latency.latency_model import LatencyModel
from compresskit.search.latency.operators import MeasuredFile, Operator, measure_operators, read_measured, read_operators


def conv(inputs: int, outputs: int, form: str = "3x3") -> Operator:
    positions = 64
    sizes = {"read": 4.0 * inputs * positions, "stored": 36.0 * inputs * outputs, "written": 4.0 * outputs * positions}
    return Operator(kind="Conv float", form=form, alignment=(8, 8), macs=9.0 * inputs * outputs * positions, **sizes)


def seconds_of(operator: Operator) -> float:
    """Formula of a machine: work, bytes, and a kernel that is faster where there is much to do."""
    much = operator.macs / (operator.macs + 1e5)
    return 1e-3 + operator.macs * 1e-8 / (0.5 + 0.5 * much) + (operator.read + operator.written) * 2e-8


def network(width: int, *, noise: float = 0.0, seed: int = 0) -> MeasuredFile:
    drawn = random.Random(seed)
    layers = [conv(width, width), conv(width, 2 * width), conv(2 * width, 2 * width), conv(2 * width, width)]
    times = [(layer, seconds_of(layer) * (1 + noise * drawn.uniform(-1, 1))) for layer in layers]
    return MeasuredFile(milliseconds=sum(t for _, t in times) + 4 * 0.002, outside=4 * 0.002, operators=tuple(times))


KNOWN = [network(width) for width in (8, 16, 32, 48, 64)]


@pytest.mark.parametrize("width", [12, 24, 40, 56])
def test_widths_between_those_measured_are_interpolated(width) -> None:
    file = network(width)
    predicted = LatencyModel(KNOWN).predict([operator for operator, _ in file.operators])
    assert predicted == pytest.approx(file.milliseconds, rel=0.05)
    by_macs = KNOWN[-1].milliseconds * sum(o.macs for o, _ in file.operators) / sum(o.macs for o, _ in KNOWN[-1].operators)
    assert abs(predicted - file.milliseconds) < abs(by_macs - file.milliseconds)


def test_its_own_error_is_stated() -> None:
    exact, noisy = (
        LatencyModel([network(width, noise=noise, seed=width) for width in range(8, 72, 8)]).error() for noise in (0, 0.5)
    )
    assert exact.files == 8
    assert exact.median <= exact.ninth <= exact.largest < 0.2
    assert noisy.median > 2 * exact.median
    assert str(exact).startswith(f"median error {exact.median:.1%}, nine of ten within")
    assert LatencyModel(KNOWN[:4]).error() is None


def test_operators_of_an_unknown_kind_are_not_guessed() -> None:
    operators = [operator for operator, _ in KNOWN[0].operators]
    lstm = Operator(kind="LSTM float", form="", alignment=(), macs=1.0, read=1.0, stored=1.0, written=1.0)
    assert LatencyModel(KNOWN).predict([*operators, lstm]) is None
    assert LatencyModel([]).predict(operators) is None


class Kinds(nn.Module):
    """Convolutions, one of them depthwise, a matrix product, and what lies between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.c, self.d = nn.Conv2d(width, 16, 1, stride=2), nn.Linear(16, 10)

    def forward(self, x):
        return self.d(self.c(torch.relu(self.b(torch.relu(self.a(x))))).mean((2, 3)))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_operators_are_those_that_run(precision, tmp_path) -> None:
    model, x = Kinds(32).eval(), torch.randn(2, 16, 12, 12)
    made = ck.quant.quantize_static(model, x) if precision == "int8" else model
    path = ck.export_onnx(made, tmp_path / "m.onnx", x)
    measured = measure_operators(path, x[:1], threads=1, seconds=0.05)
    operators = [operator for operator, _ in measured.operators]
    assert sum(milliseconds for _, milliseconds in measured.operators) + measured.outside == pytest.approx(measured.milliseconds)
    assert sorted(map(repr, read_operators(path, x[:1]))) == sorted(map(repr, operators))
    assert sum(o.macs for o in operators) == ck.count_macs(model, x[:1])
    depthwise = next(o for o in operators if o.kind.endswith("depthwise"))
    assert depthwise.macs == 32 * 9 * 12 * 12
    width = 4 if precision == "fp32" else 1
    assert depthwise.read == depthwise.written == width * 32 * 12 * 12
    measured.write(tmp_path / "operators.json")
    again = read_measured(tmp_path / "operators.json")
    assert sorted(map(repr, again.operators)) == sorted(map(repr, measured.operators))
    write_json(tmp_path / "operators.json", {"milliseconds": 1})
    with pytest.raises(ck.CheckpointError, match="no operators of a candidate in it"):
        read_measured(tmp_path / "operators.json")


def test_the_latency_that_was_measured_counts(tmp_path) -> None:
    model, x = networks.build(networks.Chain).eval(), networks.image(1)
    path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    measured = measure_operators(path, x, threads=1, seconds=0.02, milliseconds=50.0)
    assert measured.milliseconds == 50.0
    assert sum(milliseconds for _, milliseconds in measured.operators) + measured.outside == pytest.approx(50.0)


def test_each_file_is_predicted_from_the_others_alone() -> None:
    """The error that is stated is that of files which the model has not seen; an underestimate counts as an overestimate does."""
    slow = network(24)
    slow = replace(slow, milliseconds=3 * slow.milliseconds, operators=tuple((o, 3 * t) for o, t in slow.operators))
    files, errors = [*KNOWN, slow], []
    for file in files:
        others = LatencyModel([other for other in files if other is not file])
        errors.append(abs(others.predict([operator for operator, _ in file.operators]) / file.milliseconds - 1))
    found = LatencyModel(files).error()
    assert (found.largest, found.median) == pytest.approx((max(errors), statistics.median(errors)))
    assert max(errors) > 0.5


@pytest.mark.parametrize("other", [{"form": "3x3 of stride 2"}, {"alignment": (1, 8)}])
def test_kernels_of_other_forms_are_told_apart(other) -> None:
    fast = conv(16, 16)
    times = {fast: 0.1, replace(fast, **other): 0.4}
    files = [MeasuredFile(milliseconds=4 * t, outside=0.0, operators=((o, t),) * 4) for o, t in times.items()]
    model = LatencyModel(files)
    for operator, milliseconds in times.items():
        assert model.kinds["Conv float"].milliseconds([operator])[0] == pytest.approx(milliseconds, rel=0.1)


def test_what_was_measured_more_often_is_trusted_more() -> None:
    fast, slow = conv(16, 16), conv(16, 16, form="another")

    def missing(times: int) -> float:
        file = MeasuredFile(milliseconds=0.5, outside=0.0, operators=((fast, 0.1), (slow, 0.4)) * times)
        return abs(LatencyModel([file]).kinds["Conv float"].milliseconds([fast])[0] / 0.1 - 1)

    assert missing(25) < 0.2 * missing(1)


def test_an_operator_that_the_profiler_does_not_see_takes_almost_no_time() -> None:
    unseen = replace(conv(8, 8), kind="Reshape float", macs=0.0)
    files = [replace(file, operators=(*file.operators, (unseen, 0.0))) for file in KNOWN]
    predicted = LatencyModel(files).predict([operator for operator, _ in files[2].operators])
    assert predicted == pytest.approx(files[2].milliseconds, rel=0.05)


def test_equal_operators_of_a_file_count_each() -> None:
    """A network of equal blocks takes as many times as it has of them."""
    files = [
        MeasuredFile(milliseconds=0.1 * width + 0.01, outside=0.01, operators=((conv(width, width), 0.1 * width),))
        for width in (8, 16, 24, 32)
    ]
    one, ten = (LatencyModel(files).predict([conv(16, 16)] * times) for times in (1, 10))
    assert ten == pytest.approx(10 * one, rel=0.02)
    assert ten == pytest.approx(10 * files[1].milliseconds, rel=0.15)


def test_a_file_is_corrected_by_what_files_like_it_took() -> None:
    """One convolution takes twice as long beside operators that leave it nothing in the caches."""
    shared, pool, gather = conv(16, 16), *(replace(conv(8, 8), kind=kind, macs=0.0) for kind in ("Pool float", "Gather float"))
    files = [
        MeasuredFile(milliseconds=time + 1, outside=0.0, operators=((shared, time), (other, 1.0)))
        for other, time in ((pool, 1.0), (gather, 2.0)) * 3
    ]
    model = LatencyModel(files)
    assert model.predict([shared, pool]) == pytest.approx(2.0, rel=0.1)
    assert model.predict([shared, gather]) == pytest.approx(3.0, rel=0.1)
