"""CRD: the formula, the memory bank, and the bank as the loss of a term."""

from __future__ import annotations

import copy
import math
from functools import partial

import networks
import oracles
import pytest
import torch
from networks import build, images_task, indexed_task
from torch import nn

import compresskit as ck
from compresskit import distill as kd
from compresskit.base.errors import DataError, ModelError, SettingError
from compresskit.distill import Term, losses
from compresskit.distill.losses.contrastive import MemoryBank
from compresskit.distill.objectives.terms import ADAPTERS


def test_crd_equals_its_formula_and_the_bank_updates_its_rows() -> None:
    anchor, own = (torch.nn.functional.normalize(torch.randn(5, 8)) for _ in range(2))
    others = torch.nn.functional.normalize(torch.randn(5, 12, 8), dim=2)
    got = losses.crd(anchor, own, others, samples=100, log_z=math.log(40.0), temperature=0.1).item()
    assert got == pytest.approx(oracles.crd(anchor, own, others, 100, 40.0, 0.1), rel=1e-5)
    bank = MemoryBank(samples=20, width=8, negatives=16, seed=1)
    before = bank.student.clone()
    student = (torch.randn(4, 8) * 30).requires_grad_()
    teacher = torch.randn(4, 8).requires_grad_()
    index = torch.tensor([3, 7, 1, 19])
    value = bank(student, teacher, index)
    value.backward()
    assert torch.isfinite(value)
    assert student.grad.any()
    assert teacher.grad is None
    changed = (bank.student != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 3, 7, 19]
    torch.testing.assert_close(bank.student.norm(dim=1), torch.ones(20))
    assert not bank.student.requires_grad
    again = MemoryBank(samples=20, width=8, negatives=16, seed=1)
    assert again(student, teacher, index).item() == value.item()


