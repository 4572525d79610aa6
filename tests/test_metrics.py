"""Agreement with the float model, without labels: values by hand, and outputs that do not fit."""

from __future__ import annotations

import math

import networks
import pytest
import torch
from networks import build, image

import compresskit as ck
from compresskit.base.errors import DataError, SettingError
from compresskit.metrics import agreement, decibels, float_targets
from compresskit.quant import quantize_static


def test_the_float_model_agrees_with_itself_and_int8_almost() -> None:
    model, batches = build(networks.Chain), [image(16), image(16)]
    task = ck.Task(val=float_targets(model, batches), metric=agreement("classes"))
    assert ck.evaluate(model, task) == 1.0
    noisy = ck.Task(val=float_targets(model, batches), metric=agreement("sqnr"))
    assert ck.evaluate(model, noisy) == 200.0
    assert 15 < ck.evaluate(quantize_static(model, batches), noisy) < 80


def test_inputs_by_name_get_the_target_as_labels() -> None:
    batch = float_targets(lambda_model(), [{"x": torch.ones(2, 3)}])[0]
    assert set(batch) == {"x", "labels"}
    torch.testing.assert_close(batch["labels"], torch.full((2, 3), 2.0))


def lambda_model():
    class Double(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    return Double()


def test_values_by_hand() -> None:
    wanted = torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]])
    found = torch.tensor([[3.0, 1.0], [0.0, 2.0], [0.0, 1.0], [0.0, 1.0]])
    assert agreement("classes")(found, wanted) == 0.75
    assert agreement("psnr", peak=10)(torch.zeros(2, 3), torch.ones(2, 3)) == pytest.approx(20)
    assert agreement("sqnr")(torch.full((4,), 9.0), torch.full((4,), 10.0)) == pytest.approx(20)


def test_boxes_match_by_overlap_and_class() -> None:
    #                      x1   y1   x2   y2   two scores
    wanted = torch.tensor([[[0.0, 0.0, 2.0, 2.0, 0.9, 0.0], [4.0, 4.0, 6.0, 6.0, 0.0, 0.8], [8.0, 8.0, 9.0, 9.0, 0.1, 0.2]]])
    assert agreement("boxes")(wanted, wanted) == 1.0
    moved = wanted.clone()
    moved[0, 0, :4] += 0.1  # overlap 0.82
    assert agreement("boxes")(moved, wanted) == 1.0
    assert agreement("boxes", iou=0.9)(moved, wanted) == 0.5
    other = wanted.clone()
    other[0, 1, 4:] = torch.tensor([0.8, 0.0])  # of the other class
    assert agreement("boxes")(other, wanted) == 0.5
    fewer = wanted.clone()
    fewer[0, 1, 5] = 0.4  # below the score: one found, two wanted
    assert agreement("boxes")(fewer, wanted) == pytest.approx(2 / 3)
    assert agreement("boxes", score=0.95)(fewer, wanted) == 1.0  # no box on either side


@pytest.mark.parametrize(
    ("outputs", "predictions", "targets", "message"),
    [
        ("classes", torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), r"got torch.int64 \(4,\); make the data with"),
        ("classes", torch.zeros(4, 1), torch.zeros(4, 1), r"wanted predictions \(N, classes, ...\), got \(4, 1\)"),
        ("boxes", torch.zeros(4, 6), torch.zeros(4, 6), r"wanted predictions \(N, boxes, 4 \+ classes\), got \(4, 6\)"),
        ("boxes", torch.zeros(4, 2, 6), torch.full((4, 2, 6), 3.0), r"wanted scores in 0..1 .* got 3..3"),
        ("psnr", torch.zeros(4), torch.zeros(4), r"wanted pictures"),
    ],
)
def test_a_metric_that_does_not_fit_the_outputs_is_one_line(outputs, predictions, targets, message) -> None:
    with pytest.raises(DataError, match=message) as error:
        agreement(outputs)(predictions, targets)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"outputs": "words"}, {"outputs": "boxes", "iou": 2.0}, {"outputs": "psnr", "peak": 0}])
