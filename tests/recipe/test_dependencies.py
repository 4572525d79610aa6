"""What a stage depends on: whatever changes a result makes the stage run again, and nothing else does."""

from __future__ import annotations

import copy
import enum
import functools
import json
import random
import threading
import types
from dataclasses import dataclass
from functools import partial

import checkout
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import compresskit as ck
from compresskit.base.fingerprint import Description, describe_task
from compresskit.recipe.dependencies import Dependencies, describe_model, describe_stages, shows_training

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
BATCHES = list(zip(X.split(16), Y.split(16), strict=True))
SGD = partial(torch.optim.SGD, lr=0.1)
SCALE = 1.0
WEIGHTS = torch.ones(4)


def net(seed=0, **attributes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Linear(8, 4).eval()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def task_with(loss=F.cross_entropy, train=BATCHES, val=BATCHES, **settings):
    return ck.Task(loss=loss, train=train, val=val, **settings)


def keys(task, *stages, model=None):
    """The keys of the stages, and what cannot be described."""
    depends = Dependencies(
        stages=describe_stages(stages or (ck.Train(epochs=1),)),
        task=describe_task(task),
        model=describe_model(model or net(), trained=False),
        settings={},
    )
    (found,) = depends.keys()
    return [found[0]], [found[1]]


class Weighted:
    """A loss with a setting."""

    factor = 1.0

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, predictions, target):
        return self.scale * self.factor * F.cross_entropy(predictions, target)

    def method(self, predictions, target):
        return self(predictions, target)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, predictions, target):
        return self.scale * F.cross_entropy(predictions, target)


@dataclass
class DataclassLoss:
    scale: float

    def __call__(self, predictions, target):
        return self.scale * F.cross_entropy(predictions, target)


class Reduction(enum.Enum):
    ONE = 1
    TWO = 2


class Buffered(nn.Module):
    def __init__(self, value, *, persistent=True):
        super().__init__()
        self.register_buffer("scale", torch.tensor(value), persistent=persistent)

    def forward(self, predictions, target):
        return self.scale * F.cross_entropy(predictions, target)


def closure(value):
    return lambda predictions, target: F.cross_entropy(predictions, target) * (value is not None)


def default(value):
    def loss(predictions, target, scale=value):
        return scale * F.cross_entropy(predictions, target)

    return loss


def keyword_default(value):
    def loss(predictions, target, *, scale=value):
        return scale * F.cross_entropy(predictions, target)

    return loss


def undecorated(value):
    def loss(predictions, target):
        return value * F.cross_entropy(predictions, target)

    return loss


def wrapped(value):
    inside = undecorated(value)

    @functools.wraps(inside)
    def outside(*args):
        return inside(*args)

    return outside


def reading(**scope):
    """A function that reads global values."""
    code = compile("def loss(p, t):\n    return helper(p, t) * SCALE", "user", "exec")
    scope = {"__name__": "user", "SCALE": 1.0, "helper": F.cross_entropy} | scope
    types.FunctionType(code, scope)()
    return scope["loss"]


def loss_of_type(**members):
    return type("Loss", (Weighted,), members)(1.0)


def loss_of_class_of(method):
    """A function that calls a method of the metaclass of a class."""
    settings = type("Meta", (type,), {"scaled": staticmethod(method)})("Settings", (), {})
    return lambda predictions, target: settings.scaled(predictions, target)


