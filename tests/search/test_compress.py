"""`compress`: a budget in, a verified file out; resumed, refused, and printed."""

from __future__ import annotations

import copy
import errno
import importlib
import os
import re
import runpy
from dataclasses import replace
from functools import partial

import networks
import pytest
import torch
from convolution_runs import Narrow
from residual import ResNet
from torch.nn import functional as F

import compresskit as ck
from compresskit.base.files import read_json
from compresskit.cli import main
from compresskit.export.files import read_metadata
from compresskit.prune.depth.merging import saved_macs
from compresskit.search.candidate import Candidate, Removable, at_lower_rates
from compresskit.search.figures import Figures
from compresskit.search.finals.training import with_objective
from compresskit.search.proxy.workshop import Workshop
from compresskit.search.script.source import SourceWriter
from compresskit.search.study import candidate_of, first_candidates, import_optuna

plan_merges = importlib.import_module("compresskit.prune.depth.merging.plan_merges")  # a function of its package has the name
RANKED_RUNS = Workshop._ranked_runs  # before this folder's fixture
QUICK = {"trials": 2, "finalists": 1, "seconds": 0.02}


def forget(model, batch):
    """A loss of a training that forgets all, and soon."""
    inputs, labels = batch
    return {"loss": -1e4 * torch.nn.functional.cross_entropy(model(inputs), labels)}


@pytest.fixture(scope="module")
def found(model, task, tmp_path_factory):
    out = tmp_path_factory.mktemp("search") / "runs"
    return ck.compress(model, task, ck.at_most(bytes="0.5x"), out=out, **QUICK)


def test_the_file_meets_the_budget(found, task) -> None:
    assert found.onnx.stat().st_size <= 0.5 * found.dense.bytes
    assert found.figures.bytes == found.onnx.stat().st_size
    assert ck.verify_onnx(found.onnx, found.model, [task.example()]).passed
    assert found.figures.metric == pytest.approx(ck.evaluate(found.model, task), abs=0.05)
    assert len(found.tried) == 2
    best = min((t for t in found.tried if t.figures), key=lambda t: t.figures.drop)
    assert found.chosen.figures.drop == best.figures.drop  # the drop has no ceiling, so it is minimised


def test_the_file_of_a_candidate_says_no_more_of_its_stages_than_that_of_its_run(found) -> None:
    """What is said takes bytes, and files are judged by their bytes."""
    for tried in found.tried:
        file = found.code.parent / "candidates" / tried.candidate.name / "model.onnx"
        assert read_metadata(file)["stage"]["settings"] == read_metadata(found.onnx)["stage"]["settings"]


def test_it_says_what_was_tried_and_why(found) -> None:
    text = str(found)
    assert 'at_most(bytes="0.5x")' in text
    assert f"> {found.chosen.candidate.name}" in text
    assert "2 candidates measured without training" in text
    assert "it has the least drop" in text
    drops = [tried.best.drop for tried in found.curve()]
    assert drops == sorted(drops, reverse=True)


def test_the_recipe_is_python_that_runs_by_itself(found, task) -> None:
    written = runpy.run_path(str(found.code))["recipe"]
    assert repr(written) == repr(found.recipe)


def test_a_search_goes_on_and_other_budgets_reuse_it(found, model, task, monkeypatch) -> None:
    made = []
    measured = Workshop._measured
    monkeypatch.setattr(
        Workshop, "_measured", lambda self, candidate, *rest: made.append(candidate) or measured(self, candidate, *rest)
    )
    out = found.code.parent
    again = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=out, **QUICK)
    assert made == []
    assert again.chosen.candidate == found.chosen.candidate
    with pytest.raises(
        ck.ModelError, match=r"none of 2 candidates meets at_most\(bytes=100.0\); the nearest that can is at_most\(bytes="
    ):
        ck.compress(model, task, ck.at_most(bytes=100), out=out, **QUICK)
    assert made == []


