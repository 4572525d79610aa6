"""Measuring a model: parameters, MACs, the metric, latency."""

from __future__ import annotations

import time
from typing import NamedTuple

import networks
import onnxruntime
import oracles
import pytest
import torch
from networks import build, image, images_task
from torch import nn

import compresskit as ck
from compresskit import measure
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.export.check.profile.kernels import profiling_session
from compresskit.measure import count_nonzero, latency
from compresskit.measure.flops import flop_formulas

ONNXRUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


def test_macs_see_into_fused_kernels() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 10, 32)
    # q, k, v, out; two feed-forward layers; scores and their product with the values.
    want = 10 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 10 * 10 * 32
    assert ck.count_macs(layer, (x,)) == want
    assert ck.count_macs(nn.LSTM(8, 16, batch_first=True), (torch.randn(2, 5, 8),)) == 5 * 4 * 16 * (8 + 16)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_metric_that_is_not_finite_is_refused(value: str) -> None:
    with pytest.raises(DataError, match=f"the metric is {value}"):
        ck.evaluate(build(networks.Chain), images_task(ck, metric=lambda p, t: float(value)))


class SquaredError:
    """A metric of batches, as people write one."""

    higher_is_better = False

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, predictions, target):
        self.sum, self.count = self.sum + (predictions - target).square().mean() * len(target), self.count + len(target)

    def compute(self):
        return self.sum / self.count


@pytest.mark.parametrize("metric", [lambda p, t: (p - t).square().mean(), SquaredError()], ids=["function", "running"])
@pytest.mark.parametrize("column", ["predictions", "targets"])
def test_a_metric_that_compares_each_prediction_with_every_target_is_refused(column: str, metric) -> None:
    """A column beside a row is broadcast, and a perfect model looks like none."""
    values = torch.arange(16.0)
    given = {"predictions": (values[:, None], values), "targets": (values, values[:, None])}[column]
    task = ck.Task(val=[given], metric=metric, higher_is_better=False)
    with pytest.raises(DataError, match=r"are broadcast to \(16, 16\), each prediction beside every target; let the loader give"):
        ck.evaluate(nn.Identity(), task)
    assert ck.evaluate(nn.Identity(), ck.Task(val=[(values, values)], metric=metric, higher_is_better=False)) == 0
    squeezed = ck.Task(val=[given], metric=lambda p, t: (p.flatten() - t.flatten()).square().mean(), higher_is_better=False)
    assert ck.evaluate(nn.Identity(), squeezed) == 0


def test_counts_from_first_principles() -> None:
    """The source document's example: 1024-100-20 has 104,400 weights, and one hidden neuron is 1,044 of them."""
    net = nn.Sequential(nn.Linear(1024, 100, bias=False), nn.ReLU(), nn.Linear(100, 20, bias=False))
    assert ck.count_parameters(net) == 104_400
    assert ck.count_macs(net, (torch.randn(3, 1024),)) == oracles.macs([(1, 1024, 1, 100), (1, 100, 1, 20)])
    plan = ck.prune.plan_channels(net, (torch.randn(2, 1024),), budget=ck.keep(macs=0.99), round_to=1)
    ck.prune.apply_(net, plan)
    assert ck.count_parameters(net) == 104_400 - 1044
    with torch.no_grad():
        net[0].weight[0] = 0
    assert count_nonzero(net) == 104_400 - 1044 - 1024


def test_macs_of_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    want = oracles.macs([(8 * 8, 3, 9, 8), (6 * 6, 1, 9, 8), (6 * 6, 8, 1, 4)])
    assert ck.count_macs(model, image(5)) == want


def test_macs_of_a_learned_query_that_a_submodule_reads() -> None:
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.layer = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(torch.cat([self.layer(self.token.expand(len(x), -1, -1)), x], 1))

    assert ck.count_macs(Query(), (torch.randn(2, 6, 8),)) == (1 + 7) * 8 * 8