A, B = torch.ones(4), torch.tensor([1.0, 1, 1, 2])
LOSSES = {
    "attribute of a module": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.5)),
    "text attribute of a module": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")),
    "class weights of a module": (nn.CrossEntropyLoss(weight=A), nn.CrossEntropyLoss(weight=B)),
    "buffer of a module": (Buffered(1.0), Buffered(2.0)),
    "buffer that is not saved": (Buffered(1.0, persistent=False), Buffered(2.0, persistent=False)),
    "object that is called": (Weighted(1.0), Weighted(2.0)),
    "object with slots": (Slotted(1.0), Slotted(2.0)),
    "dataclass": (DataclassLoss(1.0), DataclassLoss(2.0)),
    "bound method": (Weighted(1.0).method, Weighted(2.0).method),
    "attribute of a class": (loss_of_type(), loss_of_type(factor=2.0)),
    "method of a class": (loss_of_type(__call__=undecorated(1.0)), loss_of_type(__call__=undecorated(2.0))),
    "method of a metaclass": (loss_of_class_of(undecorated(1.0)), loss_of_class_of(undecorated(2.0))),
    "number in a partial": (partial(F.cross_entropy, label_smoothing=0.0), partial(F.cross_entropy, label_smoothing=0.1)),
    "tensor in a partial": (partial(F.cross_entropy, weight=A), partial(F.cross_entropy, weight=B)),
    "argument of a partial": (partial(Weighted.method, Weighted(1.0)), partial(Weighted.method, Weighted(2.0))),
    "closure over a number": (undecorated(1.0), undecorated(2.0)),
    "closure over a text": (closure("a"), closure("b")),
    "closure over a tensor": (closure(A), closure(B)),
    "closure over an array": (closure(A.numpy()), closure(B.numpy())),
    "closure over a list": (closure([1, 2]), closure([1, 3])),
    "closure over tensors in a list": (closure([A]), closure([B])),
    "closure over a set": (closure({1, 2}), closure({1, 3})),
    "closure over a dict": (closure({"a": 1}), closure({"a": 2})),
    "closure over keys": (closure({nn.Linear: 1}), closure({nn.Conv2d: 1})),
    "closure over a namespace": (closure(types.SimpleNamespace(a=1)), closure(types.SimpleNamespace(a=2))),
    "closure over a function": (closure(lambda x: x), closure(lambda x: x + 1)),
    "closure over a partial": (closure(partial(max, 1)), closure(partial(max, 2))),
    "closure over a member": (closure(Reduction.ONE), closure(Reduction.TWO)),
    "closure over bytes": (closure(b"a"), closure(b"b")),
    "default": (default(1.0), default(2.0)),
    "tensor as default": (default(A), default(B)),
    "keyword default": (keyword_default(1.0), keyword_default(2.0)),
    "attribute of a function": (undecorated(1.0), (lambda f: setattr(f, "scale", 2.0) or f)(undecorated(1.0))),
    "under torch.no_grad": (torch.no_grad()(undecorated(1.0)), torch.no_grad()(undecorated(2.0))),
    "under functools.wraps": (wrapped(1.0), wrapped(2.0)),
    "under lru_cache": (functools.lru_cache(undecorated(1.0)), functools.lru_cache(undecorated(2.0))),
    "global number": (reading(), reading(SCALE=2.0)),
    "global tensor": (reading(SCALE=A), reading(SCALE=B)),
    "global function": (reading(helper=undecorated(1.0)), reading(helper=undecorated(2.0))),
    "body": (lambda p, t: F.cross_entropy(p, t), lambda p, t: F.cross_entropy(p, t) * 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSES)
def test_another_loss_is_noticed(kind) -> None:
    one, other = (keys(task_with(loss)) for loss in LOSSES[kind])
    assert one[1] == other[1] == [()]
    assert one[0] != other[0]
    assert keys(task_with(LOSSES[kind][0]))[0] == one[0]


def imitating(teacher):
    return [ck.Train(epochs=1, objective=ck.imitate(teacher))]


def cached(folder, seed):
    return ck.distill.cache(net(seed), task_with(), folder)


def pseudo(data):
    return [ck.Train(epochs=1, objective=ck.distill.pseudo_label(net(), unlabelled=data))]


def doubled(inputs):
    return (2 * inputs[0],)


STAGES = {
    "rate in a tensor": [[ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=torch.tensor(r)))] for r in (0.1, 0.2)],
    "rate in a numpy number": [[ck.Train(epochs=1, optimizer=partial(torch.optim.SGD, lr=np.float32(r)))] for r in (0.1, 0.2)],
    "schedule": [[ck.Train(epochs=1, schedule=ck.lr.Function(lambda done, r=r: r))] for r in (0.1, 0.2)],
    "schedule with a setting": [[ck.Train(epochs=1, schedule=ck.lr.Function(partial(pow, r)))] for r in (0.1, 0.2)],
    "weights of a teacher": [imitating(net(seed)) for seed in (0, 1)],
    "attribute of a teacher": [imitating(net(gain=g)) for g in (1.0, 2.0)],
    "inputs of a teacher": [imitating(ck.distill.Teacher(net(), inputs=f)) for f in (None, doubled)],
    "teacher of a Distill": [[ck.Distill(epochs=1, teacher=net(seed))] for seed in (0, 1)],
    "unlabelled batches": [pseudo([X]), pseudo([X + 1])],
    "unlabelled loader": [pseudo(DataLoader(data, batch_size=16)) for data in (X, X + 1)],
}