def test_an_interrupted_search_resumes(model, task, tmp_path, monkeypatch) -> None:
    made = []

    def measured(self, candidate, *rest):
        if made == [Candidate()] and not (tmp_path / "restarted").exists():
            raise KeyboardInterrupt
        made.append(candidate)
        return Figures(metric=0.5, drop=0.0, latency=1.0, bytes=1000, macs=1000)

    monkeypatch.setattr(Workshop, "_measured", measured)
    settings = {"out": tmp_path / "s", **QUICK, "trials": 2}
    with pytest.raises(KeyboardInterrupt):
        ck.compress(model, task, ck.at_most(bytes=10), **settings)
    (tmp_path / "restarted").touch()
    with pytest.raises(ck.ModelError, match="none of 2 candidates meets"):
        ck.compress(model, task, ck.at_most(bytes=10), **settings)
    assert made == [Candidate(), Candidate(macs=0.5)]


def test_a_full_disk_is_no_fault_of_a_candidate(model, task, tmp_path, monkeypatch) -> None:
    def measured(self, candidate, *rest):
        raise ck.CheckpointError("the disk is full")

    monkeypatch.setattr(Workshop, "_measured", measured)
    with pytest.raises(ck.CheckpointError, match="the disk is full"):
        ck.compress(model, task, ck.at_most(bytes=10), out=tmp_path / "s", **QUICK)
    assert not list((tmp_path / "s" / "candidates").rglob("figures.json"))


def test_a_file_for_which_there_is_no_room_is_no_fault_of_a_candidate(model, task, tmp_path, monkeypatch) -> None:
    room = os.fsync

    def full(handle) -> None:
        if "/candidates/" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        room(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ck.CompressError, match="model.onnx: the disk is full; make room and run the same command again") as told:
        ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "s", **QUICK)
    assert isinstance(told.value, ck.ExportError)
    assert not list((tmp_path / "s" / "candidates").rglob("figures.json"))
    monkeypatch.setattr(os, "fsync", room)
    found = ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "s", **QUICK)
    assert not any(t.failure for t in found.tried)


@pytest.mark.parametrize("asked", [{"bytes": 1}, {"bytes": 1, "macs": "0.9x"}], ids=str)
def test_the_nearest_budget_is_met_when_it_is_asked_for(asked, model, task, tmp_path) -> None:
    """The file of a run tells of its stage and its proof in other words, of other lengths, than that of its candidate."""
    settings = {"out": tmp_path / "s", **QUICK}
    with pytest.raises(ck.ModelError) as told:
        ck.compress(model, task, ck.at_most(**asked), **settings)
    nearest = re.search(r"the nearest that can is (at_most\(.*?\)); ask for that", str(told.value))[1]
    found = ck.compress(model, task, eval(nearest, vars(ck)), **settings)
    assert found.figures.bytes != found.chosen.figures.bytes


def test_a_candidate_that_cannot_be_made_is_named(model, task, tmp_path, monkeypatch) -> None:
    def measured(self, candidate, *rest):
        raise ck.ModelError("it cannot be cut")

    monkeypatch.setattr(Workshop, "_measured", measured)
    with pytest.raises(
        ck.ModelError, match="none of 2 candidates could be made: int8: it cannot be cut; run its stages one by one"
    ):
        ck.compress(model, task, ck.at_most(bytes=10), out=tmp_path / "s", **QUICK)


def test_the_folder_of_another_model_is_refused(found, model, task) -> None:
    other = networks.build(networks.WideChain)
    with pytest.raises(ck.CheckpointError, match="belongs to the search of another model"):
        ck.compress(other, task, ck.at_most(bytes="0.5x"), out=found.code.parent, **QUICK)
    with pytest.raises(ck.CheckpointError, match="not empty, and not the folder of a search"):
        ck.compress(model, task, ck.at_most(bytes="0.5x"), out=found.onnx.parent, **QUICK)


