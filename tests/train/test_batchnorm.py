"""Re-estimating BatchNorm statistics."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image
from torch import nn

import compresskit as ck
from compresskit.base.errors import DataError
from compresskit.prune import reestimate_batchnorm_


def test_batchnorm_without_batches() -> None:
    model = nn.Sequential(build(networks.Chain), nn.BatchNorm1d(10))
    before = copy.deepcopy(model.state_dict())
    for batches in ([], [image(1)]):
        with pytest.raises(DataError, match="wanted calibration batches with more than one value for each channel, got none"):
            reestimate_batchnorm_(model, batches)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert reestimate_batchnorm_(model, [image(8), image(1)]) == 3


def test_batches_of_one_picture_have_statistics() -> None:
    """As large pictures come; behind larger batches they would count as much as these."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16) * torch.rand(4, 1, 1, 1)
    ones, whole, alone = (copy.deepcopy(model) for model in [build(networks.Chain)] * 3)
    reestimate_batchnorm_(ones, [(row[None],) for row in x])
    first = ones.a[0](x).detach()
    torch.testing.assert_close(ones.a[1].running_mean, first.mean((0, 2, 3)))
    torch.testing.assert_close(ones.a[1].running_var, first.var((2, 3)).mean(0))
    assert ones.training is alone.training
    reestimate_batchnorm_(whole, [(x,), (x[:1],)])
    reestimate_batchnorm_(alone, [(x,)])
    assert all(torch.equal(v, alone.state_dict()[k]) for k, v in whole.state_dict().items())


@pytest.mark.parametrize(("value", "held"), [(float("nan"), "nan"), (float("inf"), "infinite values")])
def test_values_that_are_not_finite_leave_the_statistics_as_they_were(value, held) -> None:
    model, bad = build(networks.Chain), image(8)
    bad[0][3, 0, 0, 0] = value
    before = copy.deepcopy(model.state_dict())
    wanted = rf"the variance of a\.1 is nan or infinite, since batch 2 holds {held}; clean the data"
    with pytest.raises(DataError, match=wanted):
        reestimate_batchnorm_(model, [image(8), bad, image(8)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.a[1].momentum == 0.1
    with pytest.raises(DataError, match="does not run on inputs of shape"):
        reestimate_batchnorm_(model, [image(8), (torch.zeros(8, 4, 16, 16),)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_statistics_that_overflow_blame_the_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    nn.init.constant_(model[0].weight, 1e30)
    with pytest.raises(DataError, match=r"of 1 is nan or infinite \(after batch 1\), though no value of the data is"):
        reestimate_batchnorm_(model, [torch.randn(8, 4)])


def test_a_batch_is_looked_at_once_for_all_layers(monkeypatch) -> None:
    looks, isfinite = [], torch.Tensor.isfinite
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda values: looks.append(1) or isfinite(values))
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5)))
    reestimate_batchnorm_(model, [torch.randn(8, 4)] * 3)
    assert len(looks) == 3


def test_weight_averages_of_a_qat_network_take_its_statistics_along() -> None:
    """As docs/loops.md says: `update_bn` knows no layer of it, `use_buffers=True` averages statistics and ranges."""
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 6, 6) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    quantized = ck.quant.prepare_qat(model, [(x,) for x in batches]).train()
    averaged = torch.optim.swa_utils.AveragedModel(quantized, use_buffers=True)
    (name,) = [name for name, _ in quantized.named_buffers() if name.endswith("running_mean")]
    seen = []
    for x in batches:
        quantized(5 + x)
        averaged.update_parameters(quantized)
        seen.append(quantized.get_buffer(name).clone())
    torch.testing.assert_close(averaged.module.get_buffer(name), sum(seen) / 2)
    before = {key: value.clone() for key, value in quantized.state_dict().items()}
    torch.optim.swa_utils.update_bn(batches, quantized)
    assert all(torch.equal(value, before[key]) for key, value in quantized.state_dict().items())