@pytest.mark.parametrize("kind", STAGES)
def test_another_setting_of_a_stage_is_noticed(kind) -> None:
    one, other = (keys(task_with(), *stages) for stages in STAGES[kind])
    assert one[1] == other[1] == [()]
    assert one[0] != other[0]
    assert keys(task_with(), *STAGES[kind][0])[0] == one[0]


def test_another_cache_of_a_teacher_is_noticed(tmp_path) -> None:
    one, other = (keys(task_with(), *imitating(cached(tmp_path / str(seed), seed)))[0] for seed in (0, 1))
    assert one != other
    assert keys(task_with(), *imitating(cached(tmp_path / "0", 0)))[0] == one


def loader(x=X, y=Y, **settings):
    return DataLoader(TensorDataset(x, y), **{"batch_size": 16, "shuffle": True} | settings)


class Metric:
    """A running metric with a setting."""

    def __init__(self, factor):
        self.factor, self.seen = factor, 0

    def update(self, predictions, target):
        self.seen += len(target)

    def compute(self):
        return self.factor * self.seen

    def reset(self):
        self.seen = 0


TASKS = {
    "target": [{"target": name} for name in ("labels", "z")],
    "metric": [{"metric": partial(F.mse_loss, reduction=r)} for r in ("mean", "sum")],
    "running metric": [{"metric": Metric(factor)} for factor in (1, 2)],
    "direction": [{"metric": F.mse_loss, "higher_is_better": higher} for higher in (True, False)],
    "predictions": [{"predict": f} for f in (lambda o: o, lambda o: o * 2)],
    "reference": [{"reference": net(seed)} for seed in (0, 1)],
    "inputs": [{"train": list(zip(x.split(16), Y.split(16), strict=True))} for x in (X, X + 1)],
    "labels": [{"train": list(zip(X.split(16), y.split(16), strict=True))} for y in (Y, (Y + 1) % 4)],
    "last training batch": [{"train": [*BATCHES[:3], (BATCHES[3][0] + i, BATCHES[3][1])]} for i in (0, 1)],
    "last validation batch": [{"val": [*BATCHES[:3], (BATCHES[3][0], (BATCHES[3][1] + i) % 4)]} for i in (0, 1)],
    "calibration": [{"calibration": [(X + i, Y)]} for i in (0, 1)],
    "inputs of a data set": [{"train": loader(x)} for x in (X, X + 1)],
    "labels of a data set": [{"train": loader(y=y)} for y in (Y, (Y + 1) % 4)],
    "shuffle": [{"train": loader(shuffle=s)} for s in (True, False)],
    "batch size": [{"train": loader(batch_size=size)} for size in (32, 33)],
    "drop_last": [{"train": loader(drop_last=d)} for d in (True, False)],
    "collate_fn": [{"train": loader(collate_fn=f)} for f in (None, lambda rows: torch.utils.data.default_collate(rows))],
}


@pytest.mark.parametrize("kind", TASKS)
def test_other_data_or_metrics_are_noticed(kind) -> None:
    one, other = (keys(task_with(**settings)) for settings in TASKS[kind])
    assert one[1] == other[1] == [()]
    assert one[0] != other[0]
    assert keys(task_with(**TASKS[kind][0]))[0] == one[0]


def test_another_attribute_of_the_model_is_noticed() -> None:
    def model(p):
        return nn.Sequential(nn.Dropout(p), nn.Linear(8, 4))

    assert keys(task_with(), model=model(0.1))[0] != keys(task_with(), model=model(0.2))[0]
    assert keys(task_with(), model=net(0).train())[0] == keys(task_with(), model=net(0))[0]  # a recipe sets the mode
    assert keys(task_with(), model=net(0))[0] == keys(task_with(), model=net(1))[0]  # it is trained; a warning says it