@pytest.mark.slow
def test_finalists_are_trained(model, task, tmp_path) -> None:
    train = ck.Train(epochs=2, optimizer=partial(torch.optim.SGD, lr=0.01))
    found = ck.compress(model, task, ck.at_most(macs="0.6x"), out=tmp_path / "s", train=train, **QUICK)
    assert [type(stage).__name__ for stage in found.recipe.stages] == ["Prune", "QAT"]
    assert found.figures.macs <= 0.6 * found.dense.macs
    assert found.chosen.training_seconds > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 5}, r'compress\(budget\): wanted a budget such as ck.at_most\(latency="5ms"\), got 5'),
        ({"budget": ck.at_most(drop=0.5)}, r'write drop=0.005 or drop="0.5pt" for 0.5 points'),
        ({"budget": ck.at_most(drop=5)}, r'write drop=0.05 or drop="5pt" for 5 points$'),
        ({"budget": ck.at_most(drop="200pt")}, "wanted less than 1, which is 100 points, .* got 2, which is 200 points"),
        ({"seconds": float("nan")}, r"^compress\(seconds=...\): wanted a number, got nan"),
        ({"trials": 0}, r"compress\(trials=...\): wanted a whole number >= 1, got 0"),
        ({"train": 3}, r"compress\(train=...\): wanted a Train, got 3"),
        (
            {"train": ck.Train(epochs=1, optimizer=lambda p: torch.optim.SGD(p, lr=1))},
            r"compress\(train=...\), optimizer: .*<lambda> of .* cannot be imported",
        ),
        ({"budget": ck.at_most(bytes=1000, minutes="0.000001")}, "finalists have 0 steps"),
    ],
)
def test_messages(settings, message, model, task, tmp_path) -> None:
    given = {"budget": ck.at_most(bytes=1000), "out": tmp_path / "s", **QUICK} | settings
    budget = given.pop("budget")
    with pytest.raises(ck.SettingError, match=message):
        ck.compress(model, task, budget, **given)


def test_a_metric_without_a_direction_is_refused(model, task, tmp_path) -> None:
    unsaid = ck.Task(train=task.train, val=task.val, metric=lambda predictions, target: 1.0)
    with pytest.raises(ck.SettingError, match="whether a larger metric is better is not said"):
        ck.compress(model, unsaid, ck.at_most(bytes=1000), out=tmp_path / "s")


def test_optuna_is_named_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ck.SettingError, match=r"pip install 'compresskit\[search\]'"):
        import_optuna()


def rates(stage) -> tuple[type, float]:
    """The optimizer that a stage trains with, and its learning rate."""
    made = stage.optimizer([torch.nn.Parameter(torch.zeros(1))])
    return type(made), made.param_groups[0]["lr"]


def test_the_stages_of_a_candidate() -> None:
    train = ck.Train(steps=8, optimizer=partial(torch.optim.SGD, lr=0.1))
    candidate = Candidate(blocks=1, macs=0.5, rank=0.6)
    stages = candidate.stages(order=Removable(blocks=("a", "b")), samples=7, train=train)
    assert [type(stage).__name__ for stage in stages] == ["Depth", "Prune", "LowRank", "QAT"]
    assert stages[0].blocks == ("a",)
    assert stages[2].finetune.steps == 6
    assert (stages[3].steps, rates(stages[3])) == (2, (torch.optim.SGD, pytest.approx(0.01)))
    assert stages[3].bits == ck.quant.Bits()
    written = [SourceWriter().source(stage, "here") for stage in stages]
    assert written[0] == "ck.prune.depth.Depth(blocks=('a',), repair=7)"
    assert Candidate(bits="float").stages(order=Removable(), samples=1, train=train) == ()


