"""Task, graph, measure, train, surgery: what everything stands on."""

from __future__ import annotations

import copy
import json
from functools import partial

import networks
import oracles
import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, build, image, images_task
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import compresskit as ck
from compresskit import measure
from compresskit.base.errors import CheckpointError, DataError, ModelError, SettingError, TrainingError
from compresskit.base.fingerprint import describe
from compresskit.base.task import first_tensor
from compresskit.graph import surgery
from compresskit.graph.capture import capture
from compresskit.measure import count_nonzero, latency

# -- task


def test_batches_of_every_kind() -> None:
    x, z, y = torch.randn(4, 2), torch.randn(4, 3), torch.arange(4)
    task = ck.Task(val=[(x, y)])
    assert task.split((x, y))[0] == (x,)
    assert task.split([x, z, y])[0] == (x, z)
    inputs, target = task.split({"a": x, "b": z, "labels": y})
    assert list(inputs) == ["a", "b"]
    assert target is y
    assert list(ck.Task(val=[1], target="b").split({"a": x, "b": z})[0]) == ["a"]


def test_predictions_are_found() -> None:
    x = torch.randn(2, 3)
    for output in (x, (x, None), {"logits": x, "loss": 1}, {"out": x}, [[x]], {"anything": x}):
        assert first_tensor(output) is x
    with pytest.raises(DataError, match=r"pass Task\(predict="):
        first_tensor(3)


def test_two_inputs_and_a_dict_train() -> None:
    y = torch.arange(32) % 4
    batches = [{"image": torch.randn(32, 3, 16, 16) + y.view(-1, 1, 1, 1), "numbers": torch.randn(32, 8), "labels": y}]
    task = ck.Task(train=batches, val=batches)
    model = ck.Train(epochs=80, optimizer=partial(torch.optim.Adam, lr=1e-2))(networks.TwoInputs(), task)
    assert ck.evaluate(model, task) > 0.9


def test_one_tensor_stands_for_the_inputs(tmp_path) -> None:
    model, x = build(networks.Chain).eval(), torch.randn(8, 3, 16, 16)
    assert ck.count_macs(model, x) == ck.count_macs(model, (x,))
    plan = ck.prune.plan_channels(model, x, budget=ck.keep(macs=0.5), round_to=4)
    assert ck.prune.prove(model, plan, x) is None
    quantized = ck.quant.quantize_static(model, [x, [x]])
    assert ck.quant.equalize_(model, x) >= 0
    assert ck.quant.quantize_dynamic(model, x)(x).shape == (8, 10)
    assert ck.quant.quantize_weights(model, [x], rounding=ck.quant.gptq)(x).shape == (8, 10)
    path = ck.export_onnx(quantized, tmp_path / "m.onnx", x)
    assert ck.verify_onnx(path, quantized, [x]).passed
    assert len(latency([path], x, seconds=0.01)) == 1
    torch.testing.assert_close(capture(model, x).module(x), model(x))
    ck.quant.correct_bias_(quantized, [x])
    ck.quant.diagnose(quantized, [x])
    ck.quant.prepare_qat(model, [x])
    ck.prune.reestimate_batchnorm_(model, [x])
    with pytest.raises(DataError, match="quantize_static: wanted batches of inputs, such as .*, or one batch, got int"):
        ck.quant.quantize_static(model, 3)
    with pytest.raises(DataError, match=r"the example: wanted inputs as a tensor, a tuple or a dict of them, got int"):
        capture(model, 3)


def test_accuracy() -> None:
    logits = torch.eye(3)
    assert ck.accuracy(logits, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)
    dense = torch.randn(2, 5, 4, 4)
    assert ck.accuracy(dense, dense.argmax(1)) == 1.0
    with pytest.raises(DataError, match=r"classes, so labels must be 0\.\.2, got 7"):
        ck.accuracy(logits, torch.tensor([0, 1, 7]))
    with pytest.raises(DataError, match="pass another metric"):
        ck.accuracy(torch.randn(4, 1), torch.randn(4, 1))


def test_metric_over_uneven_batches_and_running_metrics() -> None:
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


def test_bad_tasks() -> None:
    with pytest.raises(SettingError, match="wanted a loader that can be read many times, got a one-pass generator"):
        ck.Task(val=(i for i in range(3)))
    with pytest.raises(SettingError, match="wanted a loader of batches, got int"):
        ck.Task(val=3)
    with pytest.raises(SettingError, match=r"needs Task\(train="):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1]))
    with pytest.raises(DataError, match="the loader is empty"):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1], train=[]))
    with pytest.raises(DataError, match="the loader is empty"):
        ck.evaluate(nn.Linear(1, 1), ck.Task(val=[]))

    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1), 0

    with pytest.raises(DataError, match="not known beforehand"):
        ck.Train(epochs=1)(nn.Linear(1, 1), ck.Task(val=[1], train=DataLoader(Stream())))
    task = ck.Task(val=[1])
    with pytest.raises(DataError, match=r"no entry 'labels' for the target, got keys \['a'\]"):
        task.split({"a": 1})
    with pytest.raises(DataError, match="wanted \\(inputs..., target\\) or a dict, got Tensor"):
        task.split(torch.zeros(3))


