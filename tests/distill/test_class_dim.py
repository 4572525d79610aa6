"""Which dimension of predictions holds the classes: taggers and language models (N, T, C), regressions of several numbers."""

from __future__ import annotations

import logging
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import ModelError, SettingError
from compresskit.distill.class_dim import ClassDim, check_soft_targets, class_dim
from compresskit.distill.losses import match_predictions, soft_targets
from compresskit.distill.losses.top_k import top_k
from compresskit.search.finals.training import with_objective

N, T, C = 4, 10, 6
LABELS = torch.arange(N * T).reshape(N, T) % C


def of_tags(predictions: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(predictions.transpose(1, 2), target)


def of_next_words(predictions: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(predictions[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def of_one_hot(predictions: Tensor, target: Tensor) -> Tensor:
    return -(target * predictions.log_softmax(-1)).sum(-1).mean()


def of_letters(predictions: Tensor, target: Tensor) -> Tensor:
    """CTC of logarithms of probabilities (N, T, C), and four letters a row."""
    return F.ctc_loss(predictions.transpose(0, 1), target, torch.full((N,), T), torch.full((N,), 4))


def of_quantiles(predictions: Tensor, target: Tensor) -> Tensor:
    """Of three quantiles (N, 3, T)."""
    return (predictions - target[:, None]).abs().mean()


def of_penalized(predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(predictions, target["label"]) + 0.05 * predictions.square().mean()


def of_soft_and_penalized(predictions: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(predictions, target) + 0.2 * predictions.square().mean()


def of_logarithms(predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Of probabilities (N, T, C)."""
    return F.nll_loss(predictions.log().flatten(0, 1), target["label"].flatten())


def of_labels(predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
    return of_tags(predictions, target["label"])


def of_checked(predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Of scores that are at most 0."""
    assert predictions.max() <= 0
    return of_labels(predictions, target)


class Locked:
    """A loss whose owner cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def loss(self, predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(predictions, target["label"])


class Averaged(nn.Module):
    """Counts its calls, in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.lock = 0, threading.Lock()

    def forward(self, predictions: Tensor, target: dict[str, Tensor]) -> Tensor:
        self.count += 1
        self.calls += 1
        return F.cross_entropy(predictions, target["label"])


def tagger(width: int = 3) -> nn.Module:
    return nn.Linear(width, C)  # (N, T, width) -> (N, T, C)


def tag_task(loss=of_tags, **settings) -> ck.Task:
    torch.manual_seed(0)
    data = [(torch.randn(N, T, 3), LABELS)]
    return ck.Task(train=data, val=data, loss=loss, **settings)


def forecasts(horizon: int = 5) -> ck.Task:
    torch.manual_seed(0)
    data = [(torch.randn(8, 3), torch.randn(8, horizon))]
    return ck.Task(train=data, val=data, loss=F.mse_loss, metric=F.mse_loss, higher_is_better=False)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("loss", "predictions", "target", "wanted"),
    [
        (F.cross_entropy, normal(8, C), torch.arange(8) % C, ClassDim(1)),
        (nn.CrossEntropyLoss(), normal(N, C, 8, 8), torch.zeros(N, 8, 8, dtype=torch.long), ClassDim(1)),
        (partial(F.cross_entropy, label_smoothing=0.1), normal(N, C, T), LABELS, ClassDim(1)),
        (F.cross_entropy, normal(N, T, T), LABELS, ClassDim(1)),
        (of_tags, normal(N, T, C), LABELS, ClassDim(-1)),
        (of_tags, normal(N, T, T), LABELS, ClassDim(-1)),  # as many places as classes
        (of_next_words, normal(N, T, C), LABELS, ClassDim(-1)),
        (of_one_hot, normal(N, T, C), F.one_hot(LABELS, C).float(), ClassDim(-1)),
        (of_letters, normal(N, T, C).log_softmax(-1), LABELS[:, :4] % 4 + 1, ClassDim(-1)),
        (of_one_hot, normal(8, C), F.one_hot(torch.arange(8) % C, C).float(), ClassDim(1)),
        (F.mse_loss, normal(8, 5), normal(8, 5), ClassDim(None)),
        (F.l1_loss, normal(N, T, C), normal(N, T, C), ClassDim(None)),
        (F.mse_loss, normal(8), normal(8), ClassDim(None)),
        (F.binary_cross_entropy_with_logits, normal(8, 5), torch.ones(8, 5), ClassDim(None)),
        (of_quantiles, normal(N, 3, T), normal(N, T), ClassDim(None)),
        (F.binary_cross_entropy_with_logits, normal(8, C), F.one_hot(torch.arange(8) % C, C).float(), ClassDim(1)),
        (F.binary_cross_entropy_with_logits, normal(N, T, C), F.one_hot(LABELS, C).float(), ClassDim(-1)),
        (F.binary_cross_entropy_with_logits, normal(8, C), torch.eye(8, C), ClassDim(1, known=False)),  # two of no class
        (F.binary_cross_entropy_with_logits, normal(8, C), torch.arange(8 * C).reshape(8, C) % 2.0, ClassDim(None)),
        (F.binary_cross_entropy_with_logits, normal(8, 1), torch.arange(8).view(8, 1) % 2.0, ClassDim(None)),
        (F.binary_cross_entropy_with_logits, normal(8, 1), torch.ones(8, 1), ClassDim(None)),
        (of_penalized, normal(8, C), {"label": torch.arange(8) % C}, ClassDim(1, known=False)),
        (of_soft_and_penalized, normal(8, C), normal(8, C).softmax(1), ClassDim(1)),
        (of_logarithms, normal(N, T, C).softmax(-1), {"label": LABELS}, ClassDim(-1)),
        (of_checked, -normal(N, T, C).abs(), {"label": LABELS}, ClassDim(-1)),
        (Locked().loss, normal(8, C), {"label": torch.arange(8) % C}, ClassDim(1)),
        (lambda p, y: p["x"], normal(8, 5), [1] * 8, ClassDim(1, known=False)),
        (lambda p, y: p["x"], normal(8, 5), normal(8, 5), ClassDim(1, known=False)),  # a loss that cannot be asked
        (lambda p, y: p["x"], normal(N, T, C), [1] * N, ClassDim(None, known=False)),
    ],
)
def test_the_task_says_where_the_classes_are(loss, predictions, target, wanted) -> None:
    data = [(predictions, target)]
    task = ck.Task(train=data, val=[(predictions,)], loss=loss)
    assert class_dim(task, nn.Identity(), predictions) == wanted


@pytest.mark.parametrize(
    ("loss", "predictions", "wanted"),
    [
        (F.cross_entropy, normal(8, C), ClassDim(1)),
        (F.cross_entropy, normal(N, C, 8, 8), ClassDim(1)),
        (F.cross_entropy, normal(N, T, C), ClassDim(None, known=False)),  # the default loss, which no training reads
        (F.mse_loss, normal(8, 5), ClassDim(None)),
        (F.smooth_l1_loss, normal(N, T, C), ClassDim(None)),
        (nn.CrossEntropyLoss(), normal(N, C, T), ClassDim(1)),  # what the user gave, which the training does not read
        (F.binary_cross_entropy_with_logits, normal(8, C), ClassDim(1, known=False)),
    ],
)
def test_without_labels_the_loss_says_it(loss, predictions, wanted) -> None:
    task = ck.Task(train=[(predictions,)], loss=loss)
    assert class_dim(task, nn.Identity(), predictions, reads_loss=False) == wanted


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss])
@pytest.mark.parametrize("shape", [(8, 2), (8, 16), (8, 128), (8, 768), (8, 4096), (1, 4096), (4, 3, 64, 64), (2, 196, 768)])
def test_wide_regressions_are_of_numbers(loss, shape) -> None:
    predictions = normal(*shape)
    shares = torch.rand(shape, generator=torch.Generator().manual_seed(2))
    data = [(predictions,), *((predictions, y) for y in (0.7 * shares, shares, 1000 * shares, 1000 * normal(*shape)))]
    tasks = [ck.Task(train=[batch], loss=loss) for batch in data]
    assert [class_dim(task, nn.Identity(), predictions) for task in tasks] == [ClassDim(None)] * 5


def test_vocabularies_are_probed_in_fp32() -> None:
    class Doubles(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype == torch.float64:
                self.most = max(self.most, out.numel())
            return out

    task, words = ck.Task(train=[(normal(2, 8, 512), {"label": LABELS[:2, :8]})], loss=of_labels), normal(2, 8, 512)
    with Doubles() as doubles:
        assert class_dim(task, nn.Identity(), words) == ClassDim(-1)
    assert doubles.most <= 512  # the places along one dimension


def test_a_loss_a_model_and_a_loader_are_left_as_they_are() -> None:
    class Counting(nn.Identity):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    class Loader:
        epoch = 0

        def __iter__(self):
            self.epoch += 1
            yield normal(8, C), {"label": torch.arange(8) % C}

    loss, model, loader = Averaged(), Counting(), Loader()
    for given in (loss, loss.forward):  # a method of it, too
        assert class_dim(ck.Task(train=loader, loss=given), model, normal(8, C)) == ClassDim(1)
        assert (loss.count, float(loss.calls), model.calls, loader.epoch) == (0, 0, 0, 0)


def test_random_numbers_of_loaders_stay_as_they_are() -> None:
    data = torch.utils.data.TensorDataset(normal(N, T, C), LABELS)
    own = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=own)
    before = torch.get_rng_state(), own.get_state()
    assert class_dim(ck.Task(train=loader, loss=of_tags), nn.Identity(), normal(N, T, C)) == ClassDim(-1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(own.get_state(), before[1])


@pytest.mark.parametrize("loss", [of_tags, of_next_words])
def test_a_tagger_is_imitated_over_its_classes(loss) -> None:
    task, student, teacher = tag_task(loss), tagger(), tagger().eval()
    x, y = batch = task.train[0]
    goal = ck.imitate(teacher, terms=[kd.Term(kd.losses.dkd)]).bind(student, task)
    losses = goal(student, batch)
    torch.testing.assert_close(losses["imitate"], 0.9 * soft_targets(student(x), teacher(x), dim=-1))
    torch.testing.assert_close(losses["dkd"], kd.losses.dkd(student(x), teacher(x), y, dim=-1))
    said = ck.imitate(teacher, dim=-1, loss=kd.losses.reverse_kl, weight=1).bind(student, task)(student, batch)
    torch.testing.assert_close(said["imitate"], kd.losses.reverse_kl(student(x), teacher(x), dim=-1))
    told = ck.imitate(teacher, loss=partial(soft_targets, dim=1), weight=1).bind(student, task)(student, batch)
    torch.testing.assert_close(told["imitate"], soft_targets(student(x), teacher(x)))


def test_the_first_classes_of_a_tagger_are_compared_and_no_positions() -> None:
    task, student, teacher = tag_task(), tagger(), nn.Linear(3, C + 2).eval()
    x, _ = batch = task.train[0]
    losses = ck.imitate(teacher, classes=C, weight=1).bind(student, task)(student, batch)
    torch.testing.assert_close(losses["imitate"], soft_targets(student(x), teacher(x)[..., :C], dim=-1))
    with pytest.raises(ModelError, match=r"classes=7\): Linear predicts 6 classes and the teacher Linear 8; wanted at most 6"):
        ck.imitate(teacher, classes=7).bind(student, task)
    with pytest.raises(ModelError, match=r"classes=6\): Linear gives predictions .* pass imitate\(dim=...\)"):
        ck.imitate(teacher, classes=C, loss=F.mse_loss).bind(student, numbers_in_place_of_tags())


def numbers_in_place_of_tags() -> ck.Task:
    return ck.Task(train=[(x, normal(N, T, C)) for x, _ in tag_task().train], loss=F.mse_loss)


def test_an_ensemble_of_taggers_has_the_mean_of_the_probabilities_of_classes() -> None:
    task, student, models = tag_task(), tagger(), [tagger().eval(), tagger().eval()]
    x, _ = batch = task.train[0]
    losses = ck.imitate(kd.Teacher(*models), weight=1).bind(student, task)(student, batch)
    mean = torch.stack([model(x).softmax(-1) for model in models]).mean(0).log()
    torch.testing.assert_close(losses["imitate"], soft_targets(student(x), mean, dim=-1))
    matched = ck.imitate(kd.Teacher(*models), loss=match_predictions, weight=1, task_weight=0)
    numbers = numbers_in_place_of_tags()
    outputs = matched.bind(student, numbers)(student, numbers.train[0])["imitate"]
    wanted = torch.stack([model(x) for model in models]).mean(0)
    torch.testing.assert_close(outputs, match_predictions(student(x), wanted, dim=None))


@pytest.mark.parametrize("top", [None, 3])
def test_a_cache_of_a_tagger_keeps_its_classes(top, tmp_path) -> None:
    task, student, teacher = tag_task(), tagger(), tagger().eval()
    x, _ = batch = task.train[0]
    cached = kd.cache(teacher, task, tmp_path / "c", top=top, dtype=torch.float32)
    losses = ck.imitate(cached, weight=1).bind(student, task)(student, batch)
    wanted = soft_targets(student(x), teacher(x), dim=-1)
    if top:
        wanted = kd.losses.top_k_soft_targets(student(x).mT, top_k(teacher(x).mT, top))
    torch.testing.assert_close(losses["imitate"], wanted)
    again = kd.cache(teacher, task, tmp_path / "c", top=top, dtype=torch.float32)
    assert again.dim == 2
    assert kd.cache(teacher, task, tmp_path / "d", dim=1).dim == 1
    with pytest.raises(ModelError, match=r"have their classes in dimension 1, .* cache\(dim=-1\), in another folder"):
        ck.imitate(kd.Cached(tmp_path / "d")).bind(student, task)
    bare = ck.Task(train=[(x,)])
    with pytest.raises(SettingError, match=r"cache\(\): the teacher Linear gives predictions \(4, 10, 6\).* cache\(dim=-1\)"):
        kd.cache(teacher, bare, tmp_path / "e")


def test_soft_targets_of_a_forecast_are_refused_before_the_first_step(tmp_path) -> None:
    task, student, teacher = forecasts(), nn.Linear(3, 5), nn.Linear(3, 5).eval()
    message = (
        r"Linear gives predictions \(\d, 5\), which the task's loss compares as numbers.*pass {}\(loss=.*match_predictions\)"
    )
    with pytest.raises(ModelError, match=r"^imitate\(\): " + message.format("imitate")):
        ck.imitate(teacher).bind(student, task)
    with pytest.raises(ModelError, match=r"^mutual\(\): " + message.format("mutual")):
        kd.mutual(nn.Linear(3, 5)).bind(student, task)
    with pytest.raises(ModelError, match=r"^pseudo_label\(\): " + message.format("pseudo_label")):
        kd.pseudo_label(teacher, [task.train[0][0]]).bind(student, task)
    seen: list = []
    first = ck.Train(epochs=1, on_step=seen.append)
    second = ck.Train(epochs=1, objective=ck.imitate())
    with pytest.raises(ModelError, match=r"^stage 2, Train: imitate\(\): " + message.format("imitate")):
        ck.Recipe(first, second).run(student, task, tmp_path / "a")
    third = ck.Distill(student=nn.Linear(3, 5), epochs=1)
    with pytest.raises(ModelError, match=r"Distill\(\): " + message.format("Distill")):
        ck.Recipe(first, third).run(student, task, tmp_path / "b")
    assert not seen


def test_a_forecast_is_imitated_as_numbers_and_a_constant_is_seen() -> None:
    task, student, teacher = forecasts(), nn.Linear(3, 5), nn.Linear(3, 5).eval()
    x, _ = batch = task.train[0]
    losses = ck.imitate(teacher, loss=match_predictions, weight=1).bind(student, task)(student, batch)
    error = (student(x) - teacher(x)).square().mean() / teacher(x).square().mean()
    torch.testing.assert_close(losses["imitate"], error)
    said = ck.imitate(teacher, dim=1, weight=1).bind(student, task)(student, batch)
    torch.testing.assert_close(said["imitate"], soft_targets(student(x), teacher(x)))
    y = torch.randn(32, 6)
    assert match_predictions(y + 100, y, dim=None) > 1000


def test_what_nobody_says_is_asked_for_or_said_in_a_warning(caplog) -> None:
    x = normal(N, T, 3)
    student, teacher = tagger(), tagger().eval()
    unlabelled = ck.Task(train=[(x,)])
    alone = partial(ck.imitate, teacher, weight=1.0, task_weight=0.0)
    with pytest.raises(
        ModelError, match=r"\(4, 10, 6\), and neither .* pass imitate\(dim=-1\) for \(N, T, C\), imitate\(dim=1\)"
    ):
        alone().bind(student, unlabelled)
    losses = alone(dim=-1).bind(student, unlabelled)(student, unlabelled.train[0])
    torch.testing.assert_close(losses["imitate"], soft_targets(student(x), teacher(x), dim=-1))
    with pytest.raises(ModelError, match=r"^imitate\(dim=3\): the model gives predictions \(4, 10, 6\)"):
        alone(dim=3).bind(student, unlabelled)
    for dim in (0, "1", 1.5):
        with pytest.raises(SettingError, match=r"^imitate\(dim=...\): wanted the dimension of the classes"):
            ck.imitate(dim=dim)
    assert not caplog.records
    rows = [(normal(8, 3), ["a"] * 8)]
    odd = ck.Task(train=rows, loss=lambda p, y: p["x"])
    with caplog.at_level(logging.WARNING):
        ck.imitate(nn.Linear(3, 5).eval(), weight=1.0, task_weight=0.0).bind(nn.Linear(3, 5), odd)
    assert "imitate: Linear gives predictions (8, 5); neither the task's loss nor its labels say of what" in caplog.text


@pytest.mark.parametrize("task", [tag_task(), forecasts()], ids=["tagger", "forecast"])
def test_the_default_of_qat_compares_classes_or_numbers(task, monkeypatch) -> None:
    objectives = []
    monkeypatch.setattr("compresskit.quant.qat.qat.fit_", lambda *a, objective, **k: objectives.append(objective))
    x, _ = batch = task.train[0]
    model = nn.Linear(3, C if x.ndim == 3 else 5).eval()
    ck.QAT(epochs=1)(model, task)
    moved = torch.zeros(len(model.bias)).index_fill_(0, torch.tensor([1]), 2.0)
    losses = objectives[0].bind(nn.Linear(3, len(moved)), task)(lambda x: model(x) + moved, batch)
    dim = -1 if x.ndim == 3 else None
    torch.testing.assert_close(losses["imitate"], 0.5 * match_predictions(model(x) + moved, model(x), dim=dim))
    assert losses["imitate"] > 0.1


def test_students_that_learn_from_one_another_and_from_pseudo_labels_know_their_classes() -> None:
    task, student, teacher = tag_task(), tagger(), tagger().eval()
    x, _ = batch = task.train[0]
    both = kd.mutual(teacher).bind(student, task)(student, batch)
    torch.testing.assert_close(both["imitate:0"], soft_targets(student(x), teacher(x), temperature=1.0, dim=-1))
    pseudo = kd.pseudo_label(teacher, [x], threshold=0.0).bind(student, task)(student, batch)
    torch.testing.assert_close(pseudo["pseudo"], kd.losses.hard_targets(student(x), teacher(x), dim=-1))
    own = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, C))
    goal = kd.self_distill("0", head=lambda features, predictions: nn.Linear(4, C)).bind(own, task)
    (head,) = goal.heads.values()
    wanted = 0.3 * soft_targets(head(own[0](x)), own(x), temperature=3.0, dim=-1)
    torch.testing.assert_close(goal(own, batch)["imitate:0"], wanted)
    goal.close()


def test_compress_imitates_a_tagger_by_soft_targets_and_a_forecast_by_squares() -> None:
    train = ck.Train(epochs=1)
    assert with_objective(train, tagger(), tag_task()).objective.loss.func is soft_targets
    assert with_objective(train, nn.Linear(3, 5), forecasts()).objective.loss is kd.losses.hint
    unlabelled = ck.Task(train=[(normal(N, T, 3),)], val=tag_task().val, loss=of_tags, metric=of_tags)
    objective = with_objective(train, tagger(), unlabelled).objective
    assert objective.loss.func is soft_targets
    assert not objective.reads_target


def test_taggers_agree_by_their_classes() -> None:
    wanted = normal(N, T, C)
    found = wanted + torch.tensor([0, 9.0, 0, 0, 0, 0])
    share = (found.argmax(-1) == wanted.argmax(-1)).double().mean().item()
    metric = ck.metrics.agreement("classes", dim=-1)
    assert metric(found, wanted) == pytest.approx(share)
    assert class_dim(ck.Task(val=[(wanted, wanted)], metric=metric), nn.Identity(), wanted) == ClassDim(-1)
    assert ck.metrics.agreement("classes", dim=1)(found, wanted) == 1.0
    with pytest.raises(ck.DataError, match=r'\(4, 10, 6\) may be \(N, classes, T\) or .* agreement\("classes", dim=-1\)'):
        ck.metrics.agreement("classes")(found, wanted)
    for settings in (dict(outputs="classes", dim=0), dict(outputs="psnr", dim=1)):
        with pytest.raises(SettingError, match=r"agreement\(dim=...\): it is the dimension of"):
            ck.metrics.agreement(**settings)
    with pytest.raises(SettingError, match=r"agreement\(outputs=...\): wanted one of"):
        ck.metrics.agreement(["classes"])


def test_an_agreement_of_classes_anywhere_leaves_a_tagger_to_its_labels() -> None:
    """Of three dimensions it does not say which one."""
    metric = ck.metrics.agreement("classes")
    assert class_dim(tag_task(metric=metric), nn.Identity(), normal(N, T, C)) == ClassDim(-1)
    assert class_dim(ck.Task(val=[(normal(8, C),)], metric=metric), nn.Identity(), normal(8, C)) == ClassDim(1)


def test_a_dimension_that_is_given_is_one_of_classes() -> None:
    """Not the batch's, by whatever number; of one that is told, a softmax is of several entries."""
    assert class_dim(forecasts(), nn.Identity(), normal(8, 5), given=-1) == ClassDim(-1)
    with pytest.raises(ModelError, match=r"x\(dim=-2\): the model gives predictions \(8, 5\), which have no such dimension"):
        class_dim(forecasts(), nn.Identity(), normal(8, 5), given=-2, where="x")
    check_soft_targets("x", partial(soft_targets, dim=-1), nn.Identity(), normal(N, 1, C))
    with pytest.raises(ModelError, match=r"x\(\): Identity gives one channel, of which a softmax says nothing"):
        check_soft_targets("x", partial(soft_targets, dim=-1), nn.Identity(), normal(N, T, 1))
