"""The check before a run."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import networks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compresskit as ck
from compresskit.base.errors import DataError, ExportError, ModelError, SettingError
from compresskit.base.stage import Stage
from compresskit.graph.surgery import copy_model
from compresskit.recipe import preflight
from compresskit.recipe.preflight import preflight_check


def test_a_loss_that_does_not_fit_the_labels_is_found_before_training(tmp_path) -> None:
    x = torch.randn(8, 3, 16, 16)
    task = ck.Task(train=[(x, torch.rand(8, 1, 1, 1))], val=[(x, torch.arange(8))])
    with pytest.raises(DataError, match=r"Task\(loss=\.\.\.\) fails on the first batch of train \(predictions \(8, 10\)"):
        ck.Recipe(ck.Train(epochs=1)).run(networks.Chain(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


UNLABELLED = [(torch.randn(8, 3, 16, 16),) for _ in range(2)]
LABELLED = [(torch.randn(8, 3, 16, 16), torch.arange(8)) for _ in range(2)]


def test_validation_data_without_labels_are_named() -> None:
    with pytest.raises(DataError, match=r"Task\(val=...\): the metric reads targets, which its batches have not"):
        preflight_check(networks.Chain(), ck.Task(val=UNLABELLED))


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (ck.Train(epochs=1), "Train"),
        (ck.Train(epochs=1, objective=ck.imitate(networks.Chain().eval())), "Train"),
        (ck.Distill(student=networks.Chain, epochs=1), "Distill"),
        (ck.Prune(budget=ck.keep(macs=0.5), finetune=ck.Train(epochs=1)), "Prune"),
        (ck.Prune(budget=ck.keep(macs=0.5), criterion=ck.prune.criteria.taylor), "Prune"),
    ],
)
def test_a_stage_whose_loss_needs_labels_that_its_task_has_not_is_refused_before_the_first_trains(stage, name, tmp_path) -> None:
    steps = []
    recipe = ck.Recipe(ck.Train(epochs=1), stage, on_step=steps.append)
    wanted = (
        rf"stage 2, {name}: its loss or its criterion reads targets, which the training data of tasks\[1\] have not"
        r" \(batch: wanted \(inputs..., target\) or a dict, got tuple\); give labelled data"
    )
    with pytest.raises(DataError, match=wanted):
        recipe.run(
            networks.Chain(), ck.Task(train=LABELLED, val=LABELLED), tmp_path / "run", tasks=(None, ck.Task(train=UNLABELLED))
        )
    with pytest.raises(DataError, match="stage 1, Train: its loss .* the training data of its task have not"):
        recipe.run(networks.Chain(), ck.Task(train=UNLABELLED, val=LABELLED), tmp_path / "run")
    assert steps == []
    assert not (tmp_path / "run").exists()


def test_no_labels_are_needed_where_no_loss_reads_them(tmp_path) -> None:
    task = ck.Task(train=UNLABELLED, val=LABELLED)
    imitation = ck.imitate(networks.Chain().eval(), task_weight=0.0)
    prune = ck.Prune(budget=ck.keep(macs=0.6), samples=8, finetune=ck.Train(epochs=1, objective=imitation))
    result = ck.Recipe(ck.Train(epochs=1, objective=imitation), prune).run(networks.Chain(), task, tmp_path / "run")
    assert [row.stage for row in result.rows] == ["1-train", "2-prune"]


def test_targets_that_no_loss_reads_need_not_fit_it(tmp_path) -> None:
    """As a folder of images gives them: numbers that mean nothing here."""
    numbered = [(x, torch.full((8, 3), 7.0)) for (x,) in UNLABELLED]
    task = ck.Task(train=numbered, val=LABELLED)
    imitation = ck.imitate(networks.Chain().eval(), task_weight=0.0)
    recipe = ck.Recipe(ck.Train(epochs=1, objective=imitation))
    assert recipe.run(networks.Chain(), task, tmp_path / "run").rows[0].stage == "1-train"
    with pytest.raises(DataError, match=r"Task\(loss=\.\.\.\) fails on the first batch of train"):
        ck.Recipe(ck.Train(epochs=1, objective=imitation), ck.QAT(epochs=1)).run(networks.Chain(), task, tmp_path / "qat")


def test_targets_that_the_agreement_with_a_float_model_cannot_read_are_found_before_training(tmp_path) -> None:
    task = ck.Task(train=LABELLED, val=LABELLED, metric=ck.metrics.agreement("classes"))
    with pytest.raises(DataError, match=r'agreement\("classes"\): wanted the float model\'s predictions as targets'):
        ck.Recipe(ck.Train(epochs=1)).run(networks.Chain(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_wrapper_for_several_devices_is_refused(tmp_path) -> None:
    task = ck.Task(train=LABELLED, val=LABELLED)
    with pytest.raises(ModelError, match=r"DataParallel runs a model on several devices, .*; pass model\.module"):
        ck.Recipe(ck.StaticQuant()).run(torch.nn.DataParallel(networks.Chain()), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_metric_of_several_numbers_is_refused_before_training(tmp_path) -> None:
    steps = []
    task = ck.Task(train=LABELLED, val=LABELLED, metric=lambda p, t: {"top1": 0.5, "top5": 0.9})
    with pytest.raises(
        DataError, match=r"Task\(metric=...\): wanted one number for all of the data, got a dict of \['top1', 'top5'\]"
    ):
        ck.Recipe(ck.Train(epochs=1, on_step=steps.append)).run(networks.Chain(), task, tmp_path / "run")
    assert not steps


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def rows(count: int, size: int, **settings) -> dict[str, DataLoader]:
    data = TensorDataset(torch.randn(count, 8), torch.arange(count) % 4)
    return {"a loader": DataLoader(data, batch_size=size, **settings), "a list": [*DataLoader(data, batch_size=size, **settings)]}


@pytest.mark.parametrize("kind", ["a loader", "a list"])
def test_a_last_batch_of_one_row_is_refused_before_training(kind, tmp_path) -> None:
    seen = []
    prune = ck.Prune(budget=ck.keep(macs=0.6), samples=8, finetune=ck.Train(epochs=1, on_step=seen.append))
    task = ck.Task(train=rows(33, 16)[kind], val=rows(33, 16)[kind])
    wanted = (
        "stage 2, Prune: the last batch of the training data has one row, of which BatchNorm has no statistics"
        r" \(Expected more than 1 value per channel .*\); pass DataLoader\(..., drop_last=True\), or another batch_size"
    )
    with pytest.raises(DataError, match=wanted):
        ck.Recipe(ck.Train(steps=1, on_step=seen.append), prune).run(normed(), task, tmp_path / "run")
    assert not seen


@pytest.mark.parametrize(
    ("model", "settings", "train"),
    [
        (normed(), {}, ck.Train(steps=2)),  # never gets there
        (normed(), {"drop_last": True}, ck.Train(epochs=1)),
        (nn.Sequential(nn.Linear(8, 4)), {}, ck.Train(epochs=1)),
        (nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 4)), {}, ck.Train(epochs=1)),
    ],
    ids=["fewer steps", "drop_last", "no BatchNorm", "four positions"],
)
def test_a_last_batch_of_one_row_is_taken_where_it_can_be_trained_on(model, settings, train) -> None:
    data = rows(33, 16, **settings)["a loader"]
    preflight_check(model, ck.Task(train=data, val=data), [train])


def test_frozen_statistics_take_a_last_batch_of_one_row() -> None:
    model, data = normed().train(), rows(33, 16)["a loader"]
    model[1].eval()
    preflight_check(model, ck.Task(train=data, val=data), [ck.Train(epochs=1)])


@pytest.mark.parametrize("kind", ["a loader", "a list"])
def test_a_last_batch_of_one_row_is_refused_before_a_qat(kind, tmp_path) -> None:
    """The statistics of the first epoch are not frozen yet, and modules that were given in eval mode are trained."""
    seen = []
    whole, one = (ck.Task(train=rows(count, 16)[kind], val=rows(count, 16)[kind]) for count in (64, 65))
    model = normed().train()
    model[1].eval()
    stages = ck.Train(steps=1, on_step=seen.append), ck.QAT(epochs=3)
    with pytest.raises(DataError, match="stage 2, QAT: the last batch of the training data has one row, of which BatchNorm"):
        ck.Recipe(*stages).run(model, whole, tmp_path / "run", tasks=(None, one))
    assert not seen


@pytest.mark.parametrize(
    ("model", "qat"),
    [
        (normed(), ck.QAT(epochs=3, freeze=0.0)),
        (normed(), ck.QAT(epochs=1)),  # frozen after 4 of 5 steps
        (normed(), ck.QAT(steps=4)),
        (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)), ck.QAT(epochs=3)),  # behind no layer: a constant
    ],
    ids=["frozen at the start", "frozen before it", "fewer steps", "constant"],
)
def test_a_last_batch_of_one_row_is_taken_where_a_qat_needs_no_statistics_of_it(model, qat) -> None:
    data = rows(65, 16)["a list"]
    task = ck.Task(train=data, val=data)
    preflight_check(model, task, [qat])
    assert torch.isfinite(qat(copy.deepcopy(model), task).eval()(data[0][0])).all()


class Grown(nn.Linear):
    """Writes a buffer and an attribute in every run."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("runs", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs, self.calls = self.runs + 1, self.calls + 1
        return super().forward(x)