def test_the_memory_bank_pulls_the_student_to_the_teacher() -> None:
    teacher = torch.nn.functional.normalize(torch.randn(32, 16))
    student = torch.randn(32, 16, requires_grad=True)
    bank, index = MemoryBank(samples=32, width=16, negatives=24), torch.arange(32)
    optimizer = torch.optim.Adam([student], lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        bank(student, teacher, index).backward()
        optimizer.step()
    assert ((torch.nn.functional.normalize(student) @ teacher.T).argmax(1) == index).all()


def test_crd_as_a_term_keeps_a_row_for_each_sample() -> None:
    task, x, _ = indexed_task(ck, shuffle=True)
    student, teacher = build(networks.Chain), build(networks.Residual)
    heads = partial(kd.losses.projection_heads, width=8)
    term = Term(kd.losses.CRDLoss(samples=96, negatives=20, seed=7), "b", "down", adapt=heads, weight=2.0)
    goal = ck.imitate(teacher, terms=[term], weight=0, task_weight=0).bind(student.eval(), task)
    (bound,) = goal.bound_terms
    bank, (adapter,) = bound.loss, goal.adapters.values()
    before = bank.student.clone()
    batch = next(iter(task.train))
    losses = goal(student, batch)
    losses["CRDLoss:b"].backward()
    with torch.no_grad():
        s = nn.functional.normalize(adapter.student_head(student.b(student.a(x[batch.indices])).mean((2, 3))))
        feature = {}
        handle = teacher.down.register_forward_hook(lambda m, a, out: feature.update(out=out))
        teacher(x[batch.indices])
        handle.remove()
        t = nn.functional.normalize(adapter.teacher_head(feature["out"].mean((2, 3))))
    own = MemoryBank(samples=96, width=8, negatives=20, seed=7)
    torch.testing.assert_close(losses["CRDLoss:b"], 2 * own(s, t, batch.indices))
    assert (bank.student != before).any(1).nonzero().flatten().tolist() == sorted(batch.indices.tolist())
    assert all(p.grad.any() for p in adapter.parameters() if p.ndim == 2)
    assert not bank.teacher.requires_grad
    assert goal.bind(student, task).bound_terms[0].loss is not bank
    ck.Train(epochs=1, objective=ck.imitate(teacher, terms=[term]))(student, task)
    assert not hasattr(student, ADAPTERS)


def test_crd_refuses_shapes_and_settings_that_do_not_fit() -> None:
    a, b, y = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(DataError, match=r"crd: wanted \(N, D\), \(N, D\) and \(N, M, D\)"):
        losses.crd(a, a, a, samples=9, log_z=0.0)
    with pytest.raises(SettingError, match="MemoryBank: wanted samples >= 2, width >= 1, negatives >= 1, got 1, 3, 4096"):
        MemoryBank(samples=1, width=3)
    with pytest.raises(SettingError, match=r"momentum=\.\.\.\): wanted a number in \[0, 1\), got 1"):
        MemoryBank(samples=4, width=3, momentum=1)
    bank = MemoryBank(samples=4, width=3, negatives=2)
    with pytest.raises(DataError, match=r"MemoryBank: wanted features \(2, 3\), got \(2, 4\)"):
        bank(b, b, y)
    with pytest.raises(DataError, match=r"MemoryBank: indices must be 0..3, got 4..4"):
        bank(a, a, y + 4)


def test_crd_as_a_term_refuses_batches_and_features_that_do_not_fit() -> None:
    student, teacher, task = build(networks.Chain), build(networks.Residual), images_task(ck)
    goal = ck.imitate(
        teacher, terms=[Term(kd.losses.CRDLoss(samples=96, negatives=4), "b", "down", adapt=kd.losses.projection_heads)]
    )
    with pytest.raises(DataError, match="term CRDLoss:b: its loss must know which samples a batch holds.*distill.indexed_loader"):
        ck.Train(epochs=1, objective=goal)(student, task)
    with pytest.raises(ModelError, match=r"CRDLoss: wanted features \(N, D\) of one width, got .*Term\(adapt=projection_heads\)"):
        ck.imitate(teacher, terms=[Term(kd.losses.CRDLoss(samples=96), "b", "down")]).bind(student, task)
    with pytest.raises(SettingError, match="wanted samples >= 2"):
        kd.losses.CRDLoss(samples=1)
    with pytest.raises(SettingError, match=r"momentum=\.\.\.\): wanted a number in \[0, 1\), got 2"):
        kd.losses.CRDLoss(samples=9, momentum=2)


def test_a_bank_is_crd_in_both_directions_and_keeps_the_fraction_that_momentum_says() -> None:
    """Negatives of a direction come from the other network's bank and are never the sample's own row; Z is of the first batch."""
    bank = MemoryBank(samples=3, width=4, negatives=64, momentum=0.25, temperature=0.5, seed=3)
    old_student, old_teacher = bank.student.clone(), bank.teacher.clone()
    student, teacher = (nn.functional.normalize(torch.randn(2, 4)) for _ in range(2))
    index, generator = torch.tensor([2, 0]), torch.Generator().manual_seed(3)
    for _ in range(2):  # the rows of both banks are drawn first
        torch.randn(3, 4, generator=generator)
    other = (index[:, None] + torch.randint(1, 3, (2, 64), generator=generator)) % 3
    wanted = 0.0
    for anchor, positive, rows in ((student, teacher, old_teacher[other]), (teacher, student, old_student[other])):
        z = 3 * ((rows @ anchor[:, :, None]) / 0.5).exp().mean().item()
        wanted += oracles.crd(anchor, positive, rows, 3, z, 0.5)
    assert bank(student, teacher, index).item() == pytest.approx(wanted, rel=1e-5)
    for rows, old, new in ((bank.student, old_student, student), (bank.teacher, old_teacher, teacher)):
        torch.testing.assert_close(rows[index], nn.functional.normalize(0.25 * old[index] + 0.75 * new))


def test_a_restored_bank_goes_on_as_the_one_before() -> None:
    batches = [(torch.randn(2, 4), torch.randn(2, 4), torch.tensor([0, 2])) for _ in range(2)]
    bank, other = (MemoryBank(samples=5, width=4, negatives=3, seed=seed) for seed in (1, 2))
    bank(*batches[0])
    other.resume_from_(copy.deepcopy(bank.resume_state()))
    assert torch.equal(other(*batches[1]), bank(*batches[1]))
    assert torch.equal(other.student, bank.student)
