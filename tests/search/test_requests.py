"""What people ask `compress` for besides images and classes: batches, regressions, sequences, minutes, folders, units."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch
import torch.nn.functional as F
from formula import figures_by_formula
from residual import ResNet
from torch import nn

import compresskit as ck
from compresskit.cli import main
from compresskit.distill.losses import hint, soft_targets
from compresskit.search.candidate import Candidate
from compresskit.search.ceilings import Ceiling, parse_ceiling
from compresskit.search.figures import Figures
from compresskit.search.finals.finalists import Finals
from compresskit.search.finals.training import with_objective
from compresskit.search.latency.stopwatch import Stopwatch
from compresskit.search.outcome import Tried, nearest_budget
from compresskit.search.proxy.workshop import Workshop

QUICK = {"trials": 2, "finalists": 1, "seconds": 0.02}


class Reader(nn.Module):
    """An LSTM over sequences of 12 numbers a step, whose last state is classified."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(12, 48, batch_first=True), nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def mean_error(predictions, targets) -> float:
    return float((predictions - targets).square().mean())


def sequences(*lengths: int) -> ck.Task:
    torch.manual_seed(0)
    batches = [(torch.randn(16, length, 12), torch.arange(16) % 4) for length in lengths]
    return ck.Task(train=batches, val=batches)


def regression(outputs: int = 1) -> tuple[nn.Module, ck.Task]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))
    batches = [(x, x[:, :outputs].sin()) for x in torch.randn(4, 32, 6)]
    task = ck.Task(train=batches, val=batches, loss=F.mse_loss, metric=mean_error, higher_is_better=False)
    return ck.Train(epochs=5)(model, task), task


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    return networks.images_task(ck)


@pytest.mark.usefixtures("by_formula")
def test_latencies_are_of_the_batch_of_the_budget(tmp_path, monkeypatch) -> None:
    model, task = regression()
    timed = []
    measured = Workshop.timed_inputs
    monkeypatch.setattr(Workshop, "timed_inputs", lambda self: timed.append(measured(self)) or timed[-1])
    ck.compress(model, task, ck.at_most(bytes="0.9x", batch=100), out=tmp_path / "s", **QUICK)
    assert [x.shape for x in timed[0]] == [(100, 6)]
    assert torch.equal(timed[0][0][32:64], task.val[0][0])


@pytest.mark.usefixtures("by_formula")
def test_a_file_may_take_one_batch_alone_which_is_that_of_the_data(tmp_path) -> None:
    model, task = regression()
    rows = [(x, x[:, :1].sin()) for x in torch.randn(2, 80, 6)]
    task = replace(task, train=rows, val=rows)
    with pytest.raises(ck.SettingError, match=r"files take batches of 80 rows alone, .*; write at_most\(batch=80\)"):
        ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", dynamic=(), **QUICK)
    assert not (tmp_path / "s").exists()
    found = ck.compress(model, task, ck.at_most(bytes="2x", batch=80), out=tmp_path / "s", dynamic=(), **QUICK)
    assert ck.verify_onnx(found.onnx, found.model, [rows[0][:1]]).passed


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.usefixtures("by_formula")
def test_a_regression_imitates_what_it_predicts(outputs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Workshop, "gains_by_dynamic", False)  # which trains nothing
    model, task = regression(outputs)
    train = ck.Train(epochs=2)
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", train=train, **QUICK)
    assert found.figures.metric < 0.5
    assert "hint" in found.code.read_text()


@pytest.mark.usefixtures("by_formula")
def test_minutes_train_what_has_to_imitate(tmp_path) -> None:
    model, task = regression()
    train = ck.Train(epochs=1, objective=ck.imitate(loss=hint))
    found = ck.compress(model, task, ck.at_most(bytes="0.9x", minutes="2s"), out=tmp_path / "s", train=train, **QUICK)
    assert found.chosen.training_seconds > 0
    unlabelled = ck.Task(
        train=[(x,) for x, _ in task.train], val=task.val, loss=F.mse_loss, metric=mean_error, higher_is_better=False
    )
    found = ck.compress(model, unlabelled, ck.at_most(bytes="0.9x", minutes="2s"), out=tmp_path / "u", **QUICK)
    assert found.chosen.training_seconds > 0