def test_descriptions_hold_no_addresses() -> None:
    stage = ck.Prune(budget=ck.keep(macs=0.5), finetune=ck.Train(epochs=1, objective=ck.imitate(nn.Linear(2, 2).eval())))
    text = json.dumps(describe(stage))
    assert "0x" not in text
    assert '"quantity": "macs", "kept": 0.5' in text
    assert '"parameters": 6' in text
    assert describe(stage) == describe(copy.deepcopy(stage))


def test_functions_are_described_by_what_they_do() -> None:
    def make(factor, names=frozenset({"a", "b", "c"})):
        return lambda x: x * factor if x in {"a", "b", "c"} else names

    assert describe(make(1)) == describe(make(1)) != describe(make(2))
    assert describe(make(1)).partition(" ")[0].endswith(".make.<locals>.<lambda>")
    assert describe(nn.functional.relu) == "torch.nn.functional.relu"

    class Metric:
        def measure(self, x):
            return x

        def double(self, x):
            return 2 * x

    bodies = {describe(method).rpartition(" ")[2] for method in (Metric().measure, Metric().measure, Metric().double)}
    assert len(bodies) == 2

    def endless(x):
        return endless(x)

    assert describe(endless) == describe(endless)


# -- graph


@pytest.mark.parametrize("kind", NETWORKS, ids=lambda k: k.__name__)
def test_captured_equals_eager(kind) -> None:
    model = build(kind).train()
    captured = capture(model, image(1))
    assert model.training
    assert captured.dynamic
    graph = captured.module.eval()
    names = {n for n, _ in model.named_parameters()}
    assert {n for n, _ in graph.named_parameters()} <= names
    model.eval()
    x = image(5)
    with torch.no_grad():
        torch.testing.assert_close(graph(*x), model(*x))
    for node in graph.graph.nodes:
        assert not str(node.target).split(".")[1:2] or not str(node.target).split(".")[1].endswith("_"), node.target
    copy.deepcopy(graph).train()(*x).sum().backward()


def test_in_place_writes_are_made_functional() -> None:
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, :1] = 0
            y += x
            return F.relu(y, inplace=True)

    graph = capture(InPlace(), (torch.randn(2, 3),)).module
    assert not any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes)
    x = torch.randn(7, 3)
    torch.testing.assert_close(graph(x), InPlace()(x))


def test_capture_says_which_line() -> None:
    class Branch(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(ModelError, match=r"(?s)Branch cannot be captured.*at .*test_floor\.py:\d+ in forward.*inside='backbone'"):
        capture(Branch(), (torch.randn(2, 3),))


def test_capture_inside() -> None:
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = networks.Chain()

        def forward(self, x):
            y = self.backbone(x * 2)
            return y[y.sum(1) > 0]

    captured = capture(Outer(), image(3), inside="backbone")
    assert captured.prefix == "backbone"
    assert captured.shapes[captured.inputs[0]] == (2, 3, 16, 16)
    with pytest.raises(ModelError, match=r"has no such module; its own are \['backbone'\]"):
        capture(Outer(), image(3), inside="neck")


def test_example_that_does_not_run() -> None:
    with pytest.raises(ModelError, match=r"Chain does not run on the example \(inputs of shape \[\(2, 5\)\]\)"):
        capture(networks.Chain(), (torch.randn(2, 5),))


# -- measure


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


def test_latency_tells_large_from_small(tmp_path) -> None:
    paths = []
    for width in (8, 256):
        model = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3))
        paths.append(ck.export_onnx(model, tmp_path / f"{width}.onnx", image(2)))
    small, large = latency(paths, image(1), seconds=0.2)
    assert 0 < small < large / 3
    with pytest.raises(SettingError, match="rounds >= 1"):
        latency(paths, image(1), rounds=0)


# -- train


def test_accumulation_is_a_larger_batch() -> None:
    x, y = torch.randn(32, 4), torch.arange(32) % 3
    sgd = partial(torch.optim.SGD, lr=0.1)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    whole = ck.Task(train=[(x, y)], val=[(x, y)])
    parts = ck.Task(train=[(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)], val=[(x, y)])
    ck.Train(epochs=2, optimizer=sgd)(models[0], whole)
    ck.Train(epochs=2, optimizer=sgd, accumulate=4)(models[1], parts)
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_hooks_and_objectives() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    seen = []
    task = ck.Task(train=[(x, y)] * 3, val=[(x, y)])

    def half(model, batch):
        return {"a": F.cross_entropy(model(batch[0]), batch[1]) * 0.5, "b": model(batch[0]).square().mean()}

    ck.fit_(nn.Linear(4, 3), task, ck.Train(epochs=2, objective=half), after_step=[lambda i, n: seen.append((i, n))])
    assert seen == [(i, 6) for i in range(1, 7)]