def test_a_cut_network_with_weights_of_4_bits_is_trained_with_rounding_from_the_start() -> None:
    train = ck.Train(steps=8, optimizer=partial(torch.optim.SGD, lr=0.1), schedule=ck.lr.OneCycle())
    prune, qat = Candidate(macs=0.5, bits="int4").stages(order=Removable(), samples=7, train=train)
    assert prune.finetune is None
    assert (qat.steps, qat.optimizer, qat.schedule) == (8, train.optimizer, train.schedule)
    assert (qat.bits, qat.freeze) == (ck.quant.Bits(weights=4), 0.8)  # its statistics follow what was cut
    best = replace(train, keep_best=True, patience=3, clip=1.0, compile=True)
    qat = Candidate(macs=0.5, bits="int4").stages(order=Removable(), samples=7, train=best)[-1]
    assert (qat.keep_best, qat.patience, qat.clip, qat.compile) == (True, 3, 1.0, False)  # it cannot be compiled
    whole = Candidate(bits="int4").stages(order=Removable(), samples=7, train=train)[-1]
    assert rates(whole)[1] == pytest.approx(0.01)  # which stays where it was
    named = replace(train, param_groups=ck.train.param_groups.no_decay_on_vectors)
    qat = Candidate(macs=0.5, bits="int4").stages(order=Removable(), samples=7, train=named)[-1]
    assert (qat.steps, qat.param_groups) == (8, named.param_groups)


def test_deeper_cuts_are_tried_first_where_candidates_are_trained() -> None:
    plain, deep = first_candidates(blocks=20, merged=0), first_candidates(blocks=20, merged=0, trains=True)
    assert max(c.blocks for c in plain) < 10 < max(c.blocks for c in deep)
    assert {c.bits for c in plain if c.blocks} == {"int8"}
    assert {c.bits for c in deep if c.blocks} == {"int4", "int8"}
    for few in (1, 2):
        found = first_candidates(blocks=few, merged=few, trains=True)
        assert len(set(found)) == len(found)


def test_widths_of_depthwise_networks_suit_their_integer_kernels() -> None:
    def multiple(depthwise: bool, **what: object) -> int:
        return Candidate(**what).stages(order=Removable(), samples=7, train=None, depthwise=depthwise)[0].round_to

    assert [multiple(depthwise, macs=macs) for depthwise in (False, True) for macs in (0.7, 0.3)] == [8, 4, 16, 8]
    assert multiple(True, macs=0.7, bits="float") == 8


def test_the_rounded_part_of_a_training_is_trained_alike() -> None:
    """What was asked for without labels reads none, and takes the formats and the clipping of the rest."""
    alike = {"precision": ck.mixed.AMP_BF16, "channels_last": True, "clip": 1.0, "accumulate": 2}
    train = ck.Train(steps=8, objective=ck.imitate(task_weight=0.0, weight=1.0), **alike)
    prune, qat = Candidate(macs=0.5).stages(order=Removable(), samples=7, train=train)
    assert qat.freeze == 0
    for training in (prune.finetune, qat):
        assert not training.reads_target
        assert alike.items() <= vars(training).items()
    own = Candidate(macs=0.5).stages(order=Removable(), samples=7, train=ck.Train(steps=8))[-1]
    assert (own.objective, own.freeze) == (None, 0.8)


@pytest.mark.parametrize("candidate", [Candidate(), Candidate(macs=0.5)], ids=lambda candidate: candidate.name)
def test_the_rounded_part_of_a_training_has_its_optimizer_at_lower_rates(candidate) -> None:
    def rounded(**settings: object) -> ck.QAT:
        return candidate.stages(order=Removable(), samples=7, train=ck.Train(steps=8, **settings))[-1]

    given = rounded(optimizer=partial(torch.optim.Adam, lr=0.01), schedule=ck.lr.Constant())
    assert rates(given) == (torch.optim.Adam, pytest.approx(0.001))
    assert given.schedule == ck.lr.Constant()
    assert rates(rounded()) == (torch.optim.AdamW, pytest.approx(1e-4))  # that of a Train that has none of its own
    steps = rounded(schedule=ck.lr.EachEpoch(partial(torch.optim.lr_scheduler.StepLR, step_size=1)))
    assert steps.schedule == ck.lr.Cosine()  # torch's may set rates of their own
    named = rounded(param_groups=ck.train.param_groups.no_decay_on_vectors)
    assert named.param_groups is ck.train.param_groups.no_decay_on_vectors
    written, names = SourceWriter().source(given, "here"), {"ck": ck, "partial": partial, "at_lower_rates": at_lower_rates}
    names["Adam"] = torch.optim.Adam
    assert "optimizer=partial(at_lower_rates, partial(Adam, lr=0.01), 0.1)" in written
    assert rates(eval(written, names)) == rates(given)