def test_the_model_is_copied_once_for_all_loaders_and_stages(monkeypatch) -> None:
    probes = []
    monkeypatch.setattr(preflight, "copy_model", lambda model: probes.append(copy_model(model)) or probes[-1])
    model, data = Grown(), [(torch.randn(8, 8), torch.arange(8) % 4)]
    task = ck.Task(train=data, val=data, calibration=data)
    preflight_check(model, task, [ck.Train(epochs=1)], {0: task})
    assert len(probes) == 1
    assert probes[0].training
    assert (probes[0].runs.item(), probes[0].calls) == (0, 0)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, partial(torch.optim.LBFGS, lr=0.1)], ids=["class", "partial"])
def test_an_optimizer_that_needs_a_closure_is_refused_before_anything_runs(optimizer, tmp_path) -> None:
    stages = ck.Train(epochs=1), ck.Train(epochs=1, optimizer=optimizer)
    task = ck.Task(train=LABELLED, val=LABELLED)
    with pytest.raises(SettingError, match="stage 2, Train: optimizer=LBFGS evaluates the loss itself, .*; give another"):
        ck.Recipe(*stages).run(networks.Chain(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def yes_or_no(count: int = 4) -> tuple[nn.Module, ck.Task]:
    """A model of one channel for each pixel, and its task."""
    x = torch.randn(count, 8, 3, 16, 16)
    data = [(each, (each.mean(1, keepdim=True) > 0).float()) for each in x]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))
    loss = F.binary_cross_entropy_with_logits
    return model, ck.Task(train=data, val=data, loss=loss, metric=lambda p, t: ((p > 0) == (t > 0.5)).float().mean())


