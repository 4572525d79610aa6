"""Terms: names, weights, adapters that are trained and removed."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import WideChain, build, hooked_modules, images_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError
from compresskit.distill import Term
from compresskit.distill.objectives.terms import ADAPTERS


def test_losses_are_named_and_weighted() -> None:
    student, teacher, task = build(networks.Chain), build(WideChain), images_task(ck)
    terms = [
        Term(kd.losses.attention_transfer, "?", weight=3.0),
        Term(kd.losses.rkd_distance, "head:in", weight=2.0),
        Term(partial(kd.losses.dkd, beta=2.0)),
        Term(kd.losses.dkd),
        Term(kd.losses.hint, "a", weight=0.0),
    ]
    goal = ck.imitate(teacher, terms=terms).bind(student, task)
    x, y = batch = task.train[0]
    losses = goal(student.eval(), batch)
    assert list(losses) == [
        "imitate",
        "attention_transfer:a",
        "attention_transfer:b",
        "rkd_distance:head:in",
        "dkd",
        "dkd#2",
        "task",
    ]
    with torch.no_grad():
        s, t = student.a(x), teacher.eval().a(x)
        torch.testing.assert_close(losses["attention_transfer:a"], 3 * kd.losses.attention_transfer(s, t))
        s, t = (m.b(m.a(x)).mean((2, 3)) for m in (student, teacher))
        torch.testing.assert_close(losses["rkd_distance:head:in"], 2 * kd.losses.rkd_distance(s, t))
        torch.testing.assert_close(losses["dkd"], kd.losses.dkd(student(x), teacher(x), y, beta=2.0))
    assert not hooked_modules(student)
    assert not hooked_modules(teacher)
    assert not hasattr(student, ADAPTERS)


def test_terms_alone_and_a_loss_with_targets() -> None:
    student, teacher, task = build(networks.Chain), build(WideChain), images_task(ck)
    only = ck.imitate(teacher, terms=[Term(kd.losses.similarity_preserving, "b")], weight=0, task_weight=0).bind(student, task)
    assert list(only(student, task.train[0])) == ["similarity_preserving:b"]
    goal = ck.imitate(teacher, loss=kd.losses.dkd, weight=1.0, task_weight=0).bind(student, task)
    x, y = task.train[0]
    torch.testing.assert_close(goal(student, (x, y))["imitate"], kd.losses.dkd(student(x), teacher.eval()(x), y))


def test_adapters_are_made_trained_and_dropped() -> None:
    student, teacher, task = build(networks.Chain), build(WideChain), images_task(ck)
    names, before = set(student.state_dict()), copy.deepcopy(teacher.state_dict())
    terms = [Term(kd.losses.hint, "b", weight=1.0, adapt=kd.project), Term(kd.losses.hint, "head:in", adapt=kd.project)]
    stage = ck.Distill(epochs=1, teacher=teacher, terms=terms, optimizer=partial(torch.optim.SGD, lr=0.05))
    goal = stage.imitation(teacher).bind(student, task)
    first, second = goal.adapters["hint:b"], goal.adapters["hint:head:in"]
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Linear)
    assert first.weight.shape == (64, 32, 1, 1)
    assert len(list(getattr(student, ADAPTERS).parameters())) == 4
    assert set(student.state_dict()) > names  # a checkpoint in the middle of training has them too
    again = stage.imitation(teacher).bind(student, task)  # the first ones are replaced, not added to
    assert len(list(getattr(student, ADAPTERS).parameters())) == 4
    start = [p.detach().clone() for p in getattr(student, ADAPTERS).parameters()]
    adapters = [*getattr(student, ADAPTERS).parameters()]
    ck.fit_(student, task, stage, objective=Bound(again))
    assert not any(torch.equal(a, b) for a, b in zip(start, adapters, strict=True))
    again.close()
    assert set(student.state_dict()) == names
    trained = stage(student, task)
    assert trained is student
    assert set(student.state_dict()) == names
    assert not hooked_modules(student)
    assert not hooked_modules(teacher)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())


class Bound:
    """An objective that is bound already."""

    def __init__(self, goal):
        self.goal = goal  # the student carries its adapters, so its own parameters are all there are

    def __call__(self, model, batch):
        return self.goal(model, batch)


@pytest.mark.parametrize("precision", ["FP32", "AMP_BF16", "MASTER_BF16"])
def test_adapters_under_mixed_precision(precision) -> None:
    student, teacher, task = build(networks.Chain), build(WideChain), images_task(ck)
    terms = [
        Term(kd.losses.hint, "b", adapt=kd.project),
        Term(kd.losses.rkd_angle, "head:in"),
        Term(kd.losses.attention_transfer, "a"),
    ]
    stage = ck.Distill(epochs=1, teacher=teacher, terms=terms, precision=getattr(ck.mixed, precision))
    stage(student, task)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in student.parameters())


def test_nothing_stays_after_a_failure() -> None:
    student, teacher = build(networks.Chain), build(WideChain)
    names = set(student.state_dict())
    task = images_task(ck, loss=lambda predictions, target: predictions.sum() * float("nan"))
    with pytest.raises(ck.TrainingError):
        ck.Distill(epochs=1, teacher=teacher, terms=[Term(kd.losses.hint, "b", adapt=kd.project)])(student, task)
    assert set(student.state_dict()) == names
    assert not hooked_modules(student)


def test_a_hint_teaches_features() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Chain), images_task(ck)
    with torch.no_grad():
        for p in student.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    goal = ck.imitate(teacher, terms=[Term(kd.losses.hint, "b", weight=10.0)], weight=0, task_weight=0)
    before = goal.bind(student, task)(student.eval(), task.val[0])["hint:b"].item()
    ck.fit_(student, task, ck.Train(epochs=5, optimizer=partial(torch.optim.Adam, lr=3e-3)), objective=goal)
    assert goal.bind(student, task)(student, task.val[0])["hint:b"].item() < before / 2


def test_terms_that_do_not_fit_the_models_are_refused() -> None:
    student, teacher, task = build(networks.Chain), build(WideChain), images_task(ck)

    def bind(*terms, teacher=teacher):
        return ck.imitate(teacher, terms=terms).bind(student, task)

    with pytest.raises(ModelError, match=r"tap 'c': Chain has no such module; the nearest are \["):
        bind(Term(kd.losses.hint, "c"))
    with pytest.raises(ModelError, match="tap 'down': WideChain has no such module"):
        bind(Term(kd.losses.hint, "b", "down"))
    with pytest.raises(ModelError, match=r"Term\(hint\): 2 taps in the student \(a, \.\.\.\), 1 in the teacher \(b, \.\.\.\)"):
        bind(Term(kd.losses.hint, "?", "b"))
    with pytest.raises(ModelError, match=r"term hint:b, teacher's b: hint: student and teacher must have one shape.*Term\(adapt"):
        bind(Term(kd.losses.hint, "b"))
    with pytest.raises(ModelError, match=r"term hint:b, teacher's head: no adapter turns features .* dimensions differ"):
        bind(Term(kd.losses.hint, "b", "head", adapt=kd.project))
    smaller = build(networks.PaddedShortcut)
    with pytest.raises(ModelError, match=r"its adapter gives \(32, 32, 16, 16\), the teacher has \(32, 32, 8, 8\)"):
        bind(Term(kd.losses.hint, "b", "out", adapt=kd.project), teacher=smaller)
    odd = nn.Sequential(build(networks.Chain))
    odd[0].extra = nn.ReLU()
    odd.eval()
    with pytest.raises(ModelError, match="tap '0.extra': the forward pass does not call that module"):
        bind(Term(kd.losses.hint, "a", "0.extra"), teacher=odd)
    with pytest.raises(SettingError, match=r"Term\(loss=\.\.\.\): wanted a function, got str"):
        Term("kd")
    with pytest.raises(SettingError, match=r"Term\(adapt=\.\.\.\): wanted a function, got bool"):
        Term(kd.losses.hint, "a", adapt=True)
    with pytest.raises(SettingError, match=r"Term\(weight=\.\.\.\): wanted a number >= 0, got -1"):
        Term(kd.losses.hint, "a", weight=-1)
    with pytest.raises(SettingError, match="without a student_tap"):
        Term(kd.losses.hint, teacher_tap="a")
    with pytest.raises(SettingError, match=r"imitate\(terms=\.\.\.\): wanted Terms, got function"):
        ck.imitate(teacher, terms=[kd.losses.hint])
    assert not hasattr(student, ADAPTERS)


@pytest.mark.parametrize(
    "goal",
    [
        lambda net: ck.imitate(net(12).eval(), terms=[kd.Term(kd.losses.hint, "0", adapt=kd.project)]),
        lambda net: kd.mutual(net(6)),
        lambda net: kd.self_distill("0"),
        lambda net: kd.self_distill("0.0"),
    ],
)
def test_adapters_peers_and_heads_of_a_sequential_student_are_trained_and_removed(goal) -> None:
    def net(width):
        return nn.Sequential(nn.Sequential(nn.Linear(8, width), nn.ReLU()), nn.Linear(width, 4))

    torch.manual_seed(0)
    batches = [(torch.randn(16, 8), torch.arange(16) % 4)] * 2
    task, student = ck.Task(train=batches, val=batches), net(8)
    bound = goal(net).bind(student, task)
    assert len(student) == 2
    assert len(list(student.parameters())) > 4
    assert all(value.isfinite() for value in bound(student, batches[0]).values())
    bound.close()
    ck.fit_(student, task, ck.Train(epochs=1, objective=goal(net)))
    assert list(student.state_dict()) == list(net(8).state_dict())