def test_the_rounded_part_of_a_training_may_have_a_loss_of_any_unit() -> None:
    """By SGD at some rate, which depends on the unit, targets in thousands end in values that are not finite."""
    x = torch.randn(200, 8)
    y = 1000 * x.sum(1, keepdim=True)
    batches = list(zip(x.split(20), y.split(20), strict=True))
    task = ck.Task(
        train=batches, val=batches, loss=F.mse_loss, metric=lambda outputs, y: (outputs - y).abs().mean(), higher_is_better=False
    )
    train = ck.Train(epochs=4, optimizer=partial(torch.optim.Adam, lr=0.03))
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = ck.fit_(network, task, replace(train, epochs=20))
    (qat,) = Candidate().stages(order=Removable(), samples=64, train=with_objective(train, model, task))
    before = ck.evaluate(model, task)
    rounded = qat(copy.deepcopy(model), replace(task, reference=model))
    assert ck.evaluate(rounded, task) <= 1.2 * before


def test_the_stages_of_a_balanced_candidate_are_placed_for_the_budget() -> None:
    train, here = ck.Train(steps=8, optimizer=partial(torch.optim.SGD, lr=0.1)), ck.quant.targets.Deployment(threads=2, batch=7)
    candidate, of = Candidate(macs=0.5, effort="balanced"), {"order": Removable(), "samples": 7, "deployment": here}
    assert candidate.name == "macs0.5-int8-balanced"
    static, qat = candidate.stages(**of, train=None)[-1], candidate.stages(**of, train=train)[-1]
    assert (static.effort, static.choose, static.deployment) == ("balanced", "auto", here)
    assert (qat.choose, qat.deployment) == ("measure", here)
    assert "deployment=ck.quant.targets.Deployment(threads=2, batch=7)" in SourceWriter().source(qat, "here")
    elsewhere = replace(ck.quant.X86, processors=("another",))
    assert candidate.stages(**of, train=train, target=elsewhere)[-1].choose == "auto"  # its times are not known here
    assert candidate.stages(**of, train=None, to_train=True, target=elsewhere)[-1].choose == "auto"
    proxy = candidate.stages(**of, train=None, to_train=True)[-1]  # as it will be placed, without effort that a training replaces
    assert (type(proxy), proxy.effort, proxy.choose, proxy.deployment) == (ck.StaticQuant, "fast", "measure", here)
    only_float = candidate.stages(**of, train=ck.Train(epochs=1))[-1]  # one epoch is for what was removed
    assert (only_float.effort, only_float.choose) == ("balanced", "auto")
    fast = Candidate(macs=0.5).stages(**of, train=None)[-1]
    assert (fast.effort, fast.deployment) == ("fast", ck.quant.targets.Deployment())
    assert {c.effort for c in first_candidates(blocks=0, merged=0)} == {"fast", "balanced"}
    assert candidate_of({"macs": 0.5, "rank": 1.0, "bits": "float", "effort": "balanced"}).effort == "fast"


def test_candidates_that_are_to_be_trained_are_made_for_it(model, task, tmp_path) -> None:
    workshop = Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0,
        target=ck.quant.X86, trains=True,
    )  # fmt: skip
    balanced = Candidate(effort="balanced")
    _, (stage,) = workshop.compressed(balanced, Removable(), 32)
    assert (stage.effort, stage.choose) == ("fast", "measure")
    untrained = replace(workshop, trains=False)
    assert untrained.stages(balanced, Removable())[0].effort == workshop.stages(balanced, Removable())[0].effort == "balanced"
    assert workshop.folder(balanced) != untrained.folder(balanced)  # which hold other files
    assert workshop.folder(Candidate()) == untrained.folder(Candidate())


