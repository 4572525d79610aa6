"""The check before a run."""

from __future__ import annotations

import networks
import pytest
import torch

import compresskit as ck
from compresskit.base.errors import DataError, ModelError


def test_a_loss_that_does_not_fit_the_labels_is_found_before_training(tmp_path) -> None:
    x = torch.randn(8, 3, 16, 16)
    task = ck.Task(train=[(x, torch.rand(8, 1, 1, 1))], val=[(x, torch.arange(8))])
    with pytest.raises(DataError, match=r"Task\(loss=\.\.\.\) fails on the first batch of train \(predictions \(8, 10\)"):
        ck.Recipe(ck.Train(epochs=1)).run(networks.Chain(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


UNLABELLED = [(torch.randn(8, 3, 16, 16),) for _ in range(2)]
LABELLED = [(torch.randn(8, 3, 16, 16), torch.arange(8)) for _ in range(2)]


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
