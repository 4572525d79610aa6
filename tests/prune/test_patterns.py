"""Sparsity patterns: N:M, blocks, and one of the user."""

from __future__ import annotations

from dataclasses import dataclass

import networks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import Net
from networks import images_task
from torch import nn

import compresskit as ck
from compresskit.base.errors import ModelError, SettingError
from compresskit.prune import plan_mask
from compresskit.prune.allocations import uniform_ratios
from compresskit.prune.patterns import NM, Block, Pattern, Unstructured

pytestmark = pytest.mark.filterwarnings("ignore:.* loses all of its weights")  # which has a test of its own


QUICK = settings(max_examples=25, deadline=None)


@given(n=st.integers(1, 7), m=st.integers(2, 8), seed=st.integers(0, 99), axis=st.integers(0, 3))
@QUICK
def test_n_of_every_m(n, m, seed, axis) -> None:
    if n >= m:
        n = m - 1
    shape = [2, 3, 2, 3]
    shape[axis] = 3 * m
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(shape[1], shape[0], tuple(shape[2:])))
    masks = plan_mask(model, pattern=NM(n=n, m=m, axis=axis))
    mask = masks.masks["0.weight"].movedim(axis, -1).reshape(-1, m)
    assert (mask.sum(1) == n).all()
    w = model[0].weight.detach().abs().movedim(axis, -1).reshape(-1, m)
    best = np.sort(w.numpy(), axis=1)[:, m - n :]
    np.testing.assert_array_equal(np.sort(np.where(mask, w, 0), axis=1)[:, m - n :], best)
    assert masks.ratio == pytest.approx(1 - n / m)


@given(a=st.sampled_from([1, 2, 4]), b=st.sampled_from([1, 2, 4]), ratio=st.floats(0, 0.95), seed=st.integers(0, 99))
@QUICK
def test_blocks_live_and_die_together(a, b, ratio, seed) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Linear(4, 8))
    masks = plan_mask(model, ck.remove(weights=ratio), pattern=Block(outputs=a, inputs=b))
    scores, states = [], []
    for name, mask in masks.masks.items():
        w = model.get_parameter(name).detach()
        for o in range(0, w.shape[0], a):
            for i in range(0, w.shape[1], b):
                for k in np.ndindex(*w.shape[2:]):
                    block = (slice(o, o + a), slice(i, i + b), *k)
                    assert mask[block].all() or not mask[block].any()
                    scores.append(w[block].norm().item())
                    states.append(bool(mask[block].any()))
    gone = round(ratio * len(scores))
    assert states.count(False) == gone
    threshold = sorted(scores)[gone]
    assert all(kept == (s >= threshold - 1e-6) for s, kept in zip(scores, states, strict=True) if abs(s - threshold) > 1e-6)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(), Block()])
def test_rows_and_spread_are_inverse(pattern) -> None:
    x = torch.arange(4 * 8 * 3 * 3.0).view(4, 8, 3, 3)
    rows = pattern.rows(x)
    marks = torch.arange(len(rows))
    assert torch.equal(pattern.rows(pattern.spread(marks, x.shape)), marks[:, None].expand_as(rows))


def test_layers_that_cannot_have_the_pattern_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.warns(UserWarning, match=r"0\.weight is left dense: its 3 values along axis 1 are no multiple of 4"):
        masks = plan_mask(model, pattern=NM())
    assert list(masks.masks) == ["1.weight"]
    assert "0.weight left dense" in str(masks)
    with pytest.warns(UserWarning, match="3 channels do not divide into blocks of 1 x 4"):
        plan_mask(model, ck.remove(weights=0.5), pattern=Block())
    with pytest.raises(ModelError, match="has no weight that NM"), pytest.warns(UserWarning, match="no axis 3"):
        plan_mask(nn.Sequential(nn.Linear(8, 8)), pattern=NM(axis=3))


@dataclass(frozen=True)
class WholeRows(Pattern):
    """Rows of a matrix, all kernel positions included."""

    def fits(self, shape):
        return "" if len(shape) > 1 else "it has one dimension"

    def rows(self, values):
        return values.flatten(1)

    def spread(self, units, shape):
        return units.view(-1, *[1] * (len(shape) - 1)).expand(shape)


@dataclass(frozen=True)
class HalfOfEachTensor(Unstructured):
    """A pattern with a ratio of its own, which the base class reaches in every tensor."""

    @property
    def fixed(self):
        return 0.5


def test_a_pattern_of_the_user() -> None:
    model = networks.build(networks.Residual)
    masks = plan_mask(model, ck.remove(weights=0.5), pattern=WholeRows(), allocation=uniform_ratios)
    for name, mask in masks.masks.items():
        rows = mask.flatten(1)
        assert torch.equal(rows.any(1), rows.all(1))
        kept = dict(model.named_parameters())[name].detach().flatten(1).norm(dim=1)
        assert kept[rows[:, 0]].min() >= kept[~rows[:, 0]].max()
    masks = plan_mask(model, pattern=HalfOfEachTensor())
    assert set(masks.ratios().values()) == {0.5}
    assert ck.Sparsify(pattern=HalfOfEachTensor())(model, images_task(ck, samples=32)) is model


@pytest.mark.parametrize("pattern", ["2:4", NM, 0.5])
def test_other_things_are_no_pattern(pattern) -> None:
    with pytest.raises(SettingError, match=r"pattern=...\): wanted a pattern such as prune.patterns.NM\(n=2, m=4\), got"):
        plan_mask(Net(), ck.remove(weights=0.5), pattern=pattern)
