"""Ways of training: generations, assistants, pseudo-labels, and students that start from their teacher's layers."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError


class Recorded(nn.Module):
    """A student that keeps the order in which students were made."""

    made: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.inner = networks.Chain()
        Recorded.made.append(self)

    def forward(self, x):
        return self.inner(x)


def test_every_generation_is_taught_by_the_one_before(monkeypatch) -> None:
    teachers = []
    plain = kd.Distill.imitation
    monkeypatch.setattr(kd.Distill, "imitation", lambda self, teacher: teachers.append(teacher) or plain(self, teacher))
    Recorded.made.clear()
    first, task = build(networks.Residual), images_task(ck)
    stage = kd.Distill(epochs=1, student=Recorded, generations=3)
    teachers.clear()
    last = stage(first, task)
    assert teachers == [first, *Recorded.made[:2]]
    assert last is Recorded.made[2]


def test_assistants_are_a_chain() -> None:
    task = images_task(ck, classes=4, samples=128)
    train = dict(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))
    teacher = ck.Train(**train)(build(networks.Residual), task)
    assistant = kd.Distill(student=networks.Depthwise, **train)(teacher, task)
    student = kd.Distill(student=networks.Chain, **train)(assistant, task)
    assert isinstance(student, networks.Chain)
    assert ck.evaluate(student, task) > 0.7


def test_pseudo_labels_are_of_what_the_teacher_is_sure_of() -> None:
    student = torch.randn(4, 5)
    teacher = torch.zeros(4, 5)
    teacher[0, 1], teacher[2, 3] = 9.0, 9.0
    got = kd.losses.hard_targets(student, teacher, threshold=0.9)
    torch.testing.assert_close(got, nn.functional.cross_entropy(student[::2], torch.tensor([1, 3])))
    keep = torch.tensor([1, 1, 0, 1])
    got = kd.losses.hard_targets(student, teacher, threshold=0.9, weight=keep)
    torch.testing.assert_close(got, nn.functional.cross_entropy(student[:1], torch.tensor([1])))
    unsure = student.clone().requires_grad_()
    kd.losses.hard_targets(unsure, teacher * 0, threshold=0.9).backward()
    assert not unsure.grad.any()


def test_a_student_learns_from_unlabelled_data() -> None:
    task = images_task(ck, classes=4, samples=128)
    teacher = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))(build(networks.Residual), task)
    unlabelled = ck.Task(train=[(x, torch.full_like(y, -100)) for x, y in task.train], val=task.val)
    student, loss = build(networks.Chain), partial(kd.losses.hard_targets, threshold=0.6)
    before = ck.evaluate(student, task)
    how = ck.Train(epochs=12, optimizer=partial(torch.optim.Adam, lr=3e-3))
    ck.fit_(student, unlabelled, how, objective=ck.imitate(teacher, loss=loss, weight=1.0, task_weight=0.0))
    assert ck.evaluate(student, task) > before + 0.3


def test_layer_map() -> None:
    assert kd.layer_map(4, 12) == {0: 2, 1: 5, 2: 8, 3: 11}
    assert kd.layer_map(3, 3) == {0: 0, 1: 1, 2: 2}
    assert kd.layer_map(2, 5) == {0: 1, 1: 4}
    for pair in ((0, 4), (5, 4)):
        with pytest.raises(SettingError, match=rf"layer_map\(\): wanted 1 <= student's layers <= teacher's, got {pair[0]} and 4"):
            kd.layer_map(*pair)


def test_a_student_starts_from_its_teachers_layers() -> None:
    def transformer(layers):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    teacher, student = transformer(6), transformer(2)
    for p in teacher.parameters():
        nn.init.normal_(p)
    kd.init_from_(student, teacher, {f"layers.{s}": f"layers.{t}" for s, t in kd.layer_map(2, 6).items()})
    for s, t in ((0, 2), (1, 5)):
        for a, b in zip(student.layers[s].parameters(), teacher.layers[t].parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.requires_grad
            assert a.data_ptr() != b.data_ptr()


def test_mutual_losses_are_the_formula() -> None:
    models, task = [build(kind).eval() for kind in (networks.Chain, networks.Residual, networks.Depthwise)], images_task(ck)
    goal = kd.mutual(*models[1:], weight=0.5, temperature=2.0).bind(models[0], task)
    x, y = task.train[0]
    losses = goal(models[0], (x, y))
    assert list(losses) == ["imitate:0", "task:0", "imitate:1", "task:1", "imitate:2", "task:2"]
    z = [m(x) for m in models]
    for i in range(3):
        others = [kd.losses.soft_targets(z[i], z[j], temperature=2.0) for j in range(3) if j != i]
        torch.testing.assert_close(losses[f"imitate:{i}"], 0.5 * sum(others) / 2)
        torch.testing.assert_close(losses[f"task:{i}"], nn.functional.cross_entropy(z[i], y))
    goal.close()


@pytest.mark.parametrize("precision", ["FP32", "MASTER_BF16"])
def test_mutual_learning_trains_all_and_keeps_one(precision) -> None:
    student, peer, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    names, before = set(student.state_dict()), copy.deepcopy(peer.state_dict())
    goal = kd.mutual(peer, task_weight=0.5).bind(student, task)
    assert not any(p is q for p in goal.peers for q in (peer, student))
    run = ck.mixed.prepare(student, torch.optim.SGD(student.parameters(), lr=0.05), getattr(ck.mixed, precision))
    student.train()
    for batch in task.train:
        run.backward(torch.stack(list(goal(run, batch).values())).sum())
        run.step()
    run.finish()
    goal.close()
    assert set(student.state_dict()) == names
    assert all(torch.equal(v, before[k]) for k, v in peer.state_dict().items())
    trained = dict(goal.peers[0].named_parameters())
    assert not any(torch.equal(p, before[name]) for name, p in trained.items() if name.endswith("weight"))
    assert all(p.dtype == torch.float32 for p in [*student.parameters(), *trained.values()])


def test_mutual_bad_input() -> None:
    student, task = build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match=r"mutual\(\): wanted at least one peer"):
        kd.mutual()
    with pytest.raises(SettingError, match=r"mutual\(\): wanted models, got list"):
        kd.mutual([student])
    with pytest.raises(SettingError, match=r"mutual\(weight=\.\.\.\): wanted a positive number, got 0"):
        kd.mutual(student, weight=0)
    with pytest.raises(SettingError, match=r"mutual\(task_weight=\.\.\.\): wanted a number >= 0, got -1"):
        kd.mutual(student, task_weight=-1)
    with pytest.raises(SettingError, match=r"mutual\(temperature=\.\.\.\): wanted a positive number, got 0"):
        kd.mutual(student, temperature=0)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ModelError, match=r"mutual\(\): Chain gives predictions \(32, 7\), Chain \(32, 10\)"):
        kd.mutual(other).bind(student, task)


def test_bad_input() -> None:
    student, teacher = build(networks.Chain), build(networks.Residual)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ModelError, match="tap 'stam': Residual has no such module; the nearest are .'stem'"):
        kd.init_from_(student, teacher, {"a": "stam"})
    with pytest.raises(ModelError, match="init_from_: head and stem are not alike: only one of them has '0.weight'"):
        kd.init_from_(student, teacher, {"a": "stem", "head": "stem"})
    with pytest.raises(
        ModelError, match=r"init_from_: b.0.weight is \(32, 16, 3, 3\), the teacher's inner.0.weight \(16, 16, 3, 3\)"
    ):
        kd.init_from_(student, teacher, {"a": "stem", "b": "inner"})
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())
    with pytest.raises(SettingError, match=r"Distill\(generations=\.\.\.\): wanted a whole number >= 1, got 0"):
        kd.Distill(epochs=1, generations=0)
    with pytest.raises(SettingError, match="each generation starts afresh; pass student="):
        kd.Distill(epochs=1, generations=2)
    with pytest.raises(SettingError, match=r"threshold=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        kd.losses.hard_targets(torch.zeros(1, 2), torch.zeros(1, 2), threshold=1)