@pytest.mark.parametrize(
    ("objective", "name"),
    [(ck.imitate(), "imitate"), (ck.distill.mutual(nn.Conv2d(3, 1, 1)), "mutual")],
    ids=["imitate", "mutual"],
)
def test_soft_targets_of_one_channel_are_refused_before_the_first_stage_trains(objective, name, tmp_path) -> None:
    model, task = yes_or_no()
    seen = []
    prune = ck.Prune(budget=ck.keep(macs=0.5), finetune=ck.Train(epochs=1, objective=objective))
    wanted = (
        rf"^stage 2, Prune: {name}\(\): Sequential gives one channel, of which a softmax says nothing; pass"
        rf" {name}\(loss=compresskit.distill.losses.match_predictions\)$"
    )
    with pytest.raises(ModelError, match=wanted):
        ck.Recipe(ck.Train(epochs=1, on_step=seen.append), prune).run(model, task, tmp_path / "run")
    assert not seen
    assert not (tmp_path / "run").exists()


def test_what_imitates_one_channel_by_another_loss_and_what_follows_a_student_is_not_refused() -> None:
    model, task = yes_or_no()
    matched = ck.Train(epochs=1, objective=ck.imitate(loss=ck.distill.losses.match_predictions))
    preflight_check(model, task, [ck.Train(epochs=1), ck.Prune(budget=ck.keep(macs=0.5), finetune=matched)])
    preflight_check(model, task, [ck.Train(epochs=1, objective=ck.imitate(weight=0, task_weight=1))])
    imitates = ck.Train(epochs=1, objective=ck.imitate())
    distill = ck.Distill(student=nn.Conv2d(3, 2, 1), epochs=1, loss=F.mse_loss)
    preflight_check(model, task, [distill, imitates])


