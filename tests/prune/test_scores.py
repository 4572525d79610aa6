"""Scores of single weights and blocks, against the formulas of their criteria."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compresskit as ck
from compresskit.prune.criteria import grasp, l2, movement, snip, taylor, wanda
from compresskit.prune.patterns import Block, Unstructured
from compresskit.prune.scores import score_weights, weight_slices

pytestmark = pytest.mark.filterwarnings("ignore:.* loses all of its weights")  # which has a test of its own


def linear_problem():
    torch.manual_seed(0)
    x, y = torch.randn(16, 6), torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(6, 4))
    return model, ck.Task(train=[(x, y)], val=[(x, y)], loss=F.mse_loss, metric=lambda p, t: 0.0), x, y


def scored(criterion, model, task):
    weights = {"0.weight": model[0].weight}
    return score_weights(model, weights, Unstructured(), criterion, task, 16, where="plan_mask")["0.weight"].view(4, 6)


def test_criteria_are_their_formulas() -> None:
    model, task, x, y = linear_problem()
    w, b = (p.detach().double() for p in model[0].parameters())
    x, y = x.double(), y.double()
    error = x @ w.T + b - y
    g = 2 * error.T @ x / error.numel()  # of the mean of squares
    torch.testing.assert_close(scored(l2, model, task), w.abs(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scored(snip, model, task), (w * g).abs(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(movement, model, task), -(w * g), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(taylor, model, task), (w * g).square(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scored(wanda, model, task), w.abs() * x.norm(dim=0), atol=1e-3, rtol=1e-4)
    # The Hessian in (w, b) is the same block for every output.
    ones = torch.cat([x, torch.ones(16, 1, dtype=torch.double)], 1)
    hessian = 2 * ones.T @ ones / error.numel()
    flow = (torch.cat([g, 2 * error.mean(0)[:, None] * 16 / error.numel()], 1) @ hessian)[:, :6]
    only_w = g @ (2 * x.T @ x / error.numel())  # biases are not masked: the flow is that of the weights
    assert not torch.allclose(flow, only_w)
    torch.testing.assert_close(scored(grasp, model, task), w * only_w, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_wanda_knows_which_input_a_weight_reads(groups) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups, bias=False))
    x = torch.randn(5, 4, 6, 6) * torch.tensor([1.0, 5.0, 0.2, 3.0]).view(1, 4, 1, 1)
    task = ck.Task(val=[(x, x)], calibration=[(x, x)])
    scores = score_weights(model, {"0.weight": model[0].weight}, Unstructured(), wanda, task, 5, where="plan_mask")
    found = scores["0.weight"].view_as(model[0].weight)
    norms = torch.linalg.vector_norm(x, dim=(0, 2, 3))
    for o in range(8):
        for i in range(4 // groups):
            channel = o // (8 // groups) * (4 // groups) + i
            torch.testing.assert_close(found[o, i].float(), model[0].weight[o, i].abs() * norms[channel], rtol=1e-4, atol=1e-5)


def test_scores_of_blocks_use_the_same_rows() -> None:
    w = nn.Parameter(torch.randn(4, 8))
    rows = weight_slices(w, Block(outputs=2, inputs=4))
    assert rows.weight.shape == (4, 8)
    torch.testing.assert_close(l2(rows)[0], w[:2, :4].detach().norm())