@pytest.mark.parametrize("trained", [False, True])
def test_what_is_frozen_counts_where_something_is(trained) -> None:
    """A training leaves frozen parameters as they are; `compress` describes its models so, too."""
    free, frozen, half, whole = (nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4))
    for other in (frozen, half, whole):
        other.load_state_dict(free.state_dict())
    frozen[0].requires_grad_(False)
    half[0].bias.requires_grad_(False)
    whole.requires_grad_(False)
    found = [json.dumps(describe_model(model, trained=trained).record) for model in (free, frozen, half, whole)]
    assert len(set(found)) == 4
    frozen[0].requires_grad_(True)
    assert json.dumps(describe_model(frozen, trained=trained).record) == found[0]


@pytest.mark.parametrize("trained", [False, True])
def test_a_part_that_came_in_eval_mode_counts(trained) -> None:
    """BatchNorm that a user froze trains otherwise than one that follows its batches."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    before = describe_model(model, trained=trained).record
    model[1].eval()
    assert describe_model(model, trained=trained).record != before


def test_what_cannot_be_described_of_a_stages_own_task_runs_it_and_all_after_it_again() -> None:
    plain = Description({}, ())
    own = {1: {"train": Description({}, ("own.train",))}}
    parts = Dependencies(stages=(plain,) * 3, task={"val": plain}, model=plain, settings={}, own=own)
    first, second = parts.keys(), parts.keys()
    assert [a[0] == b[0] for a, b in zip(first, second, strict=True)] == [True, False, False]
    assert [unknown for _, unknown in first] == [(), ("own.train",), ("own.train",)]


def test_frozen_layers_of_a_student_count_and_of_a_teacher_do_not() -> None:
    def records():
        stages = ck.Distill(student=model, epochs=1), *imitating(ck.distill.Teacher(model)), ck.Distill(teacher=whole, epochs=1)
        return [stage.record for stage in describe_stages(stages)]

    model, whole = (nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)).eval() for _ in range(2))
    before = records()
    model[0].requires_grad_(False)
    whole.requires_grad_(False)
    assert [one == other for one, other in zip(before, records(), strict=True)] == [False, True, True]


class Noisy(Dataset):
    """Draws from every generator that a data set may draw from, and counts."""

    def __init__(self):
        self.own, self.reads = np.random.default_rng(3), 0

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.reads += 1
        return X[i] + torch.rand(8) + np.random.rand() + random.random() + self.own.random(), Y[i]  # noqa: NPY002


def test_describing_moves_no_generator_and_reads_the_same_twice() -> None:
    data = DataLoader(Noisy(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(5))
    task = task_with(train=data)

    def state():
        own = (data.dataset.own.bit_generator.state, data.dataset.reads, data.generator.get_state().tolist())
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), own  # noqa: NPY002

    before, one = state(), keys(task)
    assert state() == before
    assert one[1] == [()]
    torch.rand(1), random.random(), data.dataset.own.random()
    assert keys(task) == one


def test_a_finished_stage_is_reused_with_generators_and_a_metric_that_were_used(tmp_path) -> None:
    task, recipe = task_with(train=loader(), metric=Metric(1.0)), ck.Recipe(ck.Train(epochs=1), export="last")
    recipe.run(net(), task, tmp_path / "run")
    assert [stage.action for stage in recipe.plan(net(), task, tmp_path / "run").stages] == ["reuse"]


def test_what_cannot_be_described_runs_again_and_is_named(tmp_path, caplog) -> None:
    task = task_with(loss=closure(iter_of := (i for i in range(3))))
    recipe = ck.Recipe(ck.Train(epochs=1), export="last")
    recipe.run(net(), task, tmp_path / "run")
    why = "whether these are the same as before cannot be told: Task(loss=...).value (generator)"
    assert [(stage.action, stage.why) for stage in recipe.plan(net(), task, tmp_path / "run").stages] == [("run", why)]
    recipe.run(net(), task, tmp_path / "run")
    assert f"1-train runs again: {why}" in caplog.text
    assert next(iter_of) == 0
    assert keys(task_with(loss=closure(threading.Lock())))[1] == [()]  # a lock has no value


def test_the_plan_names_what_changed(tmp_path) -> None:
    recipe = ck.Recipe(ck.Train(epochs=1), export="last")
    recipe.run(net(), task_with(), tmp_path / "run")
    changed = task_with(nn.CrossEntropyLoss(), train=loader())
    assert recipe.plan(net(), changed, tmp_path / "run").stages[0].why == "the task has changed: loss, train"


def test_a_corrected_direction_of_the_metric_runs_again_and_is_named(tmp_path) -> None:
    recipe = ck.Recipe(ck.Train(epochs=6, optimizer=SGD, keep_best=True), seed=0, export="last")
    wrong, right = (task_with(metric=F.cross_entropy, higher_is_better=higher) for higher in (True, False))
    worst = recipe.run(net(), wrong, tmp_path / "run").rows[-1].metric
    why = "the task has changed: higher_is_better"
    assert [(stage.action, stage.why) for stage in recipe.plan(net(), right, tmp_path / "run").stages] == [("run", why)]
    best = recipe.run(net(), right, tmp_path / "run").rows[-1].metric
    assert best == recipe.run(net(), right, tmp_path / "new").rows[-1].metric < worst


def test_a_direction_that_was_taken_for_granted_may_be_said_later() -> None:
    one, other = (keys(task_with(metric=F.mse_loss, higher_is_better=higher)) for higher in (None, True))
    assert one == other


def trained(model: nn.Module) -> nn.Module:
    """The model after two steps on noise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 8)).pow(2).mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, lambda n: nn.GroupNorm(2, n)], ids=["batch", "layer", "group"])