def test_what_a_training_minimises_where_nothing_is_said(images) -> None:
    classifier = networks.build(networks.WideChain)
    assert with_objective(ck.Train(epochs=1), classifier, images).objective.loss.func is soft_targets
    own = ck.Train(epochs=1, objective=ck.imitate(loss=hint))
    assert with_objective(own, classifier, images) is own
    bare = ck.Task(train=[(x,) for x, _ in images.train], val=images.val)
    objective = with_objective(ck.Train(epochs=1), classifier, bare).objective
    assert objective.loss.func is soft_targets
    assert not objective.reads_target
    logits = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    two = [(torch.randn(8, 6), torch.ones(8))]
    task = ck.Task(train=two, val=two, loss=F.binary_cross_entropy_with_logits, metric=mean_error, higher_is_better=False)
    assert with_objective(ck.Train(epochs=1), logits, task).objective.loss is hint
    smoothed = ck.Task(train=images.train, val=images.val, loss=partial(F.cross_entropy, label_smoothing=0.1))
    assert with_objective(ck.Train(epochs=1), classifier, smoothed).objective.loss.func is soft_targets


def test_an_objective_that_does_not_fit_is_refused_before_candidates_are_made(tmp_path) -> None:
    model, task = regression()
    with pytest.raises(ck.ModelError, match="gives one channel"):
        ck.compress(
            model, task, ck.at_most(bytes="0.9x"), out=tmp_path / "s", train=ck.Train(epochs=1, objective=ck.imitate()), **QUICK
        )
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("by_formula")
def test_features_that_a_candidate_has_no_longer_are_refused_before_candidates_are_made(tmp_path, model, task) -> None:
    def imitating(tap: str, **settings) -> ck.Train:
        return ck.Train(epochs=1, objective=ck.imitate(terms=[ck.distill.Term(hint, tap, **settings)]))

    with pytest.raises(ck.SettingError, match=r"cannot train the candidate macs0.5-float.*hint:b.*need an adapter"):
        ck.compress(model, task, ck.at_most(macs="0.5x"), out=tmp_path / "s", train=imitating("b"), **QUICK)
    assert not (tmp_path / "s" / "candidates").exists()
    adapted = imitating("b", adapt=ck.distill.project)
    found = ck.compress(model, task, ck.at_most(macs="0.5x"), out=tmp_path / "s", train=adapted, **QUICK)
    assert found.chosen.training_seconds > 0
    same_width = imitating("head")
    found = ck.compress(model, task, ck.at_most(macs="0.5x"), out=tmp_path / "t", train=same_width, **QUICK)
    assert found.chosen.candidate.changes_structure


def test_a_training_of_a_model_without_trainable_parameters_is_refused_before_candidates_are_made(tmp_path, model, task) -> None:
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ck.ModelError, match=r"compress\(train=...\): WideChain has no parameter with requires_grad"):
        ck.compress(frozen, task, ck.at_most(bytes="0.5x"), out=tmp_path / "s", train=ck.Train(epochs=1), **QUICK)
    assert not (tmp_path / "s").exists()


def test_features_of_blocks_that_go_are_refused_before_candidates_are_made(tmp_path, task) -> None:
    train = ck.Train(epochs=1, objective=ck.imitate(terms=[ck.distill.Term(hint, "layer1.?", adapt=ck.distill.project)]))
    with pytest.raises(ck.SettingError, match=r"cannot train the candidate \dblocks-int\d, .*layer1"):
        ck.compress(networks.build(ResNet), task, ck.at_most(macs="0.5x"), out=tmp_path / "s", train=train, **QUICK)
    assert not (tmp_path / "s" / "candidates").exists()