def test_blocks_of_a_candidate_are_not_measured_again(task, tmp_path, monkeypatch) -> None:
    """The search has their order, and the plan of a candidate is read by nobody."""
    planning = importlib.import_module("compresskit.prune.depth.plan_blocks")
    monkeypatch.setattr(planning, "times_alone", None)
    monkeypatch.setattr(importlib.import_module("compresskit.prune.depth.importance"), "_growth", None)
    model = networks.build(ResNet)
    workshop = Workshop(
        model=model, task=task, held=task, out=tmp_path, samples=32, batch=1, threads=1, seconds=0.02, seed=0, target=ck.quant.X86
    )
    candidate, order = Candidate(blocks=1, bits="float"), Removable(blocks=("layer1.0",))
    smaller, _ = workshop.compressed(candidate, order, 32)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    weights = {name: model.get_parameter(name) for name, _ in smaller.named_parameters()}
    assert any(not torch.equal(p, weights[name]) for name, p in smaller.named_parameters())  # those that are left are refitted
    sketch = replace(workshop).sketched(candidate, order)  # of which only the layers matter
    assert all(torch.equal(p, weights[name]) for name, p in sketch.named_parameters())


def test_a_training_that_makes_it_worse_is_not_handed_over(model, task, tmp_path) -> None:
    harmful = ck.Train(steps=8, optimizer=partial(torch.optim.Adam, lr=0.1), objective=forget, validate_every=0)
    found = ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path / "runs", train=harmful, **QUICK)
    assert found.chosen.untrained
    assert "learning rate" not in found.reason  # there was no short training to compare with
    assert found.figures.drop < 0.2  # of what was trained to forget, nearly all is lost
    assert "StaticQuant" in found.code.read_text()
    assert "QAT" not in found.code.read_text()
    again = ck.compress(model, task, ck.at_most(bytes="0.9x"), out=tmp_path / "runs", train=harmful, **QUICK)
    assert (again.chosen.untrained, again.figures) == (True, found.figures)


