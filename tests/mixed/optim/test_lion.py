"""Lion is the algorithm of its paper."""

from __future__ import annotations

import pytest
import torch

from compresskit.base.errors import SettingError
from compresskit.mixed import (
    Lion,
)


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -1.0}])
def test_lion_refuses_settings_out_of_range(settings) -> None:
    with pytest.raises(SettingError, match="Lion: wanted lr >= 0, betas in"):
        Lion([torch.zeros(1)], **settings)


def test_lion_is_the_algorithm_of_the_paper() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    optimizer = Lion([w], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    for gradient in ([1.0, -1.0], [-0.05, 2.0]):
        w.grad = torch.tensor(gradient)
        optimizer.step()
    # By hand: m = (0.01, -0.01); second update = sign(0.9 m + 0.1 g) = sign(0.004, 0.191) = (1, 1).
    torch.testing.assert_close(w.detach(), torch.tensor([(1 * 0.95 - 0.1) * 0.95 - 0.1, (-2 * 0.95 + 0.1) * 0.95 - 0.1]))
