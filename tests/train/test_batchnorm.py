"""Re-estimating BatchNorm statistics."""

from __future__ import annotations

import copy

import networks
import pytest
import torch
from networks import build, image

from compresskit.base.errors import DataError
from compresskit.prune import reestimate_batchnorm_


def test_batchnorm_without_batches() -> None:
    model = build(networks.Chain)
    before = copy.deepcopy(model.state_dict())
    for batches in ([], [image(1)]):
        with pytest.raises(DataError, match="no calibration batch of more than one row"):
            reestimate_batchnorm_(model, batches)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert reestimate_batchnorm_(model, [image(8), image(1)]) == 2