def test_latency_tells_large_from_small(tmp_path) -> None:
    paths = []
    for width in (8, 256):
        model = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3))
        paths.append(ck.export_onnx(model, tmp_path / f"{width}.onnx", image(2)))
    small, large = latency(paths, image(1), seconds=0.2)
    assert 0 < small < large / 3
    with pytest.raises(SettingError, match="rounds >= 1"):
        latency(paths, image(1), rounds=0)


@pytest.mark.skipif(ONNXRUNTIME < (1, 26), reason="this ONNX Runtime does not know how long threads should wait")
@pytest.mark.parametrize("profiled", [False, True])
def test_threads_of_the_runtime_sleep_soon_after_a_run(tmp_path, profiled) -> None:
    """They would take the cores from the next of several files that are timed in turn."""
    x = torch.randn(1, 3, 128, 128)
    path = ck.export_onnx(nn.Conv2d(3, 32, 3), tmp_path / "m.onnx", (x,))
    runner = profiling_session(str(path), tmp_path / "new", threads=2) if profiled else measure.session(path, threads=2)
    for _ in range(5):
        runner.run(None, {runner.get_inputs()[0].name: x.numpy()})
    time.sleep(0.005)
    began = time.process_time()
    time.sleep(0.03)
    assert time.process_time() - began < 0.01


def test_metrics_count_uneven_batches_by_their_rows() -> None:
    model = nn.Flatten()
    batches = [(torch.eye(3)[[0, 1]], torch.tensor([0, 1])), (torch.eye(3)[[2]], torch.tensor([0]))]
    assert ck.evaluate(model, ck.Task(val=batches)) == pytest.approx(2 / 3)

    class Count:
        def __init__(self):
            self.n = 0

        def reset(self):
            self.n = 0

        def update(self, predictions, target):
            self.n += len(target)

        def compute(self):
            return torch.tensor(float(self.n))

    task = ck.Task(val=batches, metric=Count())
    assert ck.evaluate(model, task) == ck.evaluate(model, task) == 3


def test_evaluation_restores_the_mode() -> None:
    model, task = build(networks.Chain).train(), images_task(ck)
    ck.evaluate(model, task)
    assert model.training
    assert measure.count_macs(model, task.example()) > 0


def test_macs_of_a_bilinear_layer() -> None:
    class Pair(nn.Bilinear):
        def forward(self, x):
            return super().forward(x[:, :3], x[:, 3:])

    assert measure.count_macs(Pair(3, 4, 5), torch.randn(2, 7)) == 3 * 4 * 5