def test_recurrent_networks_are_quantized_dynamically(tmp_path) -> None:
    task = sequences(10, 10)
    model = ck.Train(epochs=10)(Reader(), task)
    found = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "s", **QUICK)
    assert found.chosen.candidate.bits == "dynamic"
    assert found.figures.bytes < 0.5 * found.dense.bytes
    assert abs(found.figures.drop) < 0.1
    assert "ck.DynamicQuant()" in found.code.read_text()


def test_lengths_may_vary(tmp_path) -> None:
    task = sequences(10, 17)
    model = ck.Train(epochs=2)(Reader(), task)
    found = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "s", dynamic=(0, 1), **QUICK)
    assert ck.verify_onnx(found.onnx, found.model, [(torch.randn(3, 23, 12),)]).passed
    assert "dynamic=(0, 1)" in found.code.read_text()
    with pytest.raises(ck.DataError, match=r"\(16, 10, 12\) in the first batch, and \(16, 17, 12\) .*: write dynamic=\(0, 1\)"):
        ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "f", **QUICK)
    with pytest.raises(ck.SettingError, match=r"compress\(length=...\): there is no such setting; there are: train, trials"):
        ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "t", length=3)


@pytest.mark.usefixtures("by_formula")
def test_other_settings_in_a_folder_are_named(tmp_path, monkeypatch) -> None:
    model, task = regression()
    ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, held_out_samples=32, **QUICK)
    with pytest.raises(ck.CheckpointError, match=r"another held-out samples \(there: 32, here: 128\) for Sequential"):
        ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, **QUICK)
    with monkeypatch.context() as patch:
        proxy = importlib.import_module("compresskit.search.proxy.workshop")
        there = proxy.FOLDER_VERSION
        patch.setattr(proxy, "FOLDER_VERSION", 1)
        with pytest.raises(
            ck.CheckpointError, match=rf"another version of its folder \(there: {there}, here: 1\) for Sequential"
        ):
            ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path, held_out_samples=32, **QUICK)
    with pytest.raises(ck.CheckpointError, match=r"another batch \(there: 1, here: 4\) and threads \(there: 1, here: 2\) for"):
        ck.compress(model, task, ck.at_most(bytes="0.9x", batch=4, threads=2), out=tmp_path, held_out_samples=32, **QUICK)


def test_the_nearest_budget_can_be_asked_for(images, tmp_path) -> None:
    figures = Figures(metric=0.5, drop=0.33594, latency=1.0, bytes=900, macs=9)
    nearest = nearest_budget([figures], ck.at_most(bytes=100, drop=0.1), {"bytes": 100.0, "drop": 0.1})
    assert nearest == 'at_most(bytes=900, drop="0.336")'
    budget = eval(nearest, {"at_most": ck.at_most})
    assert not figures.excesses(budget.absolute(figures))
    assert not budget.drop.implausible
    assert eval(repr(budget), {"at_most": ck.at_most}) == budget
    with pytest.raises(ck.SettingError, match=r'write drop=0.005 or drop="0.5pt" for 0.5 points, and drop="0.5" if that'):
        ck.compress(networks.build(networks.WideChain), images, ck.at_most(drop=0.5), out=tmp_path, **QUICK)


def test_blocks_that_depth_would_refuse_are_not_ranked(images, tmp_path) -> None:
    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            return x.relu() + self.norm(self.conv(x))

    class Plain(Bent):
        def forward(self, x):
            return x + self.norm(self.conv(x))

    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Bent(), Plain(), Plain(), *pool).eval()
    shop = Workshop(
        model=model, task=images, held=images, out=tmp_path, samples=64, batch=1, threads=1, seconds=0.1, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip
    assert sorted(shop._ranked_blocks()) == ["2", "3"]


def test_blocks_that_cannot_be_timed_in_integers_are_timed_in_float(images, tmp_path, monkeypatch, caplog) -> None:
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            return x + self.conv(x).relu()

    def refuse(module, inputs, **_):
        raise ck.ModelError("nothing runs in integers")

    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(), Block(), *pool).eval()
    proxy = importlib.import_module("compresskit.search.proxy.workshop")
    monkeypatch.setattr(proxy, "quantize_static", refuse)
    monkeypatch.setattr(proxy, "milliseconds", lambda model, example, blocks: {"1": 1e-9, "2": 1e9})  # of which 2 costs much
    shop = Workshop(
        model=model, task=images, held=images, out=tmp_path, samples=64, batch=1, threads=1, seconds=0.1, seed=0,
        target=ck.quant.X86,
    )  # fmt: skip
    assert shop._ranked_blocks() == ("2", "1")
    assert "blocks are compared by their time in float: Sequential cannot be measured alone (nothing runs in" in caplog.text


