"""Losses of features: masks, and sizes that differ."""

from __future__ import annotations

import oracles
import pytest
import torch

from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses


def test_a_mask_leaves_out_tokens() -> None:
    student, teacher = torch.randn(2, 3, 4, 7)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    for loss in (losses.hint, losses.cosine_distance):
        torch.testing.assert_close(loss(student, teacher, weight=mask), loss(student[mask.bool()], teacher[mask.bool()]))
        torch.testing.assert_close(loss(student, teacher, weight=mask.any(1)), loss(student[:2], teacher[:2]))
    scores = torch.randn(2, 3, 2, 4, 4)
    got = losses.attention_kl(*scores, mask=mask).item()
    assert got == pytest.approx(oracles.attention_kl(*scores, mask=mask), rel=1e-5)
    student, teacher = torch.randn(3, 2, 4, 6), torch.randn(3, 2, 4, 9)  # heads of another width
    assert losses.relation_kl(student, teacher).item() == pytest.approx(oracles.relation_kl(student, teacher), rel=1e-5)


def test_masked_attention_scores_count_as_zero() -> None:
    student, teacher = torch.randn(2, 2, 3, 4, 4)
    student[..., 3], teacher[..., 3] = -1e4, float("-inf")
    seen = oracles.hint(student[..., :3], teacher[..., :3]) * 3 / 4
    assert losses.attention_scores(student, teacher).item() == pytest.approx(seen, rel=1e-5)


def test_feature_losses_refuse_shapes_and_settings_that_do_not_fit() -> None:
    a, image = torch.zeros(2, 3), torch.zeros(2, 3, 4, 4)
    with pytest.raises(DataError, match=r"attention_transfer: wanted features \(N, C, H, W\), got \(2, 3\)"):
        losses.attention_transfer(a, a)
    with pytest.raises(DataError, match=r"hcl: wanted features \(N, C, H, W\), got \(2, 3\)"):
        losses.hcl(a, a)
    with pytest.raises(SettingError, match=r"levels=\.\.\.\): wanted sizes >= 1, got \(0,\)"):
        losses.hcl(image, image, levels=(0,))
    with pytest.raises(DataError, match=r"attention_kl: wanted scores \(N, heads, T, T\), got \(2, 3\)"):
        losses.attention_kl(a, a)
    with pytest.raises(DataError, match=r"attention_kl\(mask=\.\.\.\): wanted shape \(2, 4\), got \(2, 3\)"):
        losses.attention_kl(image, image, mask=a)
    with pytest.raises(DataError, match=r"relation_kl: wanted values \(N, heads, T, d\), got \(2, 3\)"):
        losses.relation_kl(a, a)


@pytest.mark.parametrize("shape", [(8, 12, 32), (8, 4, 12, 32), (8, 12)])
def test_what_is_no_attention_score_is_refused(shape) -> None:
    with pytest.raises(DataError, match=r"attention_scores: wanted scores \(N, heads, T, T\) before the softmax, got \(8, "):
        losses.attention_scores(torch.randn(shape), torch.randn(shape))


def test_scores_at_the_bound_of_masks_count_as_zero() -> None:
    scores, others = torch.tensor([[1.0, -1e9], [2.0, -100.0]]).view(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    assert losses.attention_scores(scores, others).item() == pytest.approx((1 + 4) / 4)