class Call(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# For x (6, 8): a matrix (6, 8) or two of (3, 8) by a vector of 8 or a matrix of 4 columns; distances to 5 or 30 vectors of 8.
PRODUCTS = {
    "mv": (lambda x: x @ torch.ones(8), 6 * 8),
    "mv of a batch": (lambda x: x.view(2, 3, 8) @ torch.ones(8), 6 * 8),
    "addmv": (lambda x: torch.addmv(torch.ones(6), x, torch.ones(8)), 6 * 8),
    "addmv_": (lambda x: torch.ones(6).addmv_(x, torch.ones(8)), 6 * 8),
    "dot": (lambda x: torch.dot(x.flatten(), x.flatten()), 6 * 8),
    "vdot": (lambda x: torch.vdot(x.flatten(), x.flatten()), 6 * 8),
    "addmm_": (lambda x: torch.ones(6, 4).addmm_(x, torch.ones(8, 4)), 6 * 8 * 4),
    "baddbmm_": (lambda x: torch.ones(2, 3, 4).baddbmm_(x.view(2, 3, 8), torch.ones(2, 8, 4)), 6 * 8 * 4),
    "addbmm": (lambda x: torch.addbmm(torch.ones(3, 4), x.view(2, 3, 8), torch.ones(2, 8, 4)), 6 * 8 * 4),
    "addbmm_": (lambda x: torch.ones(3, 4).addbmm_(x.view(2, 3, 8), torch.ones(2, 8, 4)), 6 * 8 * 4),
    "addmm_activation": (lambda x: torch._addmm_activation(torch.ones(4), x, torch.ones(8, 4)), 6 * 8 * 4),
    "int_mm": (lambda x: torch._int_mm(x.to(torch.int8), torch.ones(8, 4, dtype=torch.int8)), 6 * 8 * 4),
    "few distances": (lambda x: torch.cdist(x, torch.ones(5, 8)), 6 * 5 * 8),
    "many distances": (lambda x: torch.cdist(x, torch.ones(30, 8)), 6 * 30 * 8),
    "distances of a batch": (lambda x: torch.cdist(x.view(2, 3, 8), torch.ones(1, 30, 8), p=1.0), 6 * 30 * 8),
    "distances in pairs": (nn.functional.pdist, 15 * 8),
    "conv_tbc": (lambda x: torch.conv_tbc(x.view(6, 1, 8), torch.ones(3, 8, 4), torch.ones(4)), 4 * 3 * 8 * 4),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_macs_of_products_that_the_flop_counter_of_torch_does_not_know(name: str) -> None:
    function, want = PRODUCTS[name]
    assert ck.count_macs(Call(function), torch.randn(6, 8)) == want // 6


@pytest.mark.parametrize(
    ("first", "second"), [((6, 8), (2, 8, 4)), ((2, 3, 8), (2, 8, 4)), ((2, 6, 8), (8, 4)), ((6, 8), (8, 4))]
)
def test_macs_of_a_product_for_each_group(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    formula = flop_formulas()[torch.ops.aten._grouped_mm]
    assert formula(first, second) == 2 * 6 * 8 * 4


def test_macs_of_a_recurrent_layer_of_cudnn_are_those_on_a_cpu() -> None:
    layer = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True, proj_size=5)
    shapes = [weight.shape for weight in layer.parameters()]
    formula = flop_formulas()[torch.ops.aten._cudnn_rnn]
    assert formula((3, 7, 8), shapes) == 2 * 3 * ck.count_macs(layer, torch.randn(3, 7, 8))
    assert formula((21, 8), shapes) == formula((3, 7, 8), shapes)  # a packed sequence


@pytest.mark.parametrize("what", ["predictions", "targets"])
def test_a_function_is_no_metric_of_outputs_of_several_sizes(what: str) -> None:
    sizes = [(2, 3, 4, 4), (2, 3, 6, 5)]
    others = [(2, 3, 4, 4)] * 2
    inputs, targets = (sizes, others) if what == "predictions" else (others, sizes)
    task = ck.Task(val=[(torch.zeros(a), torch.zeros(b)) for a, b in zip(inputs, targets, strict=True)], metric=lambda p, t: 0.0)
    wanted = rf"got {what} of size \(3, 4, 4\) and \(3, 6, 5\) for each sample; give a metric with update, compute and reset"
    with pytest.raises(DataError, match=wanted):
        ck.evaluate(nn.Identity(), task)


@pytest.mark.parametrize("rows", [(3, 3), (3, 2)])
def test_a_function_is_no_metric_of_predictions_whose_first_dimension_is_time(rows) -> None:
    """They would be joined over time, and their targets over samples."""
    found = []

    def metric(predictions, targets):
        found.append((tuple(predictions.shape), tuple(targets.shape)))
        return 0.0

    batches = [(torch.zeros(7, n, 5), torch.zeros(n, 2)) for n in rows]
    wanted = r"predictions \(7, 3, 5\) have the 3 samples of their targets in dimension 1; put them first, Task\(predict="
    with pytest.raises(DataError, match=wanted):
        ck.evaluate(nn.Identity(), ck.Task(val=batches, metric=metric))
    assert not found
    ck.evaluate(nn.Identity(), ck.Task(val=batches, metric=metric, predict=lambda output: output.transpose(0, 1)))
    ck.evaluate(nn.Identity(), ck.Task(val=batches[:1], metric=metric))  # nothing is joined
    assert found == [((sum(rows), 7, 5), (sum(rows), 2)), ((7, 3, 5), (3, 2))]


def test_inputs_by_name_need_the_names_of_the_file(tmp_path) -> None:
    model, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 8, 8)
    path = ck.export_onnx(model, tmp_path / "f.onnx", (x,))
    wanted = r"f\.onnx: the file wants inputs \['input'\], got \['zz'\]; give them these names, or as a tuple in this order"
    for run in (lambda: latency([path], {"zz": x}), lambda: ck.audit(path, profile=True, inputs={"zz": x})):
        with pytest.raises(DataError, match=wanted):
            run()
    assert latency([path], {"input": x, "more": x}, seconds=0.02)[0] > 0
    assert latency([path], {"in_a_list": [x]}, seconds=0.02)[0] > 0  # the exporter makes names of its own for these


class Streams(nn.Module):
    """Adds a running mean, a buffer, and the number of its runs, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(3, 4), 0
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean())
        self.runs += 1
        return self.layer(x) + self.mean + self.runs


@pytest.mark.filterwarnings("ignore:Streams. forward writes")
def test_measuring_moves_no_state(tmp_path) -> None:
    model, x = Streams().eval(), torch.randn(4, 3)
    assert ck.count_macs(model, x) == 12
    path = ck.export_onnx(model, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, model, [x]).passed
    assert not ck.verify_onnx(path, model, [x, x]).passed  # the file has no state
    assert not model.mean.any()
    assert model.runs == 0


def seen(batches) -> tuple[list[int], object]:
    """Rows of the predictions, and targets, that a function metric gets."""
    found = []

    def metric(predictions, targets):
        found.append((len(predictions), targets))
        return 0.0

    ck.evaluate(nn.Linear(8, 4), ck.Task(val=batches, metric=metric))
    return found[0]


def test_a_function_gets_targets_by_sample() -> None:
    x, other = torch.randn(2, 8), torch.randn(3, 8)
    assert seen([(x, ["a", "b"]), (other, ["c", "d", "e"])]) == (5, ["a", "b", "c", "d", "e"])
    boxes = [{"boxes": torch.zeros(k, 4)} for k in range(5)]
    assert seen([(x, boxes[:2]), (other, boxes[2:])]) == (5, boxes)
    rows, joined = seen(
        [(x, {"class": torch.zeros(2), "name": ["a", "b"]}), (other, {"class": torch.ones(3), "name": ["c"] * 3})]
    )
    assert rows == 5
    assert joined["name"] == ["a", "b", "c", "c", "c"]
    assert joined["class"].tolist() == [0, 0, 1, 1, 1]
    _, pair = seen([(x, [torch.zeros(2), torch.zeros(2, 4)]), (other, [torch.ones(3), torch.ones(3, 4)])])
    assert [part.shape for part in pair] == [(5,), (5, 4)]
    with pytest.raises(
        DataError, match=r"got lists of \[1, 1\] beside predictions of \[2, 3\] samples; give a metric with update"
    ):
        seen([(x, ["a"]), (other, ["b"])])


class Pair(NamedTuple):
    """Two targets by name."""

    start: torch.Tensor
    end: torch.Tensor


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_of_other_size_says_what_the_entries_of_a_list_are(kind) -> None:
    """`default_collate` gives lists of several targets, and collate functions for detection give tuples of samples."""
    x, other = torch.randn(2, 8), torch.randn(3, 8)
    two = kind([torch.tensor([0.0, 1.0]), torch.tensor([5.0, 6.0])])
    _, joined = seen([(x, two), (other, kind([torch.ones(3), torch.zeros(3)])), (x, two)])
    assert [part.tolist() for part in joined] == [[0, 1, 1, 1, 1, 0, 1], [5, 6, 0, 0, 0, 5, 6]]
    assert type(joined) is kind
    _, joined = seen([(x, two), (other, kind([torch.ones(k) for k in range(3)])), (x, two)])  # of samples
    assert [len(part) for part in joined] == [2, 2, 0, 1, 2, 2, 2]
    _, joined = seen([(x, two), (x, kind([torch.ones(2), torch.ones(5)]))])  # a sample with five entries
    assert [len(part) for part in joined] == [2, 2, 2, 5]
    _, joined = seen([(x, two), (other, kind([torch.ones(3)] * 3))])  # as many as samples, as many each, in all batches
    assert [len(part) for part in joined] == [2, 2, 3, 3, 3]
    boxes = [{"boxes": torch.ones(1, 4)}, {"boxes": torch.zeros(1, 4)}]
    assert seen([(x[:1], kind(boxes[:1])), (x[:1], kind(boxes[1:]))])[1] == boxes  # dicts in a list are of samples


def test_what_the_entries_of_a_list_are_is_told_by_their_kinds_where_no_batch_says_it() -> None:
    x = torch.randn(2, 8)
    for target, shapes in (
        ([torch.zeros(2).long(), torch.zeros(2)], [(4,), (4,)]),
        ([torch.zeros(2), torch.zeros(2, 4)], [(4,), (4, 4)]),
        (Pair(torch.zeros(2), torch.ones(2)), [(4,), (4,)]),
    ):
        _, joined = seen([(x, target), (x, target)])
        assert [tuple(part.shape) for part in joined] == shapes
    _, joined = seen([(x, [torch.zeros(2), {"words": ["a", "b"]}])] * 2)
    assert joined[1] == {"words": ["a", "b"] * 2}


ONE_BOX = [(torch.randn(1, 8), [torch.rand(1, 4)]) for _ in range(4)]


def test_a_list_that_may_be_of_samples_or_of_targets_is_refused() -> None:
    wanted = r"in every validation batch, of 1 samples, targets are lists of 1 tensors of as many rows, .*; let the loader give"
    for given in (ONE_BOX, [(x, {"boxes": boxes}) for x, boxes in ONE_BOX]):
        with pytest.raises(DataError, match=wanted):
            seen(given)
    assert len(seen([*ONE_BOX, (torch.randn(1, 8), [torch.rand(3, 4)])])[1]) == 5
    assert len(seen([(torch.cat([x for x, _ in ONE_BOX]), [boxes[0] for _, boxes in ONE_BOX])])[1]) == 4
    assert len(seen(ONE_BOX[:1])[1]) == 1


def test_lists_among_targets_by_place_are_by_place() -> None:
    two = torch.zeros(2)
    _, ((a, b), c, d) = seen([(torch.randn(2, 8), [[two, two + 1], two, two]) for _ in range(3)])
    assert [len(part) for part in (a, b, c, d)] == [6, 6, 6, 6]
    assert b.eq(1).all()


def test_targets_of_several_sizes_are_no_targets_of_all_samples() -> None:
    pairs = [(torch.randn(n, 8), [torch.zeros(n, size), torch.zeros(n)]) for n, size in ((3, 4), (4, 5))]
    with pytest.raises(DataError, match=r"got targets of size \(4,\) and \(5,\) for each sample"):
        seen(pairs)


def test_macs_of_no_rows_and_of_dimensions_that_are_not_there_are_refused() -> None:
    model, x = nn.Linear(8, 4), torch.randn(2, 8)
    assert ck.count_macs(model, x, dims=(0,)) == 32
    with pytest.raises(DataError, match=r"count_macs: wanted one row at least, got inputs of shape \[\(0, 8\)\]; leave"):
        ck.count_macs(model, x[:0])
    for dims in ((5,), (0, 0), 3):
        with pytest.raises(SettingError, match=r"count_macs\(dims=...\): wanted for each of 1 inputs the dimension"):
            ck.count_macs(model, x, dims=dims)


def test_parameters_without_a_shape_are_not_counted() -> None:
    for count in (measure.count_parameters, count_nonzero):
        with pytest.raises(ModelError, match=f"{count.__name__}: 0.weight has no shape yet; run the model once on an example"):
            count(nn.Sequential(nn.LazyLinear(4)))


def test_a_latency_of_no_number_of_seconds_is_refused() -> None:
    for seconds in (float("nan"), float("inf")):
        with pytest.raises(SettingError, match=f"wanted rounds >= 1 and seconds > 0, got 15 and {seconds}"):
            latency([], image(1), seconds=seconds)