def test_a_model_in_float64_is_refused_before_it_is_trained(tmp_path) -> None:
    model, task = yes_or_no()
    data, seen = [(x.double(), y.double()) for x, y in task.val], []
    recipe = ck.Recipe(ck.Train(epochs=1, on_step=seen.append))
    with pytest.raises(ExportError, match=r"0\.weight is torch\.float64, and ONNX Runtime has no Conv in DOUBLE; export model"):
        recipe.run(model.double(), replace(task, train=data, val=data), tmp_path / "run")
    assert not seen
    assert not (tmp_path / "run").exists()


class InFloat(Stage):
    """Casts the model, as a stage of a user may."""

    def __call__(self, model: nn.Module, task: ck.Task) -> nn.Module:
        return model.float()


def test_float64_that_runs_or_that_a_stage_of_the_user_may_cast_is_not_refused() -> None:
    model, task = yes_or_no()
    data = [(x.double(), y.double()) for x, y in task.val]
    double = replace(task, train=data, val=data)
    preflight_check(copy.deepcopy(model).double(), double, [ck.Train(epochs=1), InFloat()])
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 16 * 16), nn.Unflatten(1, (1, 16, 16))).double()
    preflight_check(linear, double, [ck.Train(epochs=1)])


def test_lists_that_can_be_read_in_two_ways_are_refused_before_training(tmp_path) -> None:
    model, seen = nn.Linear(8, 4), []
    data = [(torch.randn(1, 8), [torch.rand(1, 4)]) for _ in range(4)]

    def distance(predictions, targets):
        return torch.stack([(p - t).abs().mean() for p, t in zip(predictions, targets, strict=False)]).mean()

    train = ck.Train(epochs=1, on_step=seen.append)
    task = ck.Task(train=data, val=data, loss=distance, metric=distance, higher_is_better=False)
    with pytest.raises(
        DataError, match=r"in every validation batch, of 1 samples, targets are lists of 1 tensors .*; let the loader"
    ):
        ck.Recipe(train).run(model, task, tmp_path / "run")
    assert not seen
    told = [*data, (torch.randn(1, 8), [torch.rand(2, 4)])]
    preflight_check(model, replace(task, val=told), [train])


