"""What is recorded of how sure a metric is: the samples that are right, and the metric of draws."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import networks
import pytest
import torch
from torch import nn

import compresskit as ck
from compresskit.measure import numpy_inputs, session
from compresskit.recipe import outcomes
from compresskit.recipe.measure_stage import measure_stage
from compresskit.recipe.outcomes import Outcomes, OutcomesOf, measure_outcomes
from compresskit.recipe.page.statistics import bootstrap_interval


def squared(predictions, target):
    return ((predictions - target) ** 2).mean()


class Squared:
    """A running metric, as torchmetrics has them."""

    higher_is_better = False

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def update(self, predictions, target):
        self.total += float(((predictions - target) ** 2).sum())
        self.count += target.numel()

    def compute(self):
        return self.total / self.count


@pytest.fixture(scope="module")
def regression():
    torch.manual_seed(0)
    batches = [(torch.randn(50, 3), torch.randn(50, 3)) for _ in range(8)]
    return ck.Task(val=batches, metric=squared, higher_is_better=False)


def test_the_samples_that_are_right_are_recorded() -> None:
    torch.manual_seed(0)
    model, task = networks.build(networks.Chain), networks.images_task(ck, samples=70)
    found = measure_outcomes(model, task)
    with torch.no_grad():
        wanted = torch.cat([model(x).argmax(1) == y for x, y in task.val])
    assert found.metric == ck.evaluate(model, task) == wanted.double().mean().item()
    assert (found.samples, found.resampled) == (70, ())
    assert [bit == "1" for bit in f"{int(found.correct, 16):070b}"] == wanted.tolist()


def test_a_sample_whose_predictions_are_not_numbers_is_wrong() -> None:
    x, y = torch.eye(4), torch.tensor([0, 0, 2, 3])
    x[1] = float("nan")
    found = measure_outcomes(nn.Identity(), ck.Task(val=[(x, y)]))
    assert (found.metric, f"{int(found.correct, 16):04b}") == (0.75, "1011")


def test_another_metric_is_drawn_again_and_again(regression) -> None:
    found = measure_outcomes(nn.Identity(), regression)
    errors = torch.cat([((x - y) ** 2).mean(1) for x, y in regression.val])
    assert found.metric == pytest.approx(errors.mean().item(), rel=1e-5)
    assert (found.correct, found.samples, len(found.resampled)) == (None, 400, outcomes.RESAMPLES)
    low, high = bootstrap_interval(found.resampled)
    half = 1.96 * errors.std().item() / math.sqrt(400)  # of a mean, an interval is known
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert (high + low) / 2 == pytest.approx(found.metric, abs=half / 5)
    assert json.loads(json.dumps(found.to_json()))["resampled"] == list(found.resampled)


def test_a_running_metric_is_drawn_too_and_keeps_its_state(regression) -> None:
    metric = Squared()
    found = measure_outcomes(nn.Identity(), replace(regression, metric=metric, higher_is_better=None))
    wanted = measure_outcomes(nn.Identity(), regression)
    assert found.resampled == pytest.approx(wanted.resampled, rel=1e-5)
    assert metric.compute() == found.metric


def test_ignored_labels_and_pixels_are_drawn_by_sample() -> None:
    pixels = [(torch.randn(8, 3, 4), torch.randint(3, (8, 4)))]
    found = measure_outcomes(nn.Identity(), ck.Task(val=pixels))
    assert (found.correct, found.samples, len(found.resampled)) == (None, 8, outcomes.RESAMPLES)
    ignored = [(torch.randn(9, 3), torch.tensor([0, -100, 1, 2, 0, 1, 2, 0, 1]))]
    found = measure_outcomes(nn.Identity(), ck.Task(val=ignored))
    assert (found.correct, found.samples) == (None, 9)
    assert all(0 <= value <= 1 for value in found.resampled)


def test_models_that_met_other_samples_have_other_targets(regression) -> None:
    first, turned = (
        measure_outcomes(nn.Identity(), replace(regression, val=val)) for val in (regression.val, regression.val[::-1])
    )
    assert first.targets == measure_outcomes(nn.ReLU(), regression).targets
    assert first.targets != turned.targets


def test_no_interval_is_better_than_a_failed_run(regression, monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)

    def once(predictions, target, seen=[]):  # noqa: B006
        seen.append(None)
        if len(seen) > 1:
            raise ValueError("only one class")
        return 0.5

    assert measure_outcomes(nn.Identity(), replace(regression, metric=once)).to_json() == {
        "correct": None,
        "samples": 0,
        "targets": measure_outcomes(nn.Identity(), regression).targets,
    }
    assert "once of drawn samples could not be computed, and the report shows no interval: only one class" in caplog.text
    weights = torch.arange(400.0)  # of the samples, by place

    def by_place(predictions, target):
        return (weights * (predictions - target).square().mean(1)).mean()

    assert measure_outcomes(nn.Identity(), replace(regression, metric=by_place)).resampled == ()
    assert "by_place depends on the order of the samples; the report shows no interval" in caplog.text
    lists = [(x, [y, y]) for x, y in regression.val]
    assert measure_outcomes(nn.Identity(), ck.Task(val=lists, metric=lambda p, t: 0.25)) == Outcomes(metric=0.25)
    monkeypatch.setattr(outcomes, "MOST_KEPT", 1000)
    assert measure_outcomes(nn.Identity(), regression).resampled == ()
    monkeypatch.undo()
    monkeypatch.setattr(outcomes, "MOST_SECONDS", 0.0)
    assert measure_outcomes(nn.Identity(), regression).resampled == ()
    assert "squared of one draw takes long" in caplog.text


class Counted:
    """A loader that counts how often it is read to its end."""

    def __init__(self, batches) -> None:
        self.batches, self.passes = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        yield from self.batches
        self.passes += 1


def test_a_file_is_proved_and_measured_in_one_pass_over_the_data(tmp_path) -> None:
    """The metric is that of the executed file, also of a model that returns more than its predictions."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return {"features": x.relu(), "logits": self.layer(x)}

    torch.manual_seed(0)
    loader = Counted([(torch.randn(8, 4), torch.arange(8) % 3), (torch.randn(5, 4), torch.arange(5) % 3)])
    task, model = ck.Task(val=loader, predict=lambda output: output["logits"]), Model()
    (tmp_path / "stage").mkdir()
    report = measure_stage(model, task, tmp_path / "stage", settings={}, seconds=1.0, export=True)
    assert report.verified
    assert loader.passes == 1
    file = session(tmp_path / "stage" / "model.onnx")
    right = [torch.from_numpy(file.run(None, numpy_inputs(file, (x,)))[1]).argmax(1) == y for x, y in loader.batches]
    assert report.metric == pytest.approx(torch.cat(right).float().mean().item())


def of_a_rare_class(predictions, target):
    """The share of the rare class that is found; nan of a draw without it."""
    rare = target == 1
    return float((predictions.argmax(1)[rare] == 1).float().mean()) if rare.any() else math.nan


def test_a_metric_that_some_draws_have_not_has_no_interval() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 2), (torch.arange(32) == 5).long()
    found = OutcomesOf(ck.Task(train=[(x, y)], val=[(x, y)], metric=of_a_rare_class, higher_is_better=True))
    found.add(x, y)
    assert (found.outcomes().samples, found.outcomes().resampled) == (0, ())
