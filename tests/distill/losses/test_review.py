"""ReviewKD: the sum over depths and the attention-based fusion."""

from __future__ import annotations

from functools import partial

import networks
import oracles
import pytest
import torch
from networks import DEPTHS, ThreeDepths, build, images_task

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError
from compresskit.distill import Term

ADAM = partial(torch.optim.Adam, lr=3e-3)


def test_reviewkd_is_the_sum_of_its_depths() -> None:
    features = [(torch.randn(4, 6, 8, 8), torch.randn(4, 6, 8, 8)), (torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4))]
    got = kd.losses.reviewkd(*zip(*features, strict=True)).item()
    wanted = oracles.hcl(*features[0], (4, 2, 1)) + oracles.hcl(*features[1], (2, 1))
    assert got == pytest.approx(wanted, rel=1e-5)


def test_abf_is_a_gated_sum() -> None:
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


def test_reviewkd_reduces_its_loss_and_leaves_no_adapters() -> None:
    student, teacher, task = build(partial(ThreeDepths, 8)), build(partial(ThreeDepths, 12)), images_task(ck)
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


def test_reviewkd_refuses_features_that_do_not_fit() -> None:
    teacher, student, task = build(networks.Residual), build(networks.Chain), images_task(ck)
    with pytest.raises(ModelError, match=r"abf: wanted several features \(N, C, H, W\)"):
        ck.imitate(teacher, terms=[Term(kd.losses.reviewkd, ("head",), adapt=kd.losses.abf)]).bind(student, task)
    with pytest.raises(DataError, match="reviewkd: wanted as many features of the student as of the teacher, got 1, 2"):
        kd.losses.reviewkd([torch.zeros(1, 1, 2, 2)], [torch.zeros(1, 1, 2, 2)] * 2)