def pooled() -> nn.Module:
    """A network that takes images of any size."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def pictures(*shapes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 3, *size), torch.arange(rows) % 4) for rows, *size in shapes]


FIRST, OTHERS = (8, 12, 12), ((8, 9, 12), (4, 9, 7))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stages", "dynamic", "wanted"),
    [
        (
            [],
            (0,),
            r"^validation data: input is \(8, 3, 12, 12\) in the first batch, and \(8, 3, 9, 12\) in batch 2 of the validation"
            r" data; a file takes one size of each dimension that is not named as one that varies: write dynamic=\(0, 2, 3\)",
        ),
        (
            [],
            {"input": {0: "n", 2: "h"}},
            r"^validation data: .* \(4, 3, 9, 7\) in batch 3 .*: name the dimensions 3 of input in dynamic=\.\.\.",
        ),
        (
            [ck.StaticQuant(dynamic=(0, 2))],
            (0, 2, 3),
            r"^stage 2, StaticQuant: training data: .*: write StaticQuant\(dynamic=\(0, 2, 3\)\)",
        ),
        (
            [ck.DynamicQuant()],
            (0, 2, 3),
            r"^stage 2, DynamicQuant: validation data: .*: write DynamicQuant\(dynamic=\(0, 2, 3\)\)",
        ),
    ],
    ids=["by number", "by name", "of a stage", "of a stage without calibration"],
)
@pytest.mark.parametrize("kind", [list, DataLoader])
def test_validation_batches_that_no_file_takes_are_refused_before_training(stages, dynamic, wanted, kind, tmp_path) -> None:
    seen, val = [], pictures(FIRST, *OTHERS)
    task = ck.Task(train=pictures(FIRST), val=val if kind is list else DataLoader(val, batch_size=None))
    recipe = ck.Recipe(ck.Train(epochs=1, on_step=seen.append), *stages, dynamic=dynamic)
    with pytest.raises(DataError, match=wanted):
        recipe.run(pooled(), task, tmp_path / "run")
    assert not seen
    assert not (tmp_path / "run").exists()


def test_validation_batches_whose_sizes_may_vary_are_taken() -> None:
    data, train = pictures(FIRST, *OTHERS), ck.Train(epochs=1)
    free = (0, 2, 3)
    preflight_check(pooled(), ck.Task(train=data, val=data), [train, ck.QAT(epochs=1, dynamic=free)], dynamic=free)
    preflight_check(pooled(), ck.Task(train=data, val=pictures(FIRST, (0, 5, 5))), [train])  # of no rows nothing is measured
    quantized = ck.quant.quantize_static(pooled().eval(), [x for x, _ in data[:1]], dynamic=free)
    preflight_check(quantized, ck.Task(train=data, val=data), [train])  # its file has its own dimensions


def test_only_the_first_batches_of_a_loader_are_read() -> None:
    drawn = []

    class Counted(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                drawn.append(batch)
                yield batch

    preflight_check(pooled(), ck.Task(train=pictures(FIRST), val=Counted(pictures(*[FIRST] * 99), batch_size=None)))
    assert preflight.COMPARED_BATCHES <= len(drawn) < 2 * preflight.COMPARED_BATCHES


def holed(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 2, float("nan"))


@pytest.mark.parametrize(
    ("calibration", "wanted"),
    [
        (
            pictures((8, 6, 12)),
            r"calibration data: input is \(8, 3, 6, 12\) in the first batch, and \(8, 3, 12, 12\) in batch 1 of the valid",
        ),
        (
            pictures((0, 12, 12)),
            r"the first batch of the calibration data: wanted one row at least, got inputs of shape \[\(0, 3, 12, 12\)\]",
        ),
        (
            [(holed(x), y) for x, y in pictures(FIRST)],
            "the first batch of the calibration data: values of input are nan, and so are outputs of the model; clean",
        ),
    ],
    ids=["of another size", "without rows", "nan"],
)
def test_calibration_data_that_cannot_be_used_are_refused_before_training(calibration, wanted, tmp_path) -> None:
    seen, data = [], pictures(FIRST)
    task = ck.Task(train=data, val=data, calibration=calibration)
    recipe = ck.Recipe(ck.Train(epochs=1, on_step=seen.append), ck.StaticQuant())
    with pytest.raises(DataError, match=f"^stage 2, StaticQuant: {wanted}"):
        recipe.run(pooled(), task, tmp_path / "run")
    assert not seen
    preflight_check(pooled(), task, [ck.Train(epochs=1)])  # which reads none of them


@pytest.mark.parametrize("stage", [ck.StaticQuant(), ck.Prune(budget=ck.keep(macs=0.5)), ck.quant.qat.Ternarize(finetune=None)])
def test_nan_in_any_batch_of_a_list_is_refused_before_training(stage, tmp_path) -> None:
    seen, data = [], pictures(FIRST)
    calibration = [*pictures(FIRST, FIRST), *((holed(x), y) for x, y in pictures(FIRST))]
    recipe = ck.Recipe(ck.Train(epochs=1, on_step=seen.append), stage)
    with pytest.raises(
        DataError, match=f"^stage 2, {type(stage).__name__}: batch 3 of the calibration data: values of input are nan"
    ):
        recipe.run(pooled(), ck.Task(train=data, val=data, calibration=calibration), tmp_path / "run")
    assert not seen


def test_values_that_are_missing_and_that_the_model_fills_calibrate_it() -> None:
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = pooled()

        def forward(self, x):
            return self.inner(x.nan_to_num())

    data = [(holed(x), y) for x, y in pictures(FIRST)]
    preflight_check(Filled(), ck.Task(train=data, val=data), [ck.Train(epochs=1), ck.StaticQuant()])


class Masked(nn.Module):
    """A policy with a mask of its actions: -inf for those that may not be taken."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, mask):
        scores = self.inner(x)
        return scores + mask if self.kind == "added" else torch.where(mask < 0, mask, scores)