def test_without_training_effort_buys_the_metric(tmp_path, monkeypatch) -> None:
    """Channels of unlike ranges: "fast" rounds them away, "balanced" does not, and the search hands that over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
        torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
    ).eval()  # fmt: skip
    with torch.no_grad():
        for channel, factor in enumerate(torch.logspace(-2, 2, 16)):
            model[0].weight[channel] *= factor
            model[0].bias[channel] *= factor
            model[2].weight[channel] /= factor
    batches = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    val = ck.metrics.float_targets(model, batches)
    task = ck.Task(val=val, calibration=[(x, None) for x in batches], metric=ck.metrics.agreement("sqnr"), higher_is_better=True)
    ladder = [Candidate(), Candidate(effort="balanced")]
    monkeypatch.setattr(importlib.import_module("compresskit.search.explore"), "first_candidates", lambda **_: ladder)
    settings = QUICK | {"target": replace(ck.quant.X86, processors=("another",))}  # whose placement is not timed here
    found = ck.compress(model, task, ck.at_most(bytes="1MB"), out=tmp_path / "runs", **settings)
    drops = {tried.candidate.effort: tried.figures.drop for tried in found.tried}
    assert drops["balanced"] < drops["fast"] - 10  # dB
    assert found.chosen.candidate.effort == "balanced"
    assert "effort='balanced'" in found.code.read_text()


def test_runs_of_blocks_that_go_are_not_merged() -> None:
    order = Removable(blocks=("a.1", "a.2"), runs=("a.1.x + a.1.y", "a.10.x + a.10.y", "b + c"))
    stages = Candidate(blocks=1, merged=2, macs=0.5).stages(order=order, samples=7, train=None)
    assert [type(stage).__name__ for stage in stages] == ["Depth", "Merge", "Prune", "StaticQuant"]
    assert stages[1].runs == ("a.10.x + a.10.y", "b + c")
    assert SourceWriter().source(stages[1], "here").startswith("ck.prune.depth.Merge(runs=('a.10.x + a.10.y', 'b + c'), ")
    assert Candidate(merged=1, bits="float").changes_structure
    with pytest.raises(ck.ModelError, match=r"wanted 3 runs of convolutions outside of the blocks, there are 2; merge fewer"):
        Candidate(blocks=1, merged=3).stages(order=order, samples=7, train=None)


@pytest.mark.slow
def test_convolutions_that_are_faster_as_one_are_ranked_and_merged(task, monkeypatch) -> None:
    monkeypatch.setattr(plan_merges, "saved_milliseconds", saved_macs)  # which no other work on the machine changes
    model = networks.build(Narrow)
    runs = plan_merges.rank_runs(model, task, samples=8)
    assert sorted(name.split(" + ")[0] for name in runs) == [f"blocks.{i}.0" for i in range(3)]
    assert [c.merged for c in first_candidates(blocks=0, merged=3) if c.merged] == [2, 3]
    stages = Candidate(merged=2).stages(order=Removable(runs=runs), samples=8, train=None)
    merged = replace(stages[0], cost=saved_macs)(copy.deepcopy(model), task)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in merged.modules()) == 1 + 1 + 1 + 3
    assert plan_merges.rank_runs(model, task, samples=8, least=1e9) == ()
    second = next(name for name in runs if name.startswith("blocks.1"))

    def check(model, chosen, inputs):
        return "another value" if second in [run.name for run in chosen] else None

    monkeypatch.setattr(plan_merges, "check_merges", check)  # what is not proved is not proposed
    assert set(plan_merges.rank_runs(model, task, samples=8)) == {*runs} - {second}


@pytest.mark.slow
def test_the_search_merges_convolutions(task, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Workshop, "_ranked_runs", RANKED_RUNS)
    model = networks.build(Narrow)
    found = ck.compress(model, task, ck.at_most(macs="2x"), out=tmp_path, **{**QUICK, "trials": 3})
    merged = [tried for tried in found.tried if tried.candidate.merged]
    assert [tried.candidate.merged for tried in merged] == [2]  # of three; what cannot be made does not count
    assert merged[0].figures.macs < found.dense.macs
    stages = merged[0].candidate.stages(
        order=Removable(runs=tuple(read_json(tmp_path / "order.json", "")["runs"])), samples=8, train=None
    )
    result = ck.Recipe(*stages).run(model, task, out=tmp_path / "again")
    assert result.rows[-1].macs == merged[0].figures.macs


@pytest.mark.slow
def test_the_command_line(task, tmp_path, capsys, monkeypatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import compresskit as ck\nimport networks\nmodel = networks.build(networks.Chain)\ntask = networks.images_task(ck)\n"
    )
    quick = ["--trials", "1", "--finalists", "1", "--seconds", "0.02", "--out", str(tmp_path / "s")]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["compress", str(file), "--size", "0.9x", *quick]) == 0
    assert "> int8" in capsys.readouterr().out


def test_the_command_line_says_what_is_missing(tmp_path, capsys) -> None:
    file = tmp_path / "mine.py"
    assert main(["compress", str(file), "--drop", "nan"]) == 2
    assert "compress --drop: wanted 0.5 or 0.5pt, in points (hundredths), got 'nan'" in capsys.readouterr().err
    assert main(["compress", str(tmp_path / "none.py"), "--size", "1MB"]) == 2
    capsys.readouterr()
    assert main(["compress", str(file), "--size", "1MB", "--seconds", "nan"]) == 2
    assert capsys.readouterr().err == "compresskit: compress: --seconds: wanted a number, got nan\n"
    file.write_text("model = 1\n")
    assert main(["compress", str(file), "--size", "1MB"]) == 2
    assert "defines no task" in capsys.readouterr().err


def test_statistics_that_do_not_fit_the_data_are_warned_of(model, task, tmp_path, caplog) -> None:
    stale = copy.deepcopy(model)
    with torch.no_grad():
        stale.a[1].running_mean += 3
    ck.compress(stale, task, ck.at_most(bytes="0.5x"), out=tmp_path / "stale", **QUICK)
    assert "the statistics of BatchNorm in WideChain do not fit the data" in caplog.text
    caplog.clear()
    ck.compress(model, task, ck.at_most(bytes="0.5x"), out=tmp_path / "good", **QUICK)
    assert "BatchNorm" not in caplog.text
