"""Teachers run with BatchNorm folded where nothing else reads what the layer before it gives, and say the same."""

from __future__ import annotations

import networks
import pytest
import torch
from networks import build, images_task
from torch import nn

import compresskit as ck
from compresskit.distill import EMA, Teacher
from compresskit.distill.models.folded import fold_copy
from compresskit.distill.models.teacher import EMATeacher


def norms(model) -> int:
    return sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def seen(model, *shape):
    """The model after batches from which its statistics are, in eval mode."""
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.randn(*shape))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", [networks.Residual, networks.Chain, networks.Depthwise])
def test_a_folded_copy_gives_the_same_for_other_batches(kind) -> None:
    model = seen(build(kind), 8, 3, 16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded = fold_copy(model, (torch.randn(8, 3, 16, 16),))
    assert norms(model) > 0
    assert norms(folded) == 0
    for size in (1, 7):
        x = torch.randn(size, 3, 16, 16)
        torch.testing.assert_close(folded(x), model(x), atol=1e-5, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {id(p) for p in folded.parameters()} & {id(p) for p in model.parameters()}  # what is not folded is shared


class Odd(nn.Module):
    """A layer and a BatchNorm of two channels or features, used in a way that leaves them as they are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        rows = how in ("rows", "state")
        self.layer = nn.Linear(4, 4) if rows else nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4) if rows else nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 1)
        if how == "tied":
            self.other.weight = self.layer.weight
        if how == "hook":
            self.layer.register_forward_hook(lambda module, given, output: output * 2)

    def forward(self, x):
        if self.how == "rows":  # (N, 4, 4): the features of the layer are the last dimension, of the BatchNorm the middle one
            return self.norm(self.layer(x.flatten(2).mT[:, :4]))
        y = self.layer(x)
        if self.how == "read":
            return self.norm(y) + y
        if self.how == "in place":
            y += 1
        if self.how == "twice":
            return self.norm(self.layer(self.norm(y)))
        if self.how == "tied":
            return self.other(self.norm(y))
        if self.how == "attribute":
            return self.norm(y) * self.norm.running_var.view(1, -1, 1, 1)
        return self.norm(y)


@pytest.mark.parametrize("how", ["rows", "read", "in place", "twice", "tied", "attribute", "hook"])
def test_what_cannot_be_folded_runs_as_it_is(how) -> None:
    model = seen(Odd(how), 8, 4, 2, 2)
    assert fold_copy(model, (torch.randn(8, 4, 2, 2),)) is model


def test_a_folded_teacher_is_no_further_from_fp32_under_autocast() -> None:
    model, x = seen(build(networks.Residual), 8, 3, 16, 16), torch.randn(64, 3, 16, 16)
    folded, wanted = fold_copy(model, (x,)), model(x)
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(run(x).float() - wanted).square().mean() for run in (folded, model)]
    assert errors[0] <= 1.5 * errors[1]


def test_a_teacher_is_folded_where_its_predictions_alone_are_read() -> None:
    task, model = images_task(ck), seen(build(networks.Residual), 8, 3, 16, 16)
    inputs, ran = task.split(task.val[0])[0], []

    def source(teacher, taps=()):
        source = teacher if isinstance(teacher, Teacher) else EMATeacher(model, teacher.decay)
        source.example_outputs(inputs, task, taps)
        ran[:] = source._folded or list(source.members)
        return source

    teacher = source(Teacher(model, build(networks.Chain).eval()))
    assert [norms(member) for member in ran] == [0, 0]
    plain = Teacher(model, teacher.members[1])
    torch.testing.assert_close(teacher.predictions(inputs, task), plain.predictions(inputs, task), atol=1e-5, rtol=1e-4)
    assert list(teacher.state_dict()) == list(plain.state_dict())  # by which runs and caches know a teacher
    for other, taps in [(Teacher(model), ("stem",)), (Teacher(model, dtype=torch.bfloat16), ()), (EMA(), ())]:
        source(other, taps)
        assert norms(ran[0]) > 0
