"""Students by construction: the same class, smaller, with weights of the trained model, and trained by Distill."""

from __future__ import annotations

import copy
from functools import partial

import networks
import pytest
import torch
from networks import build, image, images_task
from residual import ResNet, Transformer

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune.depth import narrow


@pytest.mark.parametrize("family", [networks.Chain, ResNet, Transformer])
def test_half_the_width_is_a_smaller_model_of_the_same_class(family) -> None:
    model = build(family)
    before = copy.deepcopy(model.state_dict())
    student = narrow(model, image(2), width=0.5, round_to=2)
    assert type(student) is family
    assert ck.count_parameters(student) < 0.5 * ck.count_parameters(model)
    assert student(*image(7)).shape == (7, 10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_its_weights_are_those_of_the_channels_with_the_highest_scores() -> None:
    model = build(networks.Chain)
    student = narrow(model, image(2), width=0.5, round_to=1)
    weight = model.a[0].weight
    scores = torch.stack([row.square().sum() for row in weight])
    kept = [next(i for i, row in enumerate(weight) if torch.equal(row, new)) for new in student.a[0].weight]
    assert len(kept) == 8
    assert scores[kept].mean() > scores.mean()


def test_fewer_blocks() -> None:
    model = build(ResNet)
    student = narrow(model, image(2), width=1.0, blocks=2)
    assert sum(type(m).__name__ == "Bypass" for m in student.modules()) == 2
    torch.testing.assert_close(student.stem[0].weight, model.stem[0].weight)
    with pytest.raises(ModelError, match="wanted 9 blocks to remove, there are only 5"):
        narrow(model, image(2), blocks=9)


def test_distill_trains_it() -> None:
    torch.manual_seed(0)
    task, teacher = images_task(ck, samples=128, classes=4), build(ResNet)
    adam = partial(torch.optim.Adam, lr=3e-3)
    ck.fit_(teacher, task, ck.Train(epochs=5, optimizer=adam))
    student = ck.Distill(student=narrow(teacher, image(2), width=0.5, blocks=1, round_to=2), epochs=6, optimizer=adam)(
        teacher, task
    )
    assert ck.evaluate(student, task) > 0.5  # of four classes
    assert ck.count_macs(student, image(2)) < 0.5 * ck.count_macs(teacher, image(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, r"narrow\(width=...\): wanted the fraction of the channels that stays, in \(0, 1\], got 0"),
        ({"width": 1.5}, r"narrow\(width=...\): wanted the fraction"),
        ({"blocks": -1}, r"narrow\(blocks=...\): wanted a whole number >= 0, got -1"),
        ({"width": 1}, "a width of 1 and no block to remove leave the model as it is"),
    ],
)
def test_bad_settings(settings, message) -> None:
    with pytest.raises(SettingError, match=message):
        narrow(build(networks.Chain), image(2), **settings)


def test_what_is_ignored_keeps_its_width_and_its_blocks() -> None:
    student = narrow(build(ResNet), image(2), width=0.5, blocks=2, round_to=2, ignore=("layer2",))
    removed = [name for name, module in student.named_modules() if type(module).__name__ == "Bypass"]
    assert len(removed) == 2
    assert not any(name.startswith("layer2") for name in removed)
    assert student.layer2[1].a[0].weight.shape == (16, 16, 3, 3)