def test_a_model_shows_that_it_was_trained(norm) -> None:
    new = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 4))
    assert not shows_training(new)
    assert shows_training(trained(new))


def test_biases_beyond_what_torch_draws_show_a_training() -> None:
    for new in (nn.Linear(64, 8), nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3), nn.Conv2d(8, 8, 3, groups=8), nn.LSTM(4, 8)):
        assert not shows_training(new)
    with torch.no_grad():
        (far := nn.Linear(64, 8)).bias[3] = 0.2
        nn.init.zeros_((drawn := nn.Linear(64, 8)).bias)
        nn.init.xavier_normal_(drawn.weight)
    assert shows_training(far)
    assert not shows_training(drawn)


def test_other_weights_that_were_trained_before_run_again(tmp_path) -> None:
    """A training comes first: of new weights it keeps what is done, of trained ones its stages depend on them."""
    recipe = ck.Recipe(ck.Train(steps=1, optimizer=partial(torch.optim.SGD, lr=1e-6)), export="last")
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    first, second = (trained(copy.deepcopy(model)) for _ in range(2))
    recipe.run(first, task_with(), tmp_path / "run")
    assert recipe.plan(first, task_with(), tmp_path / "run").stages[0].action == "reuse"
    (planned,) = recipe.plan(second, task_with(), tmp_path / "run").stages
    assert (planned.action, planned.why) == ("run", "interrupted, or the model, or the weights it starts from, have changed")
    result = recipe.run(second, task_with(), tmp_path / "run")  # a warning would be an error
    assert torch.allclose(result.model[0].weight, second[0].weight, atol=1e-4)
    assert not torch.allclose(first[0].weight, second[0].weight, atol=1e-2)


def test_the_plan_says_where_new_weights_are_others(tmp_path) -> None:
    recipe = ck.Recipe(ck.Train(epochs=1), export="last")
    recipe.run(net(), task_with(), tmp_path / "run")
    (planned,) = recipe.plan(net(seed=1), task_with(), tmp_path / "run").stages
    assert (planned.action, planned.why) == ("reuse", "done, from other new weights")


def main() -> None:
    found = {kind: keys(task_with(losses[0])) for kind, losses in LOSSES.items()}
    found |= {kind: keys(task_with(), *stages[0]) for kind, stages in STAGES.items()}
    found |= {kind: keys(task_with(**settings[0])) for kind, settings in TASKS.items()}
    print(json.dumps(found))


def test_descriptions_are_the_same_in_every_process() -> None:
    runs = [checkout.python(__file__, extra={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert json.loads(runs[0]) == json.loads(runs[1])
    assert len(json.loads(runs[0])) == len(LOSSES) + len(STAGES) + len(TASKS)


if __name__ == "__main__":
    main()