def test_training_repeats_itself() -> None:
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    task = ck.Task(train=DataLoader(data, 16, shuffle=True), val=DataLoader(data, 16))
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        weights.append(ck.Train(epochs=2)(nn.Linear(4, 3), task).weight)
    assert torch.equal(*weights)


def test_a_loss_that_is_not_finite() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    task = ck.Task(train=[(x, y)] * 10, val=[(x, y)])
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"epoch 1, batch 1: the loss is not finite \(loss = nan\); the first .* is weight"):
        ck.Train(epochs=1)(model, task)
    bad = ck.Task(train=[(x / 0, y)], val=[(x, y)])
    with pytest.raises(TrainingError, match="the batch itself holds nan or inf"):
        ck.Train(epochs=1)(nn.Linear(4, 3), bad)
    odd = ck.Task(train=[(x, y)], val=[(x, y)], loss=lambda p, t: p.sum() / 0)
    with pytest.raises(TrainingError, match="so the forward pass overflowed"):
        ck.Train(epochs=1)(nn.Linear(4, 3), odd)


def test_labels_outside_the_classes() -> None:
    x, y = torch.randn(8, 4), torch.arange(8)
    with pytest.raises(DataError, match=r"training data: the model has 3 classes, so labels must be 0\.\.2, got 7"):
        ck.Train(epochs=1)(nn.Linear(4, 3), ck.Task(train=[(x, y)], val=[(x, y)]))


def test_a_batch_of_another_shape() -> None:
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    task = ck.Task(train=[(x, y), (torch.randn(8, 5), y)], val=[(torch.randn(8, 5), y)])
    with pytest.raises(
        TrainingError, match=r"epoch 1, batch 2: the loss cannot be computed \(tensors of shape \[\(8, 5\), \(8,\)\]\)"
    ):
        ck.Train(epochs=1)(nn.Linear(4, 3), task)
    with pytest.raises(DataError, match=r"validation data: the model does not run on inputs of shape \[\(8, 5\)\]"):
        ck.evaluate(nn.Linear(4, 3), task)


def test_a_loader_that_changes_its_length() -> None:
    class Liar(list):
        def __len__(self):
            return 5

    x, y = torch.randn(8, 4), torch.arange(8) % 3
    with pytest.raises(DataError, match="has length 5 and gave 2 batches"):
        ck.Train(epochs=1)(nn.Linear(4, 3), ck.Task(train=Liar([(x, y)] * 2), val=[(x, y)]))


def test_bad_training_settings() -> None:
    for settings in (
        {"epochs": 0},
        {"epochs": 1.5},
        {"epochs": 1, "accumulate": 0},
        {"epochs": 1, "clip": -1},
        {"epochs": 1, "optimizer": 3},
    ):
        with pytest.raises(SettingError, match=r"Train\(.*wanted.*got"):
            ck.Train(**settings)
    model = nn.Linear(4, 3).requires_grad_(False)
    with pytest.raises(ModelError, match="nothing can be trained"):
        ck.Train(epochs=1)(model, images_task(ck))


# -- surgery


def test_structure_rebuilds_a_pruned_model() -> None:
    model = build(networks.Depthwise)
    ck.prune.apply_(model, ck.prune.plan_channels(model, image(2), budget=ck.keep(macs=0.6), round_to=4))
    record = json.loads(json.dumps(surgery.structure(model)))
    fresh = networks.Depthwise()
    surgery.restructure_(fresh, record)
    fresh.load_state_dict(model.state_dict())
    x = image(4)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(*x), model.eval()(*x))
    assert fresh.depth[0].groups == model.depth[0].groups
    with pytest.raises(CheckpointError, match="made of another model"):
        surgery.restructure_(networks.Chain(), record)


def test_modes_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    with surgery.mode(model, training=False):
        assert not model[0].training
    assert [m.training for m in model] == [True, False]


def test_names_that_are_not_there() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"a\.b: Linear has no module 'a'"):
        surgery.get_tensor(model, "a.b")
    with pytest.raises(ModelError, match="wait: Linear has no parameter or buffer"):
        surgery.get_tensor(model, "wait")


def test_evaluation_leaves_the_mode() -> None:
    model, task = build(networks.Chain).train(), images_task(ck)
    ck.evaluate(model, task)
    assert model.training
    assert measure.count_macs(model, task.example()) > 0


def test_nan_metric() -> None:
    task = images_task(ck, metric=lambda p, t: float("nan"))
    with pytest.raises(DataError, match="the metric is nan"):
        ck.evaluate(build(networks.Chain), task)