@pytest.mark.usefixtures("by_formula")
def test_candidates_that_cannot_be_made_do_not_count(tmp_path, monkeypatch) -> None:
    model, task = regression()
    measured = Workshop._measured

    def some(self, candidate, *rest):
        if candidate.macs < 1:
            raise ck.ModelError("it has no channels")
        return measured(self, candidate, *rest)

    monkeypatch.setattr(Workshop, "_measured", some)
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    assert sum(t.figures is not None for t in found.tried) == 2
    assert any(t.failure for t in found.tried)


def test_layers_are_factored_only_where_that_saves(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Workshop, "_measured", figures_by_formula)
    for model, factors in ((Reader(), False), (networks.build(networks.WideChain), True)):
        task = sequences(7) if isinstance(model, Reader) else networks.images_task(ck, samples=64)
        out = tmp_path / type(model).__name__
        search = ck.compress(model, task, ck.at_most(bytes="0.9x"), out=out, trials=12, finalists=1, seconds=0.02)
        assert any(t.candidate.rank < 1 for t in search.tried) == factors


@pytest.mark.usefixtures("by_formula")
def test_candidates_that_are_to_be_trained_are_placed_only_near_the_ceiling(tmp_path) -> None:
    model, task = regression()
    train = ck.Train(steps=2, optimizer=torch.optim.SGD)
    ladder = {**QUICK, "trials": 12}
    plain = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "plain", **ladder)
    assert {t.candidate.effort for t in plain.tried} == {"fast", "balanced"}
    trained = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "trained", train=train, **ladder)
    assert {t.candidate.effort for t in trained.tried} == {"fast"}
    lost = ck.compress(model, task, ck.at_most(drop="100"), out=tmp_path / "drop", train=train, **ladder)
    assert {t.candidate.effort for t in lost.tried} == {"fast", "balanced"}  # the latency is minimised


@pytest.mark.usefixtures("by_formula")
def test_a_search_goes_on_between_what_keeps_a_ceiling_and_what_does_not(tmp_path, monkeypatch) -> None:
    model, inputs = networks.build(networks.WideChain), [networks.image(16)[0] for _ in range(2)]
    task = ck.Task(
        val=ck.metrics.float_targets(model, inputs),
        calibration=[(x, None) for x in inputs],
        metric=ck.metrics.agreement("sqnr"),
        higher_is_better=True,
    )
    ladder = [Candidate(macs=0.15), Candidate()]
    monkeypatch.setattr("compresskit.search.explore.first_candidates", lambda **_: ladder)
    found = ck.compress(model, task, ck.at_most(macs="0.7x"), out=tmp_path / "runs", trials=4, finalists=1, seconds=0.02)
    assert Candidate(macs=0.55) in [t.candidate for t in found.tried]


def test_of_equal_finalists_the_faster_one_is_chosen() -> None:
    def entry(macs: float, latency: float) -> Tried:
        return Tried(candidate=Candidate(macs=macs), trained=Figures(metric=1.0, drop=0.0, latency=latency, bytes=9, macs=9))

    finals = object.__new__(Finals)
    finals.ceilings, finals.minimise = {"bytes": 10.0}, "drop"
    slow, fast = entry(0.5, 2.0), entry(0.25, 1.0)
    assert Finals._best(finals, [slow, fast]) is fast


