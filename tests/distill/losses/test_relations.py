"""Losses of relations between samples: widths that differ, duplicate samples."""

from __future__ import annotations

import oracles
import pytest
import torch

from compresskit.base.errors import DataError, SettingError
from compresskit.distill import losses
from compresskit.distill.losses import RELATION_LOSSES


def test_widths_and_sizes_may_differ() -> None:
    student, teacher = torch.randn(6, 5), torch.randn(6, 4, 3, 3)
    for loss in (f for f in RELATION_LOSSES if f is not losses.info_nce):
        got = loss(student, teacher).item()
        settings = dict(gamma=0.4, order=2) if loss is losses.correlation_congruence else {}
        assert got == pytest.approx(getattr(oracles, loss.__name__)(student, teacher, **settings), rel=1e-4)
    wide, narrow = torch.randn(2, 6, 8, 8), torch.randn(2, 3, 4, 4)
    pooled = torch.nn.functional.avg_pool2d(wide.square().mean(1, keepdim=True), 2).sqrt()
    torch.testing.assert_close(losses.attention_transfer(narrow, wide), losses.attention_transfer(narrow, pooled))


def test_rkd_equals_its_formula_with_duplicates() -> None:
    student, teacher = torch.randn(2, 6, 9)
    student[2], teacher[4] = student[0], teacher[1]
    for name in ("rkd_distance", "rkd_angle"):
        got = getattr(losses, name)(student, teacher).item()
        assert got == pytest.approx(getattr(oracles, name)(student, teacher), rel=1e-4)


def test_relation_losses_refuse_shapes_and_settings_that_do_not_fit() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 4)
    for loss in RELATION_LOSSES:
        with pytest.raises(
            DataError, match=rf"{loss.__name__}: wanted features \(N, \.\.\.\) of one batch, got \(2, 3\) and \(1, 3\)"
        ):
            loss(a, a[:1])
    with pytest.raises(DataError, match="info_nce: wanted features of one width, got 3 and 4; use an adapter"):
        losses.info_nce(a, b)
    with pytest.raises(SettingError, match=r"order=\.\.\.\): wanted a whole number >= 1, got 0"):
        losses.correlation_congruence(a, a, order=0)


def test_pkt_adds_eps_inside_the_logarithm_alone() -> None:
    student, teacher = torch.randn(5, 3), torch.randn(5, 4)

    def rows(features):
        unit = features.double() / features.double().norm(dim=1, keepdim=True)
        kernel = (unit @ unit.T + 1) / 2
        return kernel / kernel.sum(1, keepdim=True)

    s, t = rows(student), rows(teacher)
    expected = float((t * ((t + 0.1) / (s + 0.1)).log()).mean())
    assert float(losses.pkt(student, teacher, eps=0.1)) == pytest.approx(expected, abs=1e-6)
    assert abs(expected) > 1e-4
