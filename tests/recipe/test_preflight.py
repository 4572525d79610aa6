"""The check before a run."""

from __future__ import annotations

import networks
import pytest
import torch

import compresskit as ck
from compresskit.base.errors import DataError


def test_a_loss_that_does_not_fit_the_labels_is_found_before_training(tmp_path) -> None:
    x = torch.randn(8, 3, 16, 16)
    task = ck.Task(train=[(x, torch.rand(8, 1, 1, 1))], val=[(x, torch.arange(8))])
    with pytest.raises(DataError, match=r"Task\(loss=\.\.\.\) fails on the first batch of train \(predictions \(8, 10\)"):
        ck.Recipe(ck.Train(epochs=1)).run(networks.Chain(), task, tmp_path / "run")
    assert not (tmp_path / "run").exists()
