"""Losses inside of `torch.autocast`, where the loops of others compute them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compresskit.distill import losses
from compresskit.distill.losses import LOGIT_LOSSES, LOSSES, RELATION_LOSSES, TARGET_LOSSES
from compresskit.distill.losses.top_k import top_k

MAPS = ("attention_transfer", "hcl", *(loss.__name__ for loss in RELATION_LOSSES))


def shape_of(loss) -> tuple[int, ...]:
    """Features wide enough for products of them to overflow or to lose digits in half precision."""
    if loss in (*LOGIT_LOSSES, *TARGET_LOSSES, losses.label_smoothing, losses.top_k_soft_targets, losses.match_predictions):
        return (16, 100)
    if loss.__name__ in MAPS:
        return (16, 64, 4, 4)
    return (8, 4, 12, 12)


def computed(loss, student: Tensor, teacher: Tensor) -> Tensor:
    target = torch.arange(16)
    if loss in TARGET_LOSSES:
        return loss(student, teacher, target)
    if loss is losses.label_smoothing:
        return loss(student, target)
    return loss(student, top_k(teacher, 5) if loss is losses.top_k_soft_targets else teacher)


def same(value: Tensor, gradient: Tensor, other: Tensor, of_other: Tensor) -> None:
    assert value.dtype == torch.float32
    assert torch.equal(value, other)
    assert torch.equal(gradient, of_other)
    assert gradient.any()


OTHERS = (losses.label_smoothing, losses.top_k_soft_targets, losses.match_predictions)


@pytest.mark.parametrize("loss", [*LOSSES, *TARGET_LOSSES, *OTHERS], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_losses_compute_in_fp32_inside_of_autocast(loss, half) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape_of(loss), generator=generator).mul(3).relu() for _ in range(2))
    student.requires_grad_()
    plain = computed(loss, student, teacher)
    (wanted,) = torch.autograd.grad(plain, student)
    with torch.autocast("cpu", dtype=half):
        value = computed(loss, student, teacher)
    same(value, torch.autograd.grad(value, student)[0], plain, wanted)


def of_heads(student: Tensor, teacher: Tensor) -> Tensor:
    return losses.head_relations(student, teacher, heads=4)


def of_queries(student: Tensor, teacher: Tensor) -> Tensor:
    return losses.query_key_scores([student, student], [teacher, teacher], heads=4)


def of_contrast(student: Tensor, teacher: Tensor) -> Tensor:
    a, b = F.normalize(student[:, 0], dim=1), F.normalize(teacher, dim=2)
    return losses.crd(a, b[:, 0], b, samples=100, log_z=1.0)


def of_bank(student: Tensor, teacher: Tensor) -> Tensor:
    bank = losses.CRDLoss(samples=64, negatives=16).start(student[:, 0], teacher[:, 0])
    return bank(student[:, 0], teacher[:, 0], torch.arange(len(student)))


@pytest.mark.parametrize("loss", [of_heads, of_queries, of_contrast, of_bank])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_losses_with_products_compute_in_fp32_inside_of_autocast(loss, half) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(8, 12, 64, generator=generator) * 3 for _ in range(2))
    student.requires_grad_()
    plain = loss(student, teacher)
    (wanted,) = torch.autograd.grad(plain, student)
    with torch.autocast("cpu", dtype=half):
        value = loss(student, teacher)
    same(value, torch.autograd.grad(value, student)[0], plain, wanted)