def test_settings_out_of_range_are_refused(settings) -> None:
    with pytest.raises(SettingError, match=r"agreement\("):
        agreement(**settings)


SIZES = [(2, 3, 16, 16), (3, 3, 24, 20)]


def test_pictures_of_several_sizes_are_compared_one_batch_after_another() -> None:
    torch.manual_seed(0)
    model, other = torch.nn.Conv2d(3, 3, 3, padding=1).eval(), torch.nn.Conv2d(3, 3, 3, padding=1).eval()
    pictures = [torch.randn(size) for size in SIZES]
    task = ck.Task(val=float_targets(model, pictures), metric=agreement("psnr"))
    assert ck.evaluate(model, task) == 200.0
    with torch.no_grad():
        pairs = [(other(x), model(x)) for x in pictures]
        error = torch.cat([(a - b).double().square().flatten(1).mean(1) for a, b in pairs])
        noise = sum(float((a - b).double().square().sum()) for a, b in pairs)
        signal = sum(float(b.double().square().sum()) for _, b in pairs)
        same = torch.cat([(a.argmax(1) == b.argmax(1)).flatten() for a, b in pairs])
    wanted = {
        "psnr": float((-10 * error.log10()).mean()),
        "sqnr": 10 * math.log10(signal / noise),
        "classes": same.double().mean().item(),
    }
    for outputs, value in wanted.items():
        found = [ck.evaluate(other, ck.Task(val=task.val, metric=agreement(outputs))) for _ in range(2)]
        assert found == pytest.approx([value, value], rel=1e-5)


def test_batches_of_boxes_add_up() -> None:
    box = torch.tensor([[[0.0, 0.0, 2.0, 2.0, 0.9]]])
    metric = agreement("boxes")
    metric.update(box, box)
    metric.update(torch.cat([box, box], 1) * 0.1, torch.cat([box, box], 1))  # none of two boxes is found
    assert metric.compute() == pytest.approx(2 / (2 + 2))
    metric.reset()
    metric.update(box, box)
    assert metric.compute() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_predictions_that_are_not_finite_do_not_agree(bad: float) -> None:
    wanted = torch.eye(4)[:2].repeat(2, 1)
    found = wanted.clone()
    found[0, 0] = bad
    for one, other in ((found, wanted), (wanted, found)):
        assert agreement("sqnr")(one, other) == agreement("psnr")(one, other) == -math.inf
    if math.isnan(bad):
        assert agreement("classes")(found, wanted) == agreement("classes")(found, found) == 0.75
    boxes = torch.tensor([[[0.0, 0.0, 2.0, 2.0, 0.9], [4.0, 4.0, 6.0, 6.0, 0.9]]])
    moved = boxes.clone()
    moved[0, 0, 2] = bad
    assert agreement("boxes")(moved, boxes) == agreement("boxes")(moved, moved) == 0.5
    model = torch.nn.Flatten()
    with pytest.raises(DataError, match="the metric is -inf on the validation set"):
        ck.evaluate(model, ck.Task(val=[(found, wanted)], metric=agreement("sqnr")))


def test_decibels_of_powers_that_are_not_finite_are_the_least() -> None:
    for bad in (math.nan, math.inf):
        assert decibels(1.0, bad, most=200.0) == decibels(bad, 1.0) == decibels(bad, 0.0, most=200.0) == -math.inf
    assert decibels(100.0, 1.0) == pytest.approx(20)
    assert decibels(1.0, 0.0, most=200.0) == 200.0


def test_no_boxes_at_all_agree() -> None:
    assert agreement("boxes")(torch.zeros(2, 0, 6), torch.zeros(2, 0, 6)) == 1.0


@pytest.mark.parametrize("name", ["score", "iou", "peak"])
def test_a_setting_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=rf"agreement\({name}=...\): wanted a number, got 'x'"):
        agreement("boxes", **{name: "x"})