def test_text_needs_no_unit() -> None:
    assert parse_ceiling("latency", "5") == parse_ceiling("latency", 5) == Ceiling(value=5.0)
    assert parse_ceiling("bytes", "1000") == parse_ceiling("bytes", torch.tensor(1000).numpy()[()]) == Ceiling(value=1000.0)
    with pytest.raises(ck.SettingError, match="wanted"):
        parse_ceiling("bytes", True)


@pytest.mark.usefixtures("by_formula")
def test_the_command_line_prints_json(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, task = regression()
    torch.save((model.state_dict(), task.val), tmp_path / "kept.pt")
    (tmp_path / "mine.py").write_text(
        "import torch, torch.nn.functional as F, compresskit as ck\n"
        "from torch.nn import Linear, ReLU, Sequential\n"
        "weights, val = torch.load('kept.pt')\n"
        "model = Sequential(Linear(6, 32), ReLU(), Linear(32, 32), ReLU(), Linear(32, 1))\n"
        "model.load_state_dict(weights)\n"
        "def error(p, t):\n    return float((p - t).square().mean())\n"
        "task = ck.Task(val=val, calibration=val, loss=F.mse_loss, metric=error, higher_is_better=False)\n"
    )
    command = ["compress", "mine.py", "--size", "100000", "--drop", "50pt", "--trials", "1", "--seconds", "0.02", "--json"]
    assert main([*command, "--finalists", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["figures"]["bytes"] <= 100000
    assert record["chosen"] in [tried["candidate"] for tried in record["tried"]]
    assert main([*command[:5], "5e1", *command[6:], "--finalists", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["budget"] == record["budget"]


def test_what_cannot_be_searched_is_said_first(tmp_path) -> None:
    model, task = regression()
    alone = ck.Task(val=task.val, loss=F.mse_loss, metric=mean_error, higher_is_better=False)
    with pytest.raises(ck.SettingError, match=r"pass Task\(calibration=...\), without labels"):
        ck.compress(model, alone, ck.at_most(bytes="0.9x"), out=tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("by_formula")
def test_a_journal_may_end_in_half_a_line_and_a_damaged_one_is_named(tmp_path, monkeypatch) -> None:
    model, task = regression()
    budget = ck.at_most(bytes="2x")
    first = ck.compress(model, task, budget, out=tmp_path, **QUICK)
    monkeypatch.setattr(Workshop, "_measured", None)  # nothing is measured again
    journal = tmp_path / "study.log"
    text = journal.read_text()
    journal.write_text(text[: len(text) // 2])
    assert ck.compress(model, task, budget, out=tmp_path, **QUICK).chosen.candidate == first.chosen.candidate
    lines = text.splitlines(keepends=True)
    journal.write_text("".join(["{" + lines[0], *lines[1:]]))
    with pytest.raises(ck.CheckpointError, match=r"study.log: a damaged journal .* delete it: what was measured stays"):
        ck.compress(model, task, budget, out=tmp_path, **QUICK)
    journal.unlink()
    assert ck.compress(model, task, budget, out=tmp_path, **QUICK).chosen.candidate == first.chosen.candidate


@pytest.mark.usefixtures("by_formula")
def test_what_removes_more_than_could_be_removed_is_not_made(tmp_path, monkeypatch) -> None:
    model, task = regression()
    monkeypatch.setattr(Workshop, "gains_by_dynamic", False)
    made, measured = [], Workshop._measured

    def some(self, candidate, *rest):
        made.append(candidate)
        if candidate.macs < 1:
            raise ck.ModelError("it has no channels")
        return measured(self, candidate, *rest)

    monkeypatch.setattr(Workshop, "_measured", some)
    ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **{**QUICK, "trials": 3})
    assert [candidate.macs for candidate in made if candidate.macs < 1] == [0.5, 0.7]  # not 0.25, 0.35 and 0.15


@pytest.fixture
def timed(monkeypatch):
    """A function that says what the uncompressed file takes, how noisy that is, and by which factor all others are slower."""
    measured = Workshop.stopwatch

    def takes(milliseconds: float, noise: float, factor) -> None:
        monkeypatch.setattr(
            Workshop, "stopwatch", lambda *a, **k: replace(measured(*a, **k), milliseconds=milliseconds, noise=noise)
        )
        monkeypatch.setattr(Stopwatch, "measure", lambda self, file: factor(file) * self.milliseconds)

    return takes


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    ("factor", "noise", "told"),
    [
        (1.06, 0.0, "It is slower than the uncompressed file, 0.0122 ms for 0.0115"),
        (2, 0.1, "It is slower than the uncompressed file"),
        (1.06, 0.1, None),  # two measurements of one file differ by more
        (1, 0.0, None),
    ],
)
def test_a_file_slower_than_the_uncompressed_one_is_remarked_on(tmp_path, timed, factor, noise, told) -> None:
    model, task = regression()
    timed(0.0115, noise, lambda file: factor)
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    assert told in str(found) if told else "slower" not in found.reason


def test_a_latency_that_was_another_before_is_remarked_on(tmp_path, timed) -> None:
    """The uncompressed file measured against itself says nothing of it: both change together."""
    model, task = regression()
    factor = {"trained": 1.3}
    timed(0.1, 0.0, lambda file: factor.get(file.parents[1].name, 1.0) / 2)
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "s", **QUICK)
    assert found.chosen.candidate.effort == "fast"
    assert found.noise == pytest.approx(0.3)
    assert "A file of the same operators took" in found.reason
    assert "latencies are known to 30.0%" in str(found)
    factor["trained"] = 1 / 1.1
    found = ck.compress(model, task, ck.at_most(bytes="2x"), out=tmp_path / "t", **QUICK)
    assert found.noise >= 0.0999
    assert "same operators" not in found.reason


NOT_PROVED, NOT_TRAINED = ck.ExportError("it DISAGREES with its model"), ck.TrainingError("batch 5: the loss is not finite")


@pytest.mark.parametrize(
    ("error", "within", "all_fail"),
    [
        (NOT_PROVED, "no: not proved", r"the files of 2 finalists were not proved.*: it DISAGREES with its model"),
        (NOT_TRAINED, "no: not trained", r"the trainings of 2 finalists failed.*: batch 5: the loss is not finite"),
    ],
    ids=["not proved", "not trained"],
)
@pytest.mark.usefixtures("by_formula")
def test_a_finalist_whose_run_fails_gives_its_place(error, within, all_fail, model, task, tmp_path, monkeypatch, caplog) -> None:
    run, asked = Finals._run, []

    def failing(self, candidate, recipe, **settings):
        asked.append(candidate.name)
        if len(set(asked)) <= failures:
            raise error
        return run(self, candidate, recipe, **settings)

    monkeypatch.setattr(Finals, "_run", failing)
    failures, budget, many = 1, ck.at_most(bytes="0.9x"), {**QUICK, "trials": 3}
    found = ck.compress(model, task, budget, out=tmp_path / "s", **many)
    first, second = asked[:2]
    assert found.chosen.candidate.name == second != first
    assert f"{first} is no finalist: {error}" in str(found)
    assert within in str(found)
    assert f"compress: {first} is no finalist" in caplog.text
    assert ck.compress(model, task, budget, out=tmp_path / "s", **many).chosen.candidate.name == second
    assert asked.count(first) == 1  # there is one that is finished

    asked.clear()
    failures = 9
    with pytest.raises(ck.ModelError, match=all_fail):
        ck.compress(model, task, budget, out=tmp_path / "none", **many)
    assert len(asked) == 2  # one more than there may be finalists
    failures = 0
    if error is NOT_PROVED:  # a search that goes on knows it
        with pytest.raises(ck.ModelError, match=all_fail):
            ck.compress(model, task, budget, out=tmp_path / "none", **many)
    else:  # the user may have mended what failed
        assert ck.compress(model, task, budget, out=tmp_path / "none", **many).chosen.candidate.name == first
