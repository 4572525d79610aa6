"""What an objective may be given besides terms: progress, samples' numbers, mixed inputs, fewer classes, unlabelled data."""

from __future__ import annotations

import copy
import re
from functools import partial

import checkout
import networks
import oracles
import pytest
import torch
import torch.nn.functional as F
from networks import build, image, images_task
from torch import nn
from torch.utils.data import TensorDataset

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.distill import Term
from compresskit.distill.objectives.terms import ADAPTERS

ADAM = partial(torch.optim.Adam, lr=3e-3)


class Shapes(nn.Module):
    """Three depths of other widths and sizes, and names to tap."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two, self.three = (
            networks.conv(3, width),
            networks.conv(width, width, s=2),
            networks.conv(width, 2 * width, s=2),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(x))).mean((2, 3)))


DEPTHS = ("one", "two", "three")


# -- weights that change


def test_warm_up() -> None:
    assert [kd.linear_warmup(d, over=0.2, to=3.0) for d in (0.0, 0.1, 0.2, 1.0)] == [0.0, 1.5, 3.0, 3.0]
    assert kd.linear_warmup(0.0, over=0.0) == 1.0


def test_a_weight_follows_the_training() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    terms = [Term(kd.losses.dkd, weight=partial(kd.linear_warmup, over=0.5, to=2.0)), Term(kd.losses.dist)]
    goal = ck.imitate(teacher, terms=terms, weight=lambda done: 1 - done).bind(student, task)
    batch = task.train[0]
    full = goal(student.eval(), batch)  # nobody said how far it is
    assert full["imitate"].item() == 0
    for done, share in ((0.0, 0.0), (0.25, 0.5), (1.0, 1.0)):
        goal.advance(done)
        now = goal(student, batch)
        torch.testing.assert_close(now["dkd"], share * full["dkd"])
        torch.testing.assert_close(now["dist"], full["dist"])
        assert (now["imitate"] > 0) == (done < 1)
    seen = []
    weight = lambda done: seen.append(done) or 1.0  # noqa: E731
    goal = ck.imitate(teacher, terms=[Term(kd.losses.dkd, weight=weight)])
    seen.clear()
    ck.Train(epochs=2, objective=goal, accumulate=2)(student, task)
    assert seen == [0.0, 0.0, 0.25, 0.5, 0.5, 0.75]  # 3 batches an epoch, 2 steps: what is done before each batch


# -- several depths at once


def test_review_is_the_sum_of_its_depths() -> None:
    features = [(torch.randn(4, 6, 8, 8), torch.randn(4, 6, 8, 8)), (torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4))]
    got = kd.losses.reviewkd(*zip(*features, strict=True)).item()
    wanted = oracles.hcl(*features[0], (4, 2, 1)) + oracles.hcl(*features[1], (2, 1))
    assert got == pytest.approx(wanted, rel=1e-5)


def test_fusion_is_a_gated_sum() -> None:
    shallow, deep = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 4, 4)
    teacher = torch.randn(2, 5, 8, 8), torch.randn(2, 7, 2, 2)
    fusions = kd.losses.abf((shallow, deep), teacher, width=3).eval()
    own, other = fusions((shallow, deep))
    assert (own.shape, other.shape) == (teacher[0].shape, teacher[1].shape)
    first, second = fusions.fusions
    y = second.narrow(deep)
    torch.testing.assert_close(other, second.widen(y[:, :, ::2, ::2]))  # nearest
    x, y = first.narrow(shallow), y.repeat_interleave(2, 2).repeat_interleave(2, 3)
    gate = torch.einsum("nchw,kc->nkhw", torch.cat([x, y], 1), first.gate.weight[:, :, 0, 0]) + first.gate.bias.view(1, 2, 1, 1)
    z = 1 / (1 + (-gate).exp())
    torch.testing.assert_close(own, first.widen(x * z[:, :1] + y * z[:, 1:]))


def test_review_teaches_and_leaves_nothing() -> None:
    student, teacher, task = build(partial(Shapes, 8)), build(partial(Shapes, 12)), images_task(ck)
    names = set(student.state_dict())
    term = Term(kd.losses.reviewkd, DEPTHS, weight=partial(kd.linear_warmup, over=0.3), adapt=kd.losses.abf)
    goal = ck.imitate(teacher, terms=[term], weight=0, task_weight=0)
    first = goal.bind(student, task)
    assert list(first(student, task.train[0])) == ["reviewkd:one+two+three"]
    before = first(student, task.train[0])["reviewkd:one+two+three"].item()
    values = []
    watched = Watched(goal, values)
    ck.Train(epochs=12, optimizer=ADAM, objective=watched)(student, task)
    assert values[-1] < 0.7 * before
    assert set(student.state_dict()) == names


class Watched(ck.Objective):
    """An objective that keeps what it was."""

    def __init__(self, goal, values):
        self.goal, self.values = goal, values

    def bind(self, model, task):
        return Watched(self.goal.bind(model, task), self.values)

    def __call__(self, model, batch):
        losses = self.goal(model, batch)
        self.values.append(sum(v.item() for v in losses.values()))
        return losses

    def advance(self, done):
        self.goal.advance(done)

    def close(self):
        self.goal.close()

    def resume_state(self):
        return self.goal.resume_state()

    def resume_from_(self, state):
        self.goal.resume_from_(state)


# -- memory


def indexed_task(**settings):
    plain = images_task(ck)
    x, y = (torch.cat(parts) for parts in zip(*plain.train, strict=True))
    return ck.Task(train=kd.indexed_loader(TensorDataset(x, y), batch_size=32, **settings), val=plain.val), x, y


@pytest.mark.parametrize("workers", [0, 1])
def test_indexed_batches(workers) -> None:
    task, x, y = indexed_task(shuffle=True, num_workers=workers)
    seen = []
    for batch in task.train:
        (inputs,), target = task.split(batch)
        assert torch.equal(inputs, x[batch.indices])
        assert torch.equal(target, y[batch.indices])
        seen.append(batch.indices)
    assert torch.cat(seen).sort().values.tolist() == list(range(96))
    named = kd.indexed_loader([{"x": torch.ones(2), "labels": 1}] * 4, batch_size=2)
    batch = next(iter(named))
    assert set(batch) == {"x", "labels"}
    assert batch.indices.tolist() == [0, 1]


def test_contrast_keeps_a_row_for_each_sample() -> None:
    task, x, _ = indexed_task(shuffle=True)
    student, teacher = build(networks.Chain), build(networks.Residual)
    heads = partial(kd.losses.projection_heads, width=8)
    term = Term(kd.losses.CRDLoss(samples=96, negatives=20, seed=7), "b", "down", adapt=heads, weight=2.0)
    goal = ck.imitate(teacher, terms=[term], weight=0, task_weight=0).bind(student.eval(), task)
    (bound,) = goal.bound_terms
    bank, (adapter,) = bound.loss, goal.adapters.values()
    before = bank.student.clone()
    batch = next(iter(task.train))
    losses = goal(student, batch)
    losses["CRDLoss:b"].backward()
    with torch.no_grad():
        s = nn.functional.normalize(adapter.student_head(student.b(student.a(x[batch.indices])).mean((2, 3))))
        feature = {}
        handle = teacher.down.register_forward_hook(lambda m, a, out: feature.update(out=out))
        teacher(x[batch.indices])
        handle.remove()
        t = nn.functional.normalize(adapter.teacher_head(feature["out"].mean((2, 3))))
    own = kd.losses.MemoryBank(samples=96, width=8, negatives=20, seed=7)
    torch.testing.assert_close(losses["CRDLoss:b"], 2 * own(s, t, batch.indices))
    assert (bank.student != before).any(1).nonzero().flatten().tolist() == sorted(batch.indices.tolist())
    assert all(p.grad.any() for p in adapter.parameters() if p.ndim == 2)
    assert not bank.teacher.requires_grad
    assert goal.bind(student, task).bound_terms[0].loss is not bank
    ck.Train(epochs=1, objective=ck.imitate(teacher, terms=[term]))(student, task)
    assert not hasattr(student, ADAPTERS)


def test_contrast_bad_input() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    goal = ck.imitate(
        teacher, terms=[Term(kd.losses.CRDLoss(samples=96, negatives=4), "b", "down", adapt=kd.losses.projection_heads)]
    )
    with pytest.raises(DataError, match="term CRDLoss:b: its loss must know which samples a batch holds.*distill.indexed_loader"):
        ck.Train(epochs=1, objective=goal)(student, task)
    with pytest.raises(ModelError, match=r"CRDLoss: wanted features \(N, D\) of one width, got .*Term\(adapt=projection_heads\)"):
        ck.imitate(teacher, terms=[Term(kd.losses.CRDLoss(samples=96), "b", "down")]).bind(student, task)
    with pytest.raises(SettingError, match="wanted samples >= 2"):
        kd.losses.CRDLoss(samples=1)
    with pytest.raises(SettingError, match=r"momentum=\.\.\.\): wanted a number in \[0, 1\), got 2"):
        kd.losses.CRDLoss(samples=9, momentum=2)
    with pytest.raises(DataError, match="indexed_loader: wanted a data set with a length .*, got generator"):
        kd.indexed_loader(i for i in range(3))
    with pytest.raises(DataError, match=r"with_indices: wanted a batch \(inputs..., target\) or a dict, got Tensor"):
        kd.with_indices(torch.zeros(2), torch.arange(2))


# -- mixed inputs, fewer classes, other inputs


def test_both_networks_see_one_mixture() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    goal = ck.imitate(teacher, weight=1, task_weight=0, mixup=1.0).bind(student.eval(), task)
    x, _ = batch = task.train[0]
    torch.manual_seed(5)
    got = goal(student, batch)["imitate"]
    torch.manual_seed(5)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    order = torch.randperm(len(x))
    mixed = share * x + (1 - share) * x[order]
    assert 0.01 < share < 0.99
    torch.testing.assert_close(got, kd.losses.soft_targets(student(mixed), teacher(mixed)))
    inputs = kd.mixup({"x": x, "ids": torch.arange(32), "scale": torch.ones(3)})
    assert torch.equal(inputs["ids"], torch.arange(32))
    assert torch.equal(inputs["scale"], torch.ones(3))
    assert not torch.equal(inputs["x"], x)
    ck.Distill(epochs=1, teacher=teacher, weight=1, task_weight=0)(student, task)
    with pytest.raises(DataError, match="mixup: no floating-point inputs, got .'torch.int64'.; ids cannot mix"):
        kd.mixup((torch.arange(4),))


class Padded(nn.Module):
    """A model whose vocabulary is padded."""

    def __init__(self, extra):
        super().__init__()
        self.inner, self.extra = build(networks.Chain), extra

    def forward(self, x):
        return nn.functional.pad(self.inner(x), (0, self.extra), value=3.0)


def test_padded_vocabularies_are_cut_on_request(tmp_path) -> None:
    student, teacher, task = Padded(2).eval(), Padded(6).eval(), images_task(ck)
    x, y = batch = task.train[0]
    goal = ck.imitate(teacher, classes=10, weight=1, terms=[Term(kd.losses.dkd)]).bind(student, task)
    losses = goal(student, batch)
    s, t = student(x)[:, :10], teacher(x)[:, :10]
    torch.testing.assert_close(losses["imitate"], kd.losses.soft_targets(s, t))
    torch.testing.assert_close(losses["dkd"], kd.losses.dkd(s, t, y))
    torch.testing.assert_close(losses["task"], 0.1 * nn.functional.cross_entropy(student(x), y))
    with pytest.raises(ModelError, match=r"teacher Padded gives predictions \(32, 16\), the student Padded \(32, 12\).*classes="):
        ck.imitate(teacher).bind(student, task)
    with pytest.raises(ModelError, match=r"classes=13\): Padded predicts 12 classes and the teacher Padded 16; .*at most 12"):
        ck.imitate(teacher, classes=13).bind(student, task)
    cached = kd.cache(teacher, task, tmp_path / "c", dtype=torch.float32)
    again = ck.imitate(cached, classes=10, weight=1).bind(student, task)(student, batch)["imitate"]
    torch.testing.assert_close(again, losses["imitate"])


def test_a_teacher_may_be_fed_otherwise() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    x, _ = batch = task.train[0]
    larger = kd.Teacher(teacher, inputs=lambda inputs: (nn.functional.interpolate(inputs[0], scale_factor=2),))
    goal = ck.imitate(larger, weight=1, task_weight=0).bind(student.eval(), task)
    wanted = kd.losses.soft_targets(student(x), teacher(x.repeat_interleave(2, 2).repeat_interleave(2, 3)))
    torch.testing.assert_close(goal(student, batch)["imitate"], wanted)


def test_bad_settings() -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match=r"Term\(weight=\.\.\.\): wanted a number >= 0, got -0.5 from its function"):
        Term(kd.losses.hint, weight=lambda done: -done)
    with pytest.raises(SettingError, match=r"imitate\(weight=\.\.\.\): wanted a number >= 0, got x from its function"):
        ck.imitate(weight=lambda done: "x")
    with pytest.raises(SettingError, match=r"imitate\(classes=\.\.\.\): wanted a whole number >= 2, got 1"):
        ck.imitate(classes=1)
    with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): wanted a number >= 0, got -1"):
        ck.imitate(mixup=-1)
    for settings in (dict(), dict(task_weight=0, loss=kd.losses.dkd), dict(task_weight=0, terms=[Term(kd.losses.dkd)])):
        with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): mixed inputs have no label; set task_weight=0"):
            ck.imitate(mixup=1.0, **settings)
    with pytest.raises(ModelError, match=r"abf: wanted several features \(N, C, H, W\)"):
        ck.imitate(teacher, terms=[Term(kd.losses.reviewkd, ("head",), adapt=kd.losses.abf)]).bind(student, task)
    with pytest.raises(DataError, match="reviewkd: wanted as many features of the student as of the teacher, got 1, 2"):
        kd.losses.reviewkd([torch.zeros(1, 1, 2, 2)], [torch.zeros(1, 1, 2, 2)] * 2)


def test_one_channel_has_no_soft_targets() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 1))
    x = image(8)[0]
    task = ck.Task(train=[(x, torch.rand(8, 1))], val=[(x, torch.rand(8, 1))], loss=F.mse_loss, metric=F.mse_loss)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(768, 1)).eval()
    with pytest.raises(ModelError, match="gives one channel, of which a softmax says nothing"):
        ck.Distill(epochs=1, teacher=teacher)(model, task)
    ck.Train(epochs=1, objective=ck.imitate(teacher, loss=F.mse_loss))(model, task)


def test_mixing_and_caches(tmp_path) -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    cached = kd.cache(teacher, task, tmp_path / "c")
    with pytest.raises(SettingError, match=r"imitate\(mixup=\.\.\.\): a cache has no predictions of mixed inputs"):
        ck.imitate(cached, mixup=1.0, task_weight=0).bind(student, task)
    with pytest.raises(SettingError, match=r"pseudo_label\(\): a cache has no predictions of the unlabelled data"):
        kd.pseudo_label(cached, [torch.zeros(1)]).bind(student, task)


# -- unlabelled data


def test_labelled_and_unlabelled_batches_go_together() -> None:
    student, teacher, task = build(networks.Chain).eval(), build(networks.Residual), images_task(ck)
    more = [torch.randn(8, 3, 16, 16), (torch.randn(6, 3, 16, 16),)]
    threshold = teacher(torch.cat([more[0], more[1][0]])).softmax(1).amax(1).median().item()
    goal = kd.pseudo_label(teacher, more, threshold=threshold, weight=0.5, task_weight=2.0).bind(student, task)
    x, y = batch = task.train[0]
    for inputs in (more[0], more[1][0], more[0]):  # it starts again
        losses = goal(student, batch)
        torch.testing.assert_close(losses["task"], 2 * nn.functional.cross_entropy(student(x), y))
        p = teacher(inputs).softmax(1).amax(1)
        sure = p >= threshold
        assert sure.sum() > 0
        labels = teacher(inputs).argmax(1)[sure]
        torch.testing.assert_close(losses["pseudo"], 0.5 * nn.functional.cross_entropy(student(inputs)[sure], labels))


def test_unlabelled_data_helps() -> None:
    task = images_task(ck, classes=4, samples=256)
    teacher = ck.Train(epochs=12, optimizer=ADAM)(build(networks.Residual), task)
    x = [x for x, _ in task.train]
    labelled = [(x, y // 2 * 2) for x, y in task.train]  # labels that say only half
    few = ck.Task(train=labelled, val=task.val)
    scores = []
    settings = dict(weight=2.0, task_weight=0.5)
    for goal in (
        None,
        *(kd.pseudo_label(teacher, x, **more, **settings) for more in (dict(threshold=0.6), dict(loss=kd.losses.soft_targets))),
    ):
        torch.manual_seed(0)
        student = ck.Train(epochs=12, optimizer=ADAM, objective=goal)(networks.Chain(), few)
        scores.append(ck.evaluate(student, task))
    assert min(scores[1:]) > scores[0] + 0.2


def test_pseudo_label_bad_input() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    with pytest.raises(SettingError, match="pseudo_label\\(\\): there is no teacher"):
        kd.pseudo_label(None, [torch.zeros(1)]).bind(student, task)
    for bad in (iter([1]), torch.zeros(2), 3):
        with pytest.raises(SettingError, match=r"unlabelled=\.\.\.\): wanted a loader of batches that can be read many times"):
            kd.pseudo_label(teacher, bad)
    with pytest.raises(SettingError, match=r"pseudo_label\(threshold=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        kd.pseudo_label(teacher, [1], threshold=1)
    with pytest.raises(SettingError, match=r"pseudo_label\(weight=\.\.\.\): wanted a positive number, got 0"):
        kd.pseudo_label(teacher, [1], weight=0)
    with pytest.raises(SettingError, match=r"pseudo_label\(task_weight=\.\.\.\): wanted a number >= 0, got -1"):
        kd.pseudo_label(teacher, [1], task_weight=-1)
    with pytest.raises(DataError, match=r"pseudo_label\(unlabelled=\.\.\.\): the loader is empty"):
        kd.pseudo_label(teacher, []).bind(student, task)
    with pytest.raises(DataError, match=r"wanted batches of inputs, a tensor, a tuple or a dict, got str"):
        kd.pseudo_label(teacher, ["text"]).bind(student, task)
    other = build(networks.Chain)
    other.head = nn.Linear(32, 7)
    with pytest.raises(ModelError, match=r"the teacher Residual gives predictions \(2, 10\), the student Chain \(2, 7\)"):
        kd.pseudo_label(teacher, [torch.zeros(2, 3, 16, 16)]).bind(other, task)


# -- the model's own last layers


def test_the_deepest_layer_teaches_the_others() -> None:
    student, task = build(partial(Shapes, 8)), images_task(ck)
    names = set(student.state_dict())
    goal = kd.self_distill("one", "t*", temperature=2.0, weight=0.4).bind(student, task)
    x, y = batch = task.train[0]
    losses = goal(student.eval(), batch)
    z, feature = student(x), student.one(x)
    torch.testing.assert_close(losses["task"], nn.functional.cross_entropy(z, y))
    own = feature.mean((2, 3)) @ goal.heads["one"].linear.weight.T + goal.heads["one"].linear.bias
    torch.testing.assert_close(losses["task:one"], 0.6 * nn.functional.cross_entropy(own, y))
    assert losses["imitate:one"].item() == pytest.approx(0.4 * oracles.soft_targets(own.detach(), z.detach(), 2.0), rel=1e-4)
    assert list(goal.heads) == ["one", "two", "three"]
    student.zero_grad()
    losses["imitate:one"].backward()
    assert student.head.weight.grad is None  # the teacher's side takes no gradient
    assert student.one[0].weight.grad.any()
    ck.Train(epochs=1, objective=kd.self_distill("one"), precision=ck.mixed.MASTER_BF16)(student, task)
    assert set(student.state_dict()) == names


def test_self_distill_bad_input() -> None:
    student, task = build(partial(Shapes, 8)), images_task(ck)
    with pytest.raises(SettingError, match=r"self_distill\(\): wanted the names of at least one module"):
        kd.self_distill()
    with pytest.raises(SettingError, match=r"self_distill\(weight=\.\.\.\): wanted a number in \(0, 1\], got 0"):
        kd.self_distill("one", weight=0)
    with pytest.raises(SettingError, match=r"self_distill\(temperature=\.\.\.\): wanted a positive number, got 0"):
        kd.self_distill("one", temperature=0)
    with pytest.raises(SettingError, match=r"self_distill\(head=\.\.\.\): wanted a function, got int"):
        kd.self_distill("one", head=3)
    with pytest.raises(ModelError, match=r"self_distill: the head of one gives \(32, 8, 16, 16\), the model \(32, 10\)"):
        kd.self_distill("one", head=lambda f, z: nn.Identity()).bind(student, task)
    with pytest.raises(ModelError, match="tap 'for': Shapes has no such module"):
        kd.self_distill("for").bind(student, task)
    with pytest.raises(ModelError, match=r"no pooled head turns features \(4, 2\) into predictions \(4, 2, 3\)"):
        kd.pooled_head(torch.zeros(4, 2), torch.zeros(4, 2, 3))
    assert not hasattr(student, ADAPTERS)


# -- copies and compilers


@pytest.mark.slow
@pytest.mark.skipif(not ck.mixed.step.compiled.has_compiler(torch.device("cpu")), reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own machinery warns of torch's other parts
def test_a_compiled_teacher_says_the_same() -> None:
    model, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    teacher = kd.Teacher(model, compiled=True)
    inputs, _ = task.split(task.train[0])
    torch.testing.assert_close(teacher.predictions(inputs, task), model(*inputs).detach(), rtol=1e-4, atol=1e-4)
    assert set(teacher.state_dict()) == {f"members.0.{name}" for name in model.state_dict()}
    ck.Distill(epochs=1, teacher=teacher)(student, task)


def test_a_compiled_teacher_has_no_taps() -> None:
    model, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(SettingError, match="this teacher has no modules to tap, only predictions"):
        ck.imitate(kd.Teacher(model, compiled=True), terms=[Term(kd.losses.hint, "b")]).bind(student, task)


def test_nothing_of_a_teacher_is_in_a_student(tmp_path) -> None:
    task, _, _ = indexed_task()
    student, teacher = build(partial(Shapes, 8)), build(partial(Shapes, 12))
    names, before = set(student.state_dict()), copy.deepcopy(teacher.state_dict())
    terms = [
        Term(kd.losses.hint, "two", adapt=kd.project),
        Term(kd.losses.reviewkd, DEPTHS, adapt=kd.losses.abf, weight=kd.linear_warmup),
        Term(kd.losses.CRDLoss(samples=96, negatives=8), "three", adapt=kd.losses.projection_heads),
        Term(kd.losses.rkd_angle, "head:in"),
    ]
    ck.Train(epochs=2, objective=ck.imitate(teacher, terms=terms), precision=ck.mixed.MASTER_BF16)(student, task)
    assert set(student.state_dict()) == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [*student.modules(), *teacher.modules()])
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
    assert all(torch.isfinite(p).all() for p in student.parameters())


def test_the_page_names_every_public_function_that_users_write() -> None:
    page = (checkout.ROOT / "docs" / "distillation.md").read_text()
    helpers = {
        "DistillLoss",
        "Cached",
        "MemoryBank",
        "find_taps",
        "tapped",
        "pooled_head",
        "with_indices",
        "indexed_loader",
        "mixup",
    }
    assert [name for name in (*kd.__all__, *kd.losses.__all__) if name not in helpers and name not in page] == []
    for name in re.findall(r"kd\.(\w+)", page):
        assert hasattr(kd, name)
    for name in re.findall(r"kd\.losses\.(\w+)", page):
        assert hasattr(kd.losses, name)