@pytest.mark.parametrize("stage", [ck.StaticQuant(), ck.QAT(steps=1)], ids=["static", "qat"])
@pytest.mark.parametrize("kind", ["added", "chosen"])
def test_a_mask_of_minus_infinity_that_reaches_the_outputs_is_taken(kind, stage) -> None:
    mask = torch.zeros(8, 4)
    mask[:, 3] = -torch.inf
    data = [(torch.randn(8, 8), mask, torch.arange(8) % 3)]
    preflight_check(Masked(kind), ck.Task(train=data, val=data), [stage])


@pytest.mark.parametrize("which", ["train", "calibration"])
def test_a_loader_without_a_length_that_gives_no_batch_is_refused(which) -> None:
    class Nothing:
        def __iter__(self):
            return iter(())

    task = ck.Task(**{"train": pictures(FIRST), "val": pictures(FIRST), which: Nothing()})
    with pytest.raises(DataError, match=rf"Task\({which}=\.\.\.\): the loader is empty; give at least one batch"):
        preflight_check(pooled(), task, [ck.StaticQuant()])


def test_sizes_that_a_stage_has_as_an_array_are_written_as_numbers() -> None:
    val = pictures(FIRST, *OTHERS)
    stage = ck.StaticQuant(dynamic=np.array([0, 2]))
    with pytest.raises(DataError, match=r"write StaticQuant\(dynamic=\(0, 2, 3\)\)"):
        preflight_check(pooled(), ck.Task(train=pictures(FIRST), val=val), [stage], dynamic=(0, 2, 3))


def test_sizes_are_compared_where_the_data_are_and_without_a_draw() -> None:
    loader = DataLoader(pictures(FIRST, FIRST), batch_size=None, shuffle=True)
    task, states = ck.Task(train=loader, val=loader), []
    for stages in ([ck.Train(epochs=1)], [ck.Train(epochs=1), ck.StaticQuant()]):
        torch.manual_seed(0)
        preflight_check(pooled(), task, stages)
        states.append(torch.get_rng_state())
    assert states[0].equal(states[1])
    there = ck.Task(val=[(torch.empty(FIRST[0], 3, 12, 12, device="meta"), torch.arange(8))])
    assert preflight._validation_shapes(pooled(), there) == [{"input": (8, 3, 12, 12)}]
